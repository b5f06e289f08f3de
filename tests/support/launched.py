"""A small training that launchers start in the place of a user's script.

It prints where it began and what came out, as examples/python/digits.py does, and imports less.
"""

from __future__ import annotations

import hashlib
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import muster

EPOCHS = 4
STEPS = 8
"""Of an epoch."""
OPTIONS: dict[str, Any] = {"seed": 0, "threads_per_replica": 1}
"""What bits depend on is the same in every process."""


def train(strategy: muster.Strategy, folder: Path | None = None, until_lost: bool = False) -> str:
    """A digest of the parameters after all epochs.

    With a folder it goes on from the checkpoint there, or keeps one after the first epoch. With `until_lost` a job of
    more than two workers goes on without an end.
    """
    torch.manual_seed(0)
    x = torch.randn(32 * STEPS, 64)
    data = TensorDataset(x, x[:, :10].argmax(1))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )
    model, _, loader = strategy.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=32, shuffle=True)
    )
    checkpoints = muster.Checkpoints(strategy, folder)
    checkpoints.load()
    if strategy.is_chief:
        print(f"{strategy.num_workers} workers begin after {strategy.steps} steps", flush=True)
    while loader.epoch < EPOCHS or (until_lost and strategy.num_workers > 2):
        for x, y in loader:
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
        if loader.epoch == 1:
            checkpoints.save()
    if strategy.is_chief:
        print(f"{strategy.num_workers} workers end after {strategy.steps} steps", flush=True)
    return hashlib.sha256(
        b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    ).hexdigest()


def train_on_replicas(replicas: int, folder: Path | None = None) -> str:
    """The digest that workers print, of as many replicas of this process."""
    with muster.MirroredStrategy(["cpu"] * replicas, **OPTIONS) as strategy:
        return train(strategy, folder)[:16]


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--until-lost", action="store_true")
    options = parser.parse_args()
    with muster.MultiWorkerMirroredStrategy.from_env(**OPTIONS) as strategy:
        digest = train(strategy, options.checkpoint, options.until_lost)
        if strategy.is_chief:
            print(f"parameters: {digest[:16]} (sha256)", flush=True)


if __name__ == "__main__":
    main()
