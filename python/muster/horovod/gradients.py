"""When gradients are there, and what is done with them."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from muster.errors import InvalidArgument
from muster.horovod.exceptions import HorovodInternalError

__all__ = ["Reductions", "add_names", "named"]

Begin = Callable[[Sequence[str], Sequence[Tensor]], Callable[[], None]]
"""Begins to reduce the gradients of parameters, which have these names; what it returns waits for that."""
_reductions_of = WeakTensorKeyDictionary()
"""Weak references to those that follow a parameter's gradients."""


def named(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """The name of each parameter of `optimizer`: from `named_parameters`, all of which are in the result, or made up.

    Raises ValueError where they are no pairs, a name is there twice, or a parameter has none.
    """
    if named_parameters is None:
        names: dict[Tensor, str] = {}
        add_names(names, optimizer)
        return names
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise InvalidArgument("named_parameters= is a sequence of (name, parameter), as model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise InvalidArgument(f"named_parameters= has these names more than once: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    missing = sum(parameter not in names for group in optimizer.param_groups for parameter in group["params"])
    if missing:
        raise InvalidArgument(
            f"named_parameters= leaves {missing} of the optimizer's parameters out; give the names of all, or none"
        )
    return names


def add_names(names: dict[Tensor, str], optimizer: Optimizer) -> None:
    """Names the parameters of `optimizer` that are not among `names` yet, by their places in its groups."""
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if parameter not in names:
                names[parameter] = f"allreduce.noname.{i}.{j}"


class Reductions:
    """Which gradients are being reduced: those of a group of parameters once each has come often enough."""

    def __init__(
        self, names: Mapping[Tensor, str], groups: Sequence[tuple[Tensor, ...]], passes: int, begin: Begin
    ) -> None:
        """Gradients of each of `groups` of parameters, which have `names`, are reduced by `begin` after `passes`
        backward passes."""
        self._names = names
        self._begin = begin
        self._passes = passes
        self._groups: list[tuple[Tensor, ...]] = []
        self._group_of: dict[Tensor, int] = {}
        self._hooks: dict[Tensor, Any] = {}
        self._came: Counter[Tensor] = Counter()
        self._under_way: dict[int, tuple[Callable[[], None], list[Tensor | None]]] = {}
        self._left: list[Callable[[], None]] = []  # waits for what was under way when a step was interrupted
        for group in groups:
            self.add(group)
        weakref.finalize(self, _remove, self._hooks)

    def add(self, group: tuple[Tensor, ...]) -> None:
        """Reduces the gradients of another `group` too, once its parameters are among the names. Whoever followed them
        before reduces them in its finish() alone from now on."""
        this = weakref.ref(self)
        for parameter in group:
            reference = _reductions_of.get(parameter)  # type: ignore[no-untyped-call]
            earlier = None if reference is None else reference()
            if earlier is not None:
                earlier._release(parameter)
            _reductions_of[parameter] = this
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter: None if (reductions := this()) is None else reductions._gradient_came(parameter)
            )
            self._group_of[parameter] = len(self._groups)
        self._groups.append(group)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._group_of

    def restart(self, passes: int | None = None) -> None:
        """Counts `passes` anew (None: as many as before), when what is under way has ended, well or not."""
        self._passes = self._passes if passes is None else passes
        self._set_aside()
        self._settle()

    def _set_aside(self) -> None:
        """What is under way is no step's any more."""
        self._came.clear()
        self._left += [wait for wait, _ in self._under_way.values()]
        self._under_way.clear()

    def _settle(self) -> None:
        while self._left:
            with contextlib.suppress(Exception):  # nobody wants the results
                self._left[-1]()
            self._left.pop()

    def _release(self, parameter: Tensor) -> None:
        self.restart()
        self._hooks.pop(parameter).remove()

    def _gradient_came(self, parameter: Tensor) -> None:
        number = self._group_of[parameter]
        if self._came[parameter] >= self._passes:
            raise AssertionError(
                f"the gradient of {self._names[parameter]} came more often than backward_passes_per_step="
                f"{self._passes} since the last step(); raise it to accumulate gradients, or step after each backward()"
            )
        self._came[parameter] += 1
        if all(self._came[member] == self._passes for member in self._groups[number]):
            self._reduce(number)

    def finish(self) -> None:
        """Reduces what is not under way too, waits for all, and counts anew. Raises AssertionError where another tensor
        has become a parameter's gradient meanwhile. What interrupts a wait (Ctrl-C) comes out at once, and drops the
        gradients."""
        for number in range(len(self._groups)):
            if number not in self._under_way:
                self._reduce(number)
        replaced = [
            self._names[parameter]
            for number, (_, gradients) in self._under_way.items()
            for parameter, gradient in zip(self._groups[number], gradients, strict=True)
            if parameter.grad is not gradient
        ]
        try:
            while self._under_way:
                number = next(iter(self._under_way))
                self._under_way[number][0]()
                del self._under_way[number]
        except HorovodInternalError:
            del self._under_way[number]
            self.restart()
            raise
        except BaseException:
            self._leave()
            raise
        self.restart()
        if replaced:
            raise AssertionError(
                f"the gradients of {', '.join(replaced)} were replaced while they were reduced; call synchronize() "
                "before what changes gradients, and step() within optimizer.skip_synchronize()"
            )

    def _leave(self) -> None:
        """Lets go of the gradients, which operations under way may still write into. The next reduction comes after
        these."""
        self._set_aside()
        for parameter in self._group_of:
            parameter.grad = None

    def check_is_idle(self) -> None:
        """Raises AssertionError between the first backward pass of a step and the step."""
        if self._under_way or self._came:
            raise AssertionError(
                "zero_grad() between backward() and step() or synchronize() would clear gradients while they are "
                "reduced; call it before backward(), or after step()"
            )

    def _reduce(self, number: int) -> None:
        self._settle()
        group = self._groups[number]
        wait = self._begin([self._names[parameter] for parameter in group], group)
        self._under_way[number] = wait, [parameter.grad for parameter in group]


def _remove(hooks: Mapping[Tensor, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
