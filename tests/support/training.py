"""Small trainings whose final parameters tests compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import muster


def digits() -> TensorDataset:
    data = load_digits()
    return TensorDataset(torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target))


class Digits(nn.Module):
    """A classifier with dropout and, if asked, batch norm and activation checkpointing."""

    def __init__(self, checkpointing: str = "none", dropout: float = 0.2, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.norm = nn.BatchNorm1d(48) if norm else nn.Identity()
        self.middle = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Dropout(dropout))
        self.last = nn.Linear(48, 10)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.first(x)))
        if self.checkpointing == "none":
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.checkpointing == "reentrant")
        return self.last(x)


class CharModel(nn.Module):
    """A one-layer transformer over bytes."""

    def __init__(self, width: int = 32, dropout: float = 0.1, checkpointing: str = "none") -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.head = nn.Linear(width, 128)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), dtype=self.head.weight.dtype)
        x = self.embedding(tokens)
        block = partial(self.block, src_mask=mask, is_causal=True)
        if self.checkpointing == "none":
            x = block(x)
        else:
            x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def text(length: int = 24, samples: int = 700) -> TensorDataset:
    source = bytes(b & 127 for b in Path(torch.__file__).read_bytes()[: samples * length])
    return TensorDataset(torch.tensor(list(source)).view(-1, length))


@dataclass(frozen=True)
class Config:
    """One training; every field changes what is computed."""

    model: str = "digits"
    optimizer: str = "sgd"
    accumulate: int = 1
    clip_norm: float | None = None
    checkpointing: str = "none"
    norm: bool = False
    dropout: float = 0.2
    steps: int = 50
    batch_size: int = 61
    dtype: torch.dtype = torch.float32
    bucket_bytes: int | None = None
    threads: int = 1

    def build(self) -> nn.Module:
        torch.manual_seed(5)
        if self.model == "digits":
            return Digits(self.checkpointing, self.dropout, self.norm).to(self.dtype)
        return CharModel(dropout=self.dropout, checkpointing=self.checkpointing).to(self.dtype)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        if self.optimizer == "adagrad":
            return torch.optim.Adagrad(parameters, lr=0.02)
        return torch.optim.AdamW(parameters, lr=2e-3)

    def loader(self) -> DataLoader[Any]:
        dataset = digits() if self.model == "digits" else text()
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True)

    def options(self) -> dict[str, Any]:
        return {
            "seed": 11,
            "accumulate": self.accumulate,
            "clip_norm": self.clip_norm,
            "threads_per_replica": self.threads,
            "bucket_bytes": self.bucket_bytes,
        }

    def loss(self, model: Callable[[Tensor], Tensor], *batch: Tensor) -> Tensor:
        if self.model == "digits":
            x, y = batch
            return F.cross_entropy(model(x.to(self.dtype)), y)
        (tokens,) = batch
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Trained:
    """What a training left: all that must agree. Arrays: tensors do not outlive the process they come from."""

    parameters: np.ndarray
    buffers: np.ndarray
    losses: list[float]


def train(strategy: muster.Strategy, config: Config) -> Trained:
    """Trains for `config.steps` windows and returns replica 0's tensors."""
    module = config.build()
    optimizer = config.make_optimizer(module.parameters())
    model, optimizer, loader = strategy.prepare(module, optimizer, config.loader())
    losses = []
    while strategy.steps < config.steps:
        for batch in loader:
            result = strategy.step(partial(config.loss, model), *batch)
            losses.append(float(result.loss))
            if strategy.steps == config.steps:
                break
    flat = torch.cat([p.detach().double().flatten() for p in module.parameters()])
    buffers = torch.cat([torch.zeros(1, dtype=torch.float64), *(b.double().flatten() for b in module.buffers())])
    return Trained(flat.numpy(), buffers.numpy(), losses)


def train_mirrored(replicas: int, configs: list[Config]) -> list[Trained]:
    """Each configuration on this many logical replicas of one process."""
    results = []
    for config in configs:
        with muster.MirroredStrategy(["cpu"] * replicas, **config.options()) as strategy:
            results.append(train(strategy, config))
    return results


def train_worker(replicas: int, configs: list[Config]) -> list[Trained]:
    """Each configuration as one worker of the job that the environment describes."""
    results = []
    for config in configs:
        with muster.MultiWorkerMirroredStrategy.from_env(["cpu"] * replicas, **config.options()) as strategy:
            results.append(train(strategy, config))
    return results
