"""What a prepared loader runs where samples are read: in the loop's process, or in DataLoader worker processes.

A reader is a map-style data set whose index is a Task and whose item is what this worker's replicas get of one global
batch: ``(parts, rows)``, the collated part of each local replica and the number of samples in it (None where nothing
tells). Collating here, per replica, is what lets any structure be divided. Readers and tasks are picklable when the
user's data set and collate function are, as spawned workers need. Owned by the process that reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    get_worker_info,
    graph_settings,
)

from muster.batch import emptied, mapped, part_sizes, pinned, rows, split
from muster.errors import InvalidArgument
from muster.stream_states import ReadBatch, ReaderState
from muster.streams import AgreedStream, stream_seed

__all__ = [
    "Ended",
    "LocalParts",
    "Parts",
    "Pinnable",
    "Skipped",
    "Task",
    "Unread",
    "indices_of",
    "reader_of",
    "reading_loader",
]

Parts = tuple[list[Any], list[int | None]]
_T = TypeVar("_T")
_END = object()


class LocalParts(NamedTuple):
    """Which parts are this worker's: `num_local` from `first` on, of `num_parts` of each batch."""

    num_parts: int
    first: int
    num_local: int

    def slices(self, n: int, capacities: Sequence[float]) -> list[slice]:
        """Where this worker's contiguous parts of `n` samples lie."""
        sizes = part_sizes(n, self.num_parts, capacities)
        starts = [sum(sizes[:part]) for part in range(self.first, self.first + self.num_local)]
        return [slice(start, start + sizes[self.first + i]) for i, start in enumerate(starts)]

    def cut(self, batch: Any, capacities: Sequence[float] = ()) -> tuple[list[Any], Any]:
        """The indices of each local part, and the index of the batch's first sample if a part is empty, else None.

        Raises InvalidArgument for an empty batch.
        """
        indices = indices_of(batch)
        parts = [indices[part] for part in self.slices(len(indices), capacities)]
        return parts, indices[:1] if any(len(part) == 0 for part in parts) else None


def indices_of(batch: Any) -> Any:
    """What a batch sampler gave, to be sliced. Raises InvalidArgument for an empty batch."""
    indices = batch if isinstance(batch, Sequence) or hasattr(batch, "__array__") else list(batch)
    if len(indices) == 0:
        raise InvalidArgument("the batch sampler gave a batch of no samples; leave empty batches out")
    return indices


@dataclass(frozen=True)
class Task:
    """One batch to read. `iteration` tells apart any two passes over the loader; `seed` is its epoch's.

    `capacities` are those of the parts when the batch was asked for (`muster.batch.part_sizes`); none if equal.
    """

    iteration: int
    epoch: int
    seed: int
    index: Any = None
    capacities: tuple[float, ...] = ()
    is_skipped: bool = False
    """Of a stream: its samples are passed over."""
    resume: Sequence[tuple[int, ReaderState | None]] = ()
    """Of a stream with states, in the first task of each reader: the batches that are passed over, and its state."""


@dataclass(frozen=True)
class Ended:
    """In place of a batch: the stream of this DataLoader worker is at its end."""

    worker: int
    state: ReaderState | None = None
    """What the next pass begins with, where batches come with states."""


@dataclass(frozen=True)
class Skipped:
    """In place of a batch that a stream passed over."""


@dataclass(frozen=True)
class Unread:
    """In place of a batch that could not be read, or collated. The one after it may be asked for."""

    failure: Any
    """The error, or in a DataLoader's worker torch's ExceptionWrapper of it, which another process gets."""

    @property
    def error(self) -> Exception:
        """As a DataLoader raises it."""
        if not isinstance(self.failure, ExceptionWrapper):
            return cast(Exception, self.failure)
        raised: list[Exception] = []
        try:
            self.failure.reraise()  # type: ignore[no-untyped-call]
        except Exception as error:
            raised.append(error)
        return raised[0]


def _tried(read: Callable[[], _T]) -> _T | Unread:
    try:
        return read()
    except Exception as error:
        info = get_worker_info()
        if info is None:
            return Unread(error)
        return Unread(ExceptionWrapper(where=f"in DataLoader worker process {info.id}"))  # type: ignore[no-untyped-call]


class IndexReader(Dataset[Parts | Unread]):
    """Reads samples by index; a task's index is a global batch's indices, as `LocalParts.cut` leaves them."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], local_parts: LocalParts) -> None:
        self.dataset = dataset
        self._collate = collate
        self._local_parts = local_parts

    def __getitem__(self, task: Task) -> Parts | Unread:
        return _tried(lambda: self._parts(*task.index))

    def _parts(self, indices: Sequence[Any], model: Any) -> Parts:
        empty = None if model is None else emptied(self._collate(self._samples(model)), 1)
        parts = [self._collate(self._samples(part)) if len(part) else empty for part in indices]
        return parts, [len(part) for part in indices]

    def _samples(self, indices: Any) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


class ReadyReader(Dataset[Parts | Unread]):
    """Reads items that are batches already (``batch_size=None``) and divides them by their rows."""

    def __init__(self, dataset: Any, convert: Callable[[Any], Any], local_parts: LocalParts) -> None:
        self.dataset = dataset
        self._convert = convert
        self._local_parts = local_parts

    def __getitem__(self, task: Task) -> Parts | Unread:
        return _tried(lambda: _divided(self._convert(self.dataset[task.index]), self._local_parts, task.capacities))


class StreamReader(Dataset[Parts | ReadBatch | Ended | Skipped | Unread]):
    """Reads an iterable data set: from the global batch's samples, j goes to part j modulo the number of parts;
    with capacities, parts are contiguous.

    The data set's iteration runs under an AgreedStream of the epoch, so that a shuffle inside it agrees on all ranks
    whatever the collate function draws; its ``set_epoch``, if it has one, is called first. With `batch_size` None its
    items are batches already and are divided by their rows. With `snapshot_every` other than 0, batches come with the
    states of the data set and its iterator, each time after so many.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        local_parts: LocalParts,
        batch_size: int | None,
        drop_last: bool,
        snapshot_every: int = 0,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._local_parts = local_parts
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._snapshot_every = snapshot_every
        self._iteration = -1
        self._num_read = 0
        self._to_skip: list[bool] = []
        """Of a pass that goes on: the batches that are passed over, and whether each is to be read for that."""
        self._iterator: Iterator[Any] = iter(())
        self._stream = AgreedStream(0)

    def __getitem__(self, task: Task) -> Parts | ReadBatch | Ended | Skipped | Unread:
        if task.iteration != self._iteration:
            self._start(task)
        is_skipped = task.is_skipped
        if self._to_skip:
            is_skipped = True
            if not self._to_skip.pop():
                return Skipped()
        size = self._batch_size or 1
        with self._stream:
            samples = _next_of(self._iterator, size)
        if not samples or (self._drop_last and len(samples) < size):
            self._iterator = iter(())
            return Ended(_worker_id(), None if self._snapshot_every == 0 else ReaderState.of(self.dataset, None, 0))
        self._num_read += 1
        if is_skipped:
            return Skipped()
        if self._snapshot_every == 0:
            return _tried(lambda: self._parts(samples, task))
        parts = self._parts(samples, task)
        is_due = self._num_read % self._snapshot_every == 0
        state = None
        if is_due or len(samples) < size:
            state = ReaderState.of(self.dataset, self._iterator, self._num_read, ended=len(samples) < size)
        return ReadBatch(parts, _worker_id(), state)

    def _parts(self, samples: list[Any], task: Task) -> Parts:
        if self._batch_size is None:
            return _divided(self._collate(samples[0]), self._local_parts, task.capacities)
        if task.capacities:
            divided = [samples[part] for part in self._local_parts.slices(len(samples), task.capacities)]
        else:
            first, num_parts = self._local_parts.first, self._local_parts.num_parts
            divided = [samples[part::num_parts] for part in range(first, first + self._local_parts.num_local)]
        empty = None if all(divided) else emptied(self._collate(samples[:1]), 1)
        return [self._collate(part) if part else empty for part in divided], [len(part) for part in divided]

    def _start(self, task: Task) -> None:
        self._iteration = task.iteration
        self._stream = AgreedStream(stream_seed(task.seed, _worker_id(), 0))
        if isinstance(self.dataset, IterDataPipe):  # workers shuffle alike, and take shares of that
            shared = torch.Generator().manual_seed(stream_seed(task.seed, 0, 1))
            graph_settings.apply_random_seed(self.dataset, shared)
        num_skipped, state = task.resume[_worker_id()] if task.resume else (0, None)
        self._num_read = 0 if state is None else state.read
        self._to_skip = [False] * min(self._num_read, num_skipped)
        self._to_skip = [True] * (num_skipped - len(self._to_skip)) + self._to_skip  # from the end
        with self._stream:
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(task.epoch)
            self._iterator = iter(self.dataset) if state is None else state.iterate(self.dataset)


@dataclass(frozen=True)
class Pinnable:
    """What a reader gave, for a DataLoader that pins memory: torch's own walk would make lists of its tuples."""

    result: Parts | ReadBatch | Ended | Skipped | Unread
    pins_objects: bool
    """Whether objects that are no structure, and have `pin_memory`, are asked for it, as torch does."""

    def pin_memory(self) -> Pinnable:
        """The same with its parts in pinned memory. Called by the DataLoader: of workers, in a thread of its own."""
        result = self.result
        if isinstance(result, ReadBatch):
            return Pinnable(result._replace(parts=self._pinned(result.parts)), self.pins_objects)
        if isinstance(result, (Ended, Skipped, Unread)):
            return self
        return Pinnable(self._pinned(result), self.pins_objects)

    def _pinned(self, parts: Parts) -> Parts:
        values, counts = parts
        return [mapped(self._pin, value) for value in values], counts

    def _pin(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return pinned(leaf)
        if self.pins_objects and callable(getattr(leaf, "pin_memory", None)):
            return leaf.pin_memory()
        return leaf


class WorkerStart:
    """Does what torch does first in a DataLoader's worker: gives the user's own data set to ``get_worker_info()``, a
    data pipe its share (``sharding_filter``), and calls the user's ``worker_init_fn``."""

    def __init__(self, loader: DataLoader[Any], is_sharded: bool) -> None:
        """`loader`: the user's. `is_sharded`: as of a prepared one, whose ranks have shares of data pipes, too; without
        workers this gives this rank its own."""
        self._worker_init_fn = loader.worker_init_fn
        has_ranks = is_sharded and dist.is_available() and dist.is_initialized()
        self._ranks, self._rank = (dist.get_world_size(), dist.get_rank()) if has_ranks else (1, 0)
        if loader.num_workers == 0 and isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
            graph_settings.apply_sharding(loader.dataset, self._ranks, self._rank)

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, (IndexReader, ReadyReader, StreamReader)):
            dataset = info.dataset.dataset
            object.__setattr__(info, "dataset", dataset)
            if isinstance(dataset, (IterDataPipe, MapDataPipe)):
                number = worker * self._ranks + self._rank
                graph_settings.apply_sharding(dataset, info.num_workers * self._ranks, number)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)


def as_is(item: Any) -> Any:
    """The collate function of a loader whose reader has collated."""
    return item


def reader_of(
    dataset: Iterable[Any] | Dataset[Any],
    collate: Callable[[Any], Any],
    local_parts: LocalParts,
    *,
    batched: bool,
    batch_size: int | None,
    drop_last: bool,
    snapshot_every: int = 0,
) -> IndexReader | ReadyReader | StreamReader:
    """The reader for a data set: iterable, or by index in batches, or by index of ready batches."""
    if isinstance(dataset, IterableDataset):
        return StreamReader(dataset, collate, local_parts, batch_size, drop_last, snapshot_every)
    return IndexReader(dataset, collate, local_parts) if batched else ReadyReader(dataset, collate, local_parts)


def _next_of(iterator: Iterator[Any], number: int) -> list[Any]:
    """Fewer at the end. A data set may be its own iterator, and begin anew whenever iter() is called, so it is not."""
    taken: list[Any] = []
    while len(taken) < number and (item := next(iterator, _END)) is not _END:
        taken.append(item)
    return taken


def _worker_id() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def _divided(batch: Any, local_parts: LocalParts, capacities: Sequence[float]) -> Parts:
    if local_parts.num_parts == 1:
        return [batch], [rows(batch)]
    num_rows = rows(batch)
    if num_rows is None:
        raise InvalidArgument(
            f"a ready batch (batch_size=None) of type {type(batch).__name__} has no tensor that tells its rows, so it "
            "cannot be divided; give the loader a batch_size, or pass sharded=True with one local replica"
        )
    mine = slice(local_parts.first, local_parts.first + local_parts.num_local)
    parts = [part for (part,) in split((batch,), local_parts.num_parts, capacities=capacities)[mine]]
    sizes: list[int | None] = [*part_sizes(num_rows, local_parts.num_parts, capacities)[mine]]
    return parts, sizes


def reading_loader(
    user: DataLoader[Any],
    reader: Any,
    tasks: Any,
    generator: torch.Generator | None,
    pins_memory: bool,
    *,
    is_sharded: bool,
) -> DataLoader[Any]:
    """The DataLoader that has `reader` read `tasks`, with the options of the user's. `pins_memory`: of its batches."""
    return DataLoader(
        reader,
        batch_size=None,
        sampler=tasks,
        num_workers=user.num_workers,
        collate_fn=partial(Pinnable, pins_objects=user.pin_memory) if pins_memory else as_is,
        pin_memory=pins_memory,
        timeout=user.timeout,
        worker_init_fn=WorkerStart(user, is_sharded),
        multiprocessing_context=user.multiprocessing_context,
        generator=generator,
        prefetch_factor=user.prefetch_factor,
        persistent_workers=user.persistent_workers,
        pin_memory_device=user.pin_memory_device,
        in_order=user.in_order,
    )
