"""Records of trainings as values that processes exchange, and how they are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """A tensor's type, and its values in a type that holds them exactly."""

    dtype: str
    values: np.ndarray

    @staticmethod
    def of(tensor: Tensor) -> Seen:
        """Of a dense tensor."""
        tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        exact = tensor.to(wide) if tensor.is_complex() or tensor.is_floating_point() else tensor
        return Seen(str(tensor.dtype).removeprefix("torch."), exact.resolve_conj().resolve_neg().numpy().copy())


Value = Seen | float | bool | str


@dataclass(frozen=True)
class Record:
    """What one process saw of a training: values by label in order, texts of errors, or why it broke off."""

    values: dict[str, Value]
    texts: list[str]
    broken: str = ""


def encoded(value: Any) -> Value:
    """A value of a Training's record."""
    return Seen.of(value) if isinstance(value, Tensor) else value


def bound(dtype: str) -> float:
    """How far two ways to round may lie apart, relative to a tensor's largest value or 1: half of the digits."""
    return math.sqrt(torch.finfo(getattr(torch, dtype)).eps)


def same_bits(a: Value, b: Value) -> bool:
    """Whether nothing differs."""
    if isinstance(a, Seen) and isinstance(b, Seen):
        return a.dtype == b.dtype and a.values.shape == b.values.shape and a.values.tobytes() == b.values.tobytes()
    return a == b or (a != a and b != b)


def distance(a: Value, b: Value) -> float:
    """Of two values, relative to the larger of b and 1; infinite where they cannot be compared."""
    if isinstance(a, (bool, str)) or isinstance(b, (bool, str)):
        return 0.0 if a == b else float("inf")
    x = a.values if isinstance(a, Seen) else np.asarray(a)
    y = b.values if isinstance(b, Seen) else np.asarray(b)
    if x.shape != y.shape or x.dtype.kind != y.dtype.kind:
        return float("inf")
    if x.dtype.kind in "bui":
        return 0.0 if np.array_equal(x, y) else float("inf")
    if not np.array_equal(np.isnan(x), np.isnan(y)):
        return float("inf")
    x, y = np.nan_to_num(x), np.nan_to_num(y)
    return float(np.abs(x - y).max(initial=0.0)) / max(1.0, float(np.abs(y).max(initial=0.0)))


def first_difference(a: Record, b: Record, limit: float | None) -> str:
    """Where two records differ: by a bit (limit None), or by more than the limit. Empty: nowhere."""
    if a.broken or b.broken:
        return "" if a.broken == b.broken else f"broken off: {a.broken or b.broken}"
    for (label, x), (other, y) in zip(a.values.items(), b.values.items(), strict=False):
        if label != other:
            return f"'{label}' in one, '{other}' in the other"
        if limit is None:
            if not same_bits(x, y):
                return f"{label}: {_shown(x)} and {_shown(y)}"
        elif (far := distance(x, y)) > limit:
            return f"{label}: {far:.2g} apart ({_shown(x)} and {_shown(y)})"
    if len(a.values) != len(b.values):
        longer = max(a, b, key=lambda record: len(record.values))
        return f"'{list(longer.values)[min(len(a.values), len(b.values))]}' in one alone"
    return ""


def _shown(value: Value) -> str:
    if not isinstance(value, Seen):
        return repr(value)
    flat = value.values.reshape(-1)
    return f"{value.dtype}{list(value.values.shape)} {np.array2string(flat[:4], precision=6)}"
