"""Batch normalisation by the statistics of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.errors import InvalidArgument
from muster.horovod.differentiable import allreduce
from muster.horovod.operations import Sum
from muster.horovod.runtime import running

__all__ = ["SyncBatchNorm"]


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
                input, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, self._factor(), self.eps
            )
        dimensions = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        count = values.new_full((1,), values.numel() / values.size(1))
        # The mean first, then distances from it: a single pass loses digits where the mean is large.
        together = allreduce(torch.cat([values.sum(dimensions), count]), op=Sum)
        total, everyones = together[:-1], together[-1].detach()
        mean = total / everyones
        centred = values - mean.view(shape)
        variance = allreduce(centred.square().sum(dimensions), op=Sum) / everyones
        if self.training and self.running_mean is not None and self.running_var is not None:
            factor = self._factor()
            with torch.no_grad():
                unbiased = variance * (everyones / (everyones - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        output: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _factor(self) -> float:
        """By how much running statistics move to those of a batch, which is counted."""
        if not self.training or self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
