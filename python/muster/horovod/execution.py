"""Operations that all ranks asked for, done on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.errors import InvalidArgument
from muster.horovod.negotiation import Ready
from muster.horovod.requests import ADASUM, AVERAGE, PRODUCT, SUM, Request
from muster.horovod.transport import Transport

__all__ = ["Executor", "Operation"]


@dataclass
class Operation:
    """What is `ready`, with this rank's tensors."""

    ready: Ready
    inputs: Sequence[Tensor | None]
    """None where this rank has joined, and gives zeros."""
    outputs: Sequence[Tensor | None]
    """Where results go; new tensors where None."""
    result: Any = None

    @property
    def request(self) -> Request:
        return self.ready.request


class Executor:
    """Does operations over `transport`, the same in the same order on all ranks, in a thread without gradients."""

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        """This is `rank` of `size`."""
        self._transport = transport
        self._rank = rank
        self._size = size
        self._buffer: Tensor | None = None

    def run(self, operations: Sequence[Operation]) -> None:
        """Sets each operation's result. Operations that can be reduced together are."""
        fused: dict[tuple[Any, ...], list[Operation]] = {}
        for operation in operations:
            request = operation.request
            if request.kind == "allreduce" and request.op not in (PRODUCT, ADASUM) and len(set(request.dtypes)) == 1:
                alike = (request.dtypes[0], request.op, request.prescale, request.postscale)
                fused.setdefault(alike, []).append(operation)
            else:
                self._run(operation)
        for together in fused.values():
            self._all_reduce(together)

    def _run(self, operation: Operation) -> None:
        kind = operation.request.kind
        if kind == "allreduce":
            operation.result = [self._reduced_alone(operation, index) for index in range(len(operation.inputs))]
        elif kind == "reducescatter":
            operation.result = [self._part_of_reduced(operation, index) for index in range(len(operation.inputs))]
        elif kind == "allgather":
            operation.result = [self._gathered(operation, index) for index in range(len(operation.inputs))]
        elif kind == "broadcast":
            operation.result = [self._broadcast(operation)]
        elif kind == "alltoall":
            operation.result = self._exchanged(operation)

    def _all_reduce(self, operations: Sequence[Operation]) -> None:
        request = operations[0].request
        dtype = _dtype(request.dtypes[0])
        sources, targets, finals = [], [], []
        for operation in operations:
            for given, output, shape in zip(operation.inputs, operation.outputs, operation.request.shapes, strict=True):
                source = torch.zeros(shape, dtype=dtype) if given is None else given.cpu()
                is_direct = output is not None and output.is_cpu and output.is_contiguous()
                target = output if is_direct and output is not None else torch.empty(shape, dtype=dtype)
                sources.append(source.reshape(-1))
                targets.append(target.view(-1))
                finals.append(output if is_direct else (target, output, given))
        window = self._window(_summed_in(dtype, request))
        for batch in _batches(sources, targets, window.numel()):
            sizes = [source.numel() for source, _ in batch]
            together = window[: sum(sizes)]
            torch.cat([source for source, _ in batch], out=together)
            self._reduce(together, request)
            for (_, target), part in zip(batch, torch.split(together, sizes), strict=True):
                _write(target, part)
        results = iter([_stored(*final) if isinstance(final, tuple) else final for final in finals])
        for operation in operations:
            operation.result = [next(results) for _ in operation.inputs]

    def _reduce(self, tensor: Tensor, request: Request) -> None:
        """In place, of contiguous values in host memory."""
        wide = tensor.to(_summed_in(tensor.dtype, request))
        _scale(wide, request.prescale)
        self._transport.all_reduce(wide, SUM if request.op == AVERAGE else request.op)
        self._scale_sum(wide, request)
        if wide is not tensor:
            tensor.copy_(wide)

    def _scale_sum(self, tensor: Tensor, request: Request) -> None:
        if request.op == AVERAGE and not tensor.is_floating_point() and request.postscale == 1.0:
            if tensor.dtype != torch.bool:
                tensor.div_(self._size, rounding_mode="trunc")
            return
        _scale(tensor, request.postscale / self._size if request.op == AVERAGE else request.postscale)

    def _reduced_alone(self, operation: Operation, index: int) -> Tensor:
        request = operation.request
        given = operation.inputs[index]
        tensor = _copy(given, request, index)
        if request.op in (PRODUCT, ADASUM):
            _scale(tensor, request.prescale)
            rows = [len(tensor.view(-1))] * self._size
            parts = self._transport.all_gather(tensor.view(-1), rows)
            values = _adasum(parts) if request.op == ADASUM else _product(parts)
            tensor = values.to(tensor.dtype).view(tensor.shape)
            _scale(tensor, request.postscale)
        else:
            self._reduce(tensor.view(-1), request)
        return _stored(tensor, operation.outputs[index], given)

    def _part_of_reduced(self, operation: Operation, index: int) -> Tensor:
        request = operation.request
        given = operation.inputs[index]
        tensor = _copy(given, request, index)
        if tensor.numel():
            self._reduce(tensor.view(-1), request)
        rows = split_rows(len(tensor), self._size)
        start = sum(rows[: self._rank])
        return _stored(tensor[start : start + rows[self._rank]].clone(), None, given)

    def _gathered(self, operation: Operation, index: int) -> Tensor:
        given = operation.inputs[index]
        tensor = _copy(given, operation.request, index)
        rows = [operation.ready.requests[rank].shapes[index][0] for rank in range(self._size)]
        return _stored(torch.cat(self._transport.all_gather(tensor, rows)), None, given)

    def _broadcast(self, operation: Operation) -> Tensor:
        (given,), (output,) = operation.inputs, operation.outputs
        tensor = _copy(given, operation.request, 0)
        if tensor.numel():
            self._transport.broadcast(tensor, operation.request.root)
        return _stored(tensor, output, given)

    def _exchanged(self, operation: Operation) -> tuple[Tensor, list[int]]:
        (given,) = operation.inputs
        splits = [operation.ready.requests[rank].splits for rank in range(self._size)]
        tensor = self._transport.all_to_all(_copy(given, operation.request, 0), splits)
        return _stored(tensor, None, given), [sent[self._rank] for sent in splits]

    def _window(self, dtype: torch.dtype) -> Tensor:
        if self._buffer is None:
            self._buffer = self._transport.allocate()
        return self._buffer.view(dtype)


def _summed_in(dtype: torch.dtype, request: Request) -> torch.dtype:
    """Of low precision fp32 where sums are scaled, which are rounded once then; transports round sums alone."""
    is_scaled = request.op == AVERAGE or request.prescale != 1.0 or request.postscale != 1.0
    return torch.float32 if is_scaled and dtype in (torch.float16, torch.bfloat16) else dtype


def _batches(
    sources: Sequence[Tensor], targets: Sequence[Tensor], capacity: int
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Parts of `sources` with the same parts of `targets`, in batches of at most `capacity` elements."""
    batch: list[tuple[Tensor, Tensor]] = []
    room = capacity
    for source, target in zip(sources, targets, strict=True):
        while source.numel() > room:
            batch.append((source[:room], target[:room]))
            source, target = source[room:], target[room:]
            yield batch
            batch, room = [], capacity
        if size := source.numel():
            batch.append((source, target))
            room -= size
    if batch:
        yield batch


def split_rows(rows: int, size: int) -> list[int]:
    """How many of `rows` rows each of `size` ranks gets of a reducescatter: equal parts, the first ones larger."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _copy(given: Tensor | None, request: Request, index: int) -> Tensor:
    """A contiguous copy in host memory, with which a transport may do what it will."""
    if given is None:
        return torch.zeros(request.shapes[index], dtype=_dtype(request.dtypes[index]))
    return given.cpu().clone(memory_format=torch.contiguous_format)


def _stored(tensor: Tensor, output: Tensor | None, given: Tensor | None) -> Tensor:
    """`tensor` where it is to be: in `output`, else on the device of what this rank has given."""
    if output is not None:
        _write(output, tensor)
        return output
    return tensor if given is None else tensor.to(given.device)


def _write(output: Tensor, values: Tensor) -> None:
    """In place. Tensors that a program made in inference mode can be written in that mode alone, which is each
    thread's own."""
    with torch.inference_mode() if output.is_inference() else nullcontext():
        output.copy_(values)


def _scale(tensor: Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    elif tensor.dtype == torch.bool:
        raise InvalidArgument(f"a bool cannot be scaled by {factor:g}; convert it to a number first")
    else:
        tensor.copy_((tensor.double() * factor).trunc())


def _product(parts: Sequence[Tensor]) -> Tensor:
    is_low = parts[0].dtype in (torch.float16, torch.bfloat16)
    result = parts[0].float() if is_low else parts[0].clone()
    for part in parts[1:]:
        result.mul_(part)
    return result


def _adasum(parts: Sequence[Tensor]) -> Tensor:
    """Adasum of gradients (Maleki et al., 2020, arXiv:2006.02924), paired as in a binary tree over ranks: what each
    has in common with the other is counted once."""
    values = [part.double() for part in parts]
    while len(values) > 1:
        values = [_adasum_of_two(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _adasum_of_two(a: Tensor, b: Tensor) -> Tensor:
    common, of_a, of_b = a.dot(b), a.dot(a), b.dot(b)
    least = torch.finfo(torch.float64).tiny ** 0.5
    share_a = 1.0 - common / of_a * 0.5 if of_a >= least else 1.0
    share_b = 1.0 - common / of_b * 0.5 if of_b >= least else 1.0
    return share_a * a + share_b * b
