"""Workers of parameter servers that have several replicas each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from support.jobs import WorkerPool
from support.servers import Servers, alone, on_servers

SAMPLES = 50


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batch(step: int = 0, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def prepared(strategy: muster.Strategy, module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return strategy.prepare(module, optimizer)[0]


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def _passes(addresses: list[str], staleness: int | None, batched: bool) -> list[list[list[int]]]:
    """The samples of each replica's part, by epoch."""
    module = nn.Linear(4, 1)
    with on_servers(addresses, devices=["cpu"] * 2, staleness=staleness, seed=3, threads_per_replica=1) as strategy:
        ready = [torch.full((5, 4), 0.0) + torch.arange(5 * i, 5 * i + 5)[:, None] for i in range(10)]
        if batched:
            data = torch.utils.data.DataLoader(Numbers(), batch_size=7, shuffle=True)
        else:
            data = torch.utils.data.DataLoader(ready, batch_size=None, shuffle=True)  # type: ignore[arg-type]
        model, _, loader = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-6), data)
        seen: list[list[list[int]]] = []
        for _ in range(2):
            seen.append([])
            for x in loader:
                assert len(x) == 2
                strategy.step(lambda x: model(x).sum(), x)
                seen[-1] += [[int(v) for v in part[:, 0]] for part in x]
        strategy.barrier()
        return seen


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("staleness", [0, None])
def test_each_sample_of_an_epoch_is_one_replicas(staleness: int | None, batched: bool, two_workers: WorkerPool) -> None:
    servers = Servers(2)
    first, second = two_workers.call(_passes, servers.addresses, staleness, batched)
    for a, b in zip(first, second, strict=True):
        assert sorted(sample for part in [*a, *b] for sample in part) == list(range(SAMPLES))
    for epoch in [*first, *second]:
        sizes = [len(part) for part in epoch]
        assert all(0 <= large - small <= 1 for large, small in zip(sizes[::2], sizes[1::2], strict=True))
    if staleness == 0 and batched:  # seven samples over four replicas
        assert {len(part) for part in first[0][:14]} == {2}
        assert [len(part) for part in second[0][:4]] == [2, 1, 2, 1]


def _meets_much(addresses: list[str], folder: str) -> dict[str, Any]:
    """What a worker of two sees of a failure, of collectives, of an empty part, of run and of a checkpoint."""
    seen: dict[str, Any] = {}
    module = small()
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "seed": 3, "threads_per_replica": 1}
    with on_servers(addresses, **options) as strategy:
        model = prepared(strategy, module)
        seen["shape"] = [strategy.num_workers, strategy.num_replicas, strategy.replica, len(strategy.devices)]
        is_bad = True

        def step(x: Tensor, y: Tensor) -> Any:
            loss = F.cross_entropy(model(x), y)
            if is_bad and strategy.replica == 3:
                raise ValueError("no luck")
            return loss

        try:
            strategy.step(step, *batch())
        except (ValueError, muster.RemoteError) as error:
            seen["failure"] = [type(error).__name__, str(error), getattr(error, "replica", None)]
        is_bad = False
        assert strategy.step(step, *batch(1)).stepped

        def sums(x: Tensor, y: Tensor) -> Any:
            total = strategy.reduce(torch.tensor(float(strategy.replica)), "sum")
            return muster.Loss(F.cross_entropy(model(x), y), metrics={"sum": total, "own": strategy.replica})

        result = strategy.step(sums, *batch(2))
        seen["metrics"] = {name: float(value) for name, value in result.metrics.items()}
        # Three of the first worker's parts, one of the second's.
        x, y = batch(3, rows=6 if strategy.rank == 0 else 2)
        parts = (x, y) if strategy.rank == 0 else tuple(muster.PerReplica([v, v[:0]]) for v in (x, y))
        result = strategy.step(step, *parts)
        seen["uneven"] = [float(result.loss), float(result.weight)]
        seen["run"] = strategy.reduce(strategy.run(lambda x, y: torch.tensor(float(len(x))), *batch(4)), "sum").item()
        strategy.save(folder)
        assert strategy.step(step, *batch(5)).stepped
        seen["values"] = torch.cat([p.detach().flatten() for p in module.parameters()])
        seen["buffers"] = torch.cat([b.double().flatten() for b in module.buffers()])
        seen["explained"] = strategy.explain()
    again = small()
    with muster.MultiWorkerMirroredStrategy.from_env(["cpu"] * 2, seed=3, threads_per_replica=1) as strategy:
        model = prepared(strategy, again)
        strategy.load(folder)
        strategy.step(step, *batch(5))
        seen["loaded"] = torch.cat([p.detach().flatten() for p in again.parameters()])
    return seen


def test_a_worker_of_two_replicas_meets_what_others_meet(two_workers: WorkerPool, tmp_path: Path) -> None:
    servers = Servers(1)
    first, second = two_workers.call(_meets_much, servers.addresses, str(tmp_path / "kept"))
    assert first["shape"] == [2, 4, 0, 2]
    assert second["shape"] == [2, 4, 2, 2]
    assert second["failure"] == ["ValueError", "no luck", None]
    assert first["failure"][0] == "RemoteError" and first["failure"][2] == 3
    assert "replica 3 on rank 1 raised ValueError: no luck" in first["failure"][1]
    for seen in (first, second):
        assert seen["metrics"] == {"sum": 6.0, "own": 1.5}
        assert seen["uneven"] == first["uneven"]
        assert seen["uneven"][1] == 8
        assert seen["run"] == 24.0
        assert "as one" in seen["explained"]
        assert np.isfinite(seen["values"]).all()
        assert np.array_equal(seen["values"], first["values"])
        assert np.array_equal(seen["buffers"], first["buffers"])
        assert np.array_equal(seen["loaded"], seen["values"])


def _has_other_devices(addresses: list[str]) -> str:
    rank = muster.Cluster.from_env().rank
    with on_servers(addresses, devices=["cpu"] * (2 - rank), seed=3, threads_per_replica=1) as strategy:
        module = small()
        model = prepared(strategy, module)
        for step in range(3):
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch(step))
        assert strategy.num_replicas == 3
        assert strategy.replica == 2 * rank
        strategy.barrier()
        return str(float(sum(p.detach().double().sum() for p in module.parameters())))


def test_workers_may_have_unequal_numbers_of_replicas(two_workers: WorkerPool) -> None:
    servers = Servers(1)
    first, second = two_workers.call(_has_other_devices, servers.addresses)
    assert first == second


def test_devices_that_are_no_cpus_are_refused() -> None:
    for device in ("cuda:0", "meta", torch.device("cuda", 1)):
        with pytest.raises(muster.InvalidArgument, match="have their replicas on the CPU"):
            alone(devices=["cpu", device])
    with pytest.raises(muster.InvalidArgument, match="must be a list"):
        alone(devices="cpu")


def test_a_server_that_dies_ends_the_step_of_every_replica() -> None:
    servers = Servers(1)
    module = small()
    with on_servers(servers.addresses, devices=["cpu"] * 3, seed=3, patience=0.5, timeout=60.0) as strategy:
        model = prepared(strategy, module)
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
        servers.running.clear()
        started = time.monotonic()
        with pytest.raises(muster.PeerLost, match=r"parameter server 0 .* is gone"):
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch(1))
        assert time.monotonic() - started < 30


def test_all_replicas_look_rows_up_at_once() -> None:
    def losses(strategy: muster.Strategy) -> list[float]:
        table = muster.ShardedEmbedding(5000, 8, mode="sum", seed=1, scale=0.1)
        ids = torch.randint(0, 5000, (400, 6), generator=torch.Generator().manual_seed(2))
        with strategy:
            model, _ = strategy.prepare(table, torch.optim.Adagrad(table.parameters(), lr=0.3))
            return [float(strategy.step(lambda x: (model(x) - 1).square().mean(), ids).loss) for _ in range(20)]

    expected = losses(muster.MirroredStrategy(["cpu"] * 4, seed=3, threads_per_replica=1))
    assert losses(alone(devices=["cpu"] * 4)) == expected
    # Each step of one worker alone is of its newest values.
    assert losses(alone(devices=["cpu"] * 4, staleness=None)) == expected
