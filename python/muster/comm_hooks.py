"""Communication hooks of torch's DistributedDataParallel, and the buckets that they get."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import Future
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from muster.errors import InvalidArgument

__all__ = ["HookedBuckets"]

Hook = Callable[[Any, Any], Any]


class GradBucket:
    """As torch's: gradients of some parameters, in one flat tensor."""

    def __init__(self, index: int, is_last: bool, parameters: Sequence[nn.Parameter], buffer: Tensor) -> None:
        """Number `index` of a backward, and whether it `is_last`: `parameters`, and their gradients as `buffer`."""
        self._index = index
        self._is_last = is_last
        self._parameters = list(parameters)
        self._buffer = buffer

    def index(self) -> int:
        """Its number in this backward."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other comes after it in this backward."""
        return self._is_last

    def parameters(self) -> list[nn.Parameter]:
        """Those whose gradients it has."""
        return list(self._parameters)

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Another flat tensor takes the place of the gradients."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the flat tensor, in the parameters' shapes."""
        if self._buffer.is_sparse:
            return [self._buffer]
        return unflattened(self._buffer, self._parameters)


class HookedBuckets:
    """The buckets of one model, and the hook that says what becomes of them."""

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]], sparse: Sequence[nn.Parameter]) -> None:
        """`buckets` in the order of backward; gradients of `sparse` are sparse, each in a bucket of its own."""
        self._buckets = [list(bucket) for bucket in buckets]
        self._sparse = {id(parameter) for parameter in sparse}
        self._hook: Hook | None = None
        self._state: Any = None

    @property
    def has_hook(self) -> bool:
        """Whether a hook was set."""
        return self._hook is not None

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [sum(p.numel() * p.element_size() for p in bucket) for bucket in self._buckets]

    def set_hook(self, state: Any, hook: Hook) -> None:
        """`hook` is called with `state` and each bucket. Raises RuntimeError where there is one already."""
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook, self._state = hook, state

    def run(self, used: Collection[nn.Parameter] | None) -> None:
        """Calls the hook with all buckets, then waits for its futures, and puts what they hold into gradients. A
        parameter without a gradient counts as zeros, and gets the result, where it is among `used` or those are None.
        """
        for bucket, value in self._run(lambda parameters: [_gradient_of(parameter) for parameter in parameters]):
            values = [value] if value.is_sparse else unflattened(value, bucket.parameters())
            for parameter, own in zip(bucket.parameters(), values, strict=True):
                if used is not None and parameter not in used:
                    continue
                if parameter.grad is None or own.is_sparse:
                    parameter.grad = own.to(parameter.dtype).clone()
                else:
                    parameter.grad.copy_(own)

    def run_without_gradients(self) -> None:
        """Likewise with zeros, and nothing is kept."""
        self._run(lambda parameters: [torch.zeros_like(parameter) for parameter in parameters])

    def _run(self, gradients_of: Callable[[list[nn.Parameter]], list[Tensor]]) -> list[tuple[GradBucket, Tensor]]:
        assert self._hook is not None
        begun = []
        for index, parameters in enumerate(self._buckets):
            gradients = gradients_of(parameters)
            if id(parameters[0]) in self._sparse:
                gradient = gradients[0]
                buffer = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
            else:
                buffer = flattened(gradients)
            bucket = GradBucket(index, index == len(self._buckets) - 1, parameters, buffer)
            begun.append((bucket, self._hook(self._state, bucket)))
        return [(bucket, _waited_for(future, bucket)) for bucket, future in begun]


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _waited_for(future: Any, bucket: GradBucket) -> Tensor:
    if not isinstance(future, Future):
        raise InvalidArgument(f"a communication hook returned a {type(future).__name__}; it must return a Future")
    value = future.wait()
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != bucket.buffer().numel():
        raise InvalidArgument("a communication hook's future must hold one tensor of the size of the bucket's buffer")
    return tensor


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all elements of these, which have one dtype."""
    return cast(Tensor, _flatten_dense_tensors(list(tensors)))  # type: ignore[no-untyped-call]


def unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` in the shapes of those that it was made of, or others `like` them."""
    return list(_unflatten_dense_tensors(flat, list(like)))  # type: ignore[no-untyped-call]
