"""Optimizer state that load_state_dict rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

__all__ = ["ExactLoads"]


class ExactLoads:
    """Exact values of tensors that torch's load_state_dict rounded to a parameter's dtype."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Tensor, int, Tensor]] = {}
        """By id of a rounded tensor: that, its version then, what load_state_dict was given."""

    def __bool__(self) -> bool:
        return bool(self._given)

    def note(self, parameters: Sequence[Tensor], state: Mapping[Tensor, Any], state_dict: dict[str, Any]) -> None:
        """After a load of `state_dict` into `state`; replaces what is known of an earlier one."""
        self._given = dict(_rounded(parameters, state, state_dict))

    def forget(self) -> None:
        """Once the state was taken over."""
        self._given = {}

    def of(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what load_state_dict was given in place of what it rounded, where nobody has written that since."""
        if not self._given or not isinstance(values, Mapping):
            return values
        exact = dict(values)
        for name, value in values.items():
            rounded, version, given = self._given.get(id(value), (None, 0, value))
            if rounded is value and rounded is not None and rounded._version == version:
                exact[name] = given
        return exact


def _rounded(
    parameters: Sequence[Tensor], state: Mapping[Tensor, Any], state_dict: dict[str, Any]
) -> Iterator[tuple[int, tuple[Tensor, int, Tensor]]]:
    for position, values in _by_position(state_dict).items():
        loaded = state.get(parameters[position], {})
        for name, given in values.items():
            rounded = loaded.get(name)
            if not isinstance(given, Tensor) or not isinstance(rounded, Tensor) or given.dtype == rounded.dtype:
                continue
            if torch.equal(given.to(rounded), rounded):  # no hook of the load has changed it
                yield id(rounded), (rounded, rounded._version, given)


def _by_position(state_dict: dict[str, Any]) -> dict[int, Mapping[str, Any]]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    positions = {number: position for position, number in enumerate(saved)}
    return {positions[number]: values for number, values in state_dict["state"].items() if number in positions}
