"""Random streams that every rank derives alike from the job's seed."""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["AgreedStream", "epoch_seed", "stream_seed"]

_MASK = 2**64 - 1
_numpy: Any = sys.modules.get("numpy")
"""Imported by torch, where it is installed."""

# "loader" in ASCII: keeps loaders' streams apart from replicas'.
_LOADERS = 0x6C6F61646572


def stream_seed(seed: int, first: int, second: int) -> int:
    """A 64-bit seed from three numbers: `muster::stream_seed` of csrc/core/replica_context.h, bit for bit.

    SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), chained by exclusive or.
    """
    mixed = 0
    for number in (seed, first, second):
        mixed = ((mixed ^ (number & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


def epoch_seed(seed: int, loader: int, epoch: int) -> int:
    """The seed of one epoch of a job's `loader`-th prepared loader: stream_seed(seed ^ "loader", loader, epoch)."""
    return stream_seed(seed ^ _LOADERS, loader, epoch)


class _States(NamedTuple):
    """Of the process-wide generators."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, dict[str, Any]] | None
    """The bit generator, of whatever kind, and its state; None where numpy is not installed."""

    @staticmethod
    def seeded(seed: int) -> _States:
        """Those that 64 bits give."""
        of_numpy = None
        if _numpy is not None:
            state = _numpy.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).get_state(legacy=False)
            of_numpy = _numpy.random.MT19937(0), state
        return _States(torch.Generator().manual_seed(seed).get_state(), random.Random(seed).getstate(), of_numpy)

    @staticmethod
    def now() -> _States:
        """As the generators are."""
        of_numpy = None
        if _numpy is not None:
            of_numpy = _numpy.random.get_bit_generator(), _numpy.random.get_state(legacy=False)
        return _States(torch.get_rng_state(), random.getstate(), of_numpy)

    def set(self) -> None:
        """Sets the generators to them."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            bit_generator, state = self.numpy
            _numpy.random.set_bit_generator(bit_generator)
            _numpy.random.set_state(state)


class AgreedStream:
    """The random state that code sees while it runs inside ``with stream:``; it goes on where the last ``with`` ended.

    Torch's default CPU generator, Python's ``random`` and, where it is installed, numpy's global generator are set to
    states seeded from `seed`, and the ambient ones are put back afterwards. These are process-wide: no other thread
    may draw from them meanwhile. Not reentrant; externally synchronised.
    """

    def __init__(self, seed: int) -> None:
        self._own = _States.seeded(seed & _MASK)
        self._ambient: _States | None = None

    def __enter__(self) -> None:
        self._ambient = _States.now()
        try:
            self._own.set()
        except BaseException:
            self._ambient.set()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._ambient is not None
        self._own = _States.now()
        self._ambient.set()
