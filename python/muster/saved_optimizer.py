"""An optimizer in a checkpoint: torch.optim's state_dict() with names of parameters instead of numbers.

A checkpoint that was converted from a file without names has their numbers: a parameter's place in the order of the
optimizer's groups. Its class may be unknown (None). State that user code keeps under keys that are no parameters is
"others", where there is any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from muster import _C, optim
from muster.errors import InvalidArgument, LayoutMismatch
from muster.flat_state import LOW, MASTER
from muster.prepared_optimizer import PreparedOptimizer
from muster.saved_layout import compare_names

__all__ = ["compare", "follow_dtypes", "has_numbers", "has_own_form", "others_of", "state_of", "with_numbers"]

_DECOUPLED = "decoupled_weight_decay"  # what tells AdamW from Adam


def has_own_form(prepared: PreparedOptimizer) -> bool:
    """Whether its class makes something of its own of torch.optim's state_dict()."""
    return type(prepared.optimizer).state_dict is not optim.AdamW.state_dict


def state_of(core: _C.StrategyCore, prepared: PreparedOptimizer) -> dict[str, Any]:
    """What a checkpoint keeps of it."""
    packed = prepared.optimizer.state_dict()
    if not (isinstance(packed, Mapping) and {"state", "param_groups"} <= packed.keys()):
        raise InvalidArgument(
            f"state_dict() of {type(prepared.optimizer).__name__} has another structure than torch's, which a "
            "checkpoint needs; remove the hook of register_state_dict_post_hook() that makes it, or let it keep "
            "'state' and 'param_groups'"
        )
    names = _names_of(core, prepared)
    groups, first = [], 0
    for group in packed["param_groups"]:
        count = len(group["params"])
        groups.append({**group, "params": names[first : first + count]})
        first += count
    of_parameters, others = optim.parted(packed["state"], len(names))
    state = {names[number]: values for number, values in of_parameters.items()}
    saved = {"name": type(prepared.optimizer).__name__, "groups": groups, "state": state}
    return {**saved, "others": others} if others else saved


def compare(core: _C.StrategyCore, prepared: PreparedOptimizer, saved: Mapping[str, Any], what: str) -> None:
    """Raises LayoutMismatch where `saved` is of another optimizer than `what`, the prepared one."""
    optimizer = prepared.optimizer
    name = type(optimizer).__name__
    if saved["name"] is None:
        _compare_options(optimizer.defaults, saved["groups"], f"{what} is {name}")
    elif name != saved["name"]:
        raise LayoutMismatch(f"{what} is {name}, and in the checkpoint {saved['name']}; build that one to go on")
    ours, theirs = optimizer.param_groups, saved["groups"]
    if len(ours) != len(theirs):
        raise LayoutMismatch(f"{what} has {len(ours)} groups, and in the checkpoint {len(theirs)}")
    if has_numbers(saved):
        _compare_numbers(ours, saved, what)
        return
    names, first = _names_of(core, prepared), 0
    for number, (group, other) in enumerate(zip(ours, theirs, strict=True)):
        count = len(group["params"])
        compare_names(names[first : first + count], other["params"], f"group {number} of {what}")
        first += count
    if unknown := next((name for name in saved["state"] if name not in names), None):
        raise LayoutMismatch(f"the checkpoint has state of '{unknown}' in {what}, which lacks it; build that one")


def with_numbers(core: _C.StrategyCore, prepared: PreparedOptimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What the prepared optimizer's load_state_dict() takes."""
    # Names that torch keeps beside belong to the order in which parameters were: the optimizer has its own.
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in saved["groups"]]
    if has_numbers(saved):
        return {"state": dict(saved["state"]), "param_groups": groups}
    numbers = {name: number for number, name in enumerate(_names_of(core, prepared))}
    state = {numbers[name]: values for name, values in saved["state"].items()}
    return {
        "state": {**state, **others_of(saved)},
        "param_groups": [{**group, "params": sorted(numbers[name] for name in group["params"])} for group in groups],
    }


def follow_dtypes(
    core: _C.StrategyCore,
    modules: Sequence[nn.Module],
    optimizers: Sequence[PreparedOptimizer],
    saved: Mapping[str, Any],
) -> None:
    """Lets `saved` keep the bits that a change of dtype would take from parameters. One of low precision whose fp32
    master copy is there is taken from that one; one that becomes of low precision has what was saved for its master
    copy."""
    saved_values: dict[nn.Parameter, Tensor] = {}
    places: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}  # until the first optimizer has widened them
    for module, tensors in zip(modules, saved["modules"], strict=True):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if isinstance(tensors.get(name), Tensor):
                saved_values[parameter] = tensors[name]
                places.setdefault(parameter, []).append((tensors, name))
    for prepared, theirs in zip(optimizers, saved["optimizers"], strict=True):
        parameters = [parameter for group in prepared.optimizer.param_groups for parameter in group["params"]]
        keys = range(len(parameters)) if has_numbers(theirs) else _names_of(core, prepared)
        for key, parameter in zip(keys, parameters, strict=True):
            widest = saved_values.get(parameter)
            if widest is None or widest.dtype == parameter.dtype:
                continue
            values = theirs["state"].get(key, {})
            if (master := values.pop(MASTER, None)) is not None:
                widest = _C.current_master(master, widest)
            for tensors, name in places.pop(parameter, ()):
                tensors[name] = widest
            if parameter.dtype in LOW and widest.dtype not in LOW and prepared.keeps_master(has_state=bool(values)):
                theirs["state"][key] = {**values, MASTER: widest}


def others_of(saved: Mapping[str, Any]) -> dict[Any, Any]:
    """State that belongs to no parameter, by the keys that user code gave it."""
    others: dict[Any, Any] = saved.get("others") or {}
    return others


def _names_of(core: _C.StrategyCore, prepared: PreparedOptimizer) -> list[str]:
    """By the numbers that torch gives parameters in state_dict(). Those of several modules may be called alike."""
    taken: Counter[str] = Counter()
    names = []
    for index in prepared.indices():
        name = core.name_of(index)
        taken[name] += 1
        names.append(name if taken[name] == 1 else f"{name}#{taken[name]}")
    return names


def has_numbers(saved: Mapping[str, Any]) -> bool:
    """Whether parameters are known by their order alone."""
    return any(isinstance(parameter, int) for group in saved["groups"] for parameter in group["params"])


def _compare_numbers(ours: Sequence[Mapping[str, Any]], saved: Mapping[str, Any], what: str) -> None:
    """By how many parameters each group has, and their shapes."""
    for number, (group, other) in enumerate(zip(ours, saved["groups"], strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise LayoutMismatch(
                f"group {number} of {what} has {len(group['params'])} parameters, and in the checkpoint "
                f"{len(other['params'])}; build the optimizer that was saved"
            )
    parameters = [parameter for group in ours for parameter in group["params"]]
    for number, values in saved["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and not _fits(value, parameters[number]):
                raise LayoutMismatch(
                    f"'{name}' of parameter {number} of {what} has shape {tuple(value.shape)} in the checkpoint, and "
                    f"that parameter {tuple(parameters[number].shape)}; the checkpoint knows parameters by their order "
                    "alone: give the optimizer the parameters that were saved, in the same order"
                )


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """A number, or of the parameter's shape, where sums along some dimensions count (Adafactor has those)."""
    return value.dim() == 0 or (
        value.dim() == parameter.dim()
        and all(size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True))
    )


def _compare_options(defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], ours: str) -> None:
    """Tells optimizers apart by what they are stepped with. (Where files lack booleans, torch fills them in.)"""
    for number, group in enumerate(groups):
        for option, value in defaults.items():
            if option not in group and value is not None and not isinstance(value, bool):
                raise LayoutMismatch(
                    f"{ours}, which has '{option}', and group {number} in the checkpoint has none: it is of another "
                    f"optimizer, with {', '.join(key for key in group if key != 'params')}; build that one"
                )
        if _DECOUPLED in group and _DECOUPLED in defaults and group[_DECOUPLED] != defaults[_DECOUPLED]:
            raise LayoutMismatch(
                f"{ours}, and group {number} in the checkpoint has {_DECOUPLED}={group[_DECOUPLED]}: AdamW and Adam "
                "differ in it; build the other one"
            )
