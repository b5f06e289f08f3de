"""The states of random generators outside steps, as tensors of a checkpoint.

``torch``, torch's default CPU generator: of each worker a row. ``python``, that of `random`, and ``numpy``, NumPy's
global one: of each worker a row of 627 int64s, which are the 624 words of the Mersenne Twister, the place in them,
whether a normal number is kept, and its bits; zeros where NumPy was not imported, or has a generator of another kind.
``cuda``, the default generators of replicas' devices: of each replica a row of 33 bytes, which are the length of a
state and the state; zeros on a CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_of_form", "restore", "states_here"]

_WORDS = 624
_COLUMNS = _WORDS + 3
_CUDA_BYTES = 32
"""That a state may have; torch's have 16."""


def states_here(devices: Sequence[torch.device]) -> dict[str, Tensor]:
    """The rows of this worker, whose replicas are on these devices."""
    return {
        "torch": torch.random.get_rng_state().unsqueeze(0),
        "python": _python_row().unsqueeze(0),
        "numpy": _numpy_row().unsqueeze(0),
        "cuda": torch.stack([_cuda_row(device) for device in devices]),
    }


def restore(saved: Mapping[str, Any], worker: int, first_replica: int, devices: Sequence[torch.device]) -> None:
    """Sets the generators to the states in this worker's rows, but for torch's: what has no row, or is not here, is
    left as it is."""
    row = saved["python"][worker].tolist()
    random.setstate((3, tuple(row[: _WORDS + 1]), _normal(row)))
    row = saved["numpy"][worker].tolist()
    if any(row):
        with contextlib.suppress(ImportError):  # the job that saved had it imported, and this one may yet
            numpy: Any = importlib.import_module("numpy")
            if _is_twister(numpy.random.get_state(legacy=False)):
                kept = _normal(row)
                key = numpy.array(row[:_WORDS], dtype=numpy.uint32)
                numpy.random.set_state(("MT19937", key, row[_WORDS], int(kept is not None), kept or 0.0))
    if saved["cuda"] is None:
        return
    for device, state in zip(devices, saved["cuda"][first_replica:], strict=False):
        length = int(state[0])
        if device.type == "cuda" and len(torch.cuda.get_rng_state(device)) == length:
            torch.cuda.set_rng_state(state[1 : 1 + length].clone(), device)


def is_of_form(value: Any) -> bool:
    """Whether restore() can take it."""
    if not isinstance(value, dict):
        return False
    cuda = value.get("cuda")
    return (
        _are_twisters(value.get("python"))
        and _are_twisters(value.get("numpy"))
        and len(value["python"]) == len(value["numpy"])
        and (cuda is None or (_is_matrix(cuda, torch.uint8, 1 + _CUDA_BYTES) and bool((cuda[:, 0] <= 32).all())))
    )


def _python_row() -> Tensor:
    _, words, kept = random.getstate()
    return _row(words, kept)


def _numpy_row() -> Tensor:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=False)
    if state is None or not _is_twister(state):
        return torch.zeros(_COLUMNS, dtype=torch.int64)
    words = state["state"]
    return _row([*words["key"].tolist(), words["pos"]], state["gauss"] if state["has_gauss"] else None)


def _is_twister(state: Mapping[str, Any]) -> bool:
    """Whether it is a state of the Mersenne Twister, and not of another kind of NumPy's generators."""
    return bool(state["bit_generator"] == "MT19937")


def _cuda_row(device: torch.device) -> Tensor:
    row = torch.zeros(1 + _CUDA_BYTES, dtype=torch.uint8)
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
        if len(state) <= _CUDA_BYTES:
            row[0] = len(state)
            row[1 : 1 + len(state)] = state
    return row


def _row(words: Sequence[int], kept: float | None) -> Tensor:
    bits = int(torch.tensor(kept or 0.0, dtype=torch.float64).view(torch.int64))
    return torch.tensor([*words, int(kept is not None), bits])


def _normal(row: Sequence[int]) -> float | None:
    return float(torch.tensor(row[_WORDS + 2]).view(torch.float64)) if row[_WORDS + 1] else None


def _are_twisters(value: Any) -> bool:
    if not _is_matrix(value, torch.int64, _COLUMNS):
        return False
    words, places = value[:, :_WORDS], value[:, _WORDS]
    return bool(((words >= 0) & (words < 1 << 32)).all() and ((places >= 0) & (places <= _WORDS)).all())


def _is_matrix(value: Any, dtype: torch.dtype, columns: int) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.dim() == 2 and value.size(1) == columns
