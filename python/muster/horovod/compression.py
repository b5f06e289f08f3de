"""In how many bits gradients travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """What makes a tensor smaller, and the result as it was. Derive from it for other ways."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """`tensor` as it travels, and what decompress() needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced `tensor` as it was before; `ctx` is what compress() returned."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """`tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """`tensor` itself; `ctx` is not needed."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors in fp16. Other tensors stay as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """`tensor` in fp16, and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """`tensor` in its dtype `ctx`."""
        return tensor.to(ctx) if isinstance(ctx, torch.dtype) and ctx.is_floating_point else tensor


class Compression:
    """The ways that there are."""

    none = NoneCompressor
    """Tensors travel as they are."""
    fp16 = FP16Compressor
    """Floating-point tensors travel in fp16."""
