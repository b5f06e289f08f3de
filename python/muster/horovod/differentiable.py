"""Collective operations that wait for their result, and through which gradients flow.

As in Horovod, gradients are those of a loss that is averaged over ranks, wherever that makes a difference: what flows
back through allgather and broadcast is the ranks' mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from muster.errors import InvalidArgument
from muster.horovod import operations
from muster.horovod.compression import Compression, Compressor
from muster.horovod.handles import engine_of, synchronize
from muster.horovod.operations import Average, Max, Min, Product, Sum
from muster.horovod.process_sets import ProcessSet, global_process_set
from muster.horovod.requests import OP_NAMES
from muster.horovod.runtime import running

__all__ = [
    "allgather", "allreduce", "alltoall", "broadcast", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "reducescatter",
]  # fmt: skip


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of `tensor`, which is not modified, over the ranks of `process_set`: the same shape and dtype.

    As allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set), and waits. The tensor
    travels as `compression` makes it. Gradients are reduced in the same way; Min, Max and Product have none.
    """
    op = operations.chosen_op(op, average)
    sent, ctx = compression.compress(tensor)
    (result,) = _Allreduce.apply(op, name, prescale_factor, postscale_factor, process_set, sent)  # type: ignore[no-untyped-call]
    return compression.decompress(result, ctx)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As allreduce(tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set) of each of
    `tensors`, under one name and at once."""
    op = operations.chosen_op(op, average)
    sent, contexts = _compressed(tensors, compression)
    results = _Allreduce.apply(op, name, prescale_factor, postscale_factor, process_set, *sent)  # type: ignore[no-untyped-call]
    return [compression.decompress(t, ctx) for t, ctx in zip(results, contexts, strict=True)]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Every rank's `tensor`, one after the other along dimension 0, in rank order.

    As allgather_async(tensor, name, process_set), and waits. The gradient is this rank's rows of the ranks' mean.
    """
    (result,) = _Allgather.apply(name, process_set, tensor)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As allgather(tensor, name, process_set) of each of `tensors`, under one name and at once."""
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The `tensor` of rank `root_rank`. As broadcast_async(tensor, root_rank, name, process_set), and waits.

    The gradient is the ranks' mean at `root_rank`, and zero on the others.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows of every rank's `tensor` that are for this one, in rank order; with `splits` also how many came from
    each rank. As alltoall_async(tensor, splits, name, process_set), and waits. Gradients go back to where the rows came
    from."""
    received, sizes = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return received if splits is None else (received, sizes)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction of `tensor`, which travels as `compression` makes it.

    As reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor), and waits. The gradient is
    every rank's rows, multiplied by the factors and, for Sum, by the number of ranks.
    """
    sent, ctx = compression.compress(tensor)
    (result,) = _Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, sent)  # type: ignore[no-untyped-call]
    return compression.decompress(result, ctx)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor) of each of
    `tensors`, under one name and at once."""
    sent, contexts = _compressed(tensors, compression)
    results = _Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *sent)  # type: ignore[no-untyped-call]
    return [compression.decompress(t, ctx) for t, ctx in zip(results, contexts, strict=True)]


def _compressed(tensors: Sequence[Tensor], compression: type[Compressor]) -> tuple[list[Tensor], list[Any]]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]


class _Allreduce(Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: int,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale, "process_set": process_set}
        handle = operations.grouped_allreduce_async(tensors, name=name, **ctx.how)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op = ctx.how["op"]
        if op in (Min, Max, Product):
            raise InvalidArgument(f"allreduce(op={OP_NAMES[op]}) has no gradient; reduce tensor.detach(), or use Sum")
        return (None, None, None, None, None, *grouped_allreduce(gradients, **ctx.how))


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[:1].numel() for tensor in tensors]
        return tuple(synchronize(operations.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        everyones = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        starts = everyones[: engine_of(ctx.process_set).rank].sum(0).tolist()
        return (None, None, *(g.narrow(0, *place) for g, *place in zip(reduced, starts, ctx.rows, strict=True)))


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(operations.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        return (reduced if running().rank == ctx.root_rank else reduced * 0), None, None, None


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        received, sizes = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.sizes = process_set, sizes
        ctx.mark_non_differentiable(sizes)
        return received, sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        returned, _ = alltoall(gradients[0], ctx.sizes, process_set=ctx.process_set)
        return returned, None, None, None


class _Reducescatter(Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.process_set = process_set
        ctx.factor = prescale * postscale * (engine_of(process_set).size if op == Sum else 1)
        handle = operations.grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        return (None, None, None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set))
