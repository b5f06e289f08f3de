"""Random streams that every rank derives alike from the job's seed."""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import Any

import torch

__all__ = ["AgreedStream", "epoch_seed", "stream_seed"]

_MASK = 2**64 - 1

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


class AgreedStream:
    """The random state that code sees while it runs inside ``with stream:``; it goes on where the last ``with`` ended.

    Torch's default CPU generator, Python's ``random`` and, once it is imported, numpy's legacy generator are set to
    states seeded from `seed`, and the ambient states are put back afterwards. These are process-wide: no other thread
    may draw from them meanwhile. Not reentrant; externally synchronised.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed & _MASK
        self._torch = torch.Generator().manual_seed(self._seed).get_state()
        self._python = random.Random(self._seed).getstate()
        self._numpy: Any = None
        self._ambient: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is None:
            self._numpy = numpy.random.RandomState([self._seed & 0xFFFFFFFF, self._seed >> 32]).get_state()
        ambient_numpy = None if numpy is None else numpy.random.get_state()
        self._ambient = (torch.get_rng_state(), random.getstate(), numpy, ambient_numpy)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if numpy is not None:
            numpy.random.set_state(self._numpy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ambient_torch, ambient_python, numpy, ambient_numpy = self._ambient
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(ambient_torch)
        random.setstate(ambient_python)
        if numpy is not None:
            self._numpy = numpy.random.get_state()
            numpy.random.set_state(ambient_numpy)
