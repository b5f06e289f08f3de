"""Sets of optimizers that step together."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from muster import _C
from muster.errors import InvalidArgument
from muster.prepared_optimizer import PreparedOptimizer

__all__ = ["OptimizerSets"]


class OptimizerSets:
    """The sets of a strategy's optimizers by number. Owned by the thread that steps."""

    def __init__(self, core: _C.StrategyCore, modules: Sequence[int], optimizers: Sequence[PreparedOptimizer]) -> None:
        """`modules` by number, `optimizers`: those that are prepared, in their order; more may come."""
        self._core = core
        self._modules = modules
        self._optimizers = optimizers
        self._sets: dict[tuple[int, ...], tuple[int, tuple[tuple[int, ...], ...]]] = {}
        self._optimizers_of_set: dict[int, tuple[int, ...]] = {}

    def set_of(self, optimizers: Optimizer | Sequence[Optimizer] | None) -> int:
        """The number of the set of these optimizers; None: of all prepared ones."""
        if optimizers is None:
            chosen = tuple(range(len(self._optimizers)))
        else:
            given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
            chosen = tuple(sorted(self._position_of(optimizer) for optimizer in given))
        shapes = tuple(self._optimizers[position].shape() for position in chosen)
        known = self._sets.get(chosen)
        if known is not None and known[1] == shapes:
            return known[0]
        parameters = self._parameters_of(chosen)
        if known is None:
            number = self._core.set_of(parameters)
        else:
            number = known[0]
            self._core.change_set(number, parameters)
        self._sets[chosen] = (number, shapes)
        self._optimizers_of_set[number] = chosen
        return number

    def _position_of(self, optimizer: Optimizer) -> int:
        for position, prepared in enumerate(self._optimizers):
            if prepared.optimizer is optimizer:
                return position
        raise InvalidArgument(
            f"optimizers= names a {type(optimizer).__name__} that was not prepared; prepare() it first"
        )

    def _parameters_of(self, positions: Sequence[int]) -> list[int]:
        if not self._modules:
            raise InvalidArgument("no module is prepared; call strategy.prepare(model, optimizer) before step()")
        if not positions:
            return [index for module in self._modules for index in self._core.parameters_of(module)]
        found: dict[int, int] = {}
        for position in positions:
            indices: list[int] = []
            for number, parameter in enumerate(self._optimizers[position].parameters()):
                index = self._core.find(parameter)
                if index < 0:
                    raise InvalidArgument(
                        f"parameter {number} (shape {tuple(parameter.shape)}) of "
                        f"{type(self._optimizers[position].optimizer).__name__} is in no prepared module; prepare() "
                        "the module it belongs to, and build the optimizer from that module's parameters"
                    )
                if found.setdefault(index, position) != position:
                    raise InvalidArgument(
                        f"parameter '{self._core.name_of(index)}' belongs to two optimizers that would step together; "
                        "say with optimizers= whose step it is"
                    )
                indices.append(index)
            self._optimizers[position].bind(indices)
        return list(found)

    def numbers(self) -> tuple[int, ...]:
        """All sets, in the order of their first steps."""
        return tuple(self._optimizers_of_set)

    def optimizers_of(self, set_number: int) -> list[PreparedOptimizer]:
        """The optimizers of a set, in the order in which they were prepared."""
        return [self._optimizers[position] for position in self._optimizers_of_set[set_number]]

    def is_fused(self, set_number: int) -> bool:
        """Whether all optimizers of a set step from the reduced sums."""
        optimizers = self.optimizers_of(set_number)
        return bool(optimizers) and all(optimizer.is_flat for optimizer in optimizers)
