"""What prepared loaders need of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from muster import _C

__all__ = ["LoaderHost"]


class LoaderHost(Protocol):
    """What a loader needs of the strategy that prepares it."""

    @property
    def num_replicas(self) -> int:
        """Replicas in the job."""

    @property
    def first_replica(self) -> int:
        """The job-wide index of this worker's first replica."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """The device of each of this worker's replicas."""

    @property
    def seed(self) -> int:
        """The job's seed, equal on all ranks."""

    @property
    def capacities(self) -> Sequence[float]:
        """By replica, what parts of batches that are asked for next follow (`muster.batch.part_sizes`)."""

    @property
    def passes(self) -> _C.Loaders | None:
        """Who begins passes that servers deal or live workers divide; None where each batch is divided over all workers
        for good."""

    @property
    def steps(self) -> int:
        """Windows that the job has closed."""

    @property
    def joins(self) -> bool:
        """Whether this worker came to a job that others had begun."""

    def any_has_more(self, has_more: bool) -> bool:
        """Whether the flag is true on any worker that steps together with this one; collective over those. Called for
        each batch of a sharded loader, one ahead."""

    def broadcast_state(self, state: Tensor) -> Tensor:
        """Collective: the chief's `state`, a uint8 vector on the CPU. Called while a loader is prepared."""
