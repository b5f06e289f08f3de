"""backward() and optimizer.step() by hand, beside the steps of a strategy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from muster import _C
from muster.backward_watch import BackwardWatch
from muster.errors import InvalidArgument

__all__ = ["ByHand"]


class ByHand:
    """State of steps by hand, shared by a strategy, its modules and optimizers. Lives as long as the strategy."""

    def __init__(self, core: _C.StrategyCore, accumulate: int) -> None:
        self.devices = core.devices
        """The device of each of this process's replicas."""
        self._core = core
        self._accumulate = accumulate
        self.gradients_are_applied = False
        """Whether a step has applied the gradients, and no backward by hand has written others since."""
        self._parameters: dict[int, Sequence[nn.Parameter]] = {}
        self._watches: dict[int, BackwardWatch] = {}
        """Of modules through which there was a forward by hand."""

    @property
    def current_local_replica(self) -> int:
        """The local replica whose step this thread is in; -1 outside a step."""
        return self._core.current_local_replica

    def add_module(self, module: int, parameters: Sequence[nn.Parameter]) -> None:
        """A module was prepared, with this number."""
        self._parameters[module] = parameters

    def watch(self, module: int, output: Any) -> None:
        """After a forward by hand through this module: where backward brings its parameters gradients, their mean over
        the workers is taken."""
        if module not in self._watches:
            this = weakref.ref(self)
            watch = BackwardWatch(
                self._parameters[module],
                lambda: None if (by_hand := this()) is None else by_hand._average(module),
            )
            if not self._core.closed:
                watch.memory = self._core.gradient_memory([p for p in self._parameters[module] if p.requires_grad])
            self._watches[module] = watch
        self._watches[module].watch(output)

    def rest(self, module: int | None = None) -> None:
        """After a forward that backward averages nothing of. None: before steps, whose backward is the strategy's."""
        for number, watch in self._watches.items():
            if module is None or number == module:
                watch.rest()

    def _average(self, module: int) -> None:
        if self._core.closed:
            return  # torch's alone
        if self._accumulate > 1:
            raise InvalidArgument(
                "backward() by hand does not know accumulate; use strategy.step(fn, ...), or no_sync() with "
                "accumulate=1"
            )
        self._core.average_gradients(module)
        self.gradients_are_applied = False
