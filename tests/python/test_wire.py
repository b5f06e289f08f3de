"""Gradients that travel in less precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import muster
from support.jobs import Launcher, WorkerPool, make_job, part_of
from support.ranks import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "owners": {"keep_gradients": False},
    "all": {"keep_gradients": True},
    "grad": {"fuse": False},
    "sharded": {"shard_optimizer": True},
}
ROWS = 8


def rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def rows_of(count: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(count, 5000, dtype=dtype)  # two tiles, which two ranks divide


def learn_rows(strategy: muster.Strategy, dtype: torch.dtype = torch.float32, windows: int = 1) -> Any:
    """A weight whose gradient is the sum of the rows that a replica sees, stepped with a rate of 1 from 0."""
    module = nn.Linear(5000, 1, bias=False).to(dtype)
    nn.init.zeros_(module.weight)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    rows = rows_of(ROWS * windows, dtype)
    for window in range(windows):
        for part in rows[window * ROWS : (window + 1) * ROWS].chunk(strategy._options.accumulate):
            strategy.step(lambda x: muster.Loss(model(x).sum(), reduction="sum"), part_of(strategy, part))
    return module.weight.view(-1)


def sums_of(rows: Tensor, replicas: int) -> list[Tensor]:
    return [part.sum(0) for part in rows.chunk(replicas)]


@pytest.fixture(params=["mirrored-2", "workers-2", "workers-2x2"])
def job(request: pytest.FixtureRequest, two_workers: WorkerPool) -> Launcher:
    return make_job(request.param, two_workers)


@pytest.mark.parametrize("mode", MODES)
def test_each_gradient_is_rounded_once_and_the_sum_where_all_need_it(job: Launcher, mode: str) -> None:
    if mode == "sharded" and job.workers == 0:
        mode = "all"
    parts = [rounded(part) for part in sums_of(rows_of(ROWS, torch.float32), job.replicas)]
    while len(parts) > 1:  # along the tree
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    (total,) = parts
    expected = total if mode == "owners" else rounded(total)
    for weight in job(learn_rows, wire="bf16", **MODES[mode]):
        np.testing.assert_allclose(-weight, expected.numpy(), rtol=3e-7, atol=1e-6)
    exact = sum(sums_of(rows_of(ROWS, torch.float32), job.replicas)).numpy()
    assert np.abs(expected.numpy() - exact).max() > 1e-3


@pytest.mark.parametrize("mode", ["owners", "all"])
def test_micro_batches_are_added_before_they_are_rounded(two_workers: WorkerPool, mode: str) -> None:
    rows = rows_of(ROWS, torch.float32)
    by_replica = [torch.cat([half[:2], other[:2]]) for half, other in [rows.chunk(2)]]
    by_replica += [torch.cat([half[2:], other[2:]]) for half, other in [rows.chunk(2)]]
    total = sum(rounded(part[:2].sum(0) + part[2:].sum(0)) for part in by_replica)
    expected = total if mode == "owners" else rounded(total)
    for name in ("mirrored-2", "workers-2"):
        for weight in make_job(name, two_workers)(learn_rows, wire="bf16", accumulate=2, **MODES[mode]):
            np.testing.assert_allclose(-weight, expected.numpy(), rtol=3e-7, atol=1e-6)


def test_double_precision_stays(two_workers: WorkerPool) -> None:
    for name in ("mirrored-2", "workers-2"):
        job = make_job(name, two_workers)
        exact = job(learn_rows, torch.float64)
        assert np.array_equal(job(learn_rows, torch.float64, wire="bf16"), exact)


def test_one_replica_sends_nothing(two_workers: WorkerPool) -> None:
    job = make_job("mirrored-1", two_workers)
    assert np.array_equal(job(learn_rows, wire="bf16"), job(learn_rows))


def train_net(strategy: muster.Strategy) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(96, 97), nn.ReLU(), nn.Linear(97, 96))
    model, _ = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))
    for _ in range(5):
        result = strategy.step(lambda x: (model(x) - x).square().mean(), x)
    return [parameter.detach() for parameter in module.parameters()], float(result.loss)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("strategy", "mirrored"), [("workers-2", "mirrored-2"), ("workers-2x2", "mirrored-4")])
def test_switching_strategy_changes_no_bit(two_workers: WorkerPool, strategy: str, mirrored: str, mode: str) -> None:
    options = {"wire": "bf16", "clip_norm": 0.5, **MODES[mode]}
    ((expected, loss),) = make_job(mirrored, two_workers)(train_net, **options)
    ((exact, exact_loss),) = make_job(mirrored, two_workers)(train_net, **{**options, "wire": None})
    assert not np.array_equal(expected[0], exact[0])
    assert loss == pytest.approx(exact_loss, rel=0.02)
    for parameters, other_loss in make_job(strategy, two_workers)(train_net, **options):
        assert other_loss == loss
        assert all(np.array_equal(own, other) for own, other in zip(parameters, expected, strict=True))


def over_gloo() -> Any:
    dist.init_process_group("gloo")
    results = []
    for wire in (None, "bf16"):
        with muster.MultiWorkerMirroredStrategy(
            muster.Cluster.from_env(), process_group=dist.group.WORLD, seed=3, wire=wire
        ) as strategy:
            parameters, _ = train_net(strategy)
            assert ("travel as fp32 through process groups" in strategy.explain()) == (wire is not None)
            results.append(torch.cat([parameter.flatten() for parameter in parameters]).numpy())
    dist.destroy_process_group()
    return results


def test_over_a_process_group() -> None:
    first, second = run_ranks(2, over_gloo)
    for exact, low in (first, second):
        assert not np.array_equal(exact, low)
        assert np.linalg.norm(exact - low) / np.linalg.norm(exact) < 0.02
    assert np.array_equal(first[1], second[1])


def test_explain_says_so() -> None:
    with muster.MirroredStrategy(["cpu:0", "cpu:1"], wire="bf16") as strategy:
        assert "bf16" in strategy.explain()
