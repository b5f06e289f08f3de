"""The states of a torchdata StatefulDataLoader's data, as its readers have them: after a pass was cut off, each goes on
where it was.

A reader is the loop's process, or one of the DataLoader's worker processes. A data set that has ``state_dict`` and
``load_state_dict`` is given its state before ``iter(dataset)``; an iterator that has them, after it. Where neither has,
a stream is passed over as that of any loader.
"""

from __future__ import annotations

import copy
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from muster import saved_tree
from muster.errors import InvalidArgument
from muster.kinds import is_count

__all__ = ["ReadBatch", "ReaderState", "StreamStates", "is_stateful_loader", "packed", "unpacked"]

_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"


def is_stateful_loader(loader: DataLoader[Any]) -> bool:
    """Whether it is torchdata's, or of a class that is derived from it."""
    return any(f"{base.__module__}.{base.__qualname__}" == _STATEFUL for base in type(loader).__mro__)


@dataclass(frozen=True)
class ReaderState:
    """Where a reader was when it had read `read` batches of a pass."""

    read: int
    dataset: Any
    """Its state_dict; None where it has none, or is its own iterator."""
    iterator: Any
    ended: bool
    """Whether the last batch was what was left: the data set may have begun anew already."""

    @staticmethod
    def of(dataset: Any, iterator: Any, read: int, ended: bool = False) -> ReaderState | None:
        """None where neither has a state."""
        of_dataset = None if iterator is dataset else _state_of(dataset)
        of_iterator = _state_of(iterator)
        if of_dataset is None and of_iterator is None:
            return None
        return ReaderState(read, of_dataset, of_iterator, ended)

    def iterate(self, dataset: Any) -> Iterator[Any]:
        """What the reader goes on with, of a data set that is as it was built."""
        if self.dataset is not None:
            dataset.load_state_dict(self.dataset)
        if self.ended and self.iterator is None:
            return iter(())
        iterator = iter(dataset)
        if self.iterator is not None:
            iterator.load_state_dict(self.iterator)
        return iter(()) if self.ended else iterator


class ReadBatch(NamedTuple):
    """A batch of a reader, and its state afterwards where that was taken."""

    parts: Any
    reader: int
    state: ReaderState | None


class StreamStates:
    """How far each reader of a pass was in what the pass has yielded. Owned by the thread that iterates."""

    def __init__(self, num_readers: int) -> None:
        self._yielded = [0] * num_readers
        self._states: list[ReaderState | None] = [None] * num_readers
        self._ends: dict[int, ReaderState | None] = {}

    def begin(self, state: ReaderState | None) -> None:
        """A pass begins in the loop's process, whose data set is so far."""
        self._states[0] = state

    def ended(self, reader: int, state: ReaderState | None) -> None:
        """The reader is at its end, and its data set so far."""
        self._ends[reader] = state

    def following(self) -> StreamStates:
        """Of the next pass of the same readers; nothing is known where one of them was not at its end."""
        following = StreamStates(len(self._states))
        if len(self._ends) == len(self._states):
            following._states = [self._ends[reader] for reader in range(len(self._states))]
        return following

    def yielded(self, batch: ReadBatch) -> None:
        """The loop got the batch."""
        self._yielded[batch.reader] += 1
        self._states[batch.reader] = batch.state or self._states[batch.reader]

    def to_resume(self) -> list[tuple[int, ReaderState | None]]:
        """For each reader the batches that were yielded of it, and its last state."""
        return list(zip(self._yielded, self._states, strict=True))

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [
            {"yielded": yielded, "state": None if state is None else dict(vars(state))}
            for yielded, state in self.to_resume()
        ]

    @staticmethod
    def loaded(saved: Any, num_readers: int) -> StreamStates:
        """What state_dict() gave. Raises InvalidArgument for anything else, and for another number of readers."""
        states = StreamStates(num_readers)
        if not isinstance(saved, list) or not all(_is_saved(each) for each in saved):
            raise InvalidArgument("this is no state of a StatefulDataLoader's streams; pass what state_dict() gave")
        if len(saved) != num_readers:
            raise InvalidArgument(
                f"the state is of a loader whose data {_in_words(len(saved))} read, and now {_in_words(num_readers)} "
                "would: each would go on in another one's data; give the loader the num_workers that it had"
            )
        for number, each in enumerate(saved):
            states._yielded[number] = each["yielded"]
            states._states[number] = None if each["state"] is None else ReaderState(**each["state"])
        return states


def packed(values: Any) -> str:
    """Nested values as one text, for other ranks. Raises InvalidArgument for what a checkpoint does not hold."""
    document, tensors = saved_tree.encode(values)
    described = {
        name: [str(tensor.dtype)[6:], list(tensor.shape), b64encode(_bytes_of(tensor)).decode()]
        for name, tensor in tensors.items()
    }
    return json.dumps([document, described])


def unpacked(text: str) -> Any:
    """What packed() was given."""
    document, described = json.loads(text)
    tensors = {}
    for name, (dtype, shape, content) in described.items():
        raw = torch.tensor(list(b64decode(content)), dtype=torch.uint8)
        tensors[name] = raw.view(getattr(torch, dtype)).reshape(shape)
    return saved_tree.decode(document, tensors)


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def _in_words(num_readers: int) -> str:
    return f"{num_readers} reader{'s' if num_readers > 1 else ''}"


def _state_of(owner: Any) -> Any:
    """A copy: a data set may go on changing what it gave."""
    if callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None)):
        return copy.deepcopy(owner.state_dict())
    return None


def _is_saved(each: Any) -> bool:
    if not isinstance(each, Mapping) or each.keys() != {"yielded", "state"} or not is_count(each["yielded"]):
        return False
    state = each["state"]
    return state is None or (
        isinstance(state, Mapping)
        and state.keys() == {"read", "dataset", "iterator", "ended"}
        and is_count(state["read"])
    )
