"""What a strategy needs of an optimizer."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from numbers import Real
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from muster import _C, optim, structure
from muster.by_hand import ByHand
from muster.errors import Error, InvalidArgument, LayoutMismatch
from muster.exact_loads import load_exactly
from muster.flat_state import FlatGroups, FlatState, FlatStep
from muster.options import StrategyOptions
from muster.saved_tree import copied

__all__ = ["PreparedOptimizer"]


class PreparedOptimizer:
    """One optimizer of a strategy. The optimizer stays the user's object; nothing is held of its groups or state.

    Calling its ``step()`` by hand after strategy.step, when no backward by hand has written gradients since, would
    apply the same gradients twice: a pre-hook refuses it. That hook, and a post-hook, also tell where in torch's step
    the hooks of user code are.
    """

    def __init__(
        self, optimizer: Optimizer, core: _C.StrategyCore, options: StrategyOptions, by_hand: ByHand, owner: object
    ) -> None:
        """`owner` lives as long as the optimizer: the strategy, without which steps by hand would be wrong."""
        if not any(group["params"] for group in optimizer.param_groups):
            raise InvalidArgument(f"{type(optimizer).__name__} has no parameters; give it the model's before prepare()")
        self.optimizer = optimizer
        self._core = core
        self._by_hand = by_hand
        self._owner = owner
        self._stepping = False
        if _needs_closure(optimizer):
            raise InvalidArgument(
                f"{type(optimizer).__name__}.step() needs a closure, which evaluates the loss several times, and a "
                "strategy has one gradient for each step; use another optimizer, or step this one without a strategy"
            )
        self._flat = optim.make_flat(optimizer) if options.fuse else None
        if not options.fuse:
            optim.make_torchs(optimizer)
        if self._flat is None and options.shard_optimizer:
            raise InvalidArgument(
                f"shard_optimizer=True needs a flat optimizer (AdamW, Adam, SGD or Adagrad), and "
                f"{type(optimizer).__name__} has no flat version; leave the option out"
            )
        self.is_compared = False
        """Whether the ranks' parameters were found to be the same."""
        self._agree: Callable[[BaseException | None], None] | None = None
        self._has_stepped = False
        self._last_pre_hook = optimizer.register_step_pre_hook(self._before_step)
        self._first_post_hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def is_flat(self) -> bool:
        """Whether it can step from the reduced sums."""
        return self._flat is not None

    def keeps_master(self, *, has_state: bool) -> bool:
        """Whether it takes over the fp32 copy of a parameter of low precision, of which it has other state or none."""
        return self._flat is not None and (has_state or not self._flat.counts_steps)

    def indices(self) -> Iterator[int]:
        """The numbers of its parameters in the core, in the order of its groups. Raises InvalidArgument at one of no
        prepared module."""
        for number, parameter in enumerate(chain.from_iterable(self.parameters())):
            index = self._core.find(parameter)
            if index < 0:
                raise InvalidArgument(
                    f"parameter {number} (shape {tuple(parameter.shape)}) of {type(self.optimizer).__name__} is in no "
                    "prepared module; prepare() the module it belongs to, and build the optimizer from that module's "
                    "parameters"
                )
            yield index

    def parameters(self) -> list[list[Tensor]]:
        """By group."""
        return [group["params"] for group in self.optimizer.param_groups]

    def bind(self, indices: list[int]) -> None:
        """Tells a flat optimizer the numbers of its parameters, when they are known or have changed."""
        if self._flat is None:
            self._core.check_need_no_flat(indices)
            return
        with self._naming_options():
            optim.bind(self._flat, self._core, indices)

    def check_step(self) -> None:
        """Raises InvalidArgument where nobody would call the step() that user code put in the place of a flat one."""
        if self._flat is not None and optim.has_own_step(self.optimizer):
            raise InvalidArgument(
                f"step() of the {type(self.optimizer).__name__} was replaced after prepare(), and the strategy steps "
                "from the reduced sums without it; replace it before prepare(), or pass fuse=False"
            )

    def note_step(self) -> None:
        """Tells learning rate schedulers that a step was made, also where its update was skipped."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self, agree: Callable[[BaseException | None], None] | None = None) -> BaseException | None:
        """Applies `.grad`. `agree` is called once, after the pre-hooks and before anything is stepped, with what they
        raised, and raises where any rank's did. Returns what a post-hook raised: the step is made then."""
        self._stepping, self._agree, self._has_stepped = True, agree, False
        if agree is not None:
            optimizer = cast(Any, self.optimizer)  # whose hooks are OrderedDicts
            optimizer._optimizer_step_pre_hooks.move_to_end(self._last_pre_hook.id)
            optimizer._optimizer_step_post_hooks.move_to_end(self._first_post_hook.id, last=False)
        try:
            with self._naming_options():
                self.optimizer.step()
        except BaseException as error:
            if self._has_stepped:
                return error
            if self._agree is not None:
                self._agree(error)
            raise
        finally:
            self._stepping, self._agree = False, None
        return None

    def has_hooks(self) -> bool:
        """Whether user code wants to be called before a step."""
        return bool(_global_optimizer_pre_hooks) or len(self.optimizer._optimizer_step_pre_hooks) > 1

    def call_pre_hooks(self) -> None:
        """Before the core steps this flat optimizer."""
        self._stepping = True
        try:
            for hook in (*_global_optimizer_pre_hooks.values(), *self.optimizer._optimizer_step_pre_hooks.values()):
                hook(self.optimizer, (self.optimizer,), {})
        finally:
            self._stepping = False

    def connect_servers(self, set_number: int) -> None:
        """Lets parameter servers step a set that they do not hold yet."""
        with self._naming_options():
            self._state().connect_servers(set_number)

    def flat_step(self) -> FlatStep:
        """What the core steps in the next call."""
        with self._naming_options():
            return self._state().flat_step()

    def flat_groups(self) -> FlatGroups:
        """What it is stepped by, as hooks and the user's function left it."""
        with self._naming_options():
            return self._state().flat_groups()

    def hyperparameters(self) -> list[str]:
        """The numbers in its groups, in words: ranks that step from `.grad` compare them. What a device holds is left
        out: nobody waits for it."""
        return [
            f"{name} {number} in group {position}"
            for position, group in enumerate(self.optimizer.param_groups)
            for name, value in group.items()
            if name != "params" and (number := _number(value)) is not None
        ]

    def kinds_of_state(self) -> tuple[list[str], bool]:
        """Of this flat optimizer, once it has stepped: names of a parameter's state tensors, and whether it counts
        steps."""
        state = self._state()
        return state.state_names, state.counts_steps

    def check_state(self) -> None:
        """Raises InvalidArgument where parameter servers hold the state and user code replaced it."""
        if self._flat is not None and (state := optim.state_of(self._flat)) is not None:
            state.follow()

    def load(self, packed: dict[str, Any]) -> None:
        """Loads a state_dict, and keeps none of the tensors that it has of parameters."""
        is_bound = self._flat is not None and optim.state_of(self._flat) is not None
        # A flat optimizer that is bound copies them itself.
        state = packed["state"] if is_bound else copied(packed["state"])
        self._load({"state": state, "param_groups": copied(packed["param_groups"])})

    def _load(self, state_dict: dict[str, Any]) -> None:
        if self._flat is None:
            load_exactly(self.optimizer, state_dict)
        else:
            self.optimizer.load_state_dict(state_dict)  # a flat one keeps what is exact itself

    def publish(self) -> None:
        """After the core stepped this flat optimizer: its new state stands in the optimizer's."""
        self._state().publish()

    def call_post_hooks(self) -> None:
        """After the core stepped all optimizers of a set."""
        for hook in (*self.optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(self.optimizer, (self.optimizer,), {})

    def broadcast_state(self) -> None:
        """Collective: every worker gets the chief's hyperparameters and state. Raises LayoutMismatch where optimizers
        differ."""
        core = self._core
        text, leaves = structure.encode(self.optimizer.state_dict(), texts=True, keeps_shared=True)
        texts = core.exchange_texts(f"{self._description()}\n{text}", "broadcast_state()")
        (chiefs, _, description), *others = (text.partition("\n") for text in texts)
        self._compare([chiefs, *(theirs for theirs, _, _ in others)])
        leaves = core.broadcast(leaves, 0)
        if core.rank != 0:
            self._load(structure.decode(description, leaves))

    def compare(self) -> None:
        """Collective: as broadcast_state, for parameters whose module was prepared later; no state is sent."""
        self._compare(self._core.exchange_texts(self._description(), "prepare()"))

    def leave(self) -> None:
        """Before the strategy closes: the optimizer is torch's again, with all its state."""
        self._last_pre_hook.remove()
        self._first_post_hook.remove()
        if self._flat is None:
            return
        try:
            optim.leave(self._flat, self._core)
        except Exception as error:
            logging.getLogger("muster").warning(
                "the state of %s did not come back from the parameter servers: %s", type(self.optimizer).__name__, error
            )

    @contextlib.contextmanager
    def _naming_options(self) -> Iterator[None]:
        """Here an error is InvalidArgument where a group has an option of another kind than its default, or lacks
        it."""
        try:
            yield
        except Error:
            raise
        except Exception as error:
            for position, group in enumerate(self.optimizer.param_groups):
                for name, default in self.optimizer.defaults.items():
                    if name not in group or not _is_like(group[name], default):
                        raise InvalidArgument(
                            f"option '{name}' of group {position} of {type(self.optimizer).__name__} is "
                            f"{repr(group[name]) if name in group else 'missing'}, and its step needs one like "
                            f"{default!r}; set optimizer.param_groups[{position}]['{name}']"
                        ) from error
            raise

    def _state(self) -> FlatState:
        assert self._flat is not None
        state = optim.state_of(self._flat)
        assert state is not None
        return state

    def _description(self) -> str:
        """Its class, and a line for each parameter."""
        core = self._core
        lines = []
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                index = core.find(parameter)
                name = f"'{core.name_of(index)}'" if index >= 0 else ""
                lines.append([name, f"{tuple(parameter.shape)} in group {number}"])
        return json.dumps([type(self.optimizer).__name__, lines])

    def _compare(self, descriptions: Sequence[str]) -> None:
        (chiefs, mine), *others = map(json.loads, descriptions)
        for rank, (name, theirs) in enumerate(others, start=1):
            if name != chiefs:
                raise LayoutMismatch(
                    f"the optimizers of the ranks differ: rank 0 has {chiefs}, rank {rank} {name}; build the same "
                    "optimizer on every rank before prepare()"
                )
            for position, (one, other) in enumerate(zip_longest(mine, theirs)):
                if one != other:
                    raise LayoutMismatch(
                        f"the optimizers of the ranks differ: parameter {position} of {name} is {_words(one)} on rank "
                        f"0, and {_words(other)} on rank {rank}; build the same optimizer on every rank, over the "
                        "parameters in the same order, before prepare()"
                    )
        self.is_compared = all(name for name, _ in mine)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping:
            agree, self._agree = self._agree, None
            if agree is not None:
                agree(None)
        elif args[1:] or kwargs.get("closure") is not None:
            return  # a closure writes the gradients that it steps from
        elif not self._core.closed and self._by_hand.gradients_are_applied:
            raise InvalidArgument(
                f"{type(optimizer).__name__}.step() was called after strategy.step, which has applied the gradients "
                "already; remove the call, or write gradients by hand with backward() first"
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._has_stepped = True


def _number(value: Any) -> Any:
    """A number, or a tuple of numbers, as it is; a tensor's; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (list, tuple)):
        numbers = tuple(map(_number, value))
        return None if None in numbers else numbers
    return value if isinstance(value, Real) else None


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value may stand for a default: as many numbers, where that is of numbers."""
    number, given = _number(default), _number(value)
    if number is None or isinstance(value, Tensor):
        return True
    if isinstance(number, tuple):
        return isinstance(given, tuple) and len(given) == len(number)
    return isinstance(given, Real)


def _words(parameter: Sequence[str] | None) -> str:
    return "none" if parameter is None else " ".join(filter(None, parameter))


def _needs_closure(optimizer: Optimizer) -> bool:
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind in positional for p in parameters)
