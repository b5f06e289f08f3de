"""Loader: a torch DataLoader whose every global batch is divided over the replicas of a job.

What holds for every kind of data:

- The batch size of the user's loader is the global batch; each replica's part is what `muster.batch.part_sizes` says.
  Every sample is in exactly one part; nothing is padded.
- A part is collated on its own, by the loader's own collate function, so any structure, custom batch objects included,
  can be divided. A part without samples has the structure and dtypes of the batch's first sample, with 0 rows: tensors
  of size(0) 1 and columns of length 1 lose their row, anything else is as collated. `part_rows_of` knows it is empty.
- With one local replica the loop gets its part itself, on its device. With several, an outer tuple or list (which
  becomes a tuple; a named tuple stays one) or mapping has a PerReplica in each field, and anything else is one
  PerReplica of the parts: custom objects, columns, and lists that hold one item per sample.
- Every tensor of a part starts on 64 bytes.

By kind:

- **By index.** The loader's own batch sampler is cut before samples are read, contiguously in replica order, so each
  worker reads only its part; shuffle, samplers, batch samplers and drop_last keep their meaning.
- **Iterable.** Every worker reads the whole stream (each DataLoader worker, too, as in torch), makes the global batches
  and keeps its parts: sample j of a batch goes to replica j modulo the number of replicas; parts of unequal
  capacity are contiguous.
- **Ready batches** (``batch_size=None``). Every worker reads each batch and narrows it to its parts (`muster.batch.
  split`, which says what can be divided).
- **Dealt** (`ParameterServerStrategy` with a staleness), by index. Servers deal whole batches in order to whichever
  worker asks, and deal again what a worker that died, or left its loop early, had not finished. A worker that is
  through waits for those of the others at the end of its pass.
- **Shared** (`ParameterServerStrategy`, synchronous), by index. As by index, but over the workers that are live when
  the batch is asked for; what a worker left undone when it died comes once more, divided over the others.
- **Ready-sharded** (``sharded=True``), any of the above: the batches are this worker's own and are divided over its
  local replicas alone. A worker that runs out goes on with empty parts until none has data.

Randomness. Samplers, and iterable data sets, draw from a stream of their own, the same on all ranks and another one in
each epoch: while they run, torch's default generator, ``random`` and numpy's legacy generator have states that follow
from `epoch_seed(seed, loader's index, epoch)`, and the ambient states are put back after every batch. Hence for
``shuffle=True``, as the C++ loader does too:

    torch's default generator is seeded with epoch_seed(...)           (muster.streams; SplitMix64)
    s = torch.empty((), dtype=torch.int64).random_()                   (drawn from it)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(s))

Samplers that have ``set_epoch`` are told the epoch. A generator that the user gave to the loader or its sampler gets
the chief's state when prepared and is left alone afterwards: it decides the order, as in torch, and setting `epoch`
does not rewind it. Reading and collating draw from the ambient generators, in DataLoader workers seeded per epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, repeat
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from muster.batch import emptied, is_column, place, rebuilt, rows
from muster.dealing import Dealer, Dealing, Members, Sharing
from muster.errors import InvalidArgument
from muster.per_replica import PerReplica
from muster.position import Position
from muster.reader import Deal, Ended, Parts, Skipped, Task, WorkerStart, as_is, reader_of
from muster.streams import AgreedStream, epoch_seed, stream_seed

__all__ = ["Loader", "LoaderHost", "size_in_words"]

T = TypeVar("T")
BatchT_co = TypeVar("BatchT_co", covariant=True)

_END = object()
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"


class LoaderHost(Protocol):
    """What a loader needs of the strategy that prepares it."""

    @property
    def num_replicas(self) -> int:
        """Replicas in the job."""

    @property
    def first_replica(self) -> int:
        """The job-wide index of this worker's first replica."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """The device of each of this worker's replicas."""

    @property
    def seed(self) -> int:
        """The job's seed, equal on all ranks."""

    @property
    def capacities(self) -> Sequence[float]:
        """By replica, what parts of batches that are asked for next follow (`muster.batch.part_sizes`)."""

    @property
    def dealer(self) -> Dealer | None:
        """Who deals whole batches; None where each batch is divided over workers."""

    @property
    def members(self) -> Members | None:
        """Over whom batches are divided; None where that is all workers for good."""

    @property
    def joins(self) -> bool:
        """Whether this worker came to a job that others had begun."""

    def any_has_more(self, has_more: bool) -> bool:
        """Whether the flag is true on any worker that steps together with this one; collective over those. Called for
        each batch of a sharded loader, one ahead."""

    def broadcast_state(self, state: Tensor) -> Tensor:
        """Collective: the chief's `state`, a uint8 vector on the CPU. Called while a loader is prepared."""


class Loader(Generic[BatchT_co]):
    """The prepared form of a torch DataLoader; see the module's text for what it yields.

    Each ``iter`` starts an epoch. `epoch` is that of the pass under way and, once a pass has run to its end, of the
    next one; a pass that was left early counts as an epoch when the next ``iter`` begins. Passes may be nested, each
    an epoch of its own (not with ``persistent_workers``, as in torch); `at_end`, `part_rows_of` and `state_dict` refer
    to the pass that was begun last. One batch is read ahead; an error in reading it is raised when it is asked for.

    All ranks iterate together: a sharded loader is collective in every ``next``. Externally synchronised, and not to
    be advanced while a step runs.
    """

    def __init__(self, loader: DataLoader[Any], host: LoaderHost, *, index: int, sharded: bool = False) -> None:
        """Prepares `loader` as the `index`-th of its strategy, `host`. Collective if the user gave it a generator.

        The user's loader is not changed, but its samplers, data set and generators are used, not copied. Raises
        InvalidArgument for what cannot be divided: no DataLoader or one with an ``__iter__`` of its own, a
        DistributedSampler without `sharded`, or ``in_order=False`` where workers must see the same batches.
        """
        _check(loader, sharded=sharded, alone=host.num_replicas == len(host.devices) and host.dealer is None)
        if host.dealer is not None and not sharded and isinstance(loader.dataset, IterableDataset):
            raise InvalidArgument(
                "servers deal batches by number, which an iterable data set has not; use one with __getitem__, or "
                "prepare_loader(loader, sharded=True) with data of this worker's own"
            )
        if host.joins and host.dealer is None and not sharded and not _is_read_by_index(loader):
            raise InvalidArgument(
                "this worker joined a running synchronous job, which is somewhere in data that is not read by index; "
                "use a data set with __getitem__ and a batch size, or start all workers again"
            )
        self._loader = loader
        self._host = host
        self._index = index
        self._sharded = sharded
        num_local = len(host.devices)
        alone = sharded or host.dealer is not None
        self._deal = Deal(num_local, 0, num_local) if alone else Deal(host.num_replicas, host.first_replica, num_local)
        self._epoch = 0
        self._iterations = 0
        self._under_way = False
        self._pass_epoch = 0  # of the pass that was begun last
        self._position = Position()
        self._persistent: DataLoader[Any] | None = None
        self._tasks = _Tasks(loader, self._deal, host)
        self._empty: Any = _END
        self._pass: weakref.ref[_Pass] | None = None
        self._dealing: Dealing | Sharing | None = None  # of the pass that was begun last
        self._generators = _generators(loader)
        self._generator_states: list[Tensor] = []  # as of when the pass under way was begun
        self._to_skip = 0  # batches of the next pass
        if not sharded:
            for generator in self._generators:
                generator.set_state(host.broadcast_state(generator.get_state()))

    @property
    def usual_rows(self) -> float:
        """Samples that a part of a full batch has on average; 0 where the user's sampler decides."""
        return (self._loader.batch_size or 0) / self._deal.num_parts

    @property
    def epoch(self) -> int:
        """Counts from 0. Setting it makes the next pass that epoch, whatever happened before."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if not _is_count(epoch):
            raise InvalidArgument(
                f"a loader's epoch counts from 0, and {epoch!r} is no such number; set it to an int >= 0"
            )
        self._epoch = epoch
        self._under_way = False
        self._to_skip = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, for `load_state_dict` of a loader of the same data in a job that is started again.

        Equal on all ranks, plain numbers, and the states of generators that the user gave to the loader or its sampler.
        A batch counts from when it was yielded, so call this after its step. Local. Raises InvalidArgument where
        parameter servers divide or deal the batches, which are those of no one worker.
        """
        self._check_has_place()
        generators = self._generator_states if self._under_way else self._states_of_generators()
        skipped = self._position.num_yielded if self._under_way else self._to_skip
        return {"epoch": self._epoch, "batches": skipped, "generators": list(generators)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass go on after the batches that `state` counts, with the order that they had.

        Those are not read again: of data that is read by index their numbers alone are drawn; of an iterable data set
        its items are passed over before they are collated. Load the same on all ranks, with the job's seed as it was.
        Raises InvalidArgument where `state_dict` would, and for a state that is none of this loader's.
        """
        self._check_has_place()
        epoch, batches = state.get("epoch"), state.get("batches")
        generators = list(state.get("generators", ()))
        if not (_is_count(epoch) and _is_count(batches) and len(generators) == len(self._generators)):
            raise InvalidArgument(
                f"this is no state of a loader with {len(self._generators)} generators of its own; pass what "
                "state_dict() gave of the same loader"
            )
        self.epoch, self._to_skip = cast(int, epoch), cast(int, batches)
        for generator, saved in zip(self._generators, generators, strict=True):
            generator.set_state(saved)

    def _check_has_place(self) -> None:
        if not self._sharded and (self._host.dealer is not None or self._host.members is not None):
            raise InvalidArgument(
                "parameter servers know which batches were trained on, and a loader does not; begin the epoch anew, or "
                "use prepare_loader(loader, sharded=True) with data of this worker's own"
            )

    def _states_of_generators(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def __getattr__(self, name: str) -> Any:
        """Attributes of the user's loader: `dataset`, `batch_size`, `sampler`, ..."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    @property
    def at_end(self) -> bool:
        """Whether the last batch of the pass was yielded and the pass was not advanced since."""
        return self._position.at_end

    def part_rows_of(self, value: object) -> list[int] | None:
        """The number of samples in each local replica's part, if `value` is of the batch that was yielded last.

        `value` is of it when it is the very object that was yielded, unchanged, or one of its fields, but no plain
        string or number. None otherwise, and for ready batches without a tensor to tell. Never touches a tensor's data.
        """
        return self._position.rows_of(value)

    def __len__(self) -> int:
        """Global batches per epoch as the user's loader says; of a sharded one, this worker's. TypeError if unknown."""
        return len(self._loader)

    def __iter__(self) -> Iterator[BatchT_co]:
        if self._under_way:
            self._epoch += 1
        self._under_way = True
        self._generator_states = self._states_of_generators()
        self._tasks.num_skipped, self._to_skip = self._to_skip, 0
        self._position = Position(self._tasks.num_skipped)
        self.release()
        seed = epoch_seed(self._host.seed, self._index, self._epoch)
        self._pass_epoch = self._epoch
        self._dealing = self._begin_dealing(seed)
        begun = _Pass(self, self._position, self._dealing, self._results(self._epoch, seed, self._dealing))
        self._pass = weakref.ref(begun)
        return begun

    def _begin_dealing(self, seed: int) -> Dealing | Sharing | None:
        dealer, members = self._host.dealer, self._host.members
        if self._sharded or isinstance(self._loader.dataset, IterableDataset):
            return None
        if dealer is not None:
            return Dealing(dealer, self._index, self._epoch, list(self._tasks.all_of(self._epoch, seed)))
        if members is not None and _is_read_by_index(self._loader):
            others = members.pass_of_others(self._index, self._epoch)
            batches = self._tasks.all_of(self._epoch, seed)
            return Sharing(members, iter(()) if others == {} else batches, others or None)
        return None

    def standing(self) -> tuple[int, dict[str, Any]] | None:
        """The epoch of the pass that was begun last, and where it is (nothing where it was left); for a worker that
        joins. None where batches are not shared."""
        if not isinstance(self._dealing, Sharing):
            return None
        is_left = self._under_way and (self._pass is None or self._pass() is None)
        return self._pass_epoch, {} if is_left else self._dealing.standing()

    def release(self) -> None:
        """Lets other workers have what is left of a dealt pass that was left early."""
        if self._dealing is not None and self._pass is not None and self._pass() is None:
            self._dealing.leave()
            self._dealing = None

    def stepped(self) -> tuple[int, int, int] | None:
        """Notes that the batch that was yielded last goes into a step. Its loader, epoch and number; None if it was not
        dealt, or is in one already."""
        return None if self._dealing is None else self._dealing.stepped()

    def settle(self, members: Sequence[int] | None) -> None:
        """The window of those steps was made of the parts of the ranks `members`; None: it was dropped."""
        if self._dealing is None:
            return
        if members is None:
            self._dealing.forget()
        else:
            self._dealing.settle(members)

    def end_workers(self) -> None:
        """Ends persistent workers, once no pass reads through them; a later pass starts others."""
        self._persistent = None

    def _results(self, epoch: int, seed: int, dealing: Dealing | Sharing | None) -> Iterator[Parts | Ended | Skipped]:
        self._iterations += 1
        self._tasks.current = Task(self._iterations, epoch, seed)
        self._tasks.dealing = dealing
        if not self._loader.persistent_workers:
            return iter(self._new_loader(seed))
        if self._persistent is None:
            self._persistent = self._new_loader(seed)
        return iter(self._persistent)

    def _new_loader(self, seed: int) -> DataLoader[Any]:
        user = self._loader
        generator = user.generator
        if generator is None:
            # Iterable data sets may shuffle by their worker's seed, so it must agree on all ranks; other data sets
            # augment by it, so it must not.
            stream = 0 if isinstance(user.dataset, IterableDataset) else 1 + self._host.first_replica
            generator = torch.Generator().manual_seed(stream_seed(seed, stream, 0))
        reader = reader_of(
            user.dataset,
            user.collate_fn,
            self._deal,
            batched=user.batch_sampler is not None,
            batch_size=user.batch_size,
            drop_last=user.drop_last,
        )
        return DataLoader(
            reader,
            batch_size=None,
            sampler=self._tasks,
            num_workers=user.num_workers,
            collate_fn=as_is,
            pin_memory=user.pin_memory,
            timeout=user.timeout,
            worker_init_fn=WorkerStart(user.worker_init_fn),
            multiprocessing_context=user.multiprocessing_context,
            generator=generator,
            prefetch_factor=user.prefetch_factor,
            persistent_workers=user.persistent_workers,
            pin_memory_device=user.pin_memory_device,
            in_order=user.in_order,
        )

    def _finished(self, position: Position) -> None:
        if self._under_way and self._position is position:
            self._epoch += 1
            self._under_way = False

    def _assembled(self, parts: Parts | None) -> _Batch:
        """The batch of these parts on their devices; of empty ones for None."""
        values, counts = self._empty_parts() if parts is None else parts
        if self._sharded and self._empty is _END:
            self._empty = emptied(values[0], -1 if counts[0] is None else counts[0])
        placed = [place(value, device) for value, device in zip(values, self._host.devices, strict=True)]
        known = [count for count in counts if count is not None]
        return _Batch(_yielded(placed, known), known if len(known) == len(counts) else None)

    def _empty_parts(self) -> Parts:
        num_local = self._deal.num_local
        return [self._empty] * num_local, [0] * num_local

    def _refusal(self, *, needs_empty: bool) -> InvalidArgument | None:
        """Collective. An error for every worker if one needs an empty part and never had a batch to model it on."""
        missing = needs_empty and self._empty is _END
        if not self._host.any_has_more(missing):
            return None
        return InvalidArgument(
            f"{'this' if missing else 'another'} worker's loader (sharded=True) has never had a batch to model its "
            "empty parts on while others have data; give every worker at least one batch in its first epoch"
        )


@dataclass(frozen=True)
class _Batch:
    value: Any
    part_rows: list[int] | None
    number: Any = None  # what its pass knows it by


class _Pass(Iterator[Any]):
    """One pass over a loader, with one batch read ahead.

    The loader does not hold it, so that leaving a loop early ends the DataLoader's worker processes at once.
    """

    def __init__(
        self,
        loader: Loader[Any],
        position: Position,
        dealing: Any,  # Dealing, Sharing or None
        results: Iterator[Parts | Ended | Skipped],
    ) -> None:
        self._loader = loader
        self._position = position
        self._dealing = dealing
        self._results = results
        self._epoch = loader._epoch
        self._ended: set[int] = set()
        self._begun = False
        self._ahead: _Batch | Exception | None = None

    def __next__(self) -> Any:
        self._position.at_end = False
        dealing = self._dealing
        if dealing is not None:
            dealing.done()
        if not self._begun:
            self._begun = True
            self._ahead = self._read(first=True)
        while self._ahead is None and dealing is not None and dealing.wait_for_more():
            seed = epoch_seed(self._loader._host.seed, self._loader._index, self._epoch)
            self._results = self._loader._results(self._epoch, seed, dealing)
            self._ahead = self._read()
        batch = self._ahead
        if batch is None:
            self._loader._finished(self._position)
            raise StopIteration
        if isinstance(batch, Exception):
            self._ahead = None
            raise batch
        if dealing is not None:
            dealing.yielded(batch.number)
        self._ahead = self._read()
        self._position.yielded(batch.value, batch.part_rows, at_end=self._ahead is None)
        return batch.value

    def _read(self, *, first: bool = False) -> _Batch | Exception | None:
        """The next batch, what went wrong in reading it, or None at the end. An error waits until it is asked for."""
        loader = self._loader
        parts = _attempted(self._next_parts)
        more = parts is not None
        refusal = None
        if loader._sharded:
            more = loader._host.any_has_more(more)
            refusal = loader._refusal(needs_empty=parts is None) if more and first else None
        number = None if self._dealing is None or parts is None else self._dealing.was_read()
        if isinstance(parts, Exception):
            if self._dealing is not None:
                self._dealing.lost(number)
            return parts
        if refusal is not None or not more:
            return refusal
        return _attempted(lambda: replace(loader._assembled(parts), number=number))

    def _next_parts(self) -> Parts | None:
        num_streams = max(1, self._loader._loader.num_workers)
        while len(self._ended) < num_streams:
            result = next(self._results, None)
            if result is None:
                break
            if isinstance(result, Ended):
                self._ended.add(result.worker)
            elif not isinstance(result, Skipped):
                return result
        return None


def _attempted(function: Callable[[], T]) -> T | Exception:
    try:
        return function()
    except Exception as error:
        return error


class _Tasks:
    """The sampler of the loader that reads: the user's batches as tasks, each pass as `current` says when it begins."""

    def __init__(self, loader: DataLoader[Any], deal: Deal, host: LoaderHost) -> None:
        self._loader = loader
        self._deal = deal
        self._host = host
        self.current = Task(0, 0, 0)
        self.num_skipped = 0
        self.dealing: Dealing | Sharing | None = None

    def __iter__(self) -> Iterator[Task]:
        if isinstance(self._loader.dataset, IterableDataset):
            skipped = repeat(replace(self.current, is_skipped=True), self.num_skipped)
            return chain(skipped, map(self._balanced, repeat(self.current)))
        if self.dealing is not None:
            return self._cut(self.current, self.dealing.to_read())
        return self._cut(self.current, zip(self._indices(self.current, self.num_skipped), repeat(self._deal)))

    def all_of(self, epoch: int, seed: int) -> Iterator[Any]:
        """The indices of every batch of a pass."""
        return self._indices(Task(0, epoch, seed))

    def _balanced(self, task: Task) -> Task:
        capacities = tuple(self._host.capacities)
        # Where all are equal, an iterable is dealt as it is without balance.
        return replace(task, capacities=capacities if len(set(capacities)) > 1 else ())

    def _cut(self, task: Task, indices: Iterable[tuple[Any, Deal]]) -> Iterator[Task]:
        for index, deal in indices:
            balanced = self._balanced(task)
            if self._loader.batch_sampler is not None:
                index = deal.cut(index, balanced.capacities)
            yield replace(balanced, index=index)

    def _indices(self, task: Task, num_skipped: int = 0) -> Iterator[Any]:
        batch_sampler = self._loader.batch_sampler
        for sampler in _samplers(self._loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(task.epoch)
        stream = AgreedStream(task.seed)
        with stream:
            indices: Iterator[Any] = iter(self._loader.sampler if batch_sampler is None else batch_sampler)
        for number in count():
            with stream:
                index = next(indices, _END)
            if index is _END:
                return
            if number >= num_skipped:
                yield index


def _yielded(parts: list[Any], part_rows: Sequence[int]) -> Any:
    """What the loop gets of the placed parts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if _are_mappings_of_fields(parts):
        return rebuilt(first, [PerReplica(part[key] for part in parts) for key in first])
    if _are_sequences_of_fields(parts, part_rows):
        fields = [PerReplica(values) for values in zip(*parts, strict=True)]
        return rebuilt(first, fields) if hasattr(first, "_fields") else tuple(fields)
    return PerReplica(parts)


def _are_mappings_of_fields(parts: list[Any]) -> bool:
    return all(isinstance(part, Mapping) and part.keys() == parts[0].keys() for part in parts)


def _are_sequences_of_fields(parts: list[Any], part_rows: Sequence[int]) -> bool:
    """Whether the parts are lists or tuples of the same fields, and not of one item per sample."""
    if not all(isinstance(part, (list, tuple)) and len(part) == len(parts[0]) > 0 for part in parts):
        return False
    if any(is_column(part) for part in parts):
        return False
    filled = [(part, count) for part, count in zip(parts, part_rows, strict=False) if count > 0]
    return not filled or not all(len(part) == count and rows(part) != count for part, count in filled)


def _check(loader: object, *, sharded: bool, alone: bool) -> None:
    if isinstance(loader, Loader):
        raise InvalidArgument("this loader is prepared already; pass the torch DataLoader it was made from")
    if not isinstance(loader, DataLoader):
        raise InvalidArgument(
            f"a {type(loader).__name__} cannot be prepared as a loader; wrap the data in a torch.utils.data.DataLoader"
        )
    # The state of a torchdata StatefulDataLoader is that of the passes which it makes itself; Loader has its own.
    if type(loader).__iter__ is not DataLoader.__iter__ and not _is_stateful(loader):
        raise InvalidArgument(
            f"{type(loader).__name__} iterates in a way of its own, which would be lost when its batch sampler is cut "
            "into parts; pass a plain torch.utils.data.DataLoader with the same data set, sampler and collate function"
        )
    if not sharded and any(isinstance(sampler, DistributedSampler) for sampler in _samplers(loader)):
        raise InvalidArgument(
            "the loader's DistributedSampler shards the data already, so that most samples would be left out; pass a "
            "plain sampler (or shuffle=True), with the global batch size, or prepare_loader(loader, sharded=True)"
        )
    if not sharded and not alone and loader.num_workers > 0 and not loader.in_order:
        raise InvalidArgument(
            "in_order=False lets each worker see the batches in another order, but all take parts of the same batch; "
            "leave in_order out, or use prepare_loader(loader, sharded=True)"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_stateful(loader: DataLoader[Any]) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" == _STATEFUL for base in type(loader).__mro__)


def _is_read_by_index(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def size_in_words(loader: DataLoader[Any]) -> str:
    """Equal on workers that divide the same data."""
    if isinstance(loader.dataset, IterableDataset):
        return "a stream"
    try:
        return f"{len(loader.sampler)} samples in {len(loader)} batches"  # type: ignore[arg-type]
    except TypeError:
        return "data of unknown size"


def _samplers(loader: DataLoader[Any]) -> list[Any]:
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


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for owner in (loader, *_samplers(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found
