"""What a rank asks of the others: one collective operation, in words that all of them can compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

__all__ = ["ADASUM", "AVERAGE", "MAX", "MIN", "OP_NAMES", "PRODUCT", "SUM", "Codec", "Request", "disagreement"]

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
"""In the order of the numbers above, which are Horovod's."""

MAX_KNOWN = 8192
"""Requests that a codec remembers; more than a model has parameters, as a rule."""


@dataclass(frozen=True)
class Request:
    """One operation of one rank. `key` names it in a process set."""

    kind: str
    """allreduce, allgather, broadcast, reducescatter, alltoall, join, barrier, add_process_set, remove_process_set."""
    name: str
    dtypes: tuple[str, ...] = ()
    """Of its tensors, as `shapes`."""
    shapes: tuple[tuple[int, ...], ...] = ()
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    """Of a broadcast: its rank in the process set."""
    device: str = "cpu"
    splits: tuple[int, ...] = ()
    """Of an alltoall: rows for each rank."""
    ranks: tuple[int, ...] = ()
    """Of a process set that is added or removed."""

    @property
    def key(self) -> str:
        """One operation of a key may be under way at a time."""
        return f"{self.kind}.{self.name}"

    @property
    def first_dimensions(self) -> list[int]:
        """Rows of each of its tensors."""
        return [shape[0] for shape in self.shapes]

    def describe(self) -> str:
        """In words, for errors."""
        tensors = ", ".join(f"{d} {list(s)}" for d, s in zip(self.dtypes, self.shapes, strict=True))
        words = [self.kind, *([f"of {tensors} on {self.device}"] if tensors else [])]
        if self.kind in ("allreduce", "reducescatter"):
            words.append(f"(op {OP_NAMES[self.op]}, factors {self.prescale:g} and {self.postscale:g})")
        if self.kind == "broadcast":
            words.append(f"from the process set's rank {self.root}")
        if self.ranks:
            words.append(f"with ranks {list(self.ranks)}")
        return " ".join(words)


class Codec:
    """Requests as bytes. A request that was sent before is sent as its number: all ranks decode the same messages in
    the same order, and so number alike."""

    def __init__(self) -> None:
        self._numbers: dict[Request, int] = {}
        self._known: list[Request] = []

    def encode(self, requests: Sequence[Request]) -> bytes:
        """`requests` of this rank."""
        numbers = self._numbers
        return json.dumps([numbers[r] if r in numbers else astuple(r) for r in requests]).encode()

    def decode(self, messages: Sequence[bytes]) -> list[list[Request]]:
        """The requests of each rank, from its message among `messages` (in rank order, this rank's own too)."""
        decoded = [[self._known[item] if isinstance(item, int) else _request(item) for item in json.loads(message)]
                   for message in messages]  # fmt: skip
        for requests in decoded:
            for request in requests:
                is_new = request not in self._numbers and ".noname." not in request.name
                if is_new and len(self._known) < MAX_KNOWN:
                    self._numbers[request] = len(self._known)
                    self._known.append(request)
        return decoded


def _request(fields: Sequence[Any]) -> Request:
    return Request(*(_tuples(value) for value in fields))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def disagreement(requests: Mapping[int, Request], num_joined: int) -> str | None:
    """What is wrong with these requests of one key, by rank, while `num_joined` ranks have joined; None if nothing."""
    (first, one), *others = sorted(requests.items())
    if num_joined and (why := _not_with_join(one)):
        return why
    if one.kind in ("allgather", "alltoall", "reducescatter"):
        for rank, request in requests.items():
            if not all(request.shapes):
                return f"rank {rank} asked for {request.describe()}, and 0 dimensions have no rows; pass tensor.view(1)"
    comparable = _comparable(one.kind)
    for rank, other in others:
        if comparable(other) != comparable(one):
            return (
                f"ranks disagree: rank {first} asked for {one.describe()}, rank {rank} for {other.describe()}; give "
                "the same on every rank"
            )
    return None


def _comparable(kind: str) -> Callable[[Request], object]:
    """What of a request must be the same on all ranks."""
    if kind in ("allgather", "alltoall"):
        return lambda r: (r.dtypes, r.device, tuple(shape[1:] for shape in r.shapes))
    return lambda r: r


def _not_with_join(request: Request) -> str | None:
    if request.kind == "allreduce" and request.op in (MIN, MAX, PRODUCT):
        return f"a rank has joined, and has nothing to give to {OP_NAMES[request.op]}; use Sum or Average"
    if request.kind in ("allgather", "alltoall", "broadcast", "reducescatter"):
        return (
            f"a rank has joined, and {request.kind} needs a tensor of every rank; do it before join(), or without"
            + (" (sparse gradients: sparse_as_dense=True)" if request.kind == "allgather" else "")
        )
    return None
