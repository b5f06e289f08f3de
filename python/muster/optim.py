"""Flat optimizers: torch.optim's, stepped in one pass over gradient, state and parameter.

`Strategy.prepare` turns a torch.optim one into the class of the same name here; it stays the same object. Alone,
without a strategy, they are torch.optim's.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster import _C
from muster.errors import InvalidArgument
from muster.exact_loads import ExactLoads, loaded_by
from muster.flat_state import DTYPES, MASTER, Algorithm, Elsewhere, FlatState, with_current_masters

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]


def _without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method of torch's Optimizer. Torch keeps torch.compile out of some by a decorator that imports all of
    torch.compile when they are first called: 1.5 s, and 70 MB a process. Before that import nothing compiles."""
    decorated = getattr(method, "__func__", None)
    # Not a patch of somebody else's, which has torch's method as __wrapped__ likewise.
    is_torchs = getattr(decorated, "__globals__", {}).get("__name__") == "torch._compile"
    if not is_torchs or "torch._dynamo" in sys.modules:
        return method
    return functools.partial(decorated.__wrapped__, method.__self__)  # type: ignore[union-attr, attr-defined]


class _Light(Optimizer):
    """Optimizer, which imports torch.compile only where a program compiles."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        _without_compiler(super().add_param_group)(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        _without_compiler(super().zero_grad)(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        return cast(dict[str, Any], _without_compiler(super().state_dict)())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        _without_compiler(super().load_state_dict)(state_dict)


class _Flat(_Light):
    """Base of the flat optimizers."""

    _algorithm: Algorithm
    _flat: FlatState | None = None
    _is_copy_of_flat: bool = False
    """Whether it is a copy of one that has a FlatState, to be stepped as that one is by hand."""

    @property
    def _exact(self) -> ExactLoads:
        # Made on demand: __init__ runs in no copy, and not where a torch.optim one becomes flat.
        return cast(ExactLoads, vars(self).setdefault("_exact_loads", ExactLoads()))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks whether step() unscales gradients and skips what is not finite. Torch's does with fused=True,
        and sets it on the object; here GradScaler does both itself."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:
        pass

    @property
    def counts_steps(self) -> bool:
        """Whether it has a number of steps as state of each parameter."""
        return self._algorithm.counts_steps

    def groups_by_position(self) -> list[int]:
        """By the parameters' positions, the number of the group that each is in."""
        return [number for number, group in enumerate(self.param_groups) for _ in group["params"]]

    def parameters_by_position(self) -> list[Tensor]:
        """The parameters in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_at(self, parameters: Sequence[Tensor]) -> dict[int, Mapping[str, Any]]:
        """`state` by the positions of `parameters`."""
        return {
            position: self._exact.of(values)
            for position, parameter in enumerate(parameters)
            if (values := self.state.get(parameter)) is not None
        }

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch.optim's, with its `closure`, from `.grad`."""
        if self._flat is None and self._is_copy_of_flat:
            _check_each_once(self)
            self._flat = FlatState(self, self._algorithm, self._exact, None, [], previous=None)
        if self._flat is None:
            # Of each class of which an optimizer was built, torch wraps step() to call hooks, as it does this one's.
            base = super().step.__func__  # type: ignore[attr-defined]
            return (base.__wrapped__ if getattr(base, "hooked", False) else base)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._flat.has_all():
            _check_each_once(self)
        self._flat = self._flat.for_step_by_hand()
        self._flat.step_from_grad()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's format. With shard_optimizer collective, and whole on every rank; parameter servers send what
        they hold."""
        if self._flat is not None:
            self._flat.follow()
        elif isinstance(self.state, Elsewhere):
            raise InvalidArgument(self.state.reason)
        # Hooks of the user's may make another structure of it.
        first = self.register_state_dict_post_hook(lambda _, packed: self._completed(packed), prepend=True)
        try:
            return self._packed()
        finally:
            first.remove()

    def _completed(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Torch's state_dict of what stands in `state`, with what stands elsewhere."""
        parameters = self.parameters_by_position()
        of_parameters, others = parted(packed["state"], len(parameters))
        if self._exact:
            of_parameters = {number: self._exact.of(values) for number, values in of_parameters.items()}
        packed["state"] = of_parameters
        if self._flat is None:
            packed["state"] = with_current_masters(packed["state"], parameters)
        else:
            packed = self._flat.whole(packed)
        packed["state"].update(others)
        return packed

    def _packed(self) -> dict[str, Any]:
        """Torch's state_dict, of what stands in `state`."""
        if not isinstance(self.state, Elsewhere):
            return super().state_dict()
        elsewhere, self.state = self.state, defaultdict(dict)
        try:
            return super().state_dict()
        finally:
            self.state = elsewhere

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, and in pickles: with what parameter servers hold."""
        kept = super().__getstate__()
        if self._flat is not None or self._is_copy_of_flat:
            kept["_is_copy_of_flat"] = True
        if isinstance(self.state, Elsewhere):
            if self._flat is None or not self._flat.is_on_servers:
                raise InvalidArgument(self.state.reason)
            kept["state"] = self._flat.from_servers()
        return kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From torch.optim's format."""
        if self._flat is not None:
            self._flat.refuse_on_servers()
        loaded = loaded_by(super().load_state_dict, self, state_dict)
        self._exact.note(self.parameters_by_position(), self.state, loaded)
        if self._flat is not None:
            self._flat.follow()


def _adam_row(group: dict[str, Any]) -> list[float]:
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


class _Adam(_Flat):
    _algorithm = Algorithm(name="adam", row=_adam_row, needs=frozenset({"exp_avg", "exp_avg_sq"}))


class AdamW(_Adam, torch.optim.AdamW):
    """torch.optim.AdamW, flat. Rows of a sparse gradient alone move, as in torch.optim.SparseAdam."""


class Adam(_Adam, torch.optim.Adam):
    """torch.optim.Adam, flat. Rows of a sparse gradient alone move, as in torch.optim.SparseAdam."""


def _sgd_row(group: dict[str, Any]) -> list[float]:
    return [
        float(group["lr"]),
        group["momentum"],
        group["dampening"],
        group["weight_decay"],
        group["nesterov"],
        group["maximize"],
    ]


class SGD(_Flat, torch.optim.SGD):
    """torch.optim.SGD, flat."""

    _algorithm = Algorithm(name="sgd", row=_sgd_row, counts_steps=False)


def _adagrad_row(group: dict[str, Any]) -> list[float]:
    return [float(group["lr"]), group["lr_decay"], group["eps"], group["weight_decay"], group["maximize"]]


class Adagrad(_Flat, torch.optim.Adagrad):
    """torch.optim.Adagrad, flat. A ``ShardedEmbedding``'s weight that is ``on_servers`` gets no state here: torch's
    would take the table's memory. On servers it starts at 0."""

    _algorithm = Algorithm(name="adagrad", row=_adagrad_row, begins_with_state=True, needs=frozenset({"sum"}))
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
        """Adds `param_group`, as torch's."""
        super().add_param_group(param_group)
        if self._hidden is None:
            return
        for weight in self.param_groups[-1]["params"]:
            if _C.is_row_stub(weight):
                self._hidden.append((weight, weight.data))
                weight.data = weight.data[:0]

    def state_at(self, parameters: Sequence[Tensor]) -> dict[int, Mapping[str, Any]]:
        """`state` by the positions of `parameters`; what starts anew, or came with a group that was added later, starts
        as the constructor's."""
        initial = self.defaults["initial_accumulator_value"]
        for parameter in parameters:
            if _C.is_row_stub(parameter):
                if initial != 0:
                    raise InvalidArgument(
                        f"initial_accumulator_value={initial}: rows on parameter servers start at 0; leave it out"
                    )
            elif initial != 0 and not isinstance(self.state, Elsewhere) and not self.state.get(parameter):
                self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, initial)}
        return super().state_at(parameters)


functools.update_wrapper(Adagrad.__init__, torch.optim.Adagrad.__init__)

_FLAT: dict[type[Optimizer], type[_Flat]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
}

# torch does this to a class when an object of it is made: with it, step() calls the optimizer's hooks.
for _class in _FLAT.values():
    _class.step = Optimizer.profile_hook_step(_class.step)  # type: ignore[method-assign]
    _class.step.hooked = True  # type: ignore[attr-defined]
_FLAT_STEPS = frozenset(_class.step for _class in _FLAT.values())


def make_flat(optimizer: Optimizer) -> _Flat | None:
    """The same object as a flat optimizer; None where there is no flat version of it (a step() of the user's own, or a
    class derived from torch.optim's; complex parameters; ``differentiable=True``). Raises InvalidArgument where a
    parameter is listed twice."""
    flat = _FLAT.get(type(optimizer))
    if (flat is None and not isinstance(optimizer, _Flat)) or has_own_step(optimizer):
        return None
    for group in optimizer.param_groups:
        if group["differentiable"] or any(parameter.dtype not in DTYPES for parameter in group["params"]):
            return None
    _check_each_once(optimizer)
    if flat is not None:
        optimizer.__class__ = flat
        _rebind_step(optimizer)
    assert isinstance(optimizer, _Flat)
    return optimizer


def make_torchs(optimizer: Optimizer) -> None:
    """Lets torch step what may have been flat: state that flat steps left is as torch's load_state_dict would have it,
    of the parameters' dtype."""
    if not isinstance(optimizer, _Flat):
        return
    optimizer._flat, optimizer._is_copy_of_flat = None, False
    if isinstance(optimizer.state, Elsewhere):
        return
    for group in optimizer.param_groups:
        has_step_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            values.pop(MASTER, None)
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    continue
                if name != "step" and value.is_floating_point() and value.shape == parameter.shape:
                    values[name] = value.to(parameter.dtype)
                elif name == "step" and has_step_on_device:
                    values[name] = value.to(parameter.device, torch.float32)


def _check_each_once(optimizer: Optimizer) -> None:
    places: dict[int, int] = {}
    for position, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        first = places.setdefault(id(parameter), position)
        if first != position:
            raise InvalidArgument(
                f"parameter {position} of {type(optimizer).__name__} (shape {tuple(parameter.shape)}) is its parameter "
                f"{first} again, and a flat step takes each once; list it once, or pass fuse=False to the strategy, "
                "where torch steps it twice"
            )


def parted(state: Mapping[Any, Any], num_parameters: int) -> tuple[dict[int, Any], dict[Any, Any]]:
    """The "state" of an optimizer's state_dict(): of parameters by their numbers, and what is under other keys, which
    torch leaves as it is."""
    of_parameters = {key: values for key, values in state.items() if key in range(num_parameters)}
    return of_parameters, {key: values for key, values in state.items() if key not in of_parameters}


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether step() is user code: of this object, where a learning rate scheduler wraps it in any case, or of its
    class, which is a flat one or derived from one."""
    own, of_class = vars(optimizer).get("step"), type(optimizer).step
    is_replaced = own is not None and getattr(own, "__wrapped__", None) is not of_class
    return is_replaced or (isinstance(optimizer, _Flat) and of_class not in _FLAT_STEPS)


def state_of(optimizer: _Flat) -> FlatState | None:
    """The state that a strategy or a step by hand has bound to the optimizer; None before."""
    return optimizer._flat


def bind(optimizer: _Flat, core: _C.StrategyCore, indices: list[int]) -> None:
    """Lets `core` step the optimizer, whose parameters have these numbers there, when they are known or have
    changed."""
    state = optimizer._flat
    if state is None or not state.is_of(core, indices):
        _check_each_once(optimizer)
        optimizer._is_copy_of_flat = False
        optimizer._flat = FlatState(optimizer, optimizer._algorithm, optimizer._exact, core, indices, state)


def leave(optimizer: _Flat, core: _C.StrategyCore) -> None:
    """Before the strategy of `core` closes: the optimizer's state is its own again, as `FlatState.leave` says."""
    state = optimizer._flat
    if state is None or state.core is not core:
        return
    if state.is_sharded:
        optimizer._flat = None
    state.leave()


def _rebind_step(optimizer: Optimizer) -> None:
    """A learning rate scheduler wraps the step() that it finds: its wrapper must find the flat one."""
    if vars(optimizer).pop("step", None) is None:
        return
    step = type(optimizer).step

    @functools.wraps(step)
    def with_note(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    with_note._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = with_note  # type: ignore[method-assign]
