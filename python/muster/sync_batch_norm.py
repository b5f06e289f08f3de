"""nn.SyncBatchNorm on every device: statistics over the whole batch, wherever replicas step together."""

from __future__ import annotations

import weakref
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from muster.batch_statistics import average_factor, normalise
from muster.collectives import Collectives
from muster.errors import InvalidArgument

__all__ = ["convert"]


class _Replicas:
    """Those that take part in a step."""

    def __init__(self, collectives: Collectives, input: Tensor) -> None:
        self._collectives = weakref.ref(collectives)  # a graph may outlive the strategy
        self.sum_in_backward = collectives.sum_in_backward(input)

    def gather(self, row: Tensor) -> Tensor:
        rows: Tensor = self._alive().gather(row[None], equal_sizes=True)
        return rows

    def reduce(self, values: Tensor) -> Tensor:
        total: Tensor = self._alive().reduce(values, "sum")
        return total

    def _alive(self) -> Collectives:
        collectives = self._collectives()
        if collectives is None:
            raise InvalidArgument("backward came to a SyncBatchNorm whose strategy has ended; detach() what is kept")
        return collectives


class _SyncBatchNorm(nn.SyncBatchNorm):
    """In training inside a step, normalises by the mean and variance of all replicas' parts together. Gradients are
    those of the whole batch on one process, and can be differentiated again."""

    _muster_collectives: weakref.ref[Collectives]

    def forward(self, input: Tensor) -> Tensor:
        use_batch_statistics = self.training or self.running_mean is None
        collectives = self._muster_collectives()
        if not use_batch_statistics or collectives is None or collectives.num_replicas == 1:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, use_batch_statistics,
                average_factor(self, updates=use_batch_statistics), self.eps,
            )  # fmt: skip
        if not collectives.is_in_step:
            raise InvalidArgument(
                "SyncBatchNorm in training mode needs its peers: call the module inside strategy.step, or after eval()"
            )
        self._check_input_dim(input)
        return normalise(self, input, _Replicas(collectives, input))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy or a pickle belongs to no strategy.
        state = {name: value for name, value in self.__dict__.items() if name != "_muster_collectives"}
        return object.__new__, (nn.SyncBatchNorm,), state


def convert(module: nn.Module, collectives: Collectives) -> None:
    """Makes every nn.SyncBatchNorm of `module` reduce through `collectives`; the objects stay the same."""
    for child in module.modules():
        if type(child) in (nn.SyncBatchNorm, _SyncBatchNorm):
            child.__class__ = _SyncBatchNorm
            object.__setattr__(child, "_muster_collectives", weakref.ref(collectives))
