"""What steps a flat optimizer: its parameters and state in the core, as its groups and `state` show them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from muster import _C
from muster.errors import InvalidArgument
from muster.exact_loads import ExactLoads
from muster.sharded_embedding import rows_are_left_out

if TYPE_CHECKING:
    from muster.stepped_optimizer import SteppedOptimizer

__all__ = [
    "DTYPES",
    "LOW",
    "MASTER",
    "Algorithm",
    "Elsewhere",
    "FlatGroups",
    "FlatState",
    "FlatStep",
    "giving_runs",
    "with_current_masters",
]

FlatGroups = tuple[str, list[list[float]]]
"""An algorithm and its hyperparameters by group."""

FlatStep = tuple[_C.FlatOptimizer, list[int], str, list[list[float]]]
"""A flat optimizer as a step uses it: its core, its parameters' numbers, its algorithm, hyperparameters by group."""

DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
"""Of parameters that a flat optimizer steps."""

LOW = {torch.bfloat16, torch.float16}
"""Those of low precision."""

MASTER = "master"
"""State key of the fp32 copy of a low-precision parameter."""
_MASTER_NUMBER = 3

_gives_runs: ContextVar[bool] = ContextVar("gives_runs", default=False)


@contextmanager
def giving_runs() -> Iterator[None]:
    """Here `state_dict` of an optimizer whose state is divided over workers has this one's runs of tensors, and no
    other worker is asked for the rest."""
    token = _gives_runs.set(True)
    try:
        yield
    finally:
        _gives_runs.reset(token)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What the core and torch's `state` are told apart by."""

    name: str
    row: Callable[[dict[str, Any]], list[float]]
    """The hyperparameters of a group, as the core takes them."""
    counts_steps: bool = True
    begins_with_state: bool = False
    """Whether torch's has state of a parameter before its first step."""
    needs: frozenset[str] = frozenset()
    """State tensors that torch's step does not do without."""


class FlatState:
    """What steps one optimizer: its parameters and state in the core, and the views of them in the optimizer's `state`.

    The optimizer's groups and `state` are the user's, as torch's: whatever user code replaced or removed there since
    the last step is taken over before the next one. `indices` are the parameters' numbers in the core, in the order of
    the groups; empty where no strategy steps them.
    """

    def __init__(
        self,
        optimizer: SteppedOptimizer,
        algorithm: Algorithm,
        exact: ExactLoads,
        core: _C.StrategyCore | None,
        indices: list[int],
        previous: FlatState | None,
    ) -> None:
        """`previous`: what stepped the optimizer until this one does."""
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._exact = exact
        self.core = core
        self.indices = indices
        self._parameters = optimizer.parameters_by_position()
        for position, parameter in enumerate(self._parameters):
            if parameter.dtype not in DTYPES:
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
        if previous is not None:
            previous.make_whole()
        self._group_of = optimizer.groups_by_position()
        if core is None:
            pairs = list(zip(self._parameters, self._group_of, strict=True))
            self._flat = _C.make_flat(algorithm.name, pairs, self._groups())
        else:
            self._flat = core.make_flat(algorithm.name, list(zip(indices, self._group_of, strict=True)), self._groups())
        self.follow()

    @property
    def state_names(self) -> list[str]:
        """Of state tensors, but for copies of low-precision parameters."""
        return list(self._flat.state_names)

    @property
    def counts_steps(self) -> bool:
        """Whether there is a step count."""
        return self._algorithm.counts_steps

    @property
    def is_on_servers(self) -> bool:
        """Whether parameter servers hold the state."""
        return self.core is not None and self.core.has_servers

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold a part of the state."""
        return self._flat.is_sharded

    def is_of(self, core: _C.StrategyCore, indices: list[int]) -> bool:
        """Whether `core` steps it, with parameters of these numbers, in the groups that the optimizer has now."""
        return self.core is core and self.indices == indices and self._group_of == self._optimizer.groups_by_position()

    def has_all(self) -> bool:
        """Whether the optimizer has the same parameters as when this was made, in the same groups."""
        parameters = self._optimizer.parameters_by_position()
        return (
            len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
            and self._group_of == self._optimizer.groups_by_position()
        )

    def flat_step(self) -> FlatStep:
        """What the core steps in the next call, after follow(): workers compare it."""
        return self._flat, self.indices, *self.flat_groups()

    def flat_groups(self) -> FlatGroups:
        """What the core steps by, after follow()."""
        self.follow()
        return self._algorithm.name, self._groups()

    def publish(self) -> None:
        """After the core stepped: views of state that is new stand in `state`. What user code changed there since
        follow() is taken over before the next step."""
        started = self._flat.take_started()
        if not started:
            return
        is_followed = self._watch.sees(self._optimizer.state)
        self._show(started)
        if is_followed:
            self._watch.note(self._optimizer.state)

    def connect_servers(self, set_number: int) -> None:
        """Gives parameter servers the state, and what else they need to step; `state` refuses what it cannot do."""
        assert self.core is not None
        self.follow()
        self.core.connect_servers(set_number, self._flat, self.indices, self._algorithm.name, self._groups())
        self._optimizer.state = Elsewhere(
            "parameter servers hold the optimizer's state from the first step on; state_dict() brings a copy, and "
            "load_state_dict() and edits come before the first step or after close()"
        )
        self._watch = _C.DictWatch()  # the other one keeps what it has seen

    def step_from_grad(self) -> None:
        """Steps from `.grad`."""
        self.follow()
        self._flat.step_from_grad(self._algorithm.name, self._groups())
        self._publish(self._flat.take_started())

    def follow(self) -> None:
        """Takes over what user code changed in `state`. Raises InvalidArgument where parameter servers hold it."""
        state = self._optimizer.state
        if isinstance(state, Elsewhere):
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
        if self.is_on_servers and isinstance(self._optimizer.state, Elsewhere):
            raise InvalidArgument(self._optimizer.state.reason)

    def for_step_by_hand(self) -> FlatState:
        """This, or where the optimizer has other parameters since what steps those."""
        if self.is_sharded or self.has_all():
            return self
        return FlatState(self._optimizer, self._algorithm, self._exact, None, [], previous=self)

    def leave(self) -> None:
        """Before the strategy closes: `state` becomes what parameter servers hold. Where they are gone, or other ranks
        hold a part of it, it refuses."""
        if self.is_sharded and any(map(self._flat.num_states, range(len(self._parameters)))):
            self._optimizer.state = Elsewhere(
                "the optimizer's state was divided over the workers of a strategy that is closed; take "
                "state_dict() before close(), and load_state_dict() it after"
            )
        if not self.is_on_servers:
            return
        # Not with what is left of the servers' if this fails.
        self._optimizer.state = Elsewhere(
            "the parameter servers were gone when the strategy closed, and the optimizer's state with them; "
            "load_state_dict() a saved one, or set optimizer.state to an empty defaultdict(dict) to start anew"
        )
        self._optimizer.state = self.from_servers()

    def from_servers(self) -> defaultdict[Tensor, Any]:
        """What `state` would be, where parameter servers hold it."""
        held = self._on_servers(to_stay=True)
        return defaultdict(dict, {self._parameters[position]: values for position, values in held.items()})

    def make_whole(self) -> None:
        """Collective with shards. `state` becomes that of all ranks."""
        if not self.is_sharded:
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
        """Collective with shards. A state_dict with what other ranks or parameter servers hold; in `giving_runs` of
        the former this rank's runs alone, where elements are in the order of rows."""
        now = self._optimizer.parameters_by_position()
        if self.is_on_servers:
            held = self._on_servers(to_stay=rows_are_left_out())
            packed["state"] = {place: held[own] for own, place in self._places_in(now) if own in held}
        elif self.is_sharded:
            assert self.core is not None
            packed["state"] = {
                position: {name: value for name, value in values.items() if value is not None}
                for position, values in packed["state"].items()
            }
            for own, place in self._places_in(now):
                if not self._flat.has_started(own):
                    continue
                for which, name in self._names():
                    run = self._flat.own_run(own, which) if _gives_runs.get() else None
                    tensor = self.core.whole_state(self._flat, own, which) if run is None else run
                    if tensor is not None:
                        packed["state"][place][name] = tensor
        else:
            packed["state"] = with_current_masters(packed["state"], now)
        return packed

    def _places_in(self, parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
        """The position here, and the place in `parameters`, of those that are in both: since the last step groups may
        have been given others, or another order."""
        places = {parameter: place for place, parameter in enumerate(parameters)}
        return [(own, places[parameter]) for own, parameter in enumerate(self._parameters) if parameter in places]

    def _on_servers(self, *, to_stay: bool = False) -> dict[int, dict[str, Any]]:
        """`to_stay`: but of rows that workers have no memory for."""
        assert self.core is not None
        part = _C.ServerPart
        states = zip(self._flat.state_names, (part.state0, part.state1, part.state2), strict=False)
        named = [*states, (MASTER, part.master)]
        # Together: a table of rows travels once.
        steps, *tensors = self.core.state_on_servers(
            self.indices, [part.steps, *(which for _, which in named)], to_stay
        )
        state: dict[int, dict[str, Any]] = {}
        there = set()
        for position, step in enumerate(steps):
            had_state = self._flat.has_started(position)
            if step is None:  # frozen when the servers took the others
                values = {position: self._values(position)} if had_state else {}
                state |= with_current_masters(values, self._parameters)
            elif step > 0 or (had_state and self._algorithm.begins_with_state):
                state[position] = {"step": step} if self._algorithm.counts_steps else {}
                there.add(position)
        for (name, _), of_part in zip(named, tensors, strict=True):
            for position, tensor in enumerate(of_part):
                if tensor is not None and position in there:
                    state[position][name] = tensor
        return {position: values for position, values in state.items() if values}

    def _names(self) -> list[tuple[int, str]]:
        return [*enumerate(self._flat.state_names), (_MASTER_NUMBER, MASTER)]

    def _groups(self) -> list[list[float]]:
        for number, group in enumerate(self._optimizer.param_groups):
            for name, default in self._optimizer.defaults.items():
                given = group.get(name)
                if any(isinstance(part, str) for part in (given if isinstance(given, tuple | list) else (given,))):
                    raise InvalidArgument(
                        f"option '{name}' of group {number} of {type(self._optimizer).__name__} is {given!r}, and its "
                        f"step needs one like {default!r}; set optimizer.param_groups[{number}]['{name}']"
                    )
        return [list(map(float, self._algorithm.row(group))) for group in self._optimizer.param_groups]

    def _take_over(self) -> None:
        state = self._optimizer.state_at(self._parameters)
        changed = []
        for position in range(len(self._parameters)):
            values = state.get(position)
            if values is not None and self._is_ours(values):
                if self._take_values(position, values):
                    changed.append(position)
            elif self._flat.has_started(position) and not self._has_nothing(position):
                self._flat.reset(position)
        self._exact.forget()
        self._publish(changed)
        self._watch.note(self._optimizer.state)

    def _is_ours(self, values: Mapping[str, Any]) -> bool:
        # Where no step is counted, None stands for what a shard has nothing of.
        masters = () if self.counts_steps else (MASTER,)  # else they come with the count
        names = ("step", *self._flat.state_names, *masters)
        return any(values.get(name) is not None or (name in values and self.is_sharded) for name in names)

    def _has_nothing(self, position: int) -> bool:
        """Nothing of it stands in `state`, as of plain SGD but for copies of low-precision parameters."""
        is_low = self._parameters[position].dtype in LOW
        return not self._algorithm.counts_steps and not is_low and self._flat.num_states(position) == 0

    def _take_values(self, position: int, values: Mapping[str, Any]) -> bool:
        """Whether anything differs from what is held."""
        flat = self._flat
        changed, begins_anew = not flat.has_started(position), False
        for which, name in enumerate(flat.state_names):
            given, held = values.get(name), flat.state(position, which)
            if given is held:
                if given is None and name in self._algorithm.needs and not flat.is_sharded:
                    self._refuse(position, name)
                continue
            if given is None:
                if name in self._algorithm.needs:
                    self._refuse(position, name)
                given = torch.zeros_like(self._parameters[position], dtype=held.dtype)  # type: ignore[union-attr]
                begins_anew = True
            flat.set_state(position, which, given.to_dense() if given.is_sparse else given)
            changed = True
        if values.get(MASTER) is not flat.master(position):
            flat.set_master(position, values.get(MASTER))
            changed = True
        if self._algorithm.counts_steps:
            count = values.get("step")
            if count is None:
                self._refuse(position, "step")
            if count is not flat.step_count(position):
                flat.set_step_count(position, float(count))
                changed = True
        elif changed:
            if begins_anew and not flat.is_sharded:  # with shards every rank keeps a buffer, or none does
                flat.reset(position)
                flat.set_master(position, values.get(MASTER))
            # SGD counts no steps: with a buffer, the first one is past.
            flat.set_step_count(position, 1.0 if flat.num_states(position) and not begins_anew else 0.0)
        return changed

    def _refuse(self, position: int, name: str) -> NoReturn:
        raise InvalidArgument(
            f"optimizer.state of parameter {position} (shape {tuple(self._parameters[position].shape)}) has no "
            f"{name!r}; give it one, or remove the parameter's entry to start anew"
        )

    def _publish(self, positions: Sequence[int]) -> None:
        if not positions:
            return
        self._show(positions)
        self._watch.note(self._optimizer.state)

    def _show(self, positions: Sequence[int]) -> None:
        for position in positions:
            values = self._values(position)
            if values:
                self._optimizer.state.setdefault(self._parameters[position], {}).update(values)
            if MASTER not in values and (known := self._optimizer.state.get(self._parameters[position])):
                known.pop(MASTER, None)  # of when the parameter was of low precision

    def _values(self, position: int) -> dict[str, Any]:
        """What is held here, as `state` has it."""
        marks_nothing = self.is_sharded and not self._algorithm.counts_steps
        values: dict[str, Any] = {}
        if self._algorithm.counts_steps:
            values["step"] = self._flat.step_count(position)
        for which, name in enumerate(self._flat.state_names):
            tensor = self._flat.state(position, which)
            if tensor is not None or marks_nothing:
                values[name] = tensor
        master = self._flat.master(position)
        if master is not None:
            values[MASTER] = master
        return values


def with_current_masters(state: Mapping[int, dict[str, Any]], parameters: Sequence[Tensor]) -> dict[int, Any]:
    """`state` by the positions of `parameters`, with master copies as the next step begins with them."""
    current = {}
    for position, values in state.items():
        parameter, master = parameters[position], values.get(MASTER)
        if master is not None:
            values = {name: value for name, value in values.items() if name != MASTER}
            if parameter.dtype in LOW:
                values[MASTER] = _C.current_master(master, parameter)
        current[position] = values
    return current


class Elsewhere(defaultdict[Any, Any]):
    """An optimizer's `state` that is not here: it refuses to be looked into, written and copied, saying why."""

    def __init__(self, reason: str) -> None:
        super().__init__(dict)
        self.reason = reason

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise InvalidArgument(self.reason)

    __missing__ = __contains__ = __setitem__ = __delitem__ = __ior__ = _refuse
    __iter__ = __len__ = __reversed__ = __reduce__ = __copy__ = _refuse
    get = keys = items = values = copy = clear = pop = popitem = setdefault = update = _refuse
