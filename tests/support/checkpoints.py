"""A small job of one worker, and checkpoints of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster

DATA = TensorDataset(torch.arange(320.0).view(40, 8) / 320, torch.arange(40) % 3)


def mirrored(**options: Any) -> muster.Strategy:
    return muster.MirroredStrategy(["cpu:0"], threads_per_replica=1, **options)


def build(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    """Whose order is not that of the module's state_dict."""
    last, *others = reversed(list(module.parameters()))
    return torch.optim.AdamW([{"params": [last], "lr": 0.03}, {"params": others}], lr=0.01)


class Job:
    """A model, its optimizer and a loader, prepared."""

    def __init__(
        self, strategy: muster.Strategy, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = two_groups
    ) -> None:
        self.strategy = strategy
        self.module = build()
        self.user = optimizer(self.module)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.user, 2)
        self.model, self.optimizer, self.loader = strategy.prepare(
            self.module, self.user, DataLoader(DATA, batch_size=8, shuffle=True)
        )

    def train(self, until: int, after_step: Callable[[int], None] = lambda steps: None) -> Job:
        while self.strategy.steps < until:
            for x, y in self.loader:
                self.strategy.step(lambda x, y: nn.functional.cross_entropy(self.model(x), y), x, y)
                self.schedule.step()
                after_step(self.strategy.steps)
                if self.strategy.steps == until:
                    break
        return self

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Of the model and the optimizer, copies."""
        packed = self.user.state_dict()
        state = {
            number: {name: torch.as_tensor(value).clone() for name, value in values.items()}
            for number, values in packed["state"].items()
        }
        module = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        return module, {"state": state, "param_groups": [dict(group) for group in packed["param_groups"]]}


def saved(folder: Path, **named: Any) -> list[Any]:
    """Checkpoints after steps 1, 2 and 3, with the schedule and what is named; the states of each."""
    states = []
    torch.manual_seed(1)
    with mirrored(seed=1) as strategy:
        job = Job(strategy)

        def after_step(_steps: int) -> None:
            states.append(job.state())
            strategy.save(folder, schedule=job.schedule, **named)

        job.train(3, after_step)
    return states


def same(left: Any, right: Any) -> bool:
    """To the last bit, tensors in dicts and lists included."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[name]) for name, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)
