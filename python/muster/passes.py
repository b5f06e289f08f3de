"""The passes over a strategy's loaders, as its steps know them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster import _C
from muster.batch import agreeing_rows, place, split
from muster.data import Loader, LoaderHost
from muster.errors import InvalidArgument

__all__ = ["Passes", "ServerPasses", "WeakHost"]


class Passes:
    """Which loaders the batches of steps come from, and how far the passes over them are.

    Where parameter servers deal or share batches, each batch that a step used, and each pass that was left, is
    accounted for. Owned by the thread that steps.
    """

    def __init__(self, core: _C.StrategyCore, host: LoaderHost, loaders: Sequence[Loader[Any]]) -> None:
        """`loaders`: those that are prepared, in their order; more may come."""
        self._core = core
        self._devices = core.devices
        self._host = host
        self._loaders = loaders
        self._stepped_loaders: weakref.WeakSet[Loader[Any]] = weakref.WeakSet()
        self._run_loaders: weakref.WeakSet[Loader[Any]] = weakref.WeakSet()
        this = weakref.ref(self)
        core.describe_passes(lambda: "" if (passes := this()) is None else passes.describe())
        self._of_others: dict[str, tuple[int, dict[str, Any]]] = {}
        """By loader: epoch and standing, where this worker joined a synchronous job."""
        self._told_at = 0

    def divide(self, args: tuple[Any, ...], *, steps: bool) -> tuple[list[tuple[Any, ...]], list[int]]:
        """The arguments of each local replica, on its device, and the samples in them (-1: unknown). `steps`: for a
        step, not for run()."""
        users = self._stepped_loaders if steps else self._run_loaders
        hint = None
        for loader in self._loaders:
            for arg in args:
                rows = loader.part_rows_of(arg)
                if rows is not None:
                    users.add(loader)
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
        used = (loader for loader in self._loaders if any(loader.part_rows_of(arg) is not None for arg in args))
        return next((loader.usual_rows for loader in used), 0.0)

    def are_at_end(self) -> bool:
        """Whether a loader that steps take batches from has yielded its last one."""
        return any(loader.at_end for loader in self._loaders if self._counts(loader))

    def _counts(self, loader: Loader[Any]) -> bool:
        return loader in self._stepped_loaders or loader not in self._run_loaders

    def describe(self) -> str:
        """For a worker that joins, which passes it to `note_others`."""
        standings = {index: loader.standing() for index, loader in enumerate(self._loaders)}
        return json.dumps({index: standing for index, standing in standings.items() if standing is not None})

    def note_others(self, told: str) -> None:
        """What another worker has described, as this one joined at the current step."""
        self._of_others = json.loads(told) if told else {}
        self._told_at = self._core.steps

    def of_others(self, loader: int, epoch: int) -> Mapping[str, Any] | None:
        """As `muster.dealing.Members.pass_of_others`, of a worker that has joined."""
        others_epoch, standing = self._of_others.get(str(loader), (-1, {}))
        if epoch < others_epoch:
            return {}
        self._of_others.pop(str(loader), None)
        if epoch > others_epoch:
            return None
        if self._core.steps > self._told_at:
            raise InvalidArgument(
                "this worker joined others in a pass over this loader, and stepped before it began that pass; iterate "
                "over loaders in the order of the other workers"
            )
        return {**standing, "members": self._core.members} if standing else {}

    def dealt_batches(self, args: tuple[Any, ...]) -> list[tuple[int, int, int]]:
        """The batches that servers dealt, of which `args` are."""
        if self._host.dealer is None and self._host.members is None:
            return []
        used = [loader for loader in self._loaders if any(loader.part_rows_of(arg) is not None for arg in args)]
        return [batch for loader in used if (batch := loader.stepped()) is not None]

    def settle(self, *, stepped: bool) -> None:
        """A window was closed, or dropped by an error."""
        if self._host.members is None and self._host.dealer is None:
            return
        members = None
        if stepped:
            members = [self._core.rank] if self._host.members is None else self._core.members
            if not members:  # another thread has closed the strategy since
                return
        for loader in self._loaders:
            loader.settle(members)

    def release(self) -> None:
        """Other workers may wait for what is left of a pass that was left early."""
        if self._host.dealer is not None:
            for loader in self._loaders:
                loader.release()

    def end_workers(self) -> None:
        """When the strategy is closed: ends persistent workers of all loaders."""
        for loader in self._loaders:
            loader.end_workers()


class ServerPasses:
    """A `muster.dealing.Dealer` and `Members`: passes whose batches parameter servers deal or share."""

    def __init__(self, core: _C.StrategyCore, passes: Passes, connect: Callable[[], None], patience: float) -> None:
        """`connect` connects to the servers, where no step has. `patience`: seconds to wait for other workers'
        batches."""
        self._core = core
        self._passes = passes
        self._connect = connect
        self._patience = patience

    @property
    def expected_members(self) -> Sequence[int]:
        """As `muster.dealing.Members`."""
        return self._core.expected_members if self._core.has_servers else range(self._core.num_workers)

    def pass_of_others(self, loader: int, epoch: int) -> Mapping[str, Any] | None:
        """As `muster.dealing.Members`."""
        if not self._core.joins:
            return None
        self._connect()
        return self._passes.of_others(loader, epoch)

    @property
    def rank(self) -> int:
        """This process's index among the workers."""
        return self._core.rank

    @property
    def patience(self) -> float:
        """Seconds to wait for other workers' batches."""
        return self._patience

    def deal(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> int | None:
        """As `muster.dealing.Dealer`."""
        self._connect()
        return self._core.deal(loader, epoch, batches, finished)

    def end_pass(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> None:
        """As `muster.dealing.Dealer`."""
        if self._core.has_servers:
            self._core.end_pass(loader, epoch, batches, finished)


class WeakHost:
    """The strategy, as loaders know it: the strategy has them, and a cycle would keep their workers alive."""

    def __init__(self, strategy: weakref.ref[Any]) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        strategy = self._strategy()
        if strategy is None:
            raise InvalidArgument("the strategy that prepared this loader is gone; keep it as long as the loader")
        return getattr(strategy, name)
