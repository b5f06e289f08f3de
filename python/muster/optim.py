"""Flat optimizers: torch.optim's, stepped in one pass over gradient, state and parameter.

`Strategy.prepare` turns a torch.optim one into the class of the same name here; it stays the same object. Alone,
without a strategy, they are torch.optim's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster import _C
from muster.errors import InvalidArgument

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]

FlatStep = tuple[_C.FlatOptimizer, list[int], str, list[list[float]]]
"""A flat optimizer as a step uses it: its core, its parameters' numbers, its algorithm, hyperparameters by group."""

_MASTER = "master"
"""State key of the fp32 copy of a low-precision parameter."""
_MASTER_NUMBER = 3


class FlatState:
    """What steps one optimizer: its parameters and state in the core, kept equal to the optimizer's groups and `state`.

    `indices` are the parameters' numbers in the core, in the order of the groups.
    """

    def __init__(self, optimizer: _Flat, core: _C.StrategyCore, indices: list[int]) -> None:
        self._optimizer = optimizer
        self._core = core
        self.indices = indices
        groups = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._flat = core.make_flat(optimizer._algorithm, list(zip(indices, groups, strict=True)), self._groups())
        loaded, optimizer._loaded = optimizer._loaded, None
        self.adopt(optimizer.state_by_position() if loaded is None else _by_position(loaded, optimizer))

    def flat_step(self) -> FlatStep:
        """What step() is going to use."""
        return self._flat, self.indices, self._optimizer._algorithm, self._groups()

    def step(self, set_number: int) -> None:
        """Steps from the reduced sums of a closed window."""
        self._core.step_flat(set_number, self._flat, self.indices, self._optimizer._algorithm, self._groups())
        self._publish(self._flat.take_started())

    def connect_servers(self, set_number: int) -> None:
        """Gives parameter servers the state, and what else they need to step."""
        self._core.connect_servers(set_number, self._flat, self.indices, self._optimizer._algorithm, self._groups())

    def step_from_grad(self) -> None:
        """Steps from `.grad`."""
        self._flat.step_from_grad(self._optimizer._algorithm, self._groups())
        self._publish(self._flat.take_started())

    def adopt(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes the values of torch.optim's `state`, by position of the parameter, and puts views in their place."""
        if self._core.has_servers:
            raise InvalidArgument(
                "parameter servers hold the optimizer's state from the first step on; load_state_dict() before it"
            )
        names = self._flat.state_names
        adopted = {position: values for position, values in state.items() if _has_tensors(values)}
        for position, values in adopted.items():
            for which, name in enumerate(names):
                if isinstance(values.get(name), Tensor):
                    self._flat.set_state(position, which, values[name])
            if isinstance(values.get(_MASTER), Tensor):
                self._flat.set_master(position, values[_MASTER])
            # SGD counts no steps: with a buffer, the first one is past.
            self._flat.set_step_count(position, float(values.get("step", 1.0)))
        self._publish(adopted)

    def whole(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Collective with shards. A state_dict with what other ranks or parameter servers hold."""
        names = (*enumerate(self._flat.state_names), (_MASTER_NUMBER, _MASTER))
        if self._core.has_servers:
            packed["state"] = self._on_servers()
        elif self._flat.is_sharded:
            packed["state"] = {position: dict(values) for position, values in packed["state"].items()}
            for position, values in packed["state"].items():
                for which, name in names:
                    tensor = self._core.whole_state(self._flat, position, which)
                    if tensor is not None:
                        values[name] = tensor
        return packed

    def _on_servers(self) -> dict[int, dict[str, Any]]:
        part = _C.ServerPart
        steps = self._core.state_on_servers(self.indices, part.steps)
        taken = {position: step for position, step in enumerate(steps) if step is not None and step > 0}
        state: dict[int, dict[str, Any]] = {
            position: {"step": step} if self._optimizer._counts_steps else {} for position, step in taken.items()
        }
        states = zip(self._flat.state_names, (part.state0, part.state1, part.state2), strict=False)
        for name, which in (*states, (_MASTER, part.master)):
            for position, tensor in enumerate(self._core.state_on_servers(self.indices, which)):
                if tensor is not None and position in taken:
                    state[position][name] = tensor
        return {position: values for position, values in state.items() if values}

    def _groups(self) -> list[list[float]]:
        return [self._optimizer._row(group) for group in self._optimizer.param_groups]

    def _publish(self, positions: Iterable[int]) -> None:
        parameters = self._optimizer.parameters_by_position()
        for position in positions:
            values: dict[str, Any] = {}
            if self._optimizer._counts_steps:
                values["step"] = self._flat.step_count(position)
            for which, name in enumerate(self._flat.state_names):
                tensor = self._flat.state(position, which)
                if tensor is not None:
                    values[name] = tensor
            master = self._flat.master(position)
            if master is not None:
                values[_MASTER] = master
            self._optimizer.state[parameters[position]] = values


def _has_tensors(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values.values())


class _Flat(Optimizer):
    """What the flat optimizers have in common."""

    _algorithm = ""
    _counts_steps = True
    _flat: FlatState | None = None
    _loaded: dict[str, Any] | None = None  # what load_state_dict was given before there was a FlatState

    def parameters_by_position(self) -> list[Tensor]:
        """The parameters in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_by_position(self) -> dict[int, Mapping[str, Any]]:
        """`state` by the parameters' positions."""
        return {
            position: self.state[parameter]
            for position, parameter in enumerate(self.parameters_by_position())
            if self.state.get(parameter)
        }

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch.optim's, from `.grad`."""
        if self._flat is None:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._flat.step_from_grad()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's format. With shard_optimizer collective, and whole on every rank; parameter servers send what
        they hold."""
        packed = super().state_dict()
        return packed if self._flat is None else self._flat.whole(packed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From torch.optim's format."""
        super().load_state_dict(state_dict)
        if self._flat is None:
            self._loaded = state_dict
        else:
            self._flat.adopt(_by_position(state_dict, self))

    def _row(self, group: dict[str, Any]) -> list[float]:
        raise NotImplementedError


def _by_position(state_dict: dict[str, Any], optimizer: _Flat) -> dict[int, Mapping[str, Any]]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    positions = {number: position for position, number in enumerate(saved)}
    return {positions[number]: values for number, values in state_dict["state"].items() if number in positions}


class _Adam(_Flat):
    _algorithm = "adam"

    def _row(self, group: dict[str, Any]) -> list[float]:
        beta1, beta2 = group["betas"]
        return [
            float(group["lr"]),
            float(beta1),
            float(beta2),
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
            group["amsgrad"],
            group["maximize"],
        ]


class AdamW(_Adam, torch.optim.AdamW):
    """torch.optim.AdamW, flat. Rows of a sparse gradient alone move, as in torch.optim.SparseAdam."""


class Adam(_Adam, torch.optim.Adam):
    """torch.optim.Adam, flat. Rows of a sparse gradient alone move, as in torch.optim.SparseAdam."""


class SGD(_Flat, torch.optim.SGD):
    """torch.optim.SGD, flat."""

    _algorithm = "sgd"
    _counts_steps = False

    def _row(self, group: dict[str, Any]) -> list[float]:
        return [
            float(group["lr"]),
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
        ]


class Adagrad(_Flat, torch.optim.Adagrad):
    """torch.optim.Adagrad, flat. A ``ShardedEmbedding``'s weight that is ``on_servers`` gets no state here: torch's
    would take the table's memory. On servers it starts at 0."""

    _algorithm = "adagrad"
    _hidden: list[tuple[Tensor, Tensor]] | None = None  # weights and what they were, while __init__ runs

    def __init__(self, *args: Any, **options: Any) -> None:
        self._hidden = []
        try:
            super().__init__(*args, **options)
        finally:
            for weight, stub in self._hidden:
                weight.data = stub
                self.state.pop(weight, None)
            self._hidden = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        super().add_param_group(param_group)
        if self._hidden is None:
            return
        for weight in self.param_groups[-1]["params"]:
            if _C.is_row_stub(weight):
                self._hidden.append((weight, weight.data))
                weight.data = weight.data[:0]

    def state_by_position(self) -> dict[int, Mapping[str, Any]]:
        """`state`; a parameter of a group that was added later starts as the constructor's."""
        initial = self.defaults["initial_accumulator_value"]
        for parameter in self.parameters_by_position():
            if _C.is_row_stub(parameter):
                if initial != 0:
                    raise InvalidArgument(
                        f"initial_accumulator_value={initial}: rows on parameter servers start at 0; leave it out"
                    )
            elif not self.state.get(parameter):
                self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, initial)}
        return super().state_by_position()

    def _row(self, group: dict[str, Any]) -> list[float]:
        return [float(group["lr"]), group["lr_decay"], group["eps"], group["weight_decay"], group["maximize"]]


_FLAT: dict[type[Optimizer], type[_Flat]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
}
_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}

# torch does this to a class when an object of it is made: with it, step() calls the optimizer's hooks.
for _class in _FLAT.values():
    _class.step = Optimizer.profile_hook_step(_class.step)  # type: ignore[method-assign]
    _class.step.hooked = True  # type: ignore[attr-defined]


def make_flat(optimizer: Optimizer) -> _Flat | None:
    """The same object as a flat optimizer; None where there is no flat version of it (a class of the user's own,
    complex parameters, ``differentiable=True``)."""
    flat = _FLAT.get(type(optimizer))
    if flat is None and not isinstance(optimizer, _Flat):
        return None
    for group in optimizer.param_groups:
        if group["differentiable"] or any(parameter.dtype not in _DTYPES for parameter in group["params"]):
            return None
    if flat is not None:
        optimizer.__class__ = flat
        _rebind_step(optimizer)
    assert isinstance(optimizer, _Flat)
    return optimizer


def _rebind_step(optimizer: Optimizer) -> None:
    """A learning rate scheduler wraps the step() that it finds: its wrapper must find the flat one."""
    wrapped = vars(optimizer).pop("step", None)
    if wrapped is None or not hasattr(wrapped, "_wrapped_by_lr_sched"):
        return
    step = type(optimizer).step

    def with_note(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    with_note._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = with_note  # type: ignore[method-assign]
