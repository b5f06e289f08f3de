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


class Attention(nn.Module):
    """The features as a sequence of six, two layers of attention over it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.down = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.layers(self.up(x.unflatten(1, (6, 4)))).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(
        nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 5)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(FEATURES, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Linear(48, 5)
    ),
    "attention": Attention,
    # A parameter of several tiles, so that ranks which shard the optimizer cut it.
    "wide": lambda: nn.Sequential(nn.Linear(FEATURES, 700), nn.Tanh(), nn.Linear(700, 5)),
}


def net(model: str = "linear") -> nn.Module:
    torch.manual_seed(3)
    return MODELS[model]()


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

    def __init__(
        self, strategy: muster.Strategy, device: torch.device, optimizer: str = "adamw", model: str = "linear"
    ) -> None:
        self.strategy = strategy
        self.module = net(model).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        self.model, self.optimizer = strategy.prepare(self.module, self.optimizer)

    def step(self, x: Tensor, y: Tensor) -> muster.StepResult:
        return self.strategy.step(self._loss, x, y)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


def train(
    devices: list[str],
    data: list[tuple[Tensor, Tensor]],
    optimizer: str = "adamw",
    model: str = "linear",
    **options: Any,
) -> Trained:
    """Every batch once, on the replicas of one process."""
    with muster.MirroredStrategy(devices, seed=1, threads_per_replica=1, **options) as strategy:
        return train_with(strategy, torch.device(devices[0]), data, optimizer, model)


def train_with(
    strategy: muster.Strategy,
    device: torch.device,
    data: list[tuple[Tensor, Tensor]],
    optimizer: str = "adamw",
    model: str = "linear",
) -> Trained:
    """Every batch once; losses are read at the end."""
    training = Training(strategy, device, optimizer, model)
    results = [training.step(x, y) for x, y in data]
    return Trained(flat(training.module), torch.stack([r.loss.double().cpu() for r in results]), results)


def train_with_torch(
    device: torch.device,
    data: list[tuple[Tensor, Tensor]],
    optimizer: str = "adamw",
    clip_norm: float | None = None,
    model: str = "linear",
) -> Trained:
    """The loop as it is written without Muster."""
    module = net(model).to(device)
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
