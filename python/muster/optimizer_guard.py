"""What a strategy needs of a plain torch.optim optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from muster import structure
from muster.errors import InvalidArgument

if TYPE_CHECKING:
    from muster.strategy import Strategy

__all__ = ["PreparedOptimizer"]


class PreparedOptimizer:
    """One optimizer of a strategy. The optimizer stays the user's object; nothing is held of its groups or state.

    Calling its ``step()`` by hand after strategy.step, when no backward by hand has written gradients since, would
    apply the same gradients twice: a pre-hook refuses it.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy) -> None:
        if not any(group["params"] for group in optimizer.param_groups):
            raise InvalidArgument(f"{type(optimizer).__name__} has no parameters; give it the model's before prepare()")
        self.optimizer = optimizer
        self._strategy = strategy
        self._stepping = False
        optimizer.register_step_pre_hook(self._check_step)

    def parameters(self) -> list[Tensor]:
        """Its parameters, in the order of its groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def shape(self) -> tuple[int, ...]:
        """Changes when a group is added; cheap enough to look at in every step."""
        return tuple(len(group["params"]) for group in self.optimizer.param_groups)

    def note_step(self) -> None:
        """Tells learning rate schedulers that a step was made, also where its update was skipped."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self) -> None:
        """Applies `.grad`."""
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False

    def broadcast_state(self) -> None:
        """Collective: every worker gets the chief's hyperparameters and state."""
        core = self._strategy._core
        text, leaves = structure.encode(self.optimizer.state_dict(), texts=True)
        description = core.exchange_texts(text)[0]
        leaves = core.broadcast(leaves, 0)
        if core.rank != 0:
            self.optimizer.load_state_dict(structure.decode(description, leaves))

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping and not self._strategy.closed and self._strategy._gradients_are_applied:
            raise InvalidArgument(
                f"{type(optimizer).__name__}.step() was called after strategy.step, which has applied the gradients "
                "already; remove the call, or write gradients by hand with backward() first"
            )
