"""torch's functions on the CPU generator's state, made to act on a replica's stream inside a step."""

from __future__ import annotations

from typing import Any

import torch

from muster import _C

__all__ = ["install"]


class _CurrentGenerator(torch.Generator):
    """The current replica's generator inside a step, torch's default one elsewhere.

    `torch.get_rng_state`, `set_rng_state`, `manual_seed`, `fork_rng` and with them activation checkpointing go through
    `torch.random.default_generator`, which this object replaces. Passed to an operator it is torch's default generator.
    """

    def get_state(self) -> torch.Tensor:
        replica = _C.replica_generator()
        return super().get_state() if replica is None else replica.get_state()

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        replica = _C.replica_generator()
        return super().set_state(new_state) if replica is None else replica.set_state(new_state)

    def manual_seed(self, seed: int) -> torch.Generator:
        replica = _C.replica_generator()
        return super().manual_seed(seed) if replica is None else replica.manual_seed(seed)

    def initial_seed(self) -> int:
        replica = _C.replica_generator()
        return super().initial_seed() if replica is None else replica.initial_seed()

    def seed(self) -> int:
        replica = _C.replica_generator()
        return super().seed() if replica is None else replica.seed()


def install() -> None:
    """Puts the replacement in place; does nothing when it is there already."""
    module: Any = torch.random
    if isinstance(module.default_generator, _CurrentGenerator):
        return
    generator = _CurrentGenerator()
    _C.adopt_default_generator(generator)
    module.default_generator = generator
