"""What a strategy needs of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from muster import optim, structure
from muster.errors import InvalidArgument, LayoutMismatch

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
        self._flat = optim.make_flat(optimizer) if strategy._options.fuse else None
        if self._flat is None and strategy._options.shard_optimizer:
            raise InvalidArgument(
                f"shard_optimizer=True needs a flat optimizer (AdamW, Adam, SGD or Adagrad), and "
                f"{type(optimizer).__name__} has no flat version; leave the option out"
            )
        optimizer.register_step_pre_hook(self._check_step)

    @property
    def is_flat(self) -> bool:
        """Whether it can step from the reduced sums."""
        return self._flat is not None

    def parameters(self) -> list[Tensor]:
        """Its parameters, in the order of its groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def shape(self) -> tuple[int, ...]:
        """Changes when a group is added; cheap enough to look at in every step."""
        return tuple(len(group["params"]) for group in self.optimizer.param_groups)

    def bind(self, indices: list[int]) -> None:
        """Tells a flat optimizer the numbers of its parameters, when they are known or have changed."""
        if self._flat is None:
            self._strategy._core.check_need_no_flat(indices)
        elif self._flat._flat is None or self._flat._flat.indices != indices:
            self._flat._flat = optim.FlatState(self._flat, self._strategy._core, indices)

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

    def has_hooks(self) -> bool:
        """Whether anybody but the guard wants to be called before a step."""
        return bool(_global_optimizer_pre_hooks) or len(self.optimizer._optimizer_step_pre_hooks) > 1

    def call_pre_hooks(self) -> None:
        """What comes before step_fused."""
        self._stepping = True
        try:
            for hook in (*_global_optimizer_pre_hooks.values(), *self.optimizer._optimizer_step_pre_hooks.values()):
                hook(self.optimizer, (self.optimizer,), {})
        finally:
            self._stepping = False

    def connect_servers(self, set_number: int) -> None:
        """Lets parameter servers step a set that they do not hold yet."""
        assert self._flat is not None
        assert self._flat._flat is not None
        self._flat._flat.connect_servers(set_number)

    def flat_step(self) -> optim.FlatStep:
        """With what step_fused would step."""
        assert self._flat is not None
        assert self._flat._flat is not None
        return self._flat._flat.flat_step()

    def step_fused(self, set_number: int) -> None:
        """Applies the reduced sums of a set."""
        assert self._flat is not None
        assert self._flat._flat is not None
        self._flat._flat.step(set_number)
        for hook in (*self.optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(self.optimizer, (self.optimizer,), {})

    def broadcast_state(self) -> None:
        """Collective: every worker gets the chief's hyperparameters and state. Raises LayoutMismatch where optimizers
        differ."""
        core = self._strategy._core
        loaded = self._flat._loaded if self._flat is not None else None
        text, leaves = structure.encode(loaded or self.optimizer.state_dict(), texts=True)
        texts = core.exchange_texts(f"{type(self.optimizer).__name__}\n{text}")
        (chiefs, _, description), *others = (text.partition("\n") for text in texts)
        for rank, (name, _, _) in enumerate(others, start=1):
            if name != chiefs:
                raise LayoutMismatch(
                    f"the optimizers of the ranks differ: rank 0 has {chiefs}, rank {rank} {name}; build the same "
                    "optimizer on every rank before prepare()"
                )
        leaves = core.broadcast(leaves, 0)
        if core.rank != 0:
            self.optimizer.load_state_dict(structure.decode(description, leaves))

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping and not self._strategy.closed and self._strategy._gradients_are_applied:
            raise InvalidArgument(
                f"{type(optimizer).__name__}.step() was called after strategy.step, which has applied the gradients "
                "already; remove the call, or write gradients by hand with backward() first"
            )
