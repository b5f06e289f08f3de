"""Workers on several hosts, which are network namespaces here."""

from __future__ import annotations

import inspect
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import muster
from support.hosts import Hosts, hosts, names_ended
from support.training import Config, train, train_mirrored

CONFIGS = [
    Config(steps=8, dropout=0.1, norm=True, accumulate=2, clip_norm=0.5),
    Config(steps=6, model="text"),
]
SECONDS = 5.0
"""The jobs' timeout where one is waited for."""


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Hosts]:
    with hosts(3) as made:
        yield made


def _train() -> list[np.ndarray]:
    results = []
    for config in CONFIGS:
        with muster.MultiWorkerMirroredStrategy.from_env(**config.options()) as strategy:
            results.append(train(strategy, config).parameters)
    return results


def _terms(ranks: int) -> list[torch.Tensor]:
    """Of each rank: more than travels at once, and the order of additions shows in their sum."""
    whole = torch.arange(2_500_003, dtype=torch.float32)
    return [whole.mul(1 + 0.1 * rank).sin().mul(10.0 ** (rank % 3)) for rank in range(ranks)]


def _reduces_along_the_tree(strategy: muster.Strategy) -> bool:
    own = _terms(strategy.num_workers)[strategy.rank]
    kept = own.clone()
    double, complex_values = own[:1000].double(), torch.complex(own[:9], own[9:18])
    sums = strategy.reduce([own, double, complex_values], "sum")
    mean = strategy.reduce(own, "mean", weight=torch.tensor(strategy.rank + 1))
    level = _terms(strategy.num_workers)
    total = strategy.num_workers * (strategy.num_workers + 1) / 2
    expected = _tree(level)
    return (
        torch.equal(own, kept)
        and torch.equal(sums[0], expected)
        and torch.equal(sums[1], _tree([term[:1000].double() for term in level]))
        and torch.equal(sums[2], _tree([torch.complex(term[:9], term[9:18]) for term in level]))
        and torch.equal(mean, _tree([term * (rank + 1.0) for rank, term in enumerate(level)]) / total)
        and torch.equal(strategy.reduce(own.short(), "max"), torch.stack(level).short().amax(0))
        and torch.equal(strategy.reduce(own.bfloat16(), "sum"), _tree([term.bfloat16() for term in level]))
    )


def _tree(level: list[torch.Tensor]) -> torch.Tensor:
    while len(level) > 1:
        level = [sum(level[i + 1 : i + 2], level[i]) for i in range(0, len(level), 2)]
    return level[0]


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
        within = _sees_the_job(strategy) and _reduces_along_the_tree(strategy)
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
        assert kind == "PeerLost", text
        assert names_ended(3, text), text
        assert seconds < SECONDS


def _train_in_the_programs_group() -> tuple[list[np.ndarray], bool, str, tuple[str, str, float]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")  # which meets where the strategy does
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


BYTES = 8_000_000
"""Of the values that each worker has to reduce."""


def _sent_during(reduce: Callable[[], Any]) -> int:
    """How many bytes left this host, headers included."""
    readings = []
    for call in (lambda: None, reduce):
        call()
        dist.barrier()
        readings.append(int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text()))
        dist.barrier()
    return readings[1] - readings[0]


def _count_what_is_sent(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """By a reduction, a step and Gloo's all_reduce: with the ranks that workers were given, and with `ranks`."""
    given = int(os.environ["RANK"])
    counted = []
    for rank in (given, ranks[given]):
        os.environ["RANK"] = str(rank)
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1000)  # where nobody met as another rank
        with muster.MultiWorkerMirroredStrategy.from_env() as strategy:
            counted.append(_sent(strategy))
    return counted


def _sent(strategy: muster.Strategy) -> tuple[int, int, int]:
    values = torch.full((BYTES // 4,), strategy.rank + 1.0)
    sums: list[torch.Tensor] = []
    by_reduce = _sent_during(lambda: sums.append(strategy.reduce(values, "sum")))
    by_gloo = _sent_during(lambda: dist.all_reduce(values))
    assert all(torch.equal(summed, torch.full_like(values, 10.0)) for summed in (*sums, values))

    model = torch.nn.Linear(BYTES // 4_000, 1_000, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.full((1, BYTES // 4_000), strategy.rank + 1.0)
    by_step = _sent_during(lambda: strategy.step(lambda x: model(x).sum(), x))
    assert (next(model.parameters()) == -2.5).all()
    return by_reduce, by_step, by_gloo


def test_fewer_bytes_leave_a_host_than_with_gloos_ring(three_hosts: Hosts) -> None:
    """The ring of four ranks sends each value 2 * 3 / 4 times over each of its edges: one of them leaves each host, or
    two where every other rank is on the other host. Muster sends it 2 - 2 / hosts times; half as much again where no
    host has both terms of an addition."""
    if reason := three_hosts.why_not_limit("1gbit"):
        pytest.skip(reason)
    try:
        results: list[Any] = three_hosts.run([0, 0, 1, 1], _count_what_is_sent, (0, 2, 1, 3))
    finally:
        three_hosts.lift_limits()
    for together, apart in results:
        for (*ours, gloo), times, times_of_gloo in ((together, 1.0, 1.5), (apart, 1.5, 3.0)):
            assert gloo > times_of_gloo * BYTES
            assert all(times * BYTES < sent < 1.02 * times * BYTES for sent in ours), results


def _disagree() -> list[str]:
    errors = []
    for is_order in (False, True):
        with muster.MultiWorkerMirroredStrategy.from_env(timeout=60.0) as strategy:
            calls = [strategy.barrier, lambda: strategy.reduce(torch.ones(3), "sum")]
            if strategy.rank == 1:
                calls.reverse()
            begun = time.monotonic()
            try:
                for call in calls if is_order else calls[:1]:
                    call()
                errors.append("")
            except muster.Error as error:
                errors.append(f"{type(error).__name__}: {error}")
            assert time.monotonic() - begun < 30
    return errors


def test_calls_outside_a_step_that_differ_between_hosts_are_named_on_all(three_hosts: Hosts) -> None:
    for errors in three_hosts.run([0, 1, 0, 1], _disagree):
        for error in errors:
            assert re.match(r"LayoutMismatch: ranks disagree: rank 0 asked for barrier, rank 1 for all_gather", error)


def _train_and_reduce() -> tuple[list[np.ndarray], bool]:
    trained = _train()
    with muster.MultiWorkerMirroredStrategy.from_env(wire="bf16") as strategy:
        assert "fp32 ones are rounded to bf16, and travel as fp32 through process groups" in strategy.explain()
        return trained, _reduces_along_the_tree(strategy)


def test_three_hosts_with_a_worker_each_train_as_one(three_hosts: Hosts) -> None:
    expected = [trained.parameters for trained in train_mirrored(3, CONFIGS)]
    for trained, reduces in three_hosts.run([0, 1, 2], _train_and_reduce):
        assert all(map(np.array_equal, trained, expected))
        assert reduces


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


def _average_by_hand() -> tuple[torch.Tensor, bool]:
    with muster.MultiWorkerMirroredStrategy.from_env() as strategy:
        model = strategy.prepare(torch.nn.Linear(2_000, 1_100, bias=False))
        weight = next(model.parameters())
        factor = torch.arange(weight.numel()).remainder(7).add(strategy.rank).float().view_as(weight)
        (model(torch.eye(2_000)).T * factor).sum().backward()
        return weight.grad, _reduces_along_the_tree(strategy)


def test_two_hosts_with_a_worker_each_reduce_and_average_in_pieces(three_hosts: Hosts) -> None:
    for gradient, reduces in three_hosts.run([1, 2], _average_by_hand):
        expected = torch.arange(gradient.numel()).remainder(7).float().add(0.5).view_as(gradient)
        assert torch.equal(gradient, expected)
        assert reduces
