"""Parameters that carry other parameters' gradients through a strategy's backward by hand."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["Carrier", "carriers_of", "flattened", "unflattened"]

_SMALL_BYTES = 1 << 16
"""Of a parameter: where a copy costs less than a tensor more."""


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all elements of these, which have one dtype."""
    return cast(Tensor, _flatten_dense_tensors(list(tensors)))  # type: ignore[no-untyped-call]


def unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` in the shapes of those that it was made of, or others `like` them."""
    return list(_unflatten_dense_tensors(flat, list(like)))  # type: ignore[no-untyped-call]


class Carrier(Protocol):
    """One parameter of the strategy's, and those of the user's whose gradients it carries. Its values mean nothing."""

    parameter: nn.Parameter

    def load(self) -> None:
        """Takes up the gradients, before they are averaged."""

    def load_zeros(self) -> None:
        """Takes up what adds nothing to the other ranks' gradients."""

    def unload(self) -> None:
        """Gives back the means; a parameter without a gradient on any rank keeps none."""


def carriers_of(parameters: Iterable[nn.Parameter], as_views: bool) -> list[Carrier]:
    """A carrier for each large parameter, and one for the small ones of each dtype, in an order that follows from
    shapes and dtypes alone. With `as_views` gradients of small parameters become views of one tensor."""
    carriers: list[Carrier] = []
    small: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.numel() * parameter.element_size() < _SMALL_BYTES:
            small.setdefault(parameter.dtype, []).append(parameter)
        else:
            carriers.append(_OfOne(parameter))
    return [*carriers, *(_OfMany(of_dtype, as_views) for of_dtype in small.values())]


class _OfOne:
    def __init__(self, carried: nn.Parameter) -> None:
        self._carried = carried
        # One value in memory for all: only the gradient is used.
        self.parameter = nn.Parameter(carried.detach().new_zeros(()).expand(carried.shape))

    def load(self) -> None:
        if self.parameter.is_contiguous() and self.parameter.numel() > 1:
            # The broadcast of prepare() gave it memory.
            self.parameter.data = self.parameter.detach().new_zeros(()).expand(self.parameter.shape)
        self.parameter.grad = self._carried.grad

    def load_zeros(self) -> None:
        self.parameter.grad = None

    def unload(self) -> None:
        if self._carried.grad is not self.parameter.grad:  # there was none, or a sparse one
            self._carried.grad = self.parameter.grad
        self.parameter.grad = None


class _OfMany:
    """Its gradient is all of theirs, flat, and behind them how many ranks have a gradient of each."""

    def __init__(self, carried: Sequence[nn.Parameter], as_views: bool) -> None:
        self._carried = carried
        self._as_views = as_views
        size = sum(parameter.numel() for parameter in carried) + len(carried)
        self._flat = carried[0].detach().new_zeros(size)
        *self._views, self._used = unflattened(self._flat, [*carried, self._flat.new_zeros(len(carried))])
        self.parameter = nn.Parameter(torch.zeros_like(self._flat))
        self._gradients: list[Tensor | None] = []  # loaded ones
        self._is_in_place = False

    def load(self) -> None:
        gradients = [parameter.grad for parameter in self._carried]
        self._gradients = gradients
        self._is_in_place = all(map(operator.is_, gradients, self._views))
        self._used.fill_(1)
        if not self._is_in_place:
            for number in _absent(gradients):
                self._views[number].zero_()
                self._used[number] = 0
            _copy(self._views, gradients)
        self.parameter.grad = self._flat

    def load_zeros(self) -> None:
        self.parameter.grad = torch.zeros_like(self._flat)

    def unload(self) -> None:
        gradients, self._gradients, self.parameter.grad = self._gradients, [], None
        if self._is_in_place:
            return
        absent = _absent(gradients)
        unused = {number for number in absent if not self._used[number]} if absent else set()
        if self._as_views:
            for number, (parameter, view) in enumerate(zip(self._carried, self._views, strict=True)):
                if number not in unused:
                    parameter.grad = view
            return
        for number in set(absent) - unused:
            self._carried[number].grad = self._views[number].clone()
        _copy(gradients, self._views)


def _absent(gradients: Sequence[Tensor | None]) -> list[int]:
    return [number for number, gradient in enumerate(gradients) if gradient is None]


def _copy(to: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    """Where there is something on both sides."""
    pairs = [(a, b) for a, b in zip(to, values, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
