"""The places of loaders in checkpoints, where not all of them are prepared before load()."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from support.ranks import run_ranks
from support.servers import alone

TRAINED = torch.arange(16.0).view(-1, 1)
EVALUATED = torch.arange(100.0, 108.0).view(-1, 1)


class Trainer:
    """Prepares what it evaluates with when it does for the first time, as functions that evaluate do."""

    def __init__(self, strategy: muster.Strategy) -> None:
        self.strategy = strategy
        module = nn.Linear(1, 1)
        self.model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-4))

    def loader(self, data: torch.Tensor = TRAINED, batch_size: int = 4, **options: Any) -> muster.Loader[Any]:
        loader = DataLoader(TensorDataset(data), batch_size=batch_size, shuffle=True)
        return self.strategy.prepare_loader(loader, **options)

    def train(self, loader: muster.Loader[Any], steps: int) -> list[list[float]]:
        """The numbers of each step's batch; the loop is left behind the last one."""
        seen: list[list[float]] = []
        while len(seen) < steps:
            for (x,) in loader:
                self.strategy.step(lambda x: self.model(x).sum(), x)
                seen.append(x.flatten().tolist())
                if len(seen) == steps:
                    break
        return seen


def undisturbed(steps: int) -> list[list[float]]:
    with muster.MirroredStrategy(["cpu"], seed=5) as strategy:
        trainer = Trainer(strategy)
        return trainer.train(trainer.loader(), steps)


def evaluates_between(folder: str, begin: Callable[[], muster.Strategy], *, sharded: bool) -> list[Any]:
    """A job that is started again twice, and evaluates before it saves. The epochs and data of each part."""
    seen: list[Any] = []
    for _ in range(3):
        with begin() as strategy:
            trainer = Trainer(strategy)
            loader = trainer.loader(sharded=sharded)
            strategy.load(folder)
            seen.append((loader.epoch, trainer.train(loader, 3)))
            evaluator = trainer.loader(EVALUATED, 2, sharded=sharded)
            seen.append((evaluator.epoch, sorted(number for (x,) in evaluator for number in x.flatten().tolist())))
            strategy.save(folder)
    return seen


def mirrored() -> muster.Strategy:
    return muster.MirroredStrategy(["cpu"], seed=5)


def of_workers() -> muster.Strategy:
    return muster.MultiWorkerMirroredStrategy(muster.Cluster.from_env(), seed=5)


def check_evaluated_between(seen: list[Any]) -> None:
    expected = undisturbed(9)
    assert seen[::2] == [(0, expected[:3]), (0, expected[3:6]), (1, expected[6:])]
    assert seen[1::2] == [(run, EVALUATED.flatten().tolist()) for run in range(3)]


def test_a_job_that_prepares_an_evaluator_later_can_be_started_again(tmp_path: Path) -> None:
    check_evaluated_between(evaluates_between(str(tmp_path), mirrored, sharded=False))


def test_so_can_one_of_sharded_loaders(tmp_path: Path) -> None:
    for seen in run_ranks(2, partial(evaluates_between, sharded=True), str(tmp_path), of_workers):
        check_evaluated_between(seen)


def saved_within_an_epoch(folder: Path) -> None:
    with muster.MirroredStrategy(["cpu"], seed=5) as strategy:
        trainer = Trainer(strategy)
        trainer.train(trainer.loader(), 2)
        strategy.save(folder)


@pytest.mark.parametrize("saves_between", [False, True])
def test_a_loader_that_is_prepared_after_load_goes_on_where_it_was(tmp_path: Path, saves_between: bool) -> None:
    saved_within_an_epoch(tmp_path)
    if saves_between:  # without it
        with muster.MirroredStrategy(["cpu"], seed=6) as strategy:
            Trainer(strategy)
            strategy.load(tmp_path)
            strategy.save(tmp_path)
    with muster.MirroredStrategy(["cpu"], seed=7) as strategy:
        trainer = Trainer(strategy)
        strategy.load(tmp_path)
        assert trainer.train(trainer.loader(), 3) == undisturbed(5)[2:]


def test_it_must_count_as_the_saved_one_did(tmp_path: Path) -> None:
    saved_within_an_epoch(tmp_path)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        trainer = Trainer(strategy)
        strategy.load(tmp_path)
        with pytest.raises(muster.LayoutMismatch, match=r"loader 0: the state is of .* batches of 4, and now 2"):
            trainer.loader(batch_size=2)
        assert trainer.train(trainer.loader(), 3) == undisturbed(5)[2:]


def test_loaders_behind_those_that_were_saved_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_within_an_epoch(tmp_path)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        trainer = Trainer(strategy)
        first, second = trainer.loader(), trainer.loader(EVALUATED)
        with caplog.at_level(logging.WARNING, "muster"):
            strategy.load(tmp_path)
        assert "the places of 1 loaders, and 2 are prepared: those behind them begin anew" in caplog.text
        caplog.clear()
        assert trainer.train(first, 3) == undisturbed(5)[2:]
        assert len(list(second)) == 2
        strategy.load(tmp_path)  # as for the best of a job's checkpoints
        assert not caplog.records
        assert trainer.train(first, 3) == undisturbed(5)[2:]


def test_servers_deal_on_of_a_loader_that_is_prepared_after_the_first_step(tmp_path: Path) -> None:
    with alone(staleness=1) as strategy:
        trainer = Trainer(strategy)
        first, second = trainer.loader(EVALUATED), trainer.loader()
        trainer.train(first, 2)
        begun = trainer.train(second, 1)
        strategy.save(tmp_path)
    with alone(staleness=1) as strategy:
        trainer = Trainer(strategy)
        first = trainer.loader(EVALUATED)
        strategy.load(tmp_path)
        trainer.train(first, 1)  # which connects servers
        rest = trainer.train(trainer.loader(), 3)
    assert sorted(number for batch in begun + rest for number in batch) == TRAINED.flatten().tolist()
