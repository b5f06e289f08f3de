"""The passes over a strategy's loaders, as its steps know them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from muster import _C
from muster.batch import agreeing_rows, place, split
from muster.errors import InvalidArgument
from muster.loader import Loader
from muster.loader_host import LoaderHost

__all__ = ["Passes", "WeakHost"]


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
        self.of_core = _C.Loaders(core, connect)
        """The passes that other workers have a part in."""

    def add(self, loader: Loader[Any]) -> None:
        """Takes up the loader that was prepared next."""
        self.of_core.add(loader.progress)
        self._loaders.append(loader)

    def divide(self, args: tuple[Any, ...], *, steps: bool) -> tuple[list[tuple[Any, ...]], list[int]]:
        """The arguments of each local replica, on its device, and the samples in them (-1: unknown). `steps`: for a
        step, not for run()."""
        hint = None
        for loader in self._loaders:
            for arg in args:
                rows = loader.part_rows_of(arg)
                if rows is not None:
                    if steps:
                        loader.progress.in_step = True
                    else:
                        loader.progress.in_run = True
                    hint = hint or rows
                    break
        parts = split(args, self._core.local_replicas, hint, self._host.capacities)
        if self._devices[0].type != "cpu":
            parts = [place(part, device) for part, device in zip(parts, self._devices, strict=True)]
        if hint is not None:
            return parts, hint
        counts = [agreeing_rows(part) for part in parts]
        return parts, [-1 if count is None else count for count in counts]

    def usual_rows(self, args: tuple[Any, ...]) -> float:
        """Samples in a part of a full batch of the loader that `args` come from; 0 for a batch of the caller's own."""
        return next((loader.progress.usual_rows for loader in self._loaders_of(args)), 0.0)

    def has_ended(self, args: tuple[Any, ...]) -> bool:
        """Whether a step of `args` is the last of a pass; else whether a loader that steps draw from yielded its last
        batch and was not advanced since."""
        of_args = [
            (loader.progress, any(known))
            for loader in self._loaders
            if (known := [is_last for arg in args if (is_last := loader.is_last(arg)) is not None])
        ]
        return self.of_core.has_ended(of_args)

    def dealt_batches(self, args: tuple[Any, ...]) -> list[tuple[int, int, int]]:
        """Batches of which `args` are go into a step. Those that servers dealt: loader, epoch and number."""
        of_job = (loader.progress.last_pass for loader in self._loaders_of(args))
        return [batch for each in of_job if each is not None and (batch := each.begin_step()) is not None]

    def end_workers(self) -> None:
        """When the strategy is closed: ends persistent workers of all loaders."""
        for loader in self._loaders:
            loader.end_workers()

    def _loaders_of(self, args: tuple[Any, ...]) -> Iterator[Loader[Any]]:
        """Those of which one of `args` is a batch, or a field of one."""
        return (loader for loader in self._loaders if any(loader.part_rows_of(arg) is not None for arg in args))


class WeakHost:
    """The strategy, as loaders know it: the strategy has them, and a cycle would keep their workers alive."""

    def __init__(self, strategy: weakref.ref[Any]) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        strategy = self._strategy()
        if strategy is None:
            raise InvalidArgument("the strategy that prepared this loader is gone; keep it as long as the loader")
        return getattr(strategy, name)
