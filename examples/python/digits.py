"""Classifies scikit-learn's handwritten digits; the training step knows nothing of how it is spread.

Two logical replicas in one process:  python examples/python/digits.py
Two worker processes:                 torchrun --nproc-per-node 2 examples/python/digits.py --multi-worker
Two workers, one parameter server:    muster run --workers 2 --servers 1 examples/python/digits.py --parameter-server

All end with the same parameters, bit for bit. With --staleness the workers of a parameter server step on their own, and
no two runs are alike.

With --checkpoint FOLDER the state is kept after every epoch and on SIGTERM, after which the exit code is 143 (128 +
15), and the same command goes on from there, also where parameters live on servers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels in 0..1: four fifths to train on, the rest to test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[len(y) // 5 :], order[: len(y) // 5]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def build_model() -> nn.Sequential:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def digest(model: nn.Module) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of all parameters."""
    together = hashlib.sha256()
    for parameter in model.parameters():
        together.update(parameter.detach().numpy().tobytes())
    return together.hexdigest()[:16]


def staleness_of(text: str) -> int | None:
    """A number of steps, or "none"."""
    if text != "none" and not text.isdecimal():
        raise typer.BadParameter(f"--staleness {text}: it must be a number of steps, or none")
    return None if text == "none" else int(text)


def main(
    multi_worker: Annotated[bool, typer.Option(help="One worker of several, started by torchrun.")] = False,
    parameter_server: Annotated[
        bool, typer.Option("--parameter-server", help="One worker of several with parameter servers, of muster run.")
    ] = False,
    staleness: Annotated[
        str, typer.Option(help="Steps that a worker of servers may be ahead of the slowest; 'none': any number.")
    ] = "0",
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    batch_size: Annotated[int, typer.Option(min=1, help="Of all replicas together.")] = 64,
    lr: Annotated[float, typer.Option(min=0)] = 3e-3,
    seed: int = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder: go on from what it keeps, and keep more.")] = None,
) -> None:
    """Trains and prints the accuracy on the test images."""
    if multi_worker and parameter_server:
        raise typer.BadParameter("--multi-worker and --parameter-server are two strategies; choose one")
    if checkpoint is not None and staleness != "0":
        raise typer.BadParameter("--checkpoint keeps a step that all workers made together; leave out --staleness")
    torch.manual_seed(seed)
    if multi_worker:
        strategy: muster.Strategy = muster.MultiWorkerMirroredStrategy.from_env()
    elif parameter_server:
        strategy = muster.ParameterServerStrategy.from_env(staleness=staleness_of(staleness))
    else:
        strategy = muster.MirroredStrategy(["cpu:0", "cpu:1"])

    train_data, test_data = read_digits()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, loader, test_loader = strategy.prepare(
        model,
        optimizer,
        DataLoader(train_data, batch_size=batch_size, shuffle=True),
        DataLoader(test_data, batch_size=256),
    )
    checkpoints = muster.Checkpoints(strategy, checkpoint, keep=2)
    kept = checkpoints.load()
    first = 0 if kept is None else kept.get("batch", 0)  # for what is printed; the example in C++ does not save it

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def count_correct(x: Tensor, y: Tensor) -> dict[str, Tensor | int]:
        return {"correct": (model(x).argmax(1) == y).sum(), "seen": len(y)}

    progress = Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        disable=not strategy.is_chief,
    )
    started = time.perf_counter()
    model.train()
    with progress:
        total = epochs * len(loader)
        bar = progress.add_task("", total=total, completed=strategy.steps, epoch=loader.epoch + 1, loss=0.0)
        while loader.epoch < epochs:
            epoch = loader.epoch
            for batch, (x, y) in enumerate(loader, first):
                result = strategy.step(train_step, x, y)
                progress.update(bar, advance=1, epoch=epoch + 1, loss=result.loss.item())
                if checkpoints.after_step(result, batch=batch + 1):
                    progress.console.print(f"stopped in epoch {epoch + 1} after {batch + 1} batches")
                    strategy.close()
                    sys.exit(128 + signal.SIGTERM)
            first = 0
            # With a staleness other workers did a part of them.
            progress.update(bar, completed=(epoch + 1) * len(loader))
            checkpoints.save(batch=0)
    seconds = time.perf_counter() - started

    model.eval()
    correct = seen = 0
    for x, y in test_loader:
        for counts in strategy.run(count_correct, x, y):
            if counts is not None:
                correct += int(counts["correct"])
                seen += counts["seen"]
    # Workers that step on their own have different numbers of batches, and reduce once, when they are through.
    correct, seen = strategy.reduce((correct, seen), "sum")

    if strategy.is_chief:
        print(f"trained in {seconds:.1f} s on {strategy.num_replicas} replicas of {strategy.num_workers} process(es)")
        print(f"parameters: {digest(model)} (sha256)")
        print(f"test accuracy: {correct / seen:.4f} ({correct} of {seen})")
        if not multi_worker and not parameter_server:
            print_change()
    strategy.close()


def print_change() -> None:
    """How the same program runs on two workers."""
    program = os.path.relpath(__file__)
    print(
        "\nOn two workers, with the same parameters bit for bit, after one change:\n"
        '-   strategy = muster.MirroredStrategy(["cpu:0", "cpu:1"])\n'
        "+   strategy = muster.MultiWorkerMirroredStrategy.from_env()\n"
        "which --multi-worker makes here:\n"
        f"    {installed('torchrun')} --nproc-per-node 2 {program} --multi-worker\n"
        "And with a parameter server, again with the same bits:\n"
        f"    {installed('muster')} run --workers 2 --servers 1 {program} --parameter-server"
    )


def installed(command: str) -> str:
    """How a shell finds it."""
    return command if shutil.which(command) else str(Path(sys.executable).with_name(command))


if __name__ == "__main__":
    typer.run(main)
