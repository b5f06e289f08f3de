"""Flat optimizers: torch.optim's, stepped in one pass over gradient, state and parameter.

`Strategy.prepare` turns a torch.optim one into the class of the same name here; it stays the same object. Alone,
without a strategy, they are torch.optim's.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NoReturn

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
    """What steps one optimizer: its parameters and state in the core, and the views of them in the optimizer's `state`.

    The optimizer's groups and `state` are the user's, as torch's: whatever user code replaced or removed there since
    the last step is taken over before the next one. `indices` are the parameters' numbers in the core, in the order of
    the groups; empty where no strategy steps them.
    """

    def __init__(self, optimizer: _Flat, core: _C.StrategyCore | None, indices: list[int]) -> None:
        self._optimizer = optimizer
        self.core = core
        self.indices = indices
        self._parameters = optimizer.parameters_by_position()
        for position, parameter in enumerate(self._parameters):
            if parameter.dtype not in _DTYPES:
                raise InvalidArgument(
                    f"parameter {position} of {type(optimizer).__name__} (shape {tuple(parameter.shape)}) is "
                    f"{str(parameter.dtype).removeprefix('torch.')}, and it was prepared to step floating ones alone; "
                    "give it all of them before prepare(), or pass fuse=False to the strategy"
                )
        self._watch = _C.DictWatch()
        if self.is_on_servers:
            raise InvalidArgument(
                "parameter servers step one optimizer, with the parameters that it has in the first step, and this is "
                "another one or has others since; give all parameters to one optimizer, as groups of it, before then"
            )
        if optimizer._flat is not None:
            optimizer._flat.make_whole()
        groups = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        if core is None:
            pairs = list(zip(self._parameters, groups, strict=True))
            self._flat = _C.make_flat(optimizer._algorithm, pairs, self._groups())
        else:
            self._flat = core.make_flat(optimizer._algorithm, list(zip(indices, groups, strict=True)), self._groups())
        self.follow()

    @property
    def is_on_servers(self) -> bool:
        """Whether parameter servers hold the state."""
        return self.core is not None and self.core.has_servers

    def has(self, parameters: list[Tensor]) -> bool:
        """Whether these are the parameters, in this order."""
        return len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters))

    def flat_step(self) -> FlatStep:
        """What step() is going to use, after follow(): workers compare it."""
        self.follow()
        return self._flat, self.indices, self._optimizer._algorithm, self._groups()

    def step(self, set_number: int) -> None:
        """Steps from the reduced sums of a closed window."""
        assert self.core is not None
        self.follow()
        self.core.step_flat(set_number, self._flat, self.indices, self._optimizer._algorithm, self._groups())
        self._publish(self._flat.take_started())

    def connect_servers(self, set_number: int) -> None:
        """Gives parameter servers the state, and what else they need to step; `state` refuses what it cannot do."""
        assert self.core is not None
        self.follow()
        self.core.connect_servers(set_number, self._flat, self.indices, self._optimizer._algorithm, self._groups())
        self._optimizer.state = _Elsewhere(
            "parameter servers hold the optimizer's state from the first step on; state_dict() brings a copy, and "
            "load_state_dict() and edits come before the first step or after close()"
        )

    def step_from_grad(self) -> None:
        """Steps from `.grad`."""
        self.follow()
        self._flat.step_from_grad(self._optimizer._algorithm, self._groups())
        self._publish(self._flat.take_started())

    def follow(self) -> None:
        """Takes over what user code changed in `state`. Raises InvalidArgument where parameter servers hold it."""
        state = self._optimizer.state
        if isinstance(state, _Elsewhere):
            if not self.is_on_servers:
                raise InvalidArgument(state.reason)
        elif self.is_on_servers:
            raise InvalidArgument(
                "optimizer.state was replaced, and parameter servers hold the state from the first step on; change it "
                "before the first step or after close()"
            )
        elif not self._watch.sees(state):
            self._take_over()

    def refuse_on_servers(self) -> None:
        """Raises InvalidArgument where parameter servers hold the state."""
        if self.is_on_servers and isinstance(self._optimizer.state, _Elsewhere):
            raise InvalidArgument(self._optimizer.state.reason)

    def for_step_by_hand(self) -> FlatState:
        """This, or where the optimizer has other parameters since what steps those."""
        if self._flat.is_sharded or self.has(self._optimizer.parameters_by_position()):
            return self
        return FlatState(self._optimizer, None, [])

    def leave(self) -> None:
        """Before the strategy closes: `state` becomes what parameter servers hold. Where they are gone, or other ranks
        hold a part of it, it refuses."""
        if self._flat.is_sharded:
            self._optimizer._flat = None
            if any(map(self._flat.num_states, range(len(self._parameters)))):
                self._optimizer.state = _Elsewhere(
                    "the optimizer's state was divided over the workers of a strategy that is closed; take "
                    "state_dict() before close(), and load_state_dict() it after"
                )
        if not self.is_on_servers:
            return
        parameters = self._optimizer.parameters_by_position()
        # Not with what is left of the servers' if this fails.
        self._optimizer.state = _Elsewhere(
            "the parameter servers were gone when the strategy closed, and the optimizer's state with them; "
            "load_state_dict() a saved one, or set optimizer.state to an empty defaultdict(dict) to start anew"
        )
        held = self._on_servers(to_stay=True)
        self._optimizer.state = defaultdict(dict, {parameters[position]: values for position, values in held.items()})

    def make_whole(self) -> None:
        """Collective with shards. `state` becomes that of all ranks."""
        if not self._flat.is_sharded:
            return
        assert self.core is not None
        self.follow()
        for position, parameter in enumerate(self._parameters):
            values = self._optimizer.state.get(parameter)
            for which, name in self._names():
                tensor = self.core.whole_state(self._flat, position, which)
                if tensor is not None and values is not None:
                    values[name] = tensor

    def whole(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Collective with shards. A state_dict with what other ranks or parameter servers hold."""
        if self.is_on_servers:
            packed["state"] = self._on_servers()
        elif self._flat.is_sharded:
            assert self.core is not None
            packed["state"] = {
                position: {name: value for name, value in values.items() if value is not None}
                for position, values in packed["state"].items()
            }
            for position in filter(self._flat.has_started, range(len(self._parameters))):
                for which, name in self._names():
                    tensor = self.core.whole_state(self._flat, position, which)
                    if tensor is not None:
                        packed["state"][position][name] = tensor
        return packed

    def _on_servers(self, *, to_stay: bool = False) -> dict[int, dict[str, Any]]:
        """`to_stay`: but of rows that workers have no memory for."""
        assert self.core is not None
        part = _C.ServerPart
        fetch = self.core.state_on_servers
        state: dict[int, dict[str, Any]] = {}
        there = set()
        for position, step in enumerate(fetch(self.indices, part.steps, to_stay)):
            had_state = self._flat.has_started(position)
            if step is None:  # frozen when the servers took the others
                state[position] = self._values(position) if had_state else {}
            elif step > 0 or (had_state and self._optimizer._begins_with_state):
                state[position] = {"step": step} if self._optimizer._counts_steps else {}
                there.add(position)
        states = zip(self._flat.state_names, (part.state0, part.state1, part.state2), strict=False)
        for name, which in (*states, (_MASTER, part.master)):
            for position, tensor in enumerate(fetch(self.indices, which, to_stay)):
                if tensor is not None and position in there:
                    state[position][name] = tensor
        return {position: values for position, values in state.items() if values}

    def _names(self) -> list[tuple[int, str]]:
        return [*enumerate(self._flat.state_names), (_MASTER_NUMBER, _MASTER)]

    def _groups(self) -> list[list[float]]:
        return [self._optimizer._row(group) for group in self._optimizer.param_groups]

    def _take_over(self) -> None:
        state = self._optimizer.state_by_position()
        changed = []
        for position in range(len(self._parameters)):
            values = state.get(position)
            if values is not None and self._is_ours(values):
                if self._take_values(position, values):
                    changed.append(position)
            elif self._flat.has_started(position) and not self._has_nothing(position):
                self._flat.reset(position)
        self._optimizer._exact = {}
        self._publish(changed)
        self._watch.note(self._optimizer.state)

    def _is_ours(self, values: Mapping[str, Any]) -> bool:
        # Where no step is counted, None stands for what a shard has nothing of.
        names = ("step", *self._flat.state_names)
        return any(values.get(name) is not None or (name in values and self._flat.is_sharded) for name in names)

    def _has_nothing(self, position: int) -> bool:
        """Nothing of it stands in `state`, as of plain SGD."""
        return not self._optimizer._counts_steps and self._flat.num_states(position) == 0

    def _take_values(self, position: int, values: Mapping[str, Any]) -> bool:
        """Whether anything differs from what is held."""
        flat = self._flat
        changed = not flat.has_started(position)
        for which, name in enumerate(flat.state_names):
            given, held = values.get(name), flat.state(position, which)
            if given is held:
                if given is None and name in self._optimizer._needs and not flat.is_sharded:
                    self._refuse(position, name)
                continue
            if given is None:
                if name in self._optimizer._needs:
                    self._refuse(position, name)
                given = torch.zeros_like(self._parameters[position], dtype=held.dtype)  # type: ignore[union-attr]
            flat.set_state(position, which, given.to_dense() if given.is_sparse else given)
            changed = True
        if values.get(_MASTER) is not flat.master(position):
            flat.set_master(position, values.get(_MASTER))
            changed = True
        if self._optimizer._counts_steps:
            count = values.get("step")
            if count is None:
                self._refuse(position, "step")
            if count is not flat.step_count(position):
                flat.set_step_count(position, float(count))
                changed = True
        elif changed:
            flat.set_step_count(position, 1.0)  # SGD counts no steps: with a buffer, the first one is past.
        return changed

    def _refuse(self, position: int, name: str) -> NoReturn:
        raise InvalidArgument(
            f"optimizer.state of parameter {position} (shape {tuple(self._parameters[position].shape)}) has no "
            f"{name!r}; give it one, or remove the parameter's entry to start anew"
        )

    def _publish(self, positions: Sequence[int]) -> None:
        if not positions:
            return
        for position in positions:
            if values := self._values(position):
                self._optimizer.state.setdefault(self._parameters[position], {}).update(values)
        self._watch.note(self._optimizer.state)

    def _values(self, position: int) -> dict[str, Any]:
        """What is held here, as `state` has it."""
        marks_nothing = self._flat.is_sharded and not self._optimizer._counts_steps
        values: dict[str, Any] = {}
        if self._optimizer._counts_steps:
            values["step"] = self._flat.step_count(position)
        for which, name in enumerate(self._flat.state_names):
            tensor = self._flat.state(position, which)
            if tensor is not None or marks_nothing:
                values[name] = tensor
        master = self._flat.master(position)
        if master is not None:
            values[_MASTER] = master
        return values


class _Elsewhere(defaultdict[Any, Any]):
    """An optimizer's `state` that is not here: empty, and it refuses to be looked into and written, saying why."""

    def __init__(self, reason: str) -> None:
        super().__init__(dict)
        self.reason = reason

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise InvalidArgument(self.reason)

    __missing__ = __contains__ = __setitem__ = __delitem__ = __ior__ = _refuse
    get = clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(dict)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)


class _Flat(Optimizer):
    """What the flat optimizers have in common."""

    _algorithm = ""
    _counts_steps = True
    _begins_with_state = False
    """Whether torch's has state of a parameter before its first step."""
    _needs: frozenset[str] = frozenset()
    """State tensors that torch's step does not do without."""
    _flat: FlatState | None = None
    _exact: Mapping[int, tuple[Tensor, int, Tensor]] = MappingProxyType({})
    """By id of a tensor that load_state_dict rounded to a parameter's dtype: that, its version then, what it was
    given."""

    def parameters_by_position(self) -> list[Tensor]:
        """The parameters in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_by_position(self) -> dict[int, Mapping[str, Any]]:
        """`state` by the parameters' positions."""
        return {
            position: self._exactly(values)
            for position, parameter in enumerate(self.parameters_by_position())
            if (values := self.state.get(parameter)) is not None
        }

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch.optim's, from `.grad`."""
        if self._flat is None:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._flat = self._flat.for_step_by_hand()
        self._flat.step_from_grad()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's format. With shard_optimizer collective, and whole on every rank; parameter servers send what
        they hold."""
        if self._flat is not None:
            self._flat.follow()
        elif isinstance(self.state, _Elsewhere):
            raise InvalidArgument(self.state.reason)
        packed = super().state_dict()
        if self._exact:
            packed["state"] = {number: self._exactly(values) for number, values in packed["state"].items()}
        return packed if self._flat is None else self._flat.whole(packed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From torch.optim's format."""
        if self._flat is not None:
            self._flat.refuse_on_servers()
        super().load_state_dict(state_dict)
        self._exact = dict(self._rounded(state_dict))
        if self._flat is not None:
            self._flat.follow()

    def _rounded(self, state_dict: dict[str, Any]) -> Iterator[tuple[int, tuple[Tensor, int, Tensor]]]:
        parameters = self.parameters_by_position()
        for position, values in _by_position(state_dict).items():
            loaded = self.state.get(parameters[position], {})
            for name, given in values.items():
                rounded = loaded.get(name)
                if not isinstance(given, Tensor) or not isinstance(rounded, Tensor) or given.dtype == rounded.dtype:
                    continue
                if torch.equal(given.to(rounded), rounded):  # no hook of the load has changed it
                    yield id(rounded), (rounded, rounded._version, given)

    def _exactly(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what load_state_dict was given in place of what it rounded, where nobody has written that since."""
        if not self._exact or not isinstance(values, Mapping):
            return values
        exact = dict(values)
        for name, value in values.items():
            rounded, version, given = self._exact.get(id(value), (None, 0, value))
            if rounded is value and rounded is not None and rounded._version == version:
                exact[name] = given
        return exact

    def _row(self, group: dict[str, Any]) -> list[float]:
        raise NotImplementedError


def _by_position(state_dict: dict[str, Any]) -> dict[int, Mapping[str, Any]]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    positions = {number: position for position, number in enumerate(saved)}
    return {positions[number]: values for number, values in state_dict["state"].items() if number in positions}


class _Adam(_Flat):
    _algorithm = "adam"
    _needs = frozenset({"exp_avg", "exp_avg_sq"})

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
    _begins_with_state = True
    _needs = frozenset({"sum"})
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
        """`state`; what starts anew, or came with a group that was added later, starts as the constructor's."""
        initial = self.defaults["initial_accumulator_value"]
        for parameter in self.parameters_by_position():
            if _C.is_row_stub(parameter):
                if initial != 0:
                    raise InvalidArgument(
                        f"initial_accumulator_value={initial}: rows on parameter servers start at 0; leave it out"
                    )
            elif initial != 0 and not isinstance(self.state, _Elsewhere) and not self.state.get(parameter):
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
