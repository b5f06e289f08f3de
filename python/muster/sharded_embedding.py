"""An embedding whose gradients are rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster import _C
from muster.errors import InvalidArgument

__all__ = ["ShardedEmbedding", "leaving_rows_out", "rows_are_left_out"]

_rows_are_left_out: ContextVar[bool] = ContextVar("rows_are_left_out", default=False)


@contextmanager
def leaving_rows_out() -> Iterator[None]:
    """Here `state_dict` and `load_state_dict`, of optimizers too, pass over weights with ``on_servers``."""
    token = _rows_are_left_out.set(True)
    try:
        yield
    finally:
        _rows_are_left_out.reset(token)


def rows_are_left_out() -> bool:
    """Whether the caller is in `leaving_rows_out`."""
    return _rows_are_left_out.get()


class ShardedEmbedding(nn.Module):
    """``torch.nn.Embedding``, or with a mode ``torch.nn.EmbeddingBag``, with sparse gradients: only the rows that a
    step used are summed over replicas, and a flat optimizer steps only those.

    Without a mode the module takes ids of any shape, int64 or int32, to the shape with ``dim`` behind it. With
    ``mode="sum"`` or ``"mean"`` it takes ids ``[bags, ids a bag]``, or ``[ids]`` with ``offsets`` ``[bags]``, where
    each bag begins, to ``[bags, dim]``; an empty bag is 0. ``per_sample_weights``, of the ids' shape, multiply the rows
    of a sum. An id outside ``[0, num_embeddings)`` is an InvalidArgument; on CUDA finding it waits for the ids.

    The optimizer and learning rate are those of the parameter group that holds ``weight``, a float32 parameter of
    ``[num_embeddings, dim]`` that may be written before ``prepare``. With Adam, rows that a step does not use keep
    their values and moments; the step count is that of ``weight``. What moves every row at every step (SGD's momentum
    and, but for Adam and AdamW, weight decay) steps the whole table.

    With ``row_wise_adagrad=True`` the optimizer, a flat Adagrad without weight decay, keeps one accumulator a row, to
    which it adds the mean of the row's squared gradients (FBGEMM's EXACT_ROWWISE_ADAGRAD): a ``dim``-th of the state.
    Its ``sum`` has the shape ``[num_embeddings, 1]``; one of the weight's shape is taken over by each row's mean. For
    steps of a strategy, on the CPU.

    Under ``ParameterServerStrategy`` rows are divided over the servers from the first step on: the module pulls
    those that its ids name, each once, and the step pushes their gradients. ``weight`` is then a stub of NaN
    without memory, ``state_dict()`` and copies fetch all rows, and ``close()`` brings them back; call the module
    from the thread that steps, in a step from any replica. Rows that were never used take no memory on servers. What
    moves every row at every step is refused there. With ``on_servers=True`` ``weight`` takes no memory here from the
    beginning, for that strategy alone. ``placement`` says which server has a row: ``"modulo"`` (row number modulo
    servers) spreads rows that are used often, wherever they are; ``"range"`` gives each server a contiguous range.

    First values are ``init="normal"`` of mean 0 and standard deviation ``scale``, or ``"uniform"`` in
    ``(-scale, scale)``. Those of a row follow from ``(seed, row)`` alone; ``seed=None`` draws one from torch's default
    generator.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        *,
        mode: Literal["sum", "mean"] | None = None,
        init: Literal["normal", "uniform"] = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        on_servers: bool = False,
        placement: Literal["modulo", "range"] = "modulo",
        row_wise_adagrad: bool = False,
    ) -> None:
        super().__init__()
        if num_embeddings < 1 or dim < 1:
            raise InvalidArgument(
                f"an embedding of {num_embeddings} rows of {dim} values: both must be positive",
            )
        if mode not in (None, "sum", "mean"):
            raise InvalidArgument(f"mode={mode!r} must be None, 'sum' or 'mean'")
        if init not in ("normal", "uniform"):
            raise InvalidArgument(f"init={init!r} must be 'normal' or 'uniform'")
        if placement not in ("modulo", "range"):
            raise InvalidArgument(f"placement={placement!r} must be 'modulo' or 'range'")
        if not 0 <= scale < math.inf:
            raise InvalidArgument(f"scale={scale} must be finite and not negative")
        if seed is not None and not 0 <= seed < 2**64:
            raise InvalidArgument(f"seed={seed} must be in [0, 2**64)")
        self.num_embeddings = num_embeddings
        self.dim = dim
        self.mode = mode
        self.init = init
        self.scale = scale
        self.on_servers = on_servers
        self.placement = placement
        self.row_wise_adagrad = row_wise_adagrad
        self.seed = int(torch.randint(2**63 - 1, (1,))) if seed is None else seed
        if on_servers:
            self.weight = nn.Parameter(_C.make_row_stub(num_embeddings, dim))
            return
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim, dtype=torch.float32, device="cpu"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives `weight` its first values again. An InvalidArgument where its rows are on servers."""
        if _C.is_row_stub(self.weight):
            raise InvalidArgument(
                "the rows are on parameter servers; their first values follow from init, scale and seed"
            )
        values = torch.empty(self.num_embeddings, self.dim, dtype=torch.float32, device="cpu")
        _C.fill_rows(values, self.init, self.scale, self.seed)
        with torch.no_grad():
            self.weight.copy_(values)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Rows of the `ids`, or sums or means over the bags that begin at `offsets`, times `per_sample_weights`."""
        self._check_ids(ids)
        if self.mode is None and (offsets is not None or per_sample_weights is not None):
            raise InvalidArgument("offsets and per_sample_weights are for bags; set mode to 'sum' or 'mean'")
        rows, ids = _C.pull_rows(self.weight, ids) or (self.weight, ids)
        if self.mode is None:
            return F.embedding(ids, rows, sparse=True)
        return F.embedding_bag(ids, rows, offsets, mode=self.mode, sparse=True, per_sample_weights=per_sample_weights)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.on_servers and rows_are_left_out():
            return
        super()._save_to_state_dict(destination, prefix, keep_vars)
        rows = _C.whole_rows(self.weight)
        if rows is not self.weight:
            destination[prefix + "weight"] = rows

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.on_servers and rows_are_left_out():
            return
        if prefix + "weight" in state_dict and _C.is_row_stub(self.weight):
            raise InvalidArgument(
                f"the rows of '{prefix}weight' are on parameter servers; load before the first step, without on_servers"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if not self.on_servers:
            rows = _C.whole_rows(self.weight)
            if rows is not self.weight:
                state["_parameters"] = {"weight": nn.Parameter(rows, self.weight.requires_grad)}
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedEmbedding:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        if self.on_servers:  # a copied stub would take the table's memory
            memo[id(self.weight)] = nn.Parameter(_C.make_row_stub(self.num_embeddings, self.dim))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return copied

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise InvalidArgument(f"ids are int64 or int32, not {str(ids.dtype).removeprefix('torch.')}")
        if ids.numel() == 0:
            return
        for value in torch.stack(torch.aminmax(ids)).tolist():
            if not 0 <= value < self.num_embeddings:
                raise InvalidArgument(
                    f"id {value} is not in [0, {self.num_embeddings}): the embedding has so many rows. Map ids to "
                    "rows first, by their remainder, say"
                )

    def extra_repr(self) -> str:
        """Sizes and mode."""
        return f"{self.num_embeddings}, {self.dim}" + (f", mode={self.mode!r}" if self.mode else "")
