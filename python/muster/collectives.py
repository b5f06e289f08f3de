"""Collectives over replicas and workers, of nested values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from muster import _C, structure
from muster.errors import InvalidArgument, LayoutMismatch
from muster.per_replica import PerReplica, rows_of
from muster.replicated import Replicated

__all__ = ["Collectives"]

_CALL = re.compile(r"(reduce|gather|broadcast)\([a-z0-9=']*\)")


class Collectives:
    """`reduce`, `gather`, `broadcast` and `barrier` of a strategy, whose methods say what they do."""

    def __init__(self, core: _C.StrategyCore, release_passes: Callable[[], None]) -> None:
        """`release_passes` is called before this thread waits for other workers outside a step."""
        self._core = core
        self._release_passes = release_passes

    @property
    def num_replicas(self) -> int:
        """Replicas of the whole job."""
        return self._core.num_replicas

    @property
    def is_in_step(self) -> bool:
        """Whether this thread is a replica's, in a step."""
        return self._core.current_local_replica >= 0

    def reduce(self, value: Any, op: Literal["sum", "mean", "min", "max"], *, weight: Any = None) -> Any:
        """As `Strategy.reduce`."""
        operation = _operation(op)
        if self.is_in_step:
            description, leaves = structure.encode(value)
            scale = self._weight_in_step(weight) if op == "mean" else torch.ones(())
            return structure.decode(description, self._core.reduce_in_step(leaves, operation, scale), as_numbers=op)
        self._release_passes()
        values, weights = self._contributions(value, weight, weighted=op == "mean")
        encoded = [structure.encode(part) for part in values]
        description = self._agreed(f"reduce({op!r})", [text for text, _ in encoded])
        results = self._core.reduce([(leaves, w) for (_, leaves), w in zip(encoded, weights, strict=True)], operation)
        return structure.decode(description, results, as_numbers=op)

    def gather(self, value: Any, *, equal_sizes: bool = False) -> Any:
        """As `Strategy.gather`. In a step with `equal_sizes` they are the same on all replicas, of which GPUs then need
        not ask one another."""
        if self.is_in_step:
            description, leaves = structure.encode(value)
            gathered = self._core.gather_in_step(leaves, equal_sizes)
            return structure.decode(description, gathered, as_numbers="none")
        self._release_passes()
        values, weights = self._contributions(value, None, weighted=False)
        encoded = [structure.encode(part) for part in values]
        description = self._agreed("gather()", [text for text, _ in encoded])
        results = self._core.gather([(leaves, w) for (_, leaves), w in zip(encoded, weights, strict=True)])
        return structure.decode(description, results, as_numbers="none")

    def sum_in_backward(self, value: Tensor) -> Callable[[Tensor], Tensor]:
        """In a step, before a node of the graph that depends on `value`: what its backward sums over replicas by.
        Raises InvalidArgument where that backward could not be, and where it is called in that of another step."""
        return self._core.sum_in_backward(value)

    def broadcast(self, value: Any, source: int) -> Any:
        """As `Strategy.broadcast`."""
        if type(value) is Replicated:
            state = [*value.parameters(), *value.buffers()]
            with torch.no_grad():
                for tensor, sent in zip(state, self.broadcast([t.detach() for t in state], source), strict=True):
                    tensor.copy_(sent)
            return value
        if self.is_in_step:
            return self._broadcast_in_step(value, source)
        description, leaves = structure.encode(value, texts=True)
        self._release_passes()
        if not 0 <= source < self._core.num_workers:
            raise InvalidArgument(f"source={source}: there are {self._core.num_workers} ranks")
        description = self._told(f"broadcast(source={source})", description)[source]
        return structure.decode(description, self._core.broadcast(leaves, source))

    def send(self, value: Any) -> Any:
        """The chief's value, outside a step, on the others. None on the chief, which takes no memory for it."""
        description, leaves = structure.encode(value, texts=True)
        self._release_passes()
        description = self._core.exchange_texts(description, "save()")[0]
        sent = self._core.broadcast(leaves, 0, to_others=True)
        return None if self._core.rank == 0 else structure.decode(description, sent)

    def barrier(self) -> None:
        """As `Strategy.barrier`."""
        if self.is_in_step:
            self._core.barrier_in_step()
        else:
            self._release_passes()
            self._core.barrier()

    def _broadcast_in_step(self, value: Any, source: int) -> Any:
        """A value without tensors travels as text, whatever the other replicas have in its place."""
        text, tensors = structure.encode(value, texts=True, numbers_in_text=True)
        if not tensors:
            return structure.decode(self._text_in_step(text, source), [])
        description, leaves = structure.encode(value, texts=True)
        if '"plain"' in description:
            description = self._text_in_step(description, source)
        return structure.decode(description, self._core.broadcast_in_step(leaves, source))

    def _text_in_step(self, text: str, source: int) -> str:
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        (length,) = self._core.broadcast_in_step([torch.tensor(len(mine))], source)
        resized = torch.zeros(int(length), dtype=torch.uint8)
        resized[: len(mine)] = mine[: len(resized)]
        (sent,) = self._core.broadcast_in_step([resized], source)
        return bytes(sent.tolist()).decode()

    def _weight_in_step(self, weight: Any) -> Tensor:
        if weight is not None:
            return torch.as_tensor(weight)
        rows = self._core.current_rows
        if rows < 0:
            raise InvalidArgument("the number of samples in this part is unknown; pass weight= to reduce(..., 'mean')")
        return torch.tensor(float(rows), dtype=torch.float64)

    def _contributions(self, value: Any, weight: Any, *, weighted: bool) -> tuple[list[Any], list[float]]:
        if not isinstance(value, PerReplica):
            return [value], [1.0 if weight is None else float(weight)]
        sizes: Sequence[Any] = rows_of(value) or [1.0] * len(value)
        if weight is not None:
            sizes = weight if isinstance(weight, PerReplica) else [weight] * len(value)
        kept = [(part, float(size)) for part, size in zip(value, sizes, strict=True) if part is not None]
        if weighted and any(size < 0 for _, size in kept):
            raise InvalidArgument("the number of samples in the parts is unknown; pass weight=PerReplica([...])")
        return [part for part, _ in kept], [size for _, size in kept]

    def _told(self, call: str, text: str) -> list[str]:
        """What each rank says in the same call. Raises LayoutMismatch where another rank makes another one."""
        texts = self._core.exchange_texts(f"{call}\n{text}", call)
        calls = [each.partition("\n")[0] for each in texts]
        for rank, theirs in enumerate(calls):
            if theirs != call:
                what = theirs if _CALL.fullmatch(theirs) else "something else"
                raise LayoutMismatch(
                    f"ranks disagree: rank {self._core.rank} called {call}, rank {rank} {what}; call the same on all "
                    "ranks, in the same order"
                )
        return [each.partition("\n")[2] for each in texts]

    def _agreed(self, call: str, descriptions: list[str]) -> str:
        everyones = [json.loads(text) for text in self._told(call, json.dumps(sorted(set(descriptions))))]
        different = sorted(set().union(*everyones))
        if len(different) > 1:
            raise LayoutMismatch(
                f"the values of the replicas differ in structure: {different[0]} and {different[1]}; pass the same "
                "structure, with numbers of the same types, everywhere"
            )
        return different[0] if different else "null"


def _operation(op: str) -> _C.ReduceOp:
    if op not in ("sum", "mean", "min", "max"):
        raise InvalidArgument(f"op={op!r}: it must be 'sum', 'mean', 'min' or 'max'")
    return cast(_C.ReduceOp, getattr(_C.ReduceOp, op))
