"""nn.SyncBatchNorm on every device: statistics over the whole batch, wherever replicas step together."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.collectives import Collectives
from muster.errors import InvalidArgument

__all__ = ["convert"]


class _SyncBatchNorm(nn.SyncBatchNorm):
    """In training inside a step, normalises by the mean and variance of all replicas' parts together.

    Two reductions: the mean first, then the squared distances from it (the two-pass formula; a single pass loses digits
    when the mean is large). Both are differentiable, so gradients are those of the whole batch on one process.
    """

    _muster_collectives: weakref.ref[Collectives]

    def forward(self, input: Tensor) -> Tensor:
        use_batch_statistics = self.training or self.running_mean is None
        collectives = self._muster_collectives()
        if not use_batch_statistics or collectives is None or collectives.num_replicas == 1:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, use_batch_statistics,
                self._average_factor(use_batch_statistics), self.eps,
            )  # fmt: skip
        if not collectives.is_in_step:
            raise InvalidArgument(
                "SyncBatchNorm in training mode needs its peers: call the module inside strategy.step, or after eval()"
            )
        self._check_input_dim(input)
        dimensions = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        count = values.new_full((1,), values.numel() / values.size(1))
        total, count = collectives.reduce((values.sum(dimensions), count), "sum")
        mean = total / count
        centred = values - mean.view(shape)
        variance = collectives.reduce(centred.square().sum(dimensions), "sum") / count
        if self.training and self.track_running_stats and self.running_mean is not None:
            factor = self._average_factor(True)
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)  # type: ignore[union-attr]
        output: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy or a pickle belongs to no strategy.
        state = {name: value for name, value in self.__dict__.items() if name != "_muster_collectives"}
        return object.__new__, (nn.SyncBatchNorm,), state

    def _average_factor(self, updates: bool) -> float:
        if not (updates and self.training and self.num_batches_tracked is not None):
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


def convert(module: nn.Module, collectives: Collectives) -> None:
    """Makes every nn.SyncBatchNorm of `module` reduce through `collectives`; the objects stay the same."""
    for child in module.modules():
        if type(child) in (nn.SyncBatchNorm, _SyncBatchNorm):
            child.__class__ = _SyncBatchNorm
            object.__setattr__(child, "_muster_collectives", weakref.ref(collectives))
