"""The passes over a strategy's loaders, as its steps know them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from muster import _C
from muster.batch import agreeing_rows, place, split
from muster.errors import InvalidArgument
from muster.loader import Loader
from muster.loader_host import LoaderHost
from muster.position import Yielded

__all__ = ["Passes", "WeakHost", "dealt_batches", "mark_in_run", "mark_in_step", "usual_rows"]


@dataclass(frozen=True)
class Source:
    """A loader that arguments of a call come from."""

    loader: Loader[Any]
    part_rows: list[int] | None
    """The samples in each local replica's part, where the loader knows them."""
    batch: int
    """The batch's number among those that the loader yielded."""
    batches: list[Yielded]
    """Those that were found."""

    @property
    def progress(self) -> _C.LoaderProgress:
        """Its loader's."""
        return self.loader.progress

    @property
    def is_last(self) -> bool:
        """Whether one of the batches is its pass's last, as far as is known."""
        return any(batch.is_last for batch in self.batches)


class Passes:
    """Which loaders the batches of steps come from, and how far the passes over them are.

    Where parameter servers deal or share batches, each batch that a step used, and each pass that was left, is
    accounted for. Owned by the thread that steps.
    """

    def __init__(self, core: _C.StrategyCore, host: LoaderHost, connect: Callable[[], None]) -> None:
        """`connect` connects to the job's servers, as a first step does."""
        self._core = core
        self._devices = core.devices
        self._host = host
        self._loaders: list[Loader[Any]] = []
        self._warned_of_left_out = False
        self.of_core = _C.Loaders(core, connect)
        """The passes that other workers have a part in."""

    def add(self, loader: Loader[Any], size: str) -> None:
        """Takes up the loader that was prepared next. Collective over workers with a `size`, which must be equal on all
        of them, in words; empty where each has data of its own. Raises LayoutMismatch."""
        self.of_core.add(loader.progress, size)
        self._loaders.append(loader)

    def sources_of(self, args: tuple[Any, ...]) -> list[Source]:
        """The loaders of which one of `args` is a batch, or a field of one."""
        sources = []
        for loader in self._loaders:
            found = [batch for arg in args if (batch := loader.find(arg)) is not None]
            if found:
                part_rows = next((list(batch.part_rows) for batch in found if batch.part_rows is not None), None)
                latest = max(batch.number for batch in found)
                sources.append(Source(loader, part_rows, latest, found))
        return sources

    def divide(self, args: tuple[Any, ...], sources: Sequence[Source]) -> tuple[list[tuple[Any, ...]], list[int]]:
        """The arguments of each local replica, on its device, and the samples in them (-1: unknown)."""
        counted = [rows for source in sources if (rows := source.part_rows) is not None]
        hint = counted[0] if counted else None
        self._look_for_left_out(counted)
        parts = split(args, self._core.local_replicas, hint, self._host.capacities)
        if self._devices[0].type != "cpu":
            parts = [place(part, device) for part, device in zip(parts, self._devices, strict=True)]
        if hint is not None:
            return parts, hint
        counts = [agreeing_rows(part) for part in parts]
        return parts, [-1 if count is None else count for count in counts]

    def _look_for_left_out(self, counted: Sequence[Sequence[int]]) -> None:
        """Warns once where a part without samples of the first loader, which is not computed, has some of another."""
        if self._warned_of_left_out:
            return
        left = sum(rows for other in counted[1:] for first, rows in zip(counted[0], other, strict=True) if first == 0)
        if left == 0:
            return
        self._warned_of_left_out = True
        logging.getLogger("muster").warning(
            "a step has batches of several loaders, and that of the loader which was prepared first has fewer samples "
            "than there are replicas: parts without any are not computed, and %d samples of other loaders in them are "
            "left out; use drop_last=True, or batch sizes whose last batch has a sample for each replica",
            left,
        )

    def has_ended(self, set_number: int, sources: Sequence[Source]) -> bool:
        """Whether a step of that set of optimizers, of batches of `sources`, is the last of a pass. Of a step of the
        caller's own tensors: whether that is so of a loader whose loop stands at its last batch. Once for each step.
        Where the window stays open else the next batch is read, if that tells it."""
        if self.of_core.stays_open(set_number):
            for loader in [source.loader for source in sources] or self._loaders:
                loader.look_ahead()
        batches = [(source.progress, source.batch, source.is_last) for source in sources]
        return self.of_core.has_ended(set_number, batches)

    def end_workers(self) -> None:
        """When the strategy is closed: ends persistent workers of all loaders."""
        for loader in self._loaders:
            loader.end_workers()


def mark_in_step(sources: Sequence[Source]) -> None:
    """Batches of `sources` are a step's."""
    for source in _counted(sources):
        source.progress.in_step = True


def mark_in_run(sources: Sequence[Source]) -> None:
    """Batches of `sources` are a run()'s."""
    for source in _counted(sources):
        source.progress.in_run = True


def usual_rows(sources: Sequence[Source]) -> float:
    """Samples in a part of a full batch of the first loader; 0 for a batch of the caller's own."""
    return next((source.progress.usual_rows for source in _counted(sources)), 0.0)


def dealt_batches(sources: Sequence[Source]) -> list[tuple[int, int, int]]:
    """Batches of `sources` go into a step. Those that servers dealt: loader, epoch and number."""
    of_job = (source.progress.last_pass for source in _counted(sources))
    return [batch for each in of_job if each is not None and (batch := each.begin_step()) is not None]


def _counted(sources: Sequence[Source]) -> Iterator[Source]:
    return (source for source in sources if source.part_rows is not None)


class WeakHost:
    """The strategy, as loaders know it: the strategy has them, and a cycle would keep their workers alive."""

    def __init__(self, strategy: weakref.ref[Any]) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        strategy = self._strategy()
        if strategy is None:
            raise InvalidArgument("the strategy that prepared this loader is gone; keep it as long as the loader")
        return getattr(strategy, name)
