"""Ranks that make different calls hear of it long before the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import muster
from support.hosts import Hosts, hosts
from support.jobs import WorkerPool

TIMEOUT = 60.0
"""Seconds, of the strategies."""
SOON = 30.0
"""Seconds, within which each rank hears of a difference."""
WORDS = "call the same on all ranks, in the same order"

Differ = Callable[[muster.Strategy, Callable[[], object]], object]


def reduces_after_it(strategy: muster.Strategy, step: Callable[[], object]) -> object:
    return step() if strategy.rank == 0 else strategy.reduce(torch.ones(2), "sum")


def saves_meanwhile(strategy: muster.Strategy, step: Callable[[], object]) -> object:
    return strategy.save("/nowhere") if strategy.rank == 0 else step()


def steps_after_a_value_that_cannot_travel(strategy: muster.Strategy, step: Callable[[], object]) -> object:
    if strategy.rank == 0:
        with pytest.raises(muster.InvalidArgument, match="cannot travel"):
            strategy.broadcast(object())
        return step()
    return strategy.broadcast(None)


def text_of(strategy: muster.Strategy, differ: Differ) -> tuple[str, str, float]:
    model = nn.Linear(4, 2)
    model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    x = torch.randn(8, 4)
    strategy.step(loss, x)
    begun = time.monotonic()
    try:
        differ(strategy, lambda: strategy.step(loss, x))
    except muster.CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("nothing was raised")


def on_a_host(differ: Differ, replicas: int = 1) -> tuple[str, str, float]:
    cluster = muster.Cluster.from_env()
    with muster.MultiWorkerMirroredStrategy(cluster, ["cpu"] * replicas, timeout=TIMEOUT) as strategy:
        return text_of(strategy, differ)


EXPECTED: dict[Differ, tuple[str, str]] = {
    reduces_after_it: ("rank 0 is in step() with 2 windows", "rank 1 in reduce('sum') with 1. "),
    saves_meanwhile: ("rank 0 is in save() with 1 windows", "rank 1 in step() with 2. "),
    steps_after_a_value_that_cannot_travel: (
        "rank 0 is in step() with 2 windows",
        "rank 1 in broadcast(source=0) with 1. ",
    ),
}


@pytest.mark.parametrize("differ", EXPECTED, ids=lambda differ: differ.__name__)
def test_ranks_in_different_calls_hear_which(two_workers: WorkerPool, differ: Differ) -> None:
    for kind, text, seconds in two_workers.call(on_a_host, differ):
        assert kind == "CommError", text
        assert all(words in text for words in (*EXPECTED[differ], WORDS)), text
        assert seconds < SOON


def test_workers_of_several_replicas_hear_it(two_workers: WorkerPool) -> None:
    for _, text, seconds in two_workers.call(on_a_host, reduces_after_it, 2):
        assert all(words in text for words in EXPECTED[reduces_after_it]), text
        assert seconds < SOON


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def test_they_hear_it_over_hosts(two_hosts: Hosts) -> None:
    for rank, (_, text, seconds) in enumerate(two_hosts.run([0, 0, 1], on_a_host, reduces_after_it)):
        assert "rank 0 is in step() with 2 windows" in text, text
        assert "in reduce('sum') with 1. " in text, (rank, text)
        assert seconds < SOON


def slow_on_one_rank(timeout: float) -> list[int]:
    """A rank that is far behind in the same calls, at each of them."""
    results = []
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=timeout) as strategy:
        model = nn.Linear(4, 2)
        model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for late in range(6):
            if strategy.is_chief:
                strategy.run(lambda: None)  # waits for nobody, so that it counts for nothing
            if late % 2 == strategy.rank:
                time.sleep(timeout / 3)
            if late < 3:
                strategy.reduce(torch.ones(1), "sum")
            results.append(strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 4)).step)
            strategy.broadcast(torch.ones(1), source=late % 2)
    return results


def test_ranks_that_are_late_in_the_same_calls_go_on(two_workers: WorkerPool) -> None:
    assert two_workers.call(slow_on_one_rank, 2.0) == [[1, 2, 3, 4, 5, 6]] * 2
