"""How the ranks of a process set move tensors: through a process group of torch.distributed, or through memory that the
processes of one host share. One thread uses a transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from muster.horovod.requests import MAX, MIN, SUM
from muster.tensor_memory import memory_of

__all__ = ["GroupTransport", "HostTransport", "Transport"]

FRAME = 1024
"""Bytes of a message between ranks that travel at once, with its length."""
_HEADER = 8
GROUP_BUFFER = 16 << 20
HOST_BUFFER = 1 << 20
"""Bytes. What ranks of a host have copied there is in a cache when they add it."""
_REDUCTIONS = {SUM: dist.ReduceOp.SUM, MIN: dist.ReduceOp.MIN, MAX: dist.ReduceOp.MAX}
_NAMES = {SUM: "sum", MIN: "min", MAX: "max"}
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.bool: torch.int32,
}
"""In which dtype a process group reduces those that it cannot, or would round at every addition."""


class Transport(Protocol):
    """Collective operations, in the same order on all ranks; tensors are contiguous. Errors are RuntimeErrors."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's `message`, by rank."""

    def allocate(self) -> Tensor:
        """Memory (uint8) in which tensors are reduced together: of the size, and where, that is fastest."""

    def all_reduce(self, tensor: Tensor, op: int) -> None:
        """In place: `tensor` becomes its reduction by `op` (SUM, MIN or MAX) over ranks. Low-precision dtypes are
        added in fp32 and rounded once; a bool is a number, and a sum of them whether any is true."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """In place: `tensor` becomes that of rank `root`."""

    def all_gather(self, tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Every rank's `tensor`, of `rows` rows by rank and otherwise equal shapes."""

    def all_to_all(self, tensor: Tensor, splits: Sequence[Sequence[int]]) -> Tensor:
        """Rows for this rank from every rank, whose `tensor` has splits[sender][receiver] rows for each receiver."""

    def abort(self, reason: str) -> None:
        """From any thread: ends what waits here, and as far as can be at peers, with an error that says `reason`."""


class GroupTransport:
    """Over a process group of torch.distributed, or a backend of one (Gloo, NCCL), with tensors on `device`."""

    def __init__(self, group: Any, device: torch.device | str = "cpu") -> None:
        """`group` serves tensors on `device`, and no one else uses it."""
        self._group = group
        self._device = torch.device(device)
        self._size: int = group.size()
        self._rank: int = group.rank()

    def exchange(self, message: bytes) -> list[bytes]:
        whole = len(message).to_bytes(_HEADER, "little") + message
        frames = self._gather_bytes(whole[:FRAME].ljust(FRAME, b"\0"))
        lengths = [_HEADER + int.from_bytes(frame[:_HEADER], "little") for frame in frames]
        rest = max(max(lengths) - FRAME, 0)
        if rest:
            tails = self._gather_bytes(whole[FRAME:].ljust(rest, b"\0"))
            frames = [frame + tail for frame, tail in zip(frames, tails, strict=True)]
        return [frame[_HEADER:length] for frame, length in zip(frames, lengths, strict=True)]

    def allocate(self) -> Tensor:
        return torch.zeros(GROUP_BUFFER, dtype=torch.uint8, device=self._device)

    def all_reduce(self, tensor: Tensor, op: int) -> None:
        wider = _WIDER.get(tensor.dtype)
        reduced = tensor if wider is None else tensor.to(wider)
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCTIONS[op]  # type: ignore[assignment]
        self._group.allreduce([reduced], options).wait()
        if wider is not None:
            tensor.copy_(reduced != 0 if tensor.dtype == torch.bool else reduced)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        if tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._group.broadcast([_bytes_of(tensor)], options).wait()

    def all_gather(self, tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
        most = max(rows)
        shape = [most, *tensor.shape[1:]]
        padded = tensor.new_zeros(shape)
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        if padded.numel():
            self._group.allgather([[_bytes_of(part) for part in parts]], [_bytes_of(padded)]).wait()
        return [part[:count] for part, count in zip(parts, rows, strict=True)]

    def all_to_all(self, tensor: Tensor, splits: Sequence[Sequence[int]]) -> Tensor:
        received = [sent[self._rank] for sent in splits]
        output = tensor.new_empty([sum(received), *tensor.shape[1:]])
        row = math.prod(tensor.shape[1:])
        if row == 0:  # on all ranks: one that has no rows takes part
            return output
        width = row * tensor.element_size()
        sizes = [count * width for count in received], [count * width for count in splits[self._rank]]
        self._group.alltoall_base(_bytes_of(output), _bytes_of(tensor), *sizes, dist.AllToAllOptions()).wait()
        return output

    def abort(self, reason: str) -> None:
        self._group.abort()

    def _gather_bytes(self, text: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(sent) for _ in range(self._size)]
        self._group.allgather([parts], [sent]).wait()
        return [bytes(memory_of(part.cpu())) for part in parts]


class HostTransport:
    """Through memory that all ranks share, all of them on one host; a few operations go over a process group."""

    def __init__(self, communicator: Any, group: Transport) -> None:
        """`communicator` is Muster's, over the same ranks as `group`."""
        self._communicator = communicator
        self._group = group

    def exchange(self, message: bytes) -> list[bytes]:
        work = self._communicator.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        work.wait()
        return [bytes(memory_of(part)) for part in work.outputs()]

    def allocate(self) -> Tensor:
        memory: Tensor = self._communicator.allocate(HOST_BUFFER, torch.uint8)
        return memory

    def all_reduce(self, tensor: Tensor, op: int) -> None:
        self._communicator.all_reduce(tensor, _NAMES[op]).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._communicator.broadcast(tensor, root).wait()

    def all_gather(self, tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
        work = self._communicator.all_gather(tensor)
        work.wait()
        parts: list[Tensor] = work.outputs()
        return parts

    def all_to_all(self, tensor: Tensor, splits: Sequence[Sequence[int]]) -> Tensor:
        return self._group.all_to_all(tensor, splits)

    def abort(self, reason: str) -> None:
        self._communicator.abort(reason)
        self._group.abort(reason)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
