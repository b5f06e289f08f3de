"""Sets of optimizers that step together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.optim import Optimizer

from muster import _C
from muster.errors import InvalidArgument
from muster.prepared_optimizer import PreparedOptimizer

__all__ = ["OptimizerSets"]


class OptimizerSets:
    """`_C.OptimizerSets` of optimizers instead of their positions. Owned by the thread that steps."""

    def __init__(self, core: _C.StrategyCore, modules: Sequence[int], optimizers: Sequence[PreparedOptimizer]) -> None:
        """`modules` by number, `optimizers`: those that are prepared, in their order; more may come."""
        self._modules = modules
        self._optimizers = optimizers
        self._sets = _C.OptimizerSets(core)
        self.numbers = self._sets.numbers
        """All sets, in the order of their first steps."""
        self.is_fused = self._sets.is_fused
        """Whether all optimizers of a set step from the reduced sums."""

    def set_of(self, optimizers: Optimizer | Sequence[Optimizer] | None) -> int:
        """The number of the set of these optimizers; None: of all prepared ones."""
        if optimizers is None:
            chosen = list(range(len(self._optimizers)))
        else:
            given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
            chosen = sorted(self._position_of(optimizer) for optimizer in given)
        groups = [group for position in chosen for group in self._optimizers[position].parameters()]
        return self._sets.set_of(chosen, groups, partial(self._members_of, chosen), optimizers is not None)

    def optimizers_of(self, set_number: int) -> list[PreparedOptimizer]:
        """The optimizers that a set was last used with, in the order in which they were prepared."""
        return [self._optimizers[position] for position in self._sets.optimizers_of(set_number)]

    def _position_of(self, optimizer: Optimizer) -> int:
        for position, prepared in enumerate(self._optimizers):
            if prepared.optimizer is optimizer:
                return position
        raise InvalidArgument(
            f"optimizers= names a {type(optimizer).__name__} that was not prepared; prepare() it first"
        )

    def _members_of(self, positions: Sequence[int]) -> list[tuple[list[int], bool]]:
        if not self._modules:
            raise InvalidArgument("no module is prepared; call strategy.prepare(model, optimizer) before step()")
        members = []
        for position in positions:
            optimizer = self._optimizers[position]
            indices = list(optimizer.indices())
            optimizer.bind(indices)
            members.append((indices, optimizer.is_flat))
        return members
