"""A small training on any devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster

BATCH = 61
FEATURES = 24


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 5)
    ).to(dtype)


def batches(count: int, device: torch.device | str) -> list[tuple[Tensor, Tensor]]:
    """A task that can be learnt, on the device; the last batch is short."""
    generator = torch.Generator().manual_seed(4)
    made = []
    answer = torch.randn(FEATURES, 5, generator=generator)
    for i in range(count):
        x = torch.randn(BATCH if i + 1 < count else BATCH // 2, FEATURES, generator=generator)
        made.append((x.to(device), (x @ answer).argmax(1).to(device)))
    return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
}


def virtual(device: torch.device, replicas: int) -> list[str]:
    """Names of so many replicas of one device."""
    if device.type == "cpu":
        return [f"cpu:{i}" for i in range(replicas)]
    return [str(device)] * replicas


@dataclass
class Trained:
    parameters: Tensor
    losses: Tensor
    results: list[muster.StepResult]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten().cpu() for p in module.parameters()])


class Training:
    """A model, its optimizer and a step, prepared by a strategy."""

    def __init__(self, strategy: muster.Strategy, device: torch.device, optimizer: str = "adamw") -> None:
        self.strategy = strategy
        self.module = net().to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        self.model, self.optimizer = strategy.prepare(self.module, self.optimizer)

    def step(self, x: Tensor, y: Tensor) -> muster.StepResult:
        return self.strategy.step(self._loss, x, y)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


def train(devices: list[str], data: list[tuple[Tensor, Tensor]], optimizer: str = "adamw", **options: Any) -> Trained:
    """Every batch once, on the replicas of one process."""
    with muster.MirroredStrategy(devices, seed=1, threads_per_replica=1, **options) as strategy:
        return train_with(strategy, torch.device(devices[0]), data, optimizer)


def train_with(
    strategy: muster.Strategy, device: torch.device, data: list[tuple[Tensor, Tensor]], optimizer: str = "adamw"
) -> Trained:
    """Every batch once; losses are read at the end."""
    training = Training(strategy, device, optimizer)
    results = [training.step(x, y) for x, y in data]
    return Trained(flat(training.module), torch.stack([r.loss.double().cpu() for r in results]), results)


def train_with_torch(
    device: torch.device, data: list[tuple[Tensor, Tensor]], optimizer: str = "adamw", clip_norm: float | None = None
) -> Trained:
    """The loop as it is written without Muster."""
    module = net().to(device)
    chosen = OPTIMIZERS[optimizer](module.parameters())
    losses = []
    for x, y in data:
        chosen.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        chosen.step()
        losses.append(loss.detach().double().cpu())
    return Trained(flat(module), torch.stack(losses), [])
