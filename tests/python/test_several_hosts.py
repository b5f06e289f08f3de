"""Workers on several hosts, which are network namespaces here."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import muster
from support.hosts import Hosts, hosts, why_no_hosts
from support.training import Config, train, train_mirrored

CONFIGS = [
    Config(steps=8, dropout=0.1, norm=True, accumulate=2, clip_norm=0.5),
    Config(steps=6, model="text"),
]
SECONDS = 5.0
"""The jobs' timeout where one is waited for."""


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Hosts]:
    if reason := why_no_hosts():
        pytest.skip(reason)
    with hosts(3) as made:
        yield made


def _train() -> list[np.ndarray]:
    results = []
    for config in CONFIGS:
        with muster.MultiWorkerMirroredStrategy.from_env(**config.options()) as strategy:
            results.append(train(strategy, config).parameters)
    return results


def _sees_the_job(strategy: muster.Strategy) -> bool:
    value = torch.tensor(1.0)
    dist.all_reduce(value)
    return (dist.get_rank(), dist.get_world_size(), float(value)) == (
        strategy.rank,
        strategy.num_workers,
        strategy.num_workers,
    )


def _step_until_somebody_is_lost(rank_that_dies: int = -1, interface: str = "") -> tuple[str, str, float]:
    """The error's type, its text, and how many seconds it took to be raised."""
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=SECONDS) as strategy:
        model = torch.nn.Linear(64, 10)
        model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(100_000):
            if step == 10:
                if strategy.rank == rank_that_dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                if strategy.rank == 0 and interface:
                    os.system(f"ip link set {interface} down")
                began = time.monotonic()
            try:
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), torch.randn(8, 64), torch.arange(8))
            except muster.CommError as error:
                return type(error).__name__, str(error), time.monotonic() - began
            if step > 10:
                time.sleep(0.005)
    raise AssertionError("nobody was lost")


def _train_and_lose_rank_3() -> tuple[list[np.ndarray], bool, bool, tuple[str, str, float]]:
    trained = _train()
    with muster.MultiWorkerMirroredStrategy.from_env() as strategy:
        within = _sees_the_job(strategy)
        assert (
            "between 2 hosts a process group (gloo), of which 2 workers a host carry a part each" in strategy.explain()
        )
    return trained, within, dist.is_initialized(), _step_until_somebody_is_lost(rank_that_dies=3)


def test_two_hosts_train_as_one_and_name_a_worker_that_died(three_hosts: Hosts) -> None:
    expected = [trained.parameters for trained in train_mirrored(4, CONFIGS)]
    *others, killed = three_hosts.run([0, 0, 1, 1], _train_and_lose_rank_3)
    assert killed == signal.SIGKILL
    for trained, within, after, (kind, text, seconds) in others:
        assert all(map(np.array_equal, trained, expected))
        assert (within, after) == (True, False)
        assert kind == "PeerLost"
        assert "worker 3 ended (it was killed, crashed or exited)" in text
        assert seconds < SECONDS


def _train_in_the_programs_group() -> tuple[list[np.ndarray], bool, str, tuple[str, str, float]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    port = int(os.environ["MASTER_PORT"])
    place = f"tcp://{os.environ['MASTER_ADDR']}:{port + 1000}"
    dist.init_process_group("gloo", init_method=place, rank=int(os.environ["RANK"]), world_size=4)
    trained = _train()
    is_kept = dist.is_initialized() and dist.get_world_size() == 4
    dist.destroy_process_group()
    if os.environ["RANK"] == "1":  # a group of its own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        muster.MultiWorkerMirroredStrategy.from_env()
        refused = ""
    except muster.InvalidArgument as error:
        refused = str(error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return trained, is_kept, refused, _step_until_somebody_is_lost(interface="eth0")


def test_hosts_of_three_and_one_worker_train_as_one_and_notice_a_link_that_is_down(three_hosts: Hosts) -> None:
    expected = [trained.parameters for trained in train_mirrored(4, CONFIGS)]
    # The first host holds the bridge: the link of another one is cut by that one's own rank 0.
    results: list[Any] = three_hosts.run([1, 1, 1, 0], _train_in_the_programs_group)
    three_hosts.connect()
    for trained, is_kept, refused, (kind, text, seconds) in results:
        assert all(map(np.array_equal, trained, expected))
        assert is_kept
        assert refused.startswith("worker 0 of 4 has no default group of torch.distributed, and others have one")
        assert kind in ("Timeout", "PeerLost"), text
        assert seconds < 4 * SECONDS


def test_three_hosts_with_a_worker_each_train_as_one(three_hosts: Hosts) -> None:
    expected = [trained.parameters for trained in train_mirrored(3, CONFIGS)]
    for trained in three_hosts.run([0, 1, 2], _train):
        assert all(map(np.array_equal, trained, expected))


def _average_by_the_drop_in() -> dict[str, tuple[str, list[np.ndarray]]]:
    """What became of gradients over several groups: by what way, and their means in two steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    rank = int(os.environ["RANK"])
    place = f"tcp://{os.environ.pop('MASTER_ADDR')}:{int(os.environ['MASTER_PORT']) + 1000}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=4)
    found = {}

    def average(name: str, group: dist.ProcessGroup | None) -> None:
        model = muster.DistributedDataParallel(_Products(), process_group=group)
        gradients = []
        for step in range(2):
            model(_factor(rank, step)).backward()
            gradients.append(model.module.weight.grad.numpy().copy())
            model.zero_grad(set_to_none=bool(step))
        found[name] = str(model._get_ddp_logging_data()["reduced_through"]), gradients

    average("all", None)
    if rank == 1:  # others need not know as many groups
        dist.new_group([1], use_local_synchronization=True)
    for name in ("three", "three again"):
        three = dist.new_group([1, 2, 3])
        if rank:
            average(name, three)
            dist.destroy_process_group(three)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        average("backwards", dist.new_group([3, 2, 1, 0], sort_ranks=False))
    dist.destroy_process_group()
    return found


class _Products(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(70_001))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


def _factor(rank: int, step: int) -> torch.Tensor:
    return torch.rand(70_001, generator=torch.Generator().manual_seed(10 * step + rank))


def test_the_drop_in_sums_on_each_host_and_gives_the_bits_of_one(three_hosts: Hosts) -> None:
    results: list[Any] = three_hosts.run([0, 1, 1, 0], _average_by_the_drop_in)
    for found in results:
        for name, (way, means) in found.items():
            assert way == "memory of each host, and process groups between 2 hosts"
            for step, mean in enumerate(means):
                a, b, c, d = (_factor(r, step) for r in range(4))
                of_all, of_three = ((a + b) + (c + d)) / 4, ((b + c) + d) / 3
                assert np.array_equal(mean, (of_three if name.startswith("three") else of_all).numpy()), name
    assert all(found.keys() >= {"all", "three", "three again"} for found in results[1:])
