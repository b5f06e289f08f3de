"""The parameter server that the chief's process hosts: who waits for whom, and what forked children have of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from support.ranks import run_ranks
from support.servers import alone


def trained(strategy: muster.Strategy, steps: int = 2) -> Any:
    module = nn.Linear(4, 2)
    model, optimizer = strategy.prepare(module, torch.optim.Adam(module.parameters()))
    for _ in range(steps):
        strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 4))
    return model, optimizer


def exit_code_of_child(child: Any) -> int:
    """Of a fork that calls it."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(9)
    for _ in range(200):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child did not end")


def test_a_forked_child_closes_and_ends_at_once() -> None:
    strategy = alone()
    model, _ = trained(strategy)

    def closes() -> None:
        strategy.close()
        os._exit(7)

    begin = time.monotonic()
    assert exit_code_of_child(closes) == 7
    assert time.monotonic() - begin < 8
    assert strategy.step(lambda x: model(x).mean(), torch.ones(4, 4)).stepped
    strategy.close()


def _asks(ask: str) -> int:
    """Of a forked child that asks its parent's server."""
    with alone() as strategy:
        model, optimizer = trained(strategy)

        def asks() -> None:
            begin = time.monotonic()
            with pytest.raises(muster.CommError, match="forked child has no connections"):
                if ask == "step":
                    strategy.step(lambda x: model(x).mean(), torch.ones(4, 4))
                optimizer.state_dict()
            assert time.monotonic() - begin < 4, "it waited for the servers, 5 s by default"
            os._exit(7)

        return exit_code_of_child(asks)


@pytest.mark.parametrize("ask", ["state_dict", "step"])
def test_a_forked_child_that_asks_hears_of_it_at_once(ask: str) -> None:
    # In a process in which autograd has no threads yet: it refuses to work in forks of others.
    assert run_ranks(1, _asks, ask) == [7]


def test_loader_workers_end_that_collect_a_strategy_of_their_parents() -> None:
    strategy = alone()
    trained(strategy)
    cycle: list[Any] = [strategy]
    cycle.append(cycle)
    del strategy, cycle  # whoever collects garbage first destroys it: a worker, which is a fork

    class Collecting(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            import gc

            gc.collect()
            return super().__getitem__(index)

    loader = DataLoader(Collecting(torch.ones(4, 1)), batch_size=2, num_workers=1, timeout=20)
    assert len(list(loader)) == 2


def _chief_leaves_early(staleness: int | None) -> tuple[float, int]:
    strategy = muster.ParameterServerStrategy.from_env(threads_per_replica=1, staleness=staleness, timeout=2.0)
    model, _ = trained(strategy)
    steps = 0
    begin = time.monotonic()
    while strategy.rank == 1 and time.monotonic() - begin < 6:
        strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 4))
        steps += 1
        time.sleep(0.1)
    strategy.close()
    return time.monotonic() - begin, steps


def test_the_chief_waits_for_workers_that_train_for_longer_than_the_timeout() -> None:
    (waited, _), (_, steps) = run_ranks(2, _chief_leaves_early, None)
    assert waited > 5
    assert steps > 10


def _interrupted() -> list[float]:
    strategy = muster.ParameterServerStrategy.from_env(threads_per_replica=1, staleness=None)
    model, _ = trained(strategy)
    begin = time.monotonic()
    if strategy.rank == 1:
        time.sleep(6)
        strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 4))
        strategy.close()
        return []
    times = []
    for _ in range(2):
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            strategy.close()
        times.append(time.monotonic() - begin)
    strategy.close()
    return [*times, time.monotonic() - begin]


def test_an_interrupt_ends_the_chiefs_wait_and_the_next_close_goes_on() -> None:
    (first, second, last), _ = run_ranks(2, _interrupted)
    assert first < 3
    assert second < 5
    assert last > 5, "the server was gone before the other worker had left"
