"""Collective operations that are begun here and ended by synchronize(), without gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from muster.errors import InvalidArgument
from muster.horovod.handles import begin, engine_of, synchronize
from muster.horovod.process_sets import ProcessSet, global_process_set
from muster.horovod.requests import ADASUM, AVERAGE, MAX, MIN, OP_NAMES, PRODUCT, SUM, Request

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather_async", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall_async", "barrier", "broadcast_", "broadcast_async", "broadcast_async_",
    "chosen_op", "grouped_allgather_async", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter_async", "join", "reducescatter_async",
    "sparse_allreduce_async",
]  # fmt: skip

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT


_REDUCED = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
})  # fmt: skip
"""What can be added up."""


def chosen_op(op: int | None, average: bool | None) -> int:
    """`op`, or what the deprecated `average` says; Average where neither is given. Raises ValueError for both."""
    if average is not None:
        if op is not None:
            raise InvalidArgument("give op or average, not both: average=True is op=Average, average=False op=Sum")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    if op not in range(len(OP_NAMES)):
        raise InvalidArgument(f"op={op!r}: it is one of {', '.join(OP_NAMES)} of muster.horovod")
    return op


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins the reduction of `tensor`, which is not modified, over the ranks of `process_set`; returns its handle.

    `tensor`: any shape, of a floating-point, integer or bool dtype, the same on all ranks. `op` is Average (default;
    of integers towards zero), Sum, Adasum, Min, Max or Product; `average` is what it was called before. The tensor is
    multiplied by `prescale_factor` before and by `postscale_factor` after. `name` says which tensors of other ranks it
    belongs to; without one, the next of those without. Raises HorovodInternalError for a name that is under way, and
    ValueError for what cannot be reduced; synchronize() raises it on every rank where tensors differ.
    """
    return _reduce([tensor], None, average, name, op, prescale_factor, postscale_factor, process_set, _only)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set), in place."""
    return _reduce([tensor], [tensor], average, name, op, prescale_factor, postscale_factor, process_set, _only)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set), and waits."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_async() of each of `tensors`, under one `name`: they are reduced at once, when all ranks have come.
    `average`, `op`, `prescale_factor`, `postscale_factor` and `process_set` as there."""
    return _reduce(tensors, None, average, name, op, prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce_async(tensors, average, name, op, prescale_factor, postscale_factor, process_set), in
    place."""
    return _reduce(tensors, tensors, average, name, op, prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set), and
    waits."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begins the sum, or average, of sparse COO tensors: all ranks' indices and values are gathered under `name`.

    `tensor` may have other non-zero entries on each rank. `op` is Sum or Average over `process_set`. Returns a function
    that waits, and returns the (uncoalesced) result. Raises ValueError for another `op`.
    """
    if op not in (AVERAGE, SUM):
        raise InvalidArgument(f"sparse_allreduce_async(op={OP_NAMES[op]}): sparse tensors have Sum and Average")
    whole = tensor.coalesce()
    indices = allgather_async(whole.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(whole.values(), f"{name}.values", process_set)

    def result() -> Tensor:
        gathered, where = synchronize(values), synchronize(indices)
        scaled = gathered / engine_of(process_set).size if op == AVERAGE else gathered
        return torch.sparse_coo_tensor(where.t(), scaled, whole.shape, check_invariants=False)

    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins the concatenation, along dimension 0, of every rank's `tensor` in rank order; returns its handle.

    `tensor`: at least 1 dimension, of any dtype; ranks may differ in dimension 0 alone. `name` and `process_set` as of
    allreduce_async().
    """
    return _begin("allgather", [tensor], [None], name, process_set, _only)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As allgather_async() of each of `tensors` under one `name`, over `process_set`."""
    return _begin("allgather", tensors, [None] * len(tensors), name, process_set, list)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins sending the `tensor` of the job's rank `root_rank`, one of `process_set`, to all; returns its handle.

    `tensor`: any shape and dtype, the same on all ranks; not modified. `name` as of allreduce_async(). Raises
    ValueError for a rank that is not of the set.
    """
    return _broadcast(tensor, None, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_async(tensor, root_rank, name, process_set), in place."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As broadcast_async_(tensor, root_rank, name, process_set), and waits."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins sending rows of `tensor` to each rank, and taking those for this one; returns its handle.

    `tensor`: at least 1 dimension, of any dtype; ranks may differ in dimension 0 alone. `splits`: how many rows go to
    each rank of `process_set`, in rank order (None: equally many). Synchronized, it is the rows in rank order, and how
    many came from each rank (int32, or as `splits`). `name` as of allreduce_async(). Raises ValueError for splits that
    are not the tensor's rows.
    """
    engine = engine_of(process_set)
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    rows = len(tensor) if tensor.dim() else 0
    if splits is None:
        if rows % engine.size:
            raise InvalidArgument(f"{rows} rows cannot be divided over {engine.size} ranks equally; give splits=")
        counts = [rows // engine.size] * engine.size
    else:
        counts = [int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if len(counts) != engine.size or min(counts) < 0 or sum(counts) != rows:
        raise InvalidArgument(f"splits={counts}: {engine.size} numbers of rows, which are {rows} together")

    def finish(result: tuple[Tensor, list[int]]) -> tuple[Tensor, Tensor]:
        received, sizes = result
        return received, torch.tensor(sizes, dtype=like.dtype, device=like.device)

    return _begin("alltoall", [tensor], [None], name, process_set, finish, splits=tuple(counts))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins the reduction of `tensor`, of which each rank of `process_set` gets its part of rows; returns its handle.

    `tensor`: at least 1 dimension, the same shape on all ranks; not modified. Parts are equal, or the first ones a row
    larger. `op` is Average or Sum. `name`, `prescale_factor`, `postscale_factor` as of allreduce_async().
    """
    return _scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, _only)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As reducescatter_async() of each of `tensors` under one `name`, with `op`, `process_set`, `prescale_factor` and
    `postscale_factor`."""
    return _scatter(tensors, name, op, process_set, prescale_factor, postscale_factor, list)


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until all ranks have said so; the rank that was last.

    Meanwhile it gives zeros to the Sum and Average of the others, which is divided by all ranks as before, and takes
    part in their barriers. What else they ask for is a HorovodInternalError there: allgather, broadcast, alltoall,
    reducescatter, Min, Max and Product need a tensor of every rank. `device` is not needed: zeros take no memory of it.
    """
    last = synchronize(_begin("join", [], [], "join", global_process_set, lambda result: result))
    return int(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of `process_set` have called it."""
    synchronize(_begin("barrier", [], [], None, process_set, lambda result: result))


def _reduce(
    tensors: Sequence[Tensor], outputs: Sequence[Tensor] | None, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet, finish: Callable[[Any], Any],
) -> int:  # fmt: skip
    chosen = chosen_op(op, average)
    if chosen == ADASUM:
        size = engine_of(process_set).size
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum is over all ranks; leave process_set= away")
        if size & (size - 1):
            raise NotImplementedError(f"Adasum pairs ranks, which {size} cannot be; start a power of 2 of them")
    where: Sequence[Tensor | None] = [None] * len(tensors) if outputs is None else outputs
    return _begin(
        "allreduce", tensors, where, name, process_set, finish,
        op=chosen, prescale=float(prescale), postscale=float(postscale),
    )  # fmt: skip


def _scatter(
    tensors: Sequence[Tensor], name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float,
    finish: Callable[[Any], Any],
) -> int:  # fmt: skip
    if op not in (AVERAGE, SUM):
        raise InvalidArgument(f"reducescatter(op={op!r}): it is Average or Sum")
    return _begin(
        "reducescatter", tensors, [None] * len(tensors), name, process_set, finish,
        op=op, prescale=float(prescale), postscale=float(postscale),
    )  # fmt: skip


def _broadcast(tensor: Tensor, output: Tensor | None, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    members = engine_of(process_set).members
    if root_rank not in members:
        raise InvalidArgument(f"broadcast from rank {root_rank}, which is not among {members}; give one of those")
    return _begin("broadcast", [tensor], [output], name, process_set, _only, root=members.index(root_rank))


def _begin(
    kind: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor | None], name: str | None, process_set: ProcessSet,
    finish: Callable[[Any], Any], **fields: Any,
) -> int:  # fmt: skip
    engine = engine_of(process_set)
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"{kind} of the name {name!r}: give a string, the same on every rank")
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
            raise InvalidArgument(
                f"{kind} '{name}' of a {tensor.layout} tensor of {tensor.dtype}; give a dense one of real numbers"
            )
        if kind in ("allreduce", "reducescatter") and tensor.dtype not in _REDUCED:
            raise InvalidArgument(f"{kind} '{name}' of {tensor.dtype}, which nobody adds up; convert it before")
    for output in outputs:
        if output is not None and _shares_elements(output):
            raise InvalidArgument(
                f"{kind}_ '{name}' of a tensor whose elements share memory, as those of expand() do, so that it cannot "
                "be written; give a clone() of it"
            )
    scales = fields.get("prescale", 1.0) != 1.0 or fields.get("postscale", 1.0) != 1.0 or fields.get("op") == AVERAGE
    if scales and any(tensor.dtype == torch.bool for tensor in tensors):
        raise InvalidArgument(f"{kind} '{name}': a bool has no average, and no factors; convert it to a number first")
    if not all(math.isfinite(fields.get(factor, 1.0)) for factor in ("prescale", "postscale")):
        raise InvalidArgument(f"{kind} '{name}': prescale_factor and postscale_factor are finite numbers")
    request = Request(
        kind,
        engine.name(kind, name),
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        tuple(tuple(tensor.shape) for tensor in tensors),
        device="cpu" if all(tensor.device.type == "cpu" for tensor in tensors) else "device",
        **fields,
    )
    return begin(engine, request, tensors, outputs, finish)


def _shares_elements(tensor: Tensor) -> bool:
    """Whether some dimension repeats the same memory, so that torch writes nothing there."""
    repeats = (size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and any(repeats)


def _only(result: Sequence[Any]) -> Any:
    return result[0]
