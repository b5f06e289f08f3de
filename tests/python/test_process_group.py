"""MultiWorkerMirroredStrategy over a process group of the user's."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import muster
from support.jobs import WorkerPool
from support.ranks import run_ranks
from support.saving import small_files
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


def _load_state_on_one(kind: str) -> tuple[bool, str, bool, bool]:
    """Whether a step goes on once rank 1 loaded the state that it has, what is said of another, whether training goes
    on from there, and whether the ranks' parameters are equal then."""
    dist.init_process_group("gloo")
    with muster.MultiWorkerMirroredStrategy(muster.Cluster.from_env(), process_group=dist.group.WORLD) as strategy:
        torch.manual_seed(0)
        module = nn.Linear(4, 2)
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            if kind == "sgd"
            else torch.optim.AdamW(module.parameters())
        )
        model, optimizer = strategy.prepare(module, optimizer)
        x = torch.full((3, 4), 1.0 + strategy.rank)

        def step() -> bool:
            return strategy.step(lambda x: model(x).square().mean(), x).stepped

        for _ in range(3):
            step()
        saved = copy.deepcopy(optimizer.state_dict())
        if strategy.rank == 1:
            optimizer.load_state_dict(copy.deepcopy(saved))
        goes_on = step()
        saved, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
        if strategy.rank == 1:
            other["state"][0]["momentum_buffer" if kind == "sgd" else "exp_avg"] += 1
            optimizer.load_state_dict(other)
        with pytest.raises(muster.LayoutMismatch) as caught:
            step()
        if strategy.rank == 1:
            optimizer.load_state_dict(saved)
        again = step()
        weights = strategy.gather(module.weight.detach()[None])
    dist.destroy_process_group()
    return goes_on, str(caught.value), again, torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_state_that_one_rank_loads_is_compared_where_each_has_its_own(kind: str) -> None:
    for goes_on, text, again, are_equal in run_ranks(2, _load_state_on_one, kind):
        assert goes_on
        assert "the optimizer's state of parameter 'weight' was written since the last step, by rank 1" in text
        assert again
        assert are_equal


def _in_default_group() -> tuple[bool, list[int], float, bool, bool]:
    """Whether there was a default group before, the job's ranks as it sees them, a sum over it, and whether it is there
    within a second strategy's end and after the first one's."""
    before = dist.is_initialized()
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=30.0) as strategy:
        value = torch.tensor(1.0 + strategy.rank)
        dist.all_reduce(value)
        ranks = [dist.get_rank(), dist.get_world_size()]
        muster.MultiWorkerMirroredStrategy.from_env(timeout=30.0).close()
        within = dist.is_initialized()
    return before, ranks, float(value), within, dist.is_initialized()


def test_workers_are_ranks_of_torch_distributed_while_the_strategy_is_open(two_workers: WorkerPool) -> None:
    for rank, seen in enumerate(two_workers.call(_in_default_group)):
        assert seen == (False, [rank, 2], 3.0, True, False)


def _closed_after_a_full_disk(folder: Path) -> tuple[bool, bool]:
    """Whether close() raised, and whether the default group is there afterwards."""
    strategy = muster.MultiWorkerMirroredStrategy.from_env(timeout=30.0)
    raised = False
    with small_files():
        strategy.save(folder, big=torch.zeros(10_000))
        try:
            strategy.close()
        except muster.CheckpointError:
            raised = True
    return raised, dist.is_initialized()


def test_the_default_group_goes_also_where_the_last_checkpoint_could_not_be_written(
    two_workers: WorkerPool, tmp_path: Path
) -> None:
    chief, other = two_workers.call(_closed_after_a_full_disk, tmp_path)
    assert chief == (True, False)
    assert not other[1]


def _with_a_group_of_its_own() -> bool:
    # Rank 1 alone has one: nobody joins another.
    if os.environ["RANK"] == "1":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=30.0):
        within = dist.is_initialized()
    assert dist.is_initialized() == within
    if within:
        dist.destroy_process_group()
    return within


def test_a_default_group_of_the_programs_is_left_alone(two_workers: WorkerPool) -> None:
    assert two_workers.call(_with_a_group_of_its_own) == [False, True]


def _without_a_network() -> bool:
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=30.0) as strategy:
        strategy.barrier()
        return dist.is_initialized()


def test_a_job_goes_on_where_no_default_group_can_be_made() -> None:
    assert run_ranks(2, _without_a_network) == [False, False]


def _forked_after(kind: str) -> int:
    """The exit status of a child in which strategies of its parent are collected."""
    gc.disable()
    group = None
    if kind == "given":
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    strategy = muster.MultiWorkerMirroredStrategy.from_env(["cpu"], process_group=group)
    strategy.cycle = strategy  # type: ignore[attr-defined]
    if kind == "closed":
        strategy.close()
    del strategy, group
    if kind == "given":
        dist.destroy_process_group()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _forked_and_called() -> tuple[list[str], float]:
    """What calls of a forked child raise, and what a call of the parent gives afterwards."""
    strategy = muster.MultiWorkerMirroredStrategy.from_env(["cpu"], timeout=30.0)
    module = nn.Linear(2, 1)
    model, _ = strategy.prepare(module, muster.optim.SGD(module.parameters(), lr=0.1))
    x = torch.ones(4, 2)
    strategy.step(lambda part: model(part).mean(), x)
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], Any]] = [
            strategy.barrier,
            lambda: strategy.reduce(1.0),
            lambda: strategy.gather(x),
            lambda: strategy.step(lambda part: model(part).mean(), x),
            lambda: model(x).mean().backward(),
            lambda: strategy.prepare(nn.Linear(2, 1)),
        ]
        for call in calls:
            try:
                call()
                os.write(tells, b"nothing;")
            except muster.InvalidArgument as error:
                os.write(tells, f"{error};".encode())
        os._exit(0)
    os.close(tells)
    os.waitpid(child, 0)
    with os.fdopen(told) as file:
        said = file.read().split(";")[:-1]
    return said, float(strategy.reduce(torch.tensor(float(strategy.rank)), "sum"))


def test_a_forked_child_does_not_take_its_parents_place() -> None:
    for rank, (said, total) in enumerate(run_ranks(2, _forked_and_called)):
        assert len(said) == 6 * 2  # there is one in the text
        assert "".join(said).count(f"a process that worker {rank} has forked is no worker") == 6
        assert total == 1


@pytest.mark.parametrize("kind", ["closed", "left open", "given"])
def test_a_forked_process_outlives_groups_of_strategies_that_are_gone(kind: str) -> None:
    assert run_ranks(2, _forked_after, kind) == [0, 0]
