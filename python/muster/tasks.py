"""What is read of a pass over a loader: the user's batches as tasks, and the samplers that make them."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, count, pairwise, repeat
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from muster import _C
from muster.reader import LocalParts, Task, indices_of
from muster.streams import AgreedStream

__all__ = [
    "DealtBatches",
    "SharedBatches",
    "Tasks",
    "generators_of",
    "is_read_by_index",
    "samplers_of",
    "size_in_words",
]

_END = object()


class Capacities(Protocol):
    """Of a `LoaderHost`."""

    @property
    def capacities(self) -> Sequence[float]:
        """By replica, what parts of batches that are asked for next follow (`muster.batch.part_sizes`)."""


class Draws(Protocol):
    """Of `muster.loader_generators`."""

    @property
    def to_draw_anew(self) -> int:
        """How often a pass that goes on asked its sampler until it was saved."""

    def begin_drawing(self) -> None:
        """The sampler is asked for the first time."""

    def note_drawn(self) -> None:
        """The sampler was asked for a batch, and may have drawn."""

    def end_drawing_anew(self) -> None:
        """The pass has asked as often as it had when it was saved."""


class _Numbers:
    """Of the batches of a pass that are being read, in their order."""

    def __init__(self) -> None:
        self._asked: deque[int] = deque()
        self._failure: Exception | None = None

    def ask(self, of_job: _C.LoaderPass) -> int | None:
        """Of the batch that is to be read next."""
        try:
            number = of_job.next()
        except Exception as error:
            self._failure = error
            raise
        if number is not None:
            self._asked.append(number)
        return number

    def of(self, read: object) -> int | None:
        """Of what was read next, or went wrong; None where `ask` raised that."""
        return None if read is self._failure else self._asked.popleft()


class DealtBatches:
    """The batches that servers deal to this worker in one pass, whole. Owned by the thread that iterates."""

    def __init__(
        self, dealt: _C.DealtPass, batches: Sequence[Any], local_parts: LocalParts, *, are_ready: bool
    ) -> None:
        """`batches`: all of the pass, of which `local_parts` gives each replica its part. `are_ready`: each is one
        item, that is read as a batch."""
        self.of_job: _C.LoaderPass = dealt
        self._batches = batches
        self._local_parts = local_parts
        self._are_ready = are_ready
        self.numbers = _Numbers()

    def to_read(self) -> Iterator[Any]:
        """The indices of tasks, as long as servers deal some."""
        while (number := self.numbers.ask(self.of_job)) is not None:
            batch = self._batches[number]
            yield batch if self._are_ready else self._local_parts.cut(batch)

    def end(self) -> None:
        """The loop came to the end of the pass, which servers know."""


class SharedBatches:
    """This worker's parts of the batches of one pass that live workers divide. Owned by the thread that iterates.

    A batch is known by its position in the pass's order, the indices of all batches one after the other.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._drawn: list[Any] = []
        self._positions: list[int] = []
        """Where those begin."""
        self._end = 0
        self.numbers = _Numbers()
        self._shared: _C.SharedPass | None = None

    def draw(self) -> int | None:
        """How many samples the batch has that follows; None at the end. Called by the pass."""
        batch = next(self._batches, _END)
        if batch is _END:
            return None
        indices = indices_of(batch)
        self._drawn.append(indices)
        self._positions.append(self._end)
        self._end += len(indices)
        return len(indices)

    def belong_to(self, shared: _C.SharedPass) -> None:
        """The pass that draws; known once it is begun."""
        self._shared = shared

    @property
    def of_job(self) -> _C.SharedPass:
        """The pass as all workers know it."""
        assert self._shared is not None
        return self._shared

    def to_read(self) -> Iterator[Any]:
        """The indices of tasks: the parts of this worker's replicas, and a sample to model an empty one on."""
        while (number := self.numbers.ask(self.of_job)) is not None:
            batch, begin, sizes = self.of_job.part_of(number)
            drawn = bisect_right(self._positions, batch) - 1
            indices, start = self._drawn[drawn], self._positions[drawn]
            ends = list(accumulate(sizes, initial=begin - start))
            parts = [indices[first:end] for first, end in pairwise(ends)]
            model = indices[batch - start : batch - start + 1] if 0 in sizes else None
            self._forget_before(self.of_job.oldest_position)
            yield parts, model

    def end(self) -> None:
        """The loop came to the end of the pass."""
        self.of_job.end()

    def _forget_before(self, position: int) -> None:
        past = max(bisect_right(self._positions, position) - 1, 0)
        del self._drawn[:past], self._positions[:past]


class Tasks:
    """The sampler of the loader that reads: the user's batches as tasks, each pass as `current` says when it begins."""

    def __init__(self, loader: DataLoader[Any], local_parts: LocalParts, host: Capacities, draws: Draws) -> None:
        self._loader = loader
        self._local_parts = local_parts
        self._host = host
        self._draws = draws
        self.current = Task(0, 0, 0)
        self.num_skipped = 0
        self.batches: DealtBatches | SharedBatches | None = None

    def __iter__(self) -> Iterator[Task]:
        if isinstance(self._loader.dataset, IterableDataset):
            task = self.current
            others = replace(task, resume=())  # states are large
            firsts = [task] * len(task.resume)
            skipped = repeat(replace(others, is_skipped=True), 0 if firsts else self.num_skipped)
            return chain(skipped, map(self._balanced, chain(firsts, repeat(others))))
        if self.batches is not None:
            return (replace(self._balanced(self.current), index=index) for index in self.batches.to_read())
        return self._cut(self.current, self._indices(self.current, self.num_skipped))

    def all_of(self, epoch: int, seed: int) -> Iterator[Any]:
        """The indices of every batch of a pass."""
        return self._indices(Task(0, epoch, seed))

    def _balanced(self, task: Task) -> Task:
        capacities = tuple(self._host.capacities)
        # Where all are equal, an iterable is divided as it is without balance.
        return replace(task, capacities=capacities if len(set(capacities)) > 1 else ())

    def _cut(self, task: Task, indices: Iterable[Any]) -> Iterator[Task]:
        for index in indices:
            balanced = self._balanced(task)
            if self._loader.batch_sampler is not None:
                index = self._local_parts.cut(index, balanced.capacities)
            yield replace(balanced, index=index)

    def _indices(self, task: Task, num_skipped: int = 0) -> Iterator[Any]:
        batch_sampler = self._loader.batch_sampler
        for sampler in samplers_of(self._loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(task.epoch)
        stream = AgreedStream(task.seed)
        self._draws.begin_drawing()
        with stream:
            indices: Iterator[Any] = iter(self._loader.sampler if batch_sampler is None else batch_sampler)
            # All at once, so that no other loader draws from the same generator in between.
            num_anew = self._draws.to_draw_anew
            asked = (next(indices, _END) for _ in range(num_anew))
            ahead = [index for number, index in enumerate(asked) if number >= num_skipped]
        if num_anew > 0:
            self._draws.end_drawing_anew()
        for index in ahead:
            if index is _END:
                return
            yield index
        for number in count(num_anew):
            with stream:
                index = next(indices, _END)
            self._draws.note_drawn()
            if index is _END:
                return
            if number >= num_skipped:
                yield index


def is_read_by_index(loader: DataLoader[Any]) -> bool:
    """Whether it makes batches of samples that are read by index."""
    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def size_in_words(loader: DataLoader[Any]) -> str:
    """Equal on workers that divide the same data, in the same order."""
    if isinstance(loader.dataset, IterableDataset):
        return "a stream"
    sampler = type(loader.sampler)
    order = "" if sampler is SequentialSampler else f", in the order of a {sampler.__name__}"
    try:
        return f"{len(loader.sampler)} samples in {len(loader)} batches{order}"  # type: ignore[arg-type]
    except TypeError:
        return "data of unknown size"


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The user's batch sampler and the samplers within it."""
    found: list[Any] = []
    sampler: Any = None
    if not isinstance(loader.dataset, IterableDataset):
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None and not any(sampler is other for other in found):
        found.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return found


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that the user gave to the loader or its samplers."""
    found: list[torch.Generator] = []
    for owner in (loader, *samplers_of(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found
