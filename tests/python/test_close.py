"""close(): safe at any moment, from any thread; what a replica still uses lives until it ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from support.ranks import run_ranks

X = torch.ones(8, 4)


def prepared(strategy: muster.Strategy) -> Any:
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return model


class Held:
    """A step function that stays in the step until it may end."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self, x: Tensor) -> Tensor:
        self.began.set()
        assert self.may_end.wait(20)
        return self.model(x).mean()  # type: ignore[no-any-return]


def in_thread(action: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def end_by_themselves(threads: list[threading.Thread]) -> None:
    """Once the garbage collector finds their strategy, which they or a traceback may hold on to a little longer."""
    for thread in threads:
        for _ in range(400):
            gc.collect()
            thread.join(0.05)
            if not thread.is_alive():
                break
        assert not thread.is_alive()


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_threads_close_waits_for_the_step(replicas: int) -> None:
    strategy = muster.MirroredStrategy(["cpu"] * replicas)
    model = prepared(strategy)
    held = Held(model)

    def close() -> None:
        assert held.began.wait(20)
        strategy.close()

    threads = [in_thread(close) for _ in range(2)]
    release = in_thread(lambda: (held.began.wait(20), threads[0].join(0.2), held.may_end.set()))
    assert strategy.step(held, X).stepped
    for thread in (release, *threads):
        thread.join(20)
        assert not thread.is_alive()
    assert strategy.closed
    with pytest.raises(muster.InvalidArgument, match="closed"):
        strategy.step(lambda x: model(x).mean(), X)


@pytest.mark.parametrize("staleness", [0, None])
def test_a_step_on_servers_is_made_when_another_thread_closes(staleness: int | None) -> None:
    strategy = muster.ParameterServerStrategy.from_env(staleness=staleness)
    model = prepared(strategy)
    assert strategy.step(lambda x: model(x).mean(), X).stepped
    before = model.module.weight.detach().clone()
    held = Held(model)

    def close() -> None:
        assert held.began.wait(20)
        strategy.close()

    closing = in_thread(close)
    release = in_thread(lambda: (held.began.wait(20), closing.join(0.2), held.may_end.set()))
    assert strategy.step(held, X).stepped
    for thread in (release, closing):
        thread.join(20)
        assert not thread.is_alive()
    assert strategy.closed
    assert not torch.equal(before, model.module.weight)


@pytest.mark.parametrize("replicas", [1, 2])
def test_close_inside_a_step_is_refused_and_the_strategy_goes_on(replicas: int) -> None:
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        model = prepared(strategy)

        def in_function(x: Tensor) -> Tensor:
            strategy.close()
            return model(x).mean()

        def in_backward(x: Tensor) -> Tensor:
            loss = model(x).mean()
            loss.register_hook(lambda gradient: strategy.close())
            return loss

        for step in (in_function, in_backward):
            with pytest.raises(muster.InvalidArgument, match=r"close\(\).*inside.*stop\(\)"):
                strategy.step(step, X)
        with pytest.raises(muster.InvalidArgument, match=r"close\(\).*inside"):
            strategy.run(in_function, X)
        assert strategy.step(lambda x: model(x).mean(), X).stepped


def test_a_signal_handler_that_closes_during_a_step_is_refused() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = prepared(strategy)
        previous = signal.signal(signal.SIGUSR1, lambda *_: strategy.close())
        try:

            def step(x: Tensor) -> Tensor:
                if strategy.replica == 0:
                    os.kill(os.getpid(), signal.SIGUSR1)
                    for _ in range(2000):
                        threading.Event().wait(0.01)
                return model(x).mean()

            with pytest.raises(muster.InvalidArgument, match=r"close\(\).*signal handler"):
                strategy.step(step, X)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert strategy.step(lambda x: model(x).mean(), X).stepped


class Deaf:
    """Holds replica 0 in a place that hears no interrupt, until it is let go."""

    def __init__(self, strategy: muster.Strategy, model: Any) -> None:
        self.strategy, self.model = strategy, model
        self.lock = threading.Lock()
        self.lock.acquire()

    def __call__(self, x: Tensor) -> Tensor:
        if self.strategy.replica == 0:
            self.lock.acquire()
        return self.model(x).mean()

    def interrupted_step(self) -> None:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            self.strategy.step(self, X)
        timer.join()
        assert self.strategy._core.busy


def test_close_after_an_interrupt_waits_for_the_replica_that_is_left() -> None:
    strategy = muster.MirroredStrategy(["cpu"] * 2)
    deaf = Deaf(strategy, prepared(strategy))
    deaf.interrupted_step()
    release = threading.Timer(0.3, deaf.lock.release)
    release.start()
    strategy.close()
    release.join()
    assert not strategy._core.busy and strategy.closed


def test_a_second_interrupt_ends_the_wait_and_the_next_close_goes_on() -> None:
    strategy = muster.MirroredStrategy(["cpu"] * 2)
    deaf = Deaf(strategy, prepared(strategy))
    deaf.interrupted_step()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        strategy.close()
    timer.join()
    with pytest.raises(muster.InvalidArgument, match="closed"):
        strategy.step(lambda x: x.sum(), X)
    deaf.lock.release()
    strategy.close()
    assert not strategy._core.busy


def test_a_strategy_that_is_forgotten_while_a_replica_works_frees_nothing_that_it_uses() -> None:
    strategy = muster.MirroredStrategy(["cpu"] * 2)
    deaf = Deaf(strategy, prepared(strategy))
    deaf.interrupted_step()
    lock, threads, gone = deaf.lock, list(strategy._threads.threads), weakref.ref(strategy)
    del strategy, deaf  # the replica has the last reference
    gc.collect()
    lock.release()
    end_by_themselves(threads)
    assert gone() is None


def test_two_threads_that_step_at_once_are_told_so() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = prepared(strategy)
        held = Held(model)
        first = in_thread(lambda: strategy.step(held, X))
        assert held.began.wait(20)
        try:
            for call in (strategy.step, strategy.run):
                with pytest.raises(muster.InvalidArgument, match="another thread is in step"):
                    call(lambda x: model(x).mean(), X)
        finally:
            held.may_end.set()
            first.join(20)
        assert strategy.step(lambda x: model(x).mean(), X).stepped


PROGRAM = """
import os, signal, sys, threading
import torch, muster
from torch import nn

how = sys.argv[1]
big = torch.randn(400, 400)
module = nn.Linear(4, 1)
started = threading.Event()

def work(x):
    if strategy.replica == 1:
        started.set()
        for _ in range(3):
            torch.linalg.svd(big)
    return model(x).mean()

def interrupt():
    started.wait(20)
    os.kill(os.getpid(), signal.SIGINT)

strategy = muster.MirroredStrategy(["cpu:0", "cpu:1"])
model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
threading.Thread(target=interrupt).start()
try:
    if how == "with":
        with strategy:
            strategy.step(work, torch.ones(8, 4))
    else:
        strategy.step(work, torch.ones(8, 4))
except KeyboardInterrupt:
    print("interrupted")
if how == "forgotten":
    del strategy
print("saved")
"""


@pytest.mark.parametrize("how", ["with", "forgotten"])
def test_ctrl_c_during_a_long_operation_ends_the_program_in_order(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interrupted", "saved"]


def interrupted_while_a_peer_is_late() -> tuple[str, float]:
    strategy = muster.MultiWorkerMirroredStrategy.from_env(["cpu"] * 2, timeout=60)
    model = prepared(strategy)

    def join() -> None:
        strategy.step(lambda x: model(x).mean(), X)

    join()
    if strategy.is_chief:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            join()
        timer.join()
        started = time.monotonic()
        strategy.close()
        return "closed", time.monotonic() - started
    time.sleep(2.5)  # late on purpose
    with pytest.raises(muster.CommError) as caught:
        join()
    return str(caught.value), 0.0


def test_close_after_an_interrupt_waits_for_no_peer() -> None:
    (text, seconds), (reason, _) = run_ranks(2, interrupted_while_a_peer_is_late)
    assert text == "closed" and seconds < 5
    assert "interrupted" in reason or "worker 0" in reason, reason


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_persistent_workers_of_a_loader_end_with_its_strategy(how: str) -> None:
    data = DataLoader(TensorDataset(X), batch_size=4, num_workers=1, persistent_workers=True)
    others = set(multiprocessing.active_children())
    gc.collect()
    gc.disable()  # a cycle would keep the workers
    try:
        strategy = muster.MirroredStrategy(["cpu"] * 2)
        loader = strategy.prepare(data)
        for _ in range(2):
            assert len(list(loader)) == 2
        (worker,) = set(multiprocessing.active_children()) - others
        if how == "closed":
            strategy.close()
        else:
            del strategy, loader
        worker.join(10)
        assert not worker.is_alive()
    finally:
        gc.enable()


class Knows(nn.Module):
    def __init__(self, strategy: muster.Strategy) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.strategy = strategy

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_module_that_refers_to_its_strategy_keeps_nothing_alive() -> None:
    def use() -> tuple[weakref.ref[muster.Strategy], list[threading.Thread]]:
        strategy = muster.MirroredStrategy(["cpu"] * 2)
        model = strategy.prepare(lambda: Knows(strategy))
        assert strategy.step(lambda x: model(x).mean(), X).stepped
        return weakref.ref(strategy), list(strategy._threads.threads)

    gone, threads = use()
    end_by_themselves(threads)
    assert gone() is None


@pytest.mark.parametrize("forks", [False, True])
def test_the_interpreters_exit_waits_for_daemon_threads_in_calls(tmp_path: Path, forks: bool) -> None:
    code = """
import os, pathlib, sys, threading, time
import torch, muster
from muster import _C

folder = pathlib.Path(sys.argv[1])
tensors = {str(i): torch.ones(2_000_000) for i in range(10)}

def end_while_a_thread_writes():
    write = lambda: _C._checkpoint.write_snapshot(folder, tensors, {})
    threading.Thread(target=write, daemon=True).start()
    while not any(folder.iterdir()):
        time.sleep(0.001)

def end_in_a_child(x):
    if os.fork() == 0:
        end_while_a_thread_writes()
        sys.exit()
    os.wait()
    return (module(x) * 0).mean()

if sys.argv[2] == "True":
    with muster.MirroredStrategy(["cpu"]) as strategy:
        module = strategy.prepare(torch.nn.Linear(1, 1))
        strategy.step(end_in_a_child, torch.ones(1, 1))
else:
    end_while_a_thread_writes()
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), str(forks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert [folder.name for folder in tmp_path.glob("snapshot-*")] == ["snapshot-0000000001"]


def stepped_in_a_child(connection: Any, strategy: muster.Strategy, model: Any) -> None:
    x = torch.ones(4096, 4)
    connection.send(bool(strategy.step(lambda x: (model(x) * x.exp()).mean(), x).stepped))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_steps_with_the_strategy_of_one_replica() -> None:
    with muster.MirroredStrategy(["cpu"], threads_per_replica=2) as strategy:
        model = prepared(strategy)
        x = torch.ones(4096, 4)
        strategy.step(lambda x: (model(x) * x.exp()).mean(), x)
        here, there = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=stepped_in_a_child, args=(there, strategy, model))
        child.start()
        try:
            assert here.poll(60) and here.recv()
        finally:
            child.kill()
