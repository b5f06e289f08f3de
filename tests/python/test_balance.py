"""MirroredStrategy(balance="auto"): parts in proportion to the speed of the replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from muster import InvalidArgument
from muster.batch import part_sizes

SECONDS_PER_ROW = (0.0002, 0.002)
BATCH = 16


@pytest.fixture
def strategy() -> Iterator[muster.MirroredStrategy]:
    with muster.MirroredStrategy(["cpu:0", "cpu:1"], balance="auto", timeout=60.0) as made:
        yield made


def data(rows: int = 150) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 5, dtype=torch.float64), torch.arange(rows) % 3)


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


class Training:
    """A step in which replica 1 is ten times as slow; it notes the samples (by index) and sizes of its batches."""

    def __init__(self, strategy: muster.MirroredStrategy, reduces: bool = False) -> None:
        self.strategy = strategy
        self.module = model_of()
        self.model, _ = strategy.prepare(self.module, torch.optim.SGD(self.module.parameters(), lr=0.1))
        self.reduces = reduces
        self.sizes: list[list[int]] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        time.sleep(len(x) * SECONDS_PER_ROW[self.strategy.replica])
        if self.reduces:
            self.strategy.reduce(1.0)
        return F.cross_entropy(self.model(x), y)

    def step(self, x: Any, y: Any) -> None:
        result = self.strategy.step(lambda x, y: muster.Loss(self.loss(x, y), output=len(x)), x, y)
        self.sizes.append([size or 0 for size in result.output])


@pytest.mark.parametrize("reduces", [False, True])
def test_the_slower_replica_gets_fewer_rows(strategy: muster.MirroredStrategy, reduces: bool) -> None:
    training = Training(strategy, reduces)
    x, y = data(BATCH).tensors
    for _ in range(12):
        training.step(x, y)
    assert training.sizes[:6] == [[8, 8]] * 6
    assert all(sum(size) == BATCH for size in training.sizes)
    assert training.sizes[-1][0] >= 12
    assert sum(strategy._core.capacities) == pytest.approx(1)
    assert strategy._core.capacities[0] > 0.75


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_follows_and_deals_every_sample_once_in_order(
    strategy: muster.MirroredStrategy, num_workers: int
) -> None:
    training = Training(strategy)
    samples = data()
    loader, test_loader = strategy.prepare(
        DataLoader(samples, BATCH, num_workers=num_workers), DataLoader(samples, BATCH, num_workers=num_workers)
    )
    for _ in range(2):
        seen = []
        for x, y in loader:
            seen += [*x]
            training.step(x, y)
        assert torch.equal(torch.cat(seen), samples.tensors[0])
    full = [size for size in training.sizes if sum(size) == BATCH]
    assert full[0] == [8, 8]
    assert full[-1][0] >= 12

    seen, sizes = [], []
    for x, y in test_loader:
        counts = strategy.run(lambda x, y: len(x), x, y)
        sizes.append([count or 0 for count in counts])
        seen.append(strategy.gather(strategy.run(lambda x, y: x, x, y)))
    assert torch.equal(torch.cat(seen), samples.tensors[0])
    assert sizes[0] == part_sizes(BATCH, 2, strategy._core.capacities)


def test_gradients_stay_the_mean_over_the_batch(strategy: muster.MirroredStrategy) -> None:
    training = Training(strategy)
    x, y = data(BATCH).tensors
    for _ in range(8):
        training.step(x, y)
    alone = model_of()
    alone.load_state_dict(training.model.state_dict())
    F.cross_entropy(alone(x[:11]), y[:11]).backward()
    expected = [parameter.detach() - 0.1 * parameter.grad for parameter in alone.parameters()]  # type: ignore[operator]
    training.step(x[:11], y[:11])
    assert training.sizes[-1][0] > 2 * training.sizes[-1][1]
    for actual, parameter in zip(training.module.parameters(), expected, strict=True):
        torch.testing.assert_close(actual.detach(), parameter, rtol=1e-12, atol=1e-12)


def test_what_was_chosen_is_logged_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "muster"), muster.MirroredStrategy(["cpu", "cpu"], balance="auto") as strategy:
        assert "take 0.5, 0.5 of a batch" in strategy.explain()
        training = Training(strategy)
        x, y = data(BATCH).tensors
        for _ in range(6):
            training.step(x, y)
        shares = ", ".join(f"{capacity:.3g}" for capacity in strategy._core.capacities)
        assert f"take {shares} of a batch" in strategy.explain()
    assert [message for message in caplog.messages if "replicas take" in message] == [
        f"[rank 0/1] replicas take {shares} of each batch that is divided from now on"
    ]


def test_parts_stay_equal_unless_asked_for() -> None:
    with muster.MirroredStrategy(["cpu", "cpu"]) as strategy:
        training = Training(strategy)
        x, y = data(BATCH).tensors
        for _ in range(8):
            training.step(x, y)
        assert training.sizes == [[8, 8]] * 8
        assert strategy._core.capacities == []
        assert "capacity" not in strategy.explain()


def test_one_replica_takes_all() -> None:
    with muster.MirroredStrategy(["cpu"], balance="auto") as strategy:
        training = Training(strategy)
        training.step(*data(BATCH).tensors)
        assert training.sizes == [[BATCH]]


def test_it_is_an_option_of_the_mirrored_strategy_alone() -> None:
    with pytest.raises(InvalidArgument, match=r"balance='fair'.*'equal' or 'auto'"):
        muster.MirroredStrategy(["cpu"], balance="fair")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="unknown option 'balance'"):
        muster.MultiWorkerMirroredStrategy(muster.Cluster(0, 1, "127.0.0.1:29500"), balance="auto")
