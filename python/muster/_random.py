"""torch's functions on the default generators' state, made to act on a replica's streams inside a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from muster import _C

__all__ = ["install"]

_CPU = torch.device("cpu")


class _CurrentGenerator(torch.Generator):
    """The current replica's generator inside a step, torch's default one elsewhere.

    `torch.get_rng_state`, `set_rng_state`, `manual_seed`, `fork_rng` and with them activation checkpointing go through
    `torch.random.default_generator` and `torch.cuda.default_generators`, which these objects replace. Passed to an
    operator it is torch's default generator.
    """

    _device = _CPU

    def _replica(self) -> torch.Generator | None:
        return _C.replica_generator(self._device)

    def get_state(self) -> torch.Tensor:
        replica = self._replica()
        return super().get_state() if replica is None else replica.get_state()

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        replica = self._replica()
        return super().set_state(new_state) if replica is None else replica.set_state(new_state)

    def manual_seed(self, seed: int) -> torch.Generator:
        replica = self._replica()
        return super().manual_seed(seed) if replica is None else replica.manual_seed(seed)

    def initial_seed(self) -> int:
        replica = self._replica()
        return super().initial_seed() if replica is None else replica.initial_seed()

    def seed(self) -> int:
        replica = self._replica()
        return super().seed() if replica is None else replica.seed()


class _CurrentCudaGenerator(_CurrentGenerator):
    """On CUDA some kernels draw from the default generator whatever the replica has: inside a step the state is that of
    both, one after the other."""

    def get_state(self) -> torch.Tensor:
        ambient = torch.Generator.get_state(self)
        replica = self._replica()
        return ambient if replica is None else torch.cat([ambient, replica.get_state()])

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        size = torch.Generator.get_state(self).numel()
        replica = self._replica()
        if replica is not None and new_state.numel() > size:
            replica.set_state(new_state[size:].clone())
        return torch.Generator.set_state(self, new_state[:size].clone())


def install(devices: Iterable[torch.device] = ()) -> None:
    """Puts the replacements for the CPU and the CUDA devices among `devices` in place, where they are not already."""
    module: Any = torch.random
    if not isinstance(module.default_generator, _CurrentGenerator):
        module.default_generator = _adopted(_CurrentGenerator(), _CPU)
    cuda: Any = torch.cuda
    for device in {device for device in devices if device.type == "cuda"}:
        cuda.init()
        generators = list(cuda.default_generators)
        if not isinstance(generators[device.index], _CurrentCudaGenerator):
            generators[device.index] = _adopted(_CurrentCudaGenerator(device), device)
            cuda.default_generators = tuple(generators)


def _adopted(generator: _CurrentGenerator, device: torch.device) -> _CurrentGenerator:
    _C.adopt_default_generator(generator, device)
    generator._device = device
    return generator
