"""A small job whose checkpoints tests write, damage and read, and a disk that is full."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster

DATA = TensorDataset(torch.arange(320.0).view(40, 8) / 320, torch.arange(40) % 3)
NAMES = {"newest": "snapshot-0000000002", "older": "snapshot-0000000001"}


def mirrored(**options: Any) -> muster.Strategy:
    return muster.MirroredStrategy(["cpu:0", "cpu:1"], threads_per_replica=1, **options)


def build(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))


class Job:
    """A model, its optimizer and a loader, prepared."""

    def __init__(self, strategy: muster.Strategy, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        self.strategy = strategy
        module = build()
        self.user = optimizer(module.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.user, [3, 6])
        prepared = strategy.prepare(module, self.user, DataLoader(DATA, batch_size=8, shuffle=True))
        self.model, self.optimizer, self.loader = prepared

    def train(self, until: int, after_step: Callable[[], None] = lambda: None) -> Job:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.model(x), y)

        while self.strategy.steps < until:
            for x, y in self.loader:
                self.strategy.step(loss, x, y)
                self.schedule.step()
                after_step()
                if self.strategy.steps == until:
                    break
        return self

    def values(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = [state[number][name] for number in sorted(state) for name in sorted(state[number])]
        return [tensor.detach().clone() for tensor in (*self.model.state_dict().values(), *moments)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def saved_twice(folder: Path) -> list[list[Tensor]]:
    """A folder of two checkpoints, after steps 1 and 2; the values of each."""
    values = []
    with mirrored(seed=1) as strategy:
        job = Job(strategy)
        for steps in (1, 2):
            values.append(job.train(steps).values())
            strategy.save(folder, schedule=job.schedule)
    return values


def loaded(folder: Path) -> tuple[int, list[Tensor]]:
    with mirrored(seed=2) as strategy:
        job = Job(strategy)
        strategy.load(folder, schedule=job.schedule)
        return strategy.steps, job.values()


@contextmanager
def small_files() -> Iterator[None]:
    """No file grows beyond 4 KB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
