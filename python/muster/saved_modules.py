"""Modules in a checkpoint: parameters and buffers, and extra state, which is whatever their class makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from muster import saved_tree
from muster.errors import LayoutMismatch
from muster.replicated import Replicated
from muster.saved_layout import compare_names

__all__ = ["compare", "take"]

_Pair = tuple[Replicated[Any], Mapping[str, Any]]
"""A module, and what was saved of it."""


def compare(module: Replicated[Any], saved: Mapping[str, Any], what: str) -> None:
    """Raises LayoutMismatch where names of its state differ, or shapes of parameters and buffers."""
    ours = module.state_dict()
    compare_names(ours, saved, what)
    own = _tensors_of(module)
    for name, value in ours.items():
        theirs = saved[name]
        if name not in own or not isinstance(value, Tensor):
            continue
        if not isinstance(theirs, Tensor):
            raise LayoutMismatch(f"'{name}' of {what} is no tensor in the checkpoint; build the model that was saved")
        if value.shape != theirs.shape:
            raise LayoutMismatch(
                f"'{name}' of {what} has shape {tuple(value.shape)}, and in the checkpoint {tuple(theirs.shape)}; "
                "build the model that was saved"
            )


def take(pairs: Sequence[_Pair]) -> None:
    """Loads each module from what was saved of it. Where a class raises for its extra state, parameters and buffers are
    as they were, and so is extra state that its class takes back."""
    plain: list[_Pair] = []
    with_extra: list[_Pair] = []
    for pair in pairs:
        (with_extra if pair[1].keys() - _tensors_of(pair[0]) else plain).append(pair)
    before = [(module, saved_tree.copied(module.state_dict())) for module, _ in with_extra]
    try:
        for module, saved in with_extra:
            module.load_state_dict(_to_load(module, saved))
    except BaseException:
        for module, state in before:
            _take_back(module, state)
        raise
    # Last, and without a copy of what they had: names and shapes fit.
    for module, saved in plain:
        module.load_state_dict(saved)


def _take_back(module: Replicated[Any], state: Mapping[str, Any]) -> None:
    own = _tensors_of(module)
    module.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False)
    for name in state.keys() - own:
        with contextlib.suppress(Exception):
            module.load_state_dict({name: state[name]}, strict=False)


def _to_load(module: Replicated[Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """With copies of all but what is written into parameters and buffers: a module may keep its extra state."""
    own = _tensors_of(module)
    return {name: value if name in own else saved_tree.copied(value) for name, value in saved.items()}


def _tensors_of(replicated: Replicated[Any]) -> set[str]:
    """The names of parameters and buffers."""
    module = replicated.module
    return {
        name
        for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    }
