"""An embedding whose gradients are rows."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster import _C
from muster.errors import InvalidArgument

__all__ = ["ShardedEmbedding"]


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
        if not 0 <= scale < math.inf:
            raise InvalidArgument(f"scale={scale} must be finite and not negative")
        if seed is not None and not 0 <= seed < 2**64:
            raise InvalidArgument(f"seed={seed} must be in [0, 2**64)")
        self.num_embeddings = num_embeddings
        self.dim = dim
        self.mode = mode
        self.init = init
        self.scale = scale
        self.seed = int(torch.randint(2**63 - 1, (1,))) if seed is None else seed
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim, dtype=torch.float32, device="cpu"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives `weight` its first values again."""
        values = torch.empty(self.num_embeddings, self.dim, dtype=torch.float32, device="cpu")
        _C.fill_rows(values, self.init, self.scale, self.seed)
        with torch.no_grad():
            self.weight.copy_(values)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Rows of the ids, or sums or means over bags of them."""
        self._check_ids(ids)
        if self.mode is None:
            if offsets is not None or per_sample_weights is not None:
                raise InvalidArgument("offsets and per_sample_weights are for bags; set mode to 'sum' or 'mean'")
            return F.embedding(ids, self.weight, sparse=True)
        return F.embedding_bag(
            ids, self.weight, offsets, mode=self.mode, sparse=True, per_sample_weights=per_sample_weights
        )

    def _check_ids(self, ids: Tensor) -> None:
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
