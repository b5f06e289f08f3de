"""The memory of tensors, as Python sees it."""

from __future__ import annotations

import ctypes

from torch import Tensor

__all__ = ["memory_of"]


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which the view keeps alive. Without NumPy."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory)
