"""What fails on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward raises `error`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ctx.error
