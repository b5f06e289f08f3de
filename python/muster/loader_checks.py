"""What a loader can be prepared from, and which places it can go on from."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from muster.errors import InvalidArgument
from muster.stream_states import is_stateful_loader
from muster.tasks import samplers_of

__all__ = ["check", "check_extent", "extent_of", "num_batches_of"]


def check(loader: object, *, sharded: bool, alone: bool) -> None:
    """Raises InvalidArgument for what no loader is made of. `alone`: no other worker reads the same batches."""
    if not isinstance(loader, DataLoader):
        raise InvalidArgument(
            f"a {type(loader).__name__} cannot be prepared as a loader; wrap the data in a torch.utils.data.DataLoader"
        )
    # A torchdata StatefulDataLoader's state is that of passes which it makes itself; Loader has its own.
    if type(loader).__iter__ is not DataLoader.__iter__ and not is_stateful_loader(loader):
        raise InvalidArgument(
            f"{type(loader).__name__} iterates in a way of its own, which would be lost when its batch sampler is cut "
            "into parts; pass a plain torch.utils.data.DataLoader with the same data set, sampler and collate function"
        )
    if not sharded and any(isinstance(sampler, DistributedSampler) for sampler in samplers_of(loader)):
        raise InvalidArgument(
            "the loader's DistributedSampler shards the data already, so that most samples would be left out; pass a "
            "plain sampler (or shuffle=True), with the global batch size, or prepare_loader(loader, sharded=True)"
        )
    if not sharded and not alone and loader.num_workers > 0 and not loader.in_order:
        raise InvalidArgument(
            "in_order=False lets each worker see the batches in another order, but all take parts of the same batch; "
            "leave in_order out, or use prepare_loader(loader, sharded=True)"
        )


def extent_of(loader: DataLoader[Any]) -> dict[str, int | str | None]:
    """In what a place within an epoch is counted: the samples in a batch; of a data set that is read by index its
    samples and its samplers' classes, of a stream without states its readers; None where a loader does not tell."""
    batch_size = loader.batch_size or _batch_size_of(loader.batch_sampler)
    extent: dict[str, int | str | None] = {"batch_size": batch_size, "size": None}
    if isinstance(loader.dataset, IterableDataset):
        if is_stateful_loader(loader):  # each of whose readers has a state of its own
            return extent
        return {**extent, "readers": max(1, loader.num_workers)}
    with contextlib.suppress(TypeError):
        extent["size"] = len(loader.dataset)  # type: ignore[arg-type]
    samplers = samplers_of(loader)
    if _is_of_known_length(samplers):
        extent["samples"] = len(samplers[-1])
    return {**extent, "sampler": ", ".join(type(sampler).__name__ for sampler in samplers)}


def _batch_size_of(batch_sampler: Any) -> int | None:
    """Where one of the user's own has a number of that name: nothing says what else it may mean by it."""
    try:
        size = batch_sampler.batch_size
        return None if isinstance(size, bool) else operator.index(size)
    except Exception:
        return None


def num_batches_of(loader: DataLoader[Any]) -> int | None:
    """In a pass, where torch's own samplers alone say it; None where nothing tells, or nothing certain."""
    samplers = samplers_of(loader)
    is_certain = _is_of_known_length(samplers) and all(type(sampler) is BatchSampler for sampler in samplers[:-1])
    return len(samplers[0]) if is_certain else None


def _is_of_known_length(samplers: Sequence[Any]) -> bool:
    """Whether the innermost is one of torch's, whose length is how many samples it draws."""
    kinds = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return bool(samplers) and type(samplers[-1]) in kinds


_WORDS = {
    "batch_size": "batches of {}",
    "size": "a data set of {}",
    "samples": "a sampler that draws {} samples",
    "readers": "{} DataLoader worker(s) that read a stream",
    "sampler": "the order of {}",
}


def check_extent(extent: Mapping[str, int | str | None], state: Mapping[str, Any]) -> None:
    """Raises InvalidArgument where the saved state is of the middle of an epoch of other batches, or of other data."""
    if not state.get("batches") and not any(each["next"] for each in state.get("passes") or ()):
        return
    for name, words in _WORDS.items():
        ours, theirs = extent.get(name), state.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            raise InvalidArgument(
                f"the state is of the middle of an epoch with {words.format(theirs)}, and now {ours}: samples would "
                "come twice, or not at all; give the loader what it had, and others from an epoch's end on"
            )
