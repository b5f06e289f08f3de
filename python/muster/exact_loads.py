"""Optimizer state that load_state_dict converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ExactLoads", "load_exactly", "loaded_by"]


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
        loaded = state.get(parameters[position])
        if not isinstance(values, Mapping) or not isinstance(loaded, Mapping):
            continue
        for name, given in values.items():
            rounded = loaded.get(name)
            if isinstance(given, Tensor) and isinstance(rounded, Tensor) and _is_converted(given, rounded):
                yield id(rounded), (rounded, rounded._version, given)


def _is_converted(given: Tensor, loaded: Tensor) -> bool:
    """Whether it is of another dtype, and no hook of the load has changed it."""
    return given.dtype != loaded.dtype and torch.equal(given.to(loaded), loaded)


def _by_position(state_dict: dict[str, Any]) -> dict[int, Any]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    positions = {number: position for position, number in enumerate(saved)}
    return {positions[number]: values for number, values in state_dict["state"].items() if number in positions}


def loaded_by(
    load: Callable[[dict[str, Any]], None], optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Calls `load`, a load_state_dict of `optimizer`. Returns what torch's then loads: what the optimizer's pre-hooks
    make of `state_dict`."""
    seen = [state_dict]
    last = optimizer.register_load_state_dict_pre_hook(lambda _, loaded: seen.append(loaded))
    try:
        load(state_dict)
    finally:
        last.remove()
    return seen[-1]


def load_exactly(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Has `optimizer` load a `state_dict`, with what torch's load_state_dict would convert as it was given: tensors of
    another dtype than the parameter's, and strings. Of the optimizers of torch.optim, and of classes that derive from
    them, whose steps want a parameter's dtype, floating tensors of at least one dimension are converted all the same.
    """
    loaded = loaded_by(optimizer.load_state_dict, optimizer, state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_torch = any(
        kind.__module__.startswith("torch.optim") for kind in type(optimizer).__mro__ if kind is not Optimizer
    )
    for position, given in _by_position(loaded).items():
        parameter = parameters[position]
        if parameter in optimizer.state:
            optimizer.state[parameter] = _as_given(given, optimizer.state[parameter], of_torch)


def _as_given(given: Any, loaded: Any, of_torch: bool) -> Any:
    """What was `loaded`, but for what was converted."""
    if isinstance(given, Tensor) and isinstance(loaded, Tensor):
        if not _is_converted(given, loaded) or (of_torch and given.dim() > 0 and given.is_floating_point()):
            return loaded
        return given.to(loaded.device, copy=True)
    if isinstance(given, str) and isinstance(loaded, str):
        return given
    if isinstance(given, Mapping) and isinstance(loaded, MutableMapping):
        for name in given.keys() & loaded.keys():
            loaded[name] = _as_given(given[name], loaded[name], of_torch)
        return loaded
    if type(given) in (list, tuple) and type(loaded) is type(given) and len(given) == len(loaded):
        return type(given)(_as_given(one, other, of_torch) for one, other in zip(given, loaded, strict=True))
    return loaded
