"""MultiWorkerMirroredStrategy over a process group of the user's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

import muster
from support.ranks import run_ranks
from support.training import Config, Trained, train, train_mirrored

CONFIGS = [
    Config(steps=12, dropout=0.0, accumulate=3),
    Config(steps=12, dropout=0.0, norm=True, clip_norm=0.5),
]


def _train_over_gloo(replicas: int) -> list[Any]:
    dist.init_process_group("gloo")
    cluster = muster.Cluster.from_env()
    results: list[Any] = []
    for config in CONFIGS:
        with muster.MultiWorkerMirroredStrategy(
            cluster, ["cpu"] * replicas, process_group=dist.group.WORLD, **config.options()
        ) as strategy:
            results.append(train(strategy, config))
    with muster.MultiWorkerMirroredStrategy(cluster, process_group=dist.group.WORLD) as strategy:
        results.append(_reduce_with_an_empty_part(strategy))
    dist.destroy_process_group()
    return results


def _reduce_with_an_empty_part(strategy: muster.Strategy) -> float:
    import torch

    model, _ = strategy.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    rows = 3 if strategy.rank == 0 else 0
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(strategy.reduce(x.sum(), "sum")))
        return model(x).mean()

    strategy.step(step, torch.ones(rows, 1))
    return seen[0] if seen else -1.0


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_gloo_agrees_with_mirrored_and_handles_absent_replicas() -> None:
    for replicas in (1, 2):
        expected = train_mirrored(2 * replicas, CONFIGS)
        first, second = run_ranks(2, _train_over_gloo, replicas)
        for config, want, *got in zip(CONFIGS, expected, first, second, strict=False):
            for trained in got:
                assert isinstance(trained, Trained)
                assert _distance(trained.parameters, want.parameters) < 1e-5, config
            assert np.array_equal(got[0].parameters, got[1].parameters), config
        assert (first[-1], second[-1]) == (3.0, -1.0)
