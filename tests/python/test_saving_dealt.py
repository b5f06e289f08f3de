"""Checkpoints in the middle of an epoch whose batches parameter servers deal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from muster import LayoutMismatch
from support.commands import Command, wait_until
from support.ranks import run_ranks
from support.servers import Servers, on_servers

SAMPLES, SIZE = 22, 4
BATCHES = 6
DATA = TensorDataset(torch.arange(2.0 * SAMPLES).view(SAMPLES, 2), torch.arange(SAMPLES))
Batch = tuple[int, ...]


class Job:
    """A model that counts nothing, and a loader in its own order."""

    def __init__(self, strategy: muster.Strategy, *, size: int = SIZE, generator: int | None = None) -> None:
        self.strategy = strategy
        module = nn.Linear(2, 1)
        own = None if generator is None else torch.Generator().manual_seed(generator)
        self.model, self.optimizer, self.loader = strategy.prepare(
            module,
            torch.optim.SGD(module.parameters(), lr=0.001),
            DataLoader(DATA, batch_size=size, shuffle=True, generator=own),
        )

    def step(self, x: Tensor) -> None:
        self.strategy.step(lambda x: self.model(x).sum(), x)

    def epoch(self) -> list[Batch]:
        """Trains on what is left of it; the samples of each batch."""
        batches = []
        for x, numbers in self.loader:
            batches.append(tuple(numbers.tolist()))
            self.step(x)
        return batches


def dealt(seed: int, **options: Any) -> muster.ParameterServerStrategy:
    """The only worker of a job, which hosts its server."""
    return muster.ParameterServerStrategy(
        muster.Cluster(0, 1, ""), seed=seed, threads_per_replica=1, staleness=1, **options
    )


def undisturbed(generator: int | None = None) -> list[list[Batch]]:
    """The batches of two epochs."""
    with dealt(3) as strategy:
        job = Job(strategy, generator=generator)
        return [job.epoch(), job.epoch()]


def save_in_the_middle(folder: Path, trained: int, generator: int | None = None) -> list[Batch]:
    """Trains on so many batches, has the next one, and saves."""
    batches: list[Batch] = []
    with dealt(3) as strategy:
        job = Job(strategy, generator=generator)
        for x, numbers in job.loader:
            if len(batches) == trained:
                strategy.save(folder)
                break
            job.step(x)
            batches.append(tuple(numbers.tolist()))
    return batches


@pytest.mark.parametrize("generator", [None, 5])
def test_an_epoch_goes_on_with_what_was_in_no_step(generator: int | None, tmp_path: Path) -> None:
    first, second = undisturbed(generator)
    assert save_in_the_middle(tmp_path, 3, generator) == first[:3]
    with dealt(99) as strategy:  # the seed, and so the order, is the checkpoint's
        job = Job(strategy, generator=None if generator is None else 77)
        strategy.load(tmp_path)
        assert (strategy.seed, job.loader.epoch) == (3, 0)
        strategy.save(tmp_path / "again")  # before servers know of it
        assert job.epoch() == first[3:]
        assert job.epoch() == second
    with dealt(98) as strategy:
        job = Job(strategy, generator=None if generator is None else 76)
        strategy.load(tmp_path / "again")
        assert job.epoch() == first[3:]


def test_an_epoch_that_had_ended_is_not_begun_anew(tmp_path: Path) -> None:
    first, second = undisturbed()
    with dealt(3) as strategy:
        job = Job(strategy)
        assert job.epoch() == first
        strategy.save(tmp_path)
    with dealt(4) as strategy:
        job = Job(strategy)
        strategy.load(tmp_path)
        assert job.loader.epoch == 1
        assert job.epoch() == second


def test_an_epoch_goes_on_under_other_strategies_and_back(tmp_path: Path) -> None:
    first, second = undisturbed()
    save_in_the_middle(tmp_path, 3)
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        job = Job(strategy)
        strategy.load(tmp_path)
        for x, numbers in job.loader:
            assert tuple(numbers.tolist()) == first[3]
            job.step(x)
            strategy.save(tmp_path)
            break
    with dealt(5) as strategy:
        job = Job(strategy)
        strategy.load(tmp_path)
        assert job.epoch() == first[4:]
        assert job.epoch() == second


def _save_while_another_has_batches(servers: list[str], folder: Path) -> list[Batch]:
    """Rank 1 has batches, and trains on none until rank 0 has trained on three and saved. The batches of each."""
    batches: list[Batch] = []
    with on_servers(servers, seed=3, threads_per_replica=1, staleness=None, timeout=60.0) as strategy:
        job = Job(strategy)
        taken, saved = folder / "taken", folder / "saved"
        for x, numbers in job.loader:
            if strategy.rank == 1:
                taken.touch()
                wait_until(saved.exists, "the first worker has saved")
            else:
                wait_until(taken.exists, "the other worker has a batch")
            job.step(x)
            batches.append(tuple(numbers.tolist()))
            if strategy.rank == 0 and len(batches) == 3:
                strategy.save(folder / "checkpoints")
                strategy.save(folder / "checkpoints")  # which waits until the first one is written
                saved.touch()
    return batches


def test_batches_that_other_workers_had_are_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = undisturbed()
    servers = Servers(1)
    trained, others = run_ranks(2, _save_while_another_has_batches, servers.addresses, tmp_path)
    assert sorted(trained + others) == sorted(first)
    trained = trained[:3]
    folder = tmp_path / "checkpoints"
    with dealt(4) as strategy:
        job = Job(strategy)
        strategy.load(folder)
        assert job.epoch() == [batch for batch in first if batch not in trained]
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        job = Job(strategy)
        strategy.load(folder)
        begin = min(number for number, batch in enumerate(first) if batch not in trained)
        again = sum(batch in trained for batch in first[begin:])
        assert again > 0  # rank 1 had one of the first
        assert f"with batch {begin}: parameter servers had dealt its batches, and {again} that were" in caplog.text
        assert job.epoch() == first[begin:]
    with Command("checkpoint", "show", folder) as command:
        returncode, out, err = command.end(60)
    assert returncode == 0, err
    assert "epoch 0, 3 batches in" in out


def test_batches_of_another_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_the_middle(tmp_path, 3)
    with dealt(4) as strategy:
        job = Job(strategy, size=SIZE + 1)
        with pytest.raises(LayoutMismatch, match=r"loader 0: .* batches of 4, and now 5"):
            strategy.load(tmp_path)
        monkeypatch.setattr(muster.loader.Loader, "extent", {})  # as what C++ saved, which has none
        strategy.load(tmp_path)
        with pytest.raises(LayoutMismatch, match=f"has 5 batches, .* the checkpoint, {BATCHES}"):
            job.epoch()


@pytest.mark.parametrize(
    "change",
    [
        {"next": -1},
        {"next": BATCHES + 1},
        {"undone": [3]},
        {"undone": [2, 1]},
        {"undone": None},
        {"epoch": "0"},
    ],
)
def test_passes_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    loader = {
        "epoch": 0,
        "batches": 0,
        "generators": [],
        "passes": [{"epoch": 0, "batches": 6, "next": 3, "undone": []}],
    }
    muster.saved_layout.check_content(muster.saved_layout.with_all_parts({"loaders": [loader]}))
    loader["passes"] = [{"epoch": 0, "batches": 6, "next": 3, "undone": [], **change}]
    with pytest.raises(muster.CheckpointError, match="loaders/0/passes"):
        muster.saved_layout.check_content(muster.saved_layout.with_all_parts({"loaders": [loader]}))
