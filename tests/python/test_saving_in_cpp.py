"""Checkpoints go from Python to C++ and back: each goes on with what the other saved."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import muster
from muster import _C, saved_tree

STEPS = 10  # two epochs
INPUTS = torch.stack([torch.sin(torch.arange(6.0) * (i + 1)) for i in range(40)])
TARGETS = torch.arange(40) % 3


def train(folder: Path, until: int, precision: str = "fp32", schedules: bool = False, **state: Any) -> list[Tensor]:
    """Goes on from the newest checkpoint to `until` steps, and saves."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = {"schedule": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30)} if schedules else {}
    with muster.MirroredStrategy(["cpu", "cpu"], precision=precision, threads_per_replica=1) as strategy:
        loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8, shuffle=True)
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
        strategy.load(folder, **kept)
        while strategy.steps < until:
            for x, y in loader:
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
                if strategy.steps == until:
                    break
        strategy.save(folder, **kept, **state)
        return [tensor.clone() for tensor in model.state_dict().values()]


def go_on(program: Path, folder: Path, steps: int, precision: str = "fp32", workers: int = 1) -> None:
    """In C++: two replicas of one worker, or two workers."""
    command = [str(program), str(folder), str(steps), precision]
    if workers == 1:
        command += ["2"]
    else:
        command = [sys.executable, "-m", "muster", "run", "--no-python", "--workers", str(workers), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_run_that_changes_its_language_ends_with_the_same_bits(
    programs: Path, tmp_path: Path, precision: str, workers: int
) -> None:
    expected = train(tmp_path / "undisturbed", STEPS, precision)
    folder = tmp_path / "hops"
    train(folder, 3, precision)
    go_on(programs / "resuming", folder, 4, precision, workers)
    actual = train(folder, STEPS, precision)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


class Clicks(nn.Module):
    """A table beside a dense part."""

    def __init__(self, *, on_servers: bool) -> None:
        super().__init__()
        self.table = muster.ShardedEmbedding(60, 4, mode="sum", scale=0.3, seed=2**63 + 1, on_servers=on_servers)
        self.read = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.read(self.table(ids))
        return result


def train_rows(strategy: muster.Strategy, folder: Path, until: int, *, on_servers: bool) -> list[Tensor]:
    torch.manual_seed(3)
    module = Clicks(on_servers=on_servers)
    model, _ = strategy.prepare(module, muster.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0, amsgrad=True))
    strategy.load(folder)
    while strategy.steps < until:
        ids = (torch.arange(8) * (3 + strategy.steps) % 20).view(4, 2)
        strategy.step(lambda x: model(x).square().mean(), ids)
    strategy.save(folder)
    return [tensor.clone() for tensor in module.state_dict().values()]


def test_a_table_that_changes_its_language_ends_with_the_same_bits(programs: Path, tmp_path: Path) -> None:
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        expected = train_rows(strategy, tmp_path / "undisturbed", 9, on_servers=False)
    folder = tmp_path / "hops"
    for until in (3, 9):
        with muster.ParameterServerStrategy(muster.Cluster(0, 1, ""), threads_per_replica=1) as strategy:
            actual = train_rows(strategy, folder, until, on_servers=True)
        if until == 3:
            go_on(programs / "resuming", folder, 3, "rows")
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def content_of(folder: Path) -> Any:
    found = _C.read_asked_snapshot(folder)
    assert found is not None
    tensors, metadata, _ = found
    return saved_tree.decode(str(metadata["content"]), tensors)


def assert_equal(ours: Any, theirs: Any, place: str = "") -> None:
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs), place
    elif isinstance(theirs, dict):
        assert type(ours) is type(theirs) and ours.keys() == theirs.keys(), place
        for key, value in theirs.items():
            assert_equal(ours[key], value, f"{place}/{key}")
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs) and len(ours) == len(theirs), place
        for index, value in enumerate(theirs):
            assert_equal(ours[index], value, f"{place}/{index}")
    else:
        assert (type(ours), ours) == (type(theirs), theirs), place


def test_cpp_hands_on_what_it_does_not_know(programs: Path, tmp_path: Path) -> None:
    state = {"note": "é", "numbers": (1, 2.0, None, True, float("inf")), "counts": Counter({3: 1, 5: 2})}
    train(tmp_path, 3, schedules=True, **state, nested={1: [torch.arange(3)], "x": {"a/b": torch.ones(2)}})
    before = content_of(tmp_path)
    go_on(programs / "resuming", tmp_path, 0)
    after = content_of(tmp_path)
    for content in (before, after):
        # An object's state_dict is a value in C++. Torch's own generator is where each program has drawn to.
        content["state"] = {name: next(iter(kept.values())) for name, kept in content["state"].items()}
    for loader in before["loaders"]:
        del loader["sampler"]  # C++ has other classes
    assert_equal(after, before)
    train(tmp_path, 5, schedules=True)  # which finds its schedule's state


def test_cpp_refuses_the_place_of_a_sampler_that_draws_fewer(programs: Path, tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(INPUTS, TARGETS)
    with muster.MirroredStrategy(["cpu", "cpu"]) as strategy:
        loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, num_samples=24))
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
        next(iter(loader))
        strategy.save(tmp_path)
    done = subprocess.run(
        [programs / "resuming", tmp_path, "2", "fp32", "2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "loader 0: the checkpoint is of the middle of an epoch with a sampler whose samples are 24, and now 40" in (
        done.stderr
    )


def test_cpp_goes_on_with_what_was_converted(programs: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model(INPUTS).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    command = [
        sys.executable,
        "-m",
        "muster",
        "checkpoint",
        "convert",
        str(tmp_path / "file.pt"),
        str(tmp_path / "made"),
    ]
    subprocess.run(command, check=True, timeout=60)
    go_on(programs / "resuming", tmp_path / "made", 0)
    content = content_of(tmp_path / "made")
    assert_equal(content["modules"][0], dict(model.state_dict()))
    assert content["optimizers"][0]["groups"][0]["lr"] == 3e-3
    names = [name for name, _ in model.named_parameters()]
    for position, values in optimizer.state_dict()["state"].items():
        assert_equal(content["optimizers"][0]["state"][names[position]], values)


def test_cpp_refuses_what_it_cannot_go_on_with(programs: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model: Any = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), maximize=True)
        loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8)
        strategy.prepare(model, optimizer, loader)
        strategy.save(tmp_path)
    command = [str(programs / "resuming"), str(tmp_path), "1", "fp32", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "optimizer 0 was saved with maximize=True, which AdamW has not in C++" in done.stderr
