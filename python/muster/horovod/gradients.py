"""When gradients are there, and what is done with them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from muster.errors import InvalidArgument
from muster.horovod.exceptions import HorovodInternalError

__all__ = ["Reductions", "named"]

Begin = Callable[[Sequence[str], Sequence[Tensor]], Callable[[], None]]
"""Begins to reduce the gradients of parameters, which have these names; what it returns waits for that."""


def named(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """The name of each parameter of `optimizer`, in the order of its groups: from `named_parameters`, or made up.

    Raises ValueError where they are no pairs, a name is there twice, or a parameter has none.
    """
    parameters = [
        (f"allreduce.noname.{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {parameter: name for name, parameter in parameters}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise InvalidArgument("named_parameters= is a sequence of (name, parameter), as model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise InvalidArgument(f"named_parameters= has these names more than once: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    missing = sum(parameter not in names for _, parameter in parameters)
    if missing:
        raise InvalidArgument(
            f"named_parameters= leaves {missing} of the optimizer's parameters out; give the names of all, or none"
        )
    return {parameter: names[parameter] for _, parameter in parameters}


class Reductions:
    """Which gradients are being reduced: those of a group of parameters once each has come often enough."""

    def __init__(
        self, names: Mapping[Tensor, str], groups: Sequence[tuple[Tensor, ...]], passes: int, begin: Begin
    ) -> None:
        """Gradients of each of `groups` of parameters, which have `names`, are reduced by `begin` after `passes`
        backward passes."""
        self._names = names
        self._groups = groups
        self._group_of = {parameter: number for number, group in enumerate(groups) for parameter in group}
        self._begin = begin
        self._passes = passes
        self._came: Counter[Tensor] = Counter()
        self._under_way: dict[int, Callable[[], None]] = {}
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(self._gradient_came)  # type: ignore[no-untyped-call]

    def restart(self, passes: int | None = None) -> None:
        """Counts `passes` anew (None: as many as before), when what is under way has ended, well or not."""
        self._passes = self._passes if passes is None else passes
        self._came.clear()
        while self._under_way:
            with contextlib.suppress(HorovodInternalError):
                self._under_way.popitem()[1]()

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
        """Reduces what is not under way too, waits for all, and counts anew."""
        for number in range(len(self._groups)):
            if number not in self._under_way:
                self._reduce(number)
        try:
            while self._under_way:
                self._under_way.pop(next(iter(self._under_way)))()
        finally:
            self.restart()

    def check_is_idle(self) -> None:
        """Raises AssertionError between the first backward pass of a step and the step."""
        if self._under_way or self._came:
            raise AssertionError(
                "zero_grad() between backward() and step() or synchronize() would clear gradients while they are "
                "reduced; call it before backward(), or after step()"
            )

    def _reduce(self, number: int) -> None:
        group = self._groups[number]
        self._under_way[number] = self._begin([self._names[parameter] for parameter in group], group)
