"""What the files of others hold, as the parts of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from muster.errors import CheckpointError

__all__ = ["Found", "found_in"]

MODELS = ("model", "state_dict", "model_state_dict", "module", "models", "modules")
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "optimizers", "optimizer_states")


@dataclass
class Found:
    """In one file or several."""

    modules: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    """As a checkpoint has them: parameters by name, or by number where the file knows no names."""
    values: dict[str, Any] = field(default_factory=dict)
    """All else, by name."""

    def add(self, other: Found) -> None:
        """What another file holds."""
        self.modules += other.modules
        self.optimizers += other.optimizers
        self.values |= other.values

    def strip(self, prefix: str) -> None:
        """Takes a prefix off the names of parameters. Raises CheckpointError where one lacks it."""

        def stripped(name: Any) -> Any:
            if not isinstance(name, str):
                return name
            if not name.startswith(prefix):
                raise CheckpointError(f"'{name}' does not begin with '{prefix}', as --strip-prefix says; leave it out")
            return name.removeprefix(prefix)

        self.modules = [{stripped(name): value for name, value in module.items()} for module in self.modules]
        for optimizer in self.optimizers:
            optimizer["state"] = {stripped(name): values for name, values in optimizer["state"].items()}
            for group in optimizer["groups"]:
                group["params"] = [stripped(name) for name in group["params"]]


def found_in(value: Any, path: object) -> Found:
    """In what torch.save wrote: a state_dict, or a dict that has some. Raises CheckpointError for anything else."""
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"'{path}' holds a {type(value).__name__}; save a state_dict, or a dict with 'model' and 'optimizer'"
        )
    if is_optimizer(value):
        return Found(optimizers=[optimizer_of(value, [], path)])
    model = next((name for name in MODELS if _are_states(value.get(name))), None)
    optimizer = next((name for name in OPTIMIZERS if _are_optimizers(value.get(name))), None)
    if model is None and optimizer is None:
        if not any(isinstance(each, Tensor) for each in value.values()):
            keys = ", ".join(map(repr, list(value)[:8])) or "none"
            raise CheckpointError(
                f"'{path}' holds neither a state_dict nor one under {', '.join(map(repr, MODELS[:3]))}; its keys are "
                f"{keys}: save a dict with 'model' and 'optimizer'"
            )
        return Found(modules=[dict(value)])
    modules = [] if model is None else [dict(each) for each in _listed(value[model])]
    optimizers = [] if optimizer is None else _listed(value[optimizer])
    return Found(
        modules,
        [optimizer_of(each, modules, path) for each in optimizers],
        {str(name): each for name, each in value.items() if name not in (model, optimizer)},
    )


def is_optimizer(value: object) -> bool:
    """Whether it is torch.optim's state_dict."""
    return isinstance(value, Mapping) and "state" in value and isinstance(value.get("param_groups"), (list, tuple))


def optimizer_of(packed: Mapping[str, Any], modules: Sequence[Mapping[str, Any]], path: object) -> dict[str, Any]:
    """A checkpoint's form of torch.optim's state_dict.

    Numbers become names where the file says which, and else stay: the order of a module's state_dict is that of its
    registration, in which an optimizer's parameters need not be. Raises CheckpointError where state and groups do not
    belong together.
    """
    groups = [dict(group) for group in packed["param_groups"]]
    given = [key for group in groups for key in group.get("params", ())]
    names = _names(groups, given, modules)
    # Whatever the numbers were: torch.distributed.checkpoint makes strings of those in the state.
    known = dict(zip(map(str, given), names, strict=True))
    if len(known) != len(given):
        raise CheckpointError(f"an optimizer in '{path}' has a parameter twice in its groups; save it again")
    state = {}
    for key, values in packed["state"].items():
        if str(key) not in known:
            raise CheckpointError(f"an optimizer in '{path}' has state of {key!r}, which is in none of its groups")
        state[known[str(key)]] = dict(values)
    for group in groups:
        group.pop("param_names", None)
        group["params"] = [known[str(key)] for key in group.get("params", ())]
    return {"name": None, "groups": groups, "state": state}


def _names(
    groups: Sequence[Mapping[str, Any]], given: Sequence[Any], modules: Sequence[Mapping[str, Any]]
) -> Sequence[Any]:
    """For the parameters of all groups, in order; or their places in it."""
    if given and all(isinstance(key, str) for key in given):
        return given
    named = [name for group in groups for name in group.get("param_names") or ()]
    times = Counter(name for module in modules for name in module)
    if len(named) == len(given) == len(set(named)) and all(times[name] == 1 for name in named):
        return named
    return range(len(given))


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _are_states(value: Any) -> bool:
    listed = list(_listed(value))
    return bool(listed) and all(
        isinstance(each, Mapping) and any(isinstance(item, Tensor) for item in each.values()) for each in listed
    )


def _are_optimizers(value: Any) -> bool:
    listed = list(_listed(value))
    return bool(listed) and all(map(is_optimizer, listed))
