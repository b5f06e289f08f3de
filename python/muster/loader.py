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
- Every tensor of a part starts on 64 bytes. On CUDA devices a part is copied from pinned memory, while the device works
  on the batch before. `pin_memory=True` need not be asked for: with DataLoader workers all batches that they have read
  wait in pinned memory (`num_workers` times `prefetch_factor`, which bounds it).

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
does not rewind it. Reading and collating draw from the ambient generators, which
DataLoader workers seed when they start.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from muster import _C
from muster.assembly import Assembly
from muster.errors import InvalidArgument
from muster.kinds import is_count
from muster.loader_checks import check, check_extent, extent_of, num_batches_of
from muster.loader_generators import LoaderGenerators
from muster.loader_host import LoaderHost
from muster.loader_pass import Pass, PassWatch, Reads
from muster.position import Position, Yielded
from muster.reader import Ended, LocalParts, Parts, Skipped, Task, Unread, reader_of, reading_loader
from muster.stream_states import ReadBatch, ReaderState, StreamStates, is_stateful_loader
from muster.streams import epoch_seed, stream_seed
from muster.tasks import DealtBatches, SharedBatches, Tasks, is_read_by_index

__all__ = ["Loader"]

BatchT_co = TypeVar("BatchT_co", covariant=True)


class Loader(Generic[BatchT_co]):
    """The prepared form of a torch DataLoader; see the module's text for what it yields.

    Each ``iter`` starts an epoch. `epoch` is that of the pass under way and, once a pass has run to its end, of the
    next one; a pass that was left early counts as an epoch when the next ``iter`` begins. Passes may be nested, each
    an epoch of its own (not with ``persistent_workers``, as in torch); `at_end`, `part_rows_of`, `is_last` and
    `state_dict` refer to the pass that was begun last. One batch is read ahead of DataLoader workers, of sharded data,
    and where parameter servers deal batches or live workers divide them; an error in reading it is raised when it is
    asked for. Else a batch is read when it is asked for, as in torch, or when the end must be known and no sampler of
    torch's tells: by `at_end`, `is_last` and steps with ``accumulate`` above 1.

    All ranks iterate together: a sharded loader is collective in every ``next``. Externally synchronised, and not to
    be advanced while a step runs.
    """

    def __init__(self, loader: DataLoader[Any], host: LoaderHost, *, index: int, sharded: bool = False) -> None:
        """Prepares `loader` as the `index`-th of its strategy, `host`. Collective if the user gave it a generator.

        The user's loader is not changed, but its samplers, data set and generators are used, not copied. Raises
        InvalidArgument for what cannot be divided: no DataLoader or one with an ``__iter__`` of its own, a
        DistributedSampler without `sharded`, or ``in_order=False`` where workers must see the same batches.
        """
        are_dealt = host.passes is not None and host.passes.are_dealt
        if isinstance(loader, Loader):
            raise InvalidArgument("this loader is prepared already; pass the torch DataLoader it was made from")
        check(loader, sharded=sharded, alone=host.num_replicas == len(host.devices) and not are_dealt)
        if are_dealt and not sharded and isinstance(loader.dataset, IterableDataset):
            raise InvalidArgument(
                "servers deal batches by number, which an iterable data set has not; use one with __getitem__, or "
                "prepare_loader(loader, sharded=True) with data of this worker's own"
            )
        if host.joins and not are_dealt and not sharded and not is_read_by_index(loader):
            raise InvalidArgument(
                "this worker joined a running synchronous job, which is somewhere in data that is not read by index; "
                "use a data set with __getitem__ and a batch size, or start all workers again"
            )
        self._loader = loader
        self._host = host
        self._index = index
        self._sharded = sharded
        num_local = len(host.devices)
        alone = sharded or are_dealt
        num_parts, first = (num_local, 0) if alone else (host.num_replicas, host.first_replica)
        self._local_parts = LocalParts(num_parts, first, num_local)
        self._epoch = 0
        self._iterations = 0
        self._under_way = False
        self._watch: PassWatch | None = None
        self._num_loads = 0
        self._position = Position()
        self._persistent: DataLoader[Any] | None = None
        self._generators = LoaderGenerators(loader)
        self._tasks = Tasks(loader, self._local_parts, host, self._generators)
        self._assembly = Assembly(host, self._local_parts, is_sharded=sharded)
        self._to_skip = 0  # batches of the next pass
        self._has_states = is_stateful_loader(loader) and isinstance(loader.dataset, IterableDataset)
        self._streams = StreamStates(self._num_readers)
        self._loaded: StreamStates | None = None  # of the next pass
        self._resume: list[tuple[int, ReaderState | None]] = []
        self.progress = _C.LoaderProgress()
        """How far it is, as the strategy knows it."""
        # 0 where the user's sampler decides.
        self.progress.usual_rows = (loader.batch_size or 0) / self._local_parts.num_parts
        if not sharded:
            for generator in self._generators.all:
                generator.set_state(host.broadcast_state(generator.get_state()))

    @property
    def epoch(self) -> int:
        """Counts from 0. Setting it makes the next pass that epoch, whatever happened before."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if not is_count(epoch):
            raise InvalidArgument(
                f"a loader's epoch counts from 0, and {epoch!r} is no such number; set it to an int >= 0"
            )
        self._epoch = epoch
        self._under_way = False
        self._to_skip = 0
        self._loaded = None
        self._generators.forget()

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, for `load_state_dict` of a loader of the same data in a job that is started again.

        Equal on all ranks (but of a sharded loader), plain numbers, and the states of generators that the user gave to
        the loader or its sampler. Of a StatefulDataLoader of an iterable data set also the states of that and of its
        iterators, as of the last batch that was yielded of each reader.
        A pass that is gone, as one that was left by ``break``, and after which steps were made counts as an epoch.
        A batch counts from when it was yielded, so call this after its step; of batches that live workers divide it
        counts from its step. Of those, one of which a worker that died left something undone counts as not trained on,
        and what comes behind it: a warning says so. Local. Raises InvalidArgument where parameter servers deal the
        batches, which are those of no one worker.
        """
        self._check_has_place()
        was_left = self._under_way and self._watch is not None and self._watch.was_left()
        is_under_way = self._under_way and not was_left
        skipped = self._num_trained() if is_under_way else self._to_skip
        state: dict[str, Any] = {"epoch": self._epoch + was_left, "batches": skipped, **self.extent}
        state |= self._generators.state_dict(is_under_way=is_under_way)
        if self._has_states:
            state["streams"] = (self._streams if is_under_way else self._next_streams()).state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass go on after the batches that `state` counts, with the order that they had. One that is
        under way raises InvalidArgument when it is asked for more.

        Those are not read again: of data that is read by index their numbers alone are drawn; of an iterable data set
        its items are passed over before they are collated. Load the same on all ranks, with the job's seed as it was.
        Raises InvalidArgument where `state_dict` would, and for a state that is none of this loader's.
        """
        self._check_has_place()
        epoch, batches = state.get("epoch"), state.get("batches")
        if not (is_count(epoch) and is_count(batches) and self._generators.fit(state)):
            raise InvalidArgument(
                f"this is no state of a loader with {len(self.generators)} generators of its own; pass what "
                "state_dict() gave of the same loader"
            )
        streams = self.check_place(state)
        self.epoch, self._to_skip, self._loaded = epoch, batches, streams
        self._persistent = None
        self._num_loads += 1
        self._generators.load_state_dict(state, skipped=self._to_skip)

    def check_place(self, state: Mapping[str, Any]) -> StreamStates | None:
        """The states of readers in `state`, which `state_dict` gave; None where none are needed. Raises InvalidArgument
        for the middle of an epoch of other batches or data, or of another number of readers."""
        check_extent(self.extent, state)
        saved = state.get("streams")
        if not self._has_states or saved is None:
            return None
        if state.get("batches") == 0 and isinstance(saved, list) and len(saved) != self._num_readers:
            return None
        return StreamStates.loaded(saved, self._num_readers)

    @property
    def extent(self) -> dict[str, int | str | None]:
        """In what its place is counted, as all workers say; nothing where each has data of its own."""
        return {} if self._sharded else extent_of(self._loader)

    @property
    def is_sharded(self) -> bool:
        """Whether its batches are this worker's own."""
        return self._sharded

    @property
    def has_place(self) -> bool:
        """Whether this worker knows which batches of a pass were trained on, so that `state_dict` can say it."""
        return self._sharded or self._host.passes is None or not self._host.passes.are_dealt

    @property
    def dealt(self) -> tuple[_C.Loaders, int] | None:
        """Where servers deal the batches: who knows the passes, and this loader's number there."""
        return None if self.has_place else (cast(_C.Loaders, self._host.passes), self._index)

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that the user gave to the loader and its sampler."""
        return self._generators.all

    @property
    def generator_states(self) -> list[Tensor]:
        """Theirs, as of the beginning of the pass under way or, between passes, of now."""
        return self._generators.began(is_under_way=self._under_way)

    @property
    def _pins_memory(self) -> bool:
        """Whether batches wait in memory that CUDA devices copy from by themselves."""
        return self._loader.pin_memory or any(device.type == "cuda" for device in self._host.devices)

    @property
    def _num_readers(self) -> int:
        return max(1, self._loader.num_workers)

    def _next_streams(self) -> StreamStates:
        """Of the next pass: a data set of this process, or of persistent workers, goes on with what it is now."""
        if self._loaded is not None:
            return self._loaded
        if self._loader.persistent_workers:
            return self._streams.following()
        streams = StreamStates(self._num_readers)
        if self._has_states and self._loader.num_workers == 0 and self._iterations > 0:
            streams.begin(ReaderState.of(self._loader.dataset, None, 0))
        return streams

    def _num_trained(self) -> int:
        """Batches of the pass under way, from its beginning on."""
        shared = self.progress.last_pass
        return shared.num_trained() if isinstance(shared, _C.SharedPass) else self._position.num_yielded

    def _check_has_place(self) -> None:
        if not self.has_place:
            raise InvalidArgument(
                "parameter servers deal the batches, and know which were trained on; begin the epoch anew, or use "
                "prepare_loader(loader, sharded=True) with data of this worker's own"
            )

    def __reduce__(self) -> NoReturn:
        raise InvalidArgument(
            "a prepared loader is one of its strategy's, which knows no copy; copy the DataLoader, and prepare the copy"
        )

    def __getattr__(self, name: str) -> Any:
        """Attributes of the user's loader: `dataset`, `batch_size`, `sampler`, ..."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    @property
    def at_end(self) -> bool:
        """Whether the last batch of the pass was yielded and the pass was not advanced since."""
        self.look_ahead()
        return self.progress.at_end

    def look_ahead(self) -> None:
        """Finds out whether the latest batch of the pass is its last, where that takes reading the next one."""
        if self._under_way and self._watch is not None:
            self._watch.look_ahead()

    def part_rows_of(self, value: object) -> list[int] | None:
        """The number of samples in each local replica's part, if `value` is of a batch that was yielded lately.

        `value` is of it when it is the very object that was yielded, unchanged, or one of its fields, but no plain
        string or number. None otherwise, and for ready batches without a tensor to tell. Never touches a tensor's data.
        """
        batch = self.find(value)
        return None if batch is None or batch.part_rows is None else list(batch.part_rows)

    def is_last(self, value: object) -> bool | None:
        """Whether the batch of `value` is its pass's last; None where it is not recognised, see `part_rows_of`."""
        batch = self.find(value)
        self.look_ahead()
        return None if batch is None else batch.is_last

    def find(self, value: object) -> Yielded | None:
        """The batch that `value` is of; None where it is not recognised, see `part_rows_of`."""
        return self._position.find(value)

    def __len__(self) -> int:
        """Global batches per epoch as the user's loader says; of a sharded one, this worker's. TypeError if unknown."""
        return len(self._loader)

    def __iter__(self) -> Iterator[BatchT_co]:
        if self._under_way:
            self._epoch += 1
        self._under_way = True
        self._generators.begin_pass(draws_anew=self._to_skip > 0)
        self._streams = self._next_streams()
        self._resume, self._loaded = [] if self._loaded is None else self._loaded.to_resume(), None
        self._tasks.num_skipped, self._to_skip = self._to_skip, 0
        self._position = Position(self._tasks.num_skipped)
        leave = partial(self.progress.leave, self.progress.begin_pass())
        epoch, position = self._epoch, self._position
        seed = epoch_seed(self._host.seed, self._index, epoch)
        batches = self._begin_pass(seed)
        # Data that is read by index passes over batches itself, and so do readers that have states.
        is_stream = isinstance(self._loader.dataset, IterableDataset)
        self._watch = None
        begun = Pass(
            Reads(
                position=position,
                streams=self._streams,
                batches=batches,
                num_readers=self._num_readers,
                to_skip=position.num_yielded if is_stream and not self._resume else 0,
                reads_ahead=self._loader.num_workers > 0 or self._sharded or batches is not None,
                num_batches=num_batches_of(self._loader),
                goes_on=self._local_parts.num_local == self._local_parts.num_parts,
                is_sharded=self._sharded,
                begin=lambda: self._results(epoch, seed, batches),
                note_advance=lambda: self._note_advance(position),
                note_yield=lambda is_last: self._note_yield(position, is_last),
                note_end=lambda: self._note_end(position),
                finish=lambda: self._finished(position),
                check=partial(self._check_not_loaded, self._num_loads),
                any_has_more=self._host.any_has_more,
                refusal=self._assembly.refusal,
                assembled=self._assembly.assembled,
            )
        )
        self._watch = PassWatch(begun, partial(attrgetter("steps"), self._host), leave)
        return begun

    def _check_not_loaded(self, num_loads: int) -> None:
        if self._num_loads != num_loads:
            raise InvalidArgument("the loader was loaded while a loop over it ran; begin a new loop")

    def _note_advance(self, position: Position) -> None:
        if self._position is position:
            self.progress.at_end = False

    def _note_yield(self, position: Position, is_last: bool) -> int:
        return self.progress.note_yield(is_last) if self._position is position else 0

    def _note_end(self, position: Position) -> None:
        if self._position is position:
            self.progress.at_end = True

    def _begin_pass(self, seed: int) -> DealtBatches | SharedBatches | None:
        """None where this worker has its parts of the batches for itself."""
        self.progress.last_pass = None
        passes = self._host.passes
        if passes is not None:
            passes.leave_passes()
        if passes is None or self._sharded or isinstance(self._loader.dataset, IterableDataset):
            return None
        all_batches = self._tasks.all_of(self._epoch, seed)
        if passes.are_dealt:
            whole = list(all_batches)
            dealt = passes.deal(self._index, self._epoch, len(whole))
            self.progress.last_pass = dealt
            return DealtBatches(dealt, whole, self._local_parts, are_ready=self._loader.batch_sampler is None)
        if not is_read_by_index(self._loader):
            return None
        batches = SharedBatches(all_batches)
        draw = weakref.WeakMethod(batches.draw)  # else it would keep the data, and itself, through the pass
        shared = passes.share(self._index, self._epoch, lambda: None if (drawn := draw()) is None else drawn())
        batches.belong_to(shared)
        shared.skip(self._position.num_yielded)
        self.progress.last_pass = shared
        return batches

    def end_workers(self) -> None:
        """Ends persistent workers, once no pass reads through them; a later pass starts others."""
        self._persistent = None
        self._generators.note_workers(False)

    def _results(
        self, epoch: int, seed: int, batches: DealtBatches | SharedBatches | None
    ) -> Iterator[Parts | ReadBatch | Ended | Skipped | Unread]:
        self._iterations += 1
        self._tasks.current = Task(self._iterations, epoch, seed, resume=self._resume)
        self._tasks.batches = batches
        if self._loader.persistent_workers:
            if self._persistent is None:
                self._persistent = self._new_loader(seed)
            results = iter(self._persistent)
            self._generators.note_workers(True)
        else:
            results = iter(self._new_loader(seed))
        if isinstance(self._loader.dataset, IterableDataset):
            self._generators.end_drawing_anew()
        self._generators.end_beginning()
        return map(attrgetter("result"), results) if self._pins_memory else results

    def _new_loader(self, seed: int) -> DataLoader[Any]:
        user = self._loader
        generator = self._generators.of_workers(user)
        if generator is None:
            # Iterable data sets may shuffle by their worker's seed, so it must agree on all ranks; other data sets
            # augment by it, so it must not.
            stream = 0 if isinstance(user.dataset, IterableDataset) else 1 + self._host.first_replica
            generator = torch.Generator().manual_seed(stream_seed(seed, stream, 0))
        reader = reader_of(
            user.dataset,
            user.collate_fn,
            self._local_parts,
            batched=user.batch_sampler is not None,
            batch_size=user.batch_size,
            drop_last=user.drop_last,
            snapshot_every=getattr(user, "snapshot_every_n_steps", 1) if self._has_states else 0,
        )
        return reading_loader(user, reader, self._tasks, generator, self._pins_memory, is_sharded=self._sharded)

    def _finished(self, position: Position) -> None:
        if self._under_way and self._position is position:
            self._epoch += 1
            self._under_way = False
