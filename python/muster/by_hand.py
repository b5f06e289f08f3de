"""backward() and optimizer.step() by hand, beside the steps of a strategy."""

from __future__ import annotations

from muster import _C
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

    @property
    def current_local_replica(self) -> int:
        """The local replica whose step this thread is in; -1 outside a step."""
        return self._core.current_local_replica

    def average_gradients(self, module: int) -> None:
        """Collective, after a backward by hand through the outputs of this prepared module."""
        if self._core.closed:
            return  # torch's alone
        if self._accumulate > 1:
            raise InvalidArgument(
                "backward() by hand does not know accumulate; use strategy.step(fn, ...), or no_sync() with "
                "accumulate=1"
            )
        self._core.average_gradients(module)
        self.gradients_are_applied = False
