"""An optimizer as what steps it sees it; for types alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["SteppedOptimizer"]


class SteppedOptimizer(Protocol):
    """What `FlatState` needs of the optimizer that it steps."""

    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def groups_by_position(self) -> list[int]:
        """By the parameters' positions, the number of the group that each is in."""

    def parameters_by_position(self) -> list[Tensor]:
        """The parameters in the order of the groups."""

    def state_at(self, parameters: Sequence[Tensor]) -> dict[int, Mapping[str, Any]]:
        """`state` by the positions of `parameters`."""
