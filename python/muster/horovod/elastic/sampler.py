"""A sampler that goes on in the middle of an epoch, over any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from muster.horovod.runtime import running

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Divides a dataset's indices over ranks, and what is left of them after record_batch(), over the ranks of then.

    Shuffled by `seed` and epoch, alike on all ranks. Every rank gets as many: some of the first indices are there twice
    where the numbers do not go into each other. Include it in a TorchState, call record_batch() after each batch, and
    set_epoch() at the end of each epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Over `dataset`, whose length does not change; with `shuffle`, in an order that `seed` and the epoch give."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        """Whose order it is."""
        self.processed_num = 0
        """Samples of the epoch that were recorded, of all ranks."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """At the end of an epoch: begins `epoch`, with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has trained on another `batch_size` samples; `batch_idx` is not needed."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how much of it was recorded."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what is left over the ranks that there are."""
        job = running()
        self.num_replicas, self.rank = job.size, job.rank
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        missing = self.total_size - len(left)
        # The last ranks' samples, again from the beginning of what is left, as often as it takes.
        padded = left + (left * (missing // max(len(left), 1) + 1))[:missing]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
