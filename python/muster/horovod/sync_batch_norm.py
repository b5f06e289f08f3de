"""Batch normalisation by the statistics of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.batch_statistics import average_factor, normalise
from muster.errors import InvalidArgument
from muster.horovod.differentiable import allreduce
from muster.horovod.operations import Sum
from muster.horovod.runtime import running

__all__ = ["SyncBatchNorm"]


class _Ranks:
    """All ranks."""

    def gather(self, row: Tensor) -> Tensor:
        # Sums, to which a rank that has joined adds nothing; in fp64, where squares of large means leave enough digits.
        wide = row.double()
        (mean, variance), elements = wide[:-1].chunk(2), wide[-1:]
        sums = allreduce(torch.cat([mean, variance + mean.square(), torch.ones_like(elements)]) * elements, op=Sum)
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        return torch.cat([mean, (square - mean.square()).clamp(min=0), sums[-1:]]).to(row.dtype)[None]

    def reduce(self, values: Tensor) -> Tensor:
        return allreduce(values, op=Sum)

    sum_in_backward = reduce


class SyncBatchNorm(nn.SyncBatchNorm):
    """nn.BatchNorm1d, 2d and 3d over the batches of all ranks, on any device; ranks may have other numbers of rows.

    In training, and without running statistics, the forward pass is collective, and so is its backward pass. Input and
    output: (rows, num_features, ...), of a floating-point dtype. Running statistics are equal on all ranks.
    """

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`module` with one of these in place of each batch normalisation in it, with its parameters and buffers; or
        the new one, where `module` is one itself. Raises ValueError for a `process_group`."""
        if process_group is not None:
            raise InvalidArgument("convert_sync_batchnorm(process_group=...): it is over all ranks; leave it away")
        converted: nn.Module = super().convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        for part in converted.modules():
            if type(part) is nn.SyncBatchNorm:
                part.__class__ = cls  # which adds no attributes
        return converted

    def forward(self, input: Tensor) -> Tensor:
        """The normalised `input`. Raises ValueError for fewer than 2 dimensions."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or running().size == 1:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, uses_batch,
                average_factor(self, updates=uses_batch), self.eps,
            )  # fmt: skip
        return normalise(self, input, _Ranks())
