"""Exceptions, signals and stops: every rank learns, and the strategy stays usable and agrees to the last bit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import muster
from support.failures import FailsInBackward
from support.jobs import Launcher, WorkerPool, part_of
from support.ranks import run_ranks


class Broken(Exception):
    """Not a built-in, and with state."""

    def __init__(self, code: int) -> None:
        super().__init__(f"broken {code}")
        self.code = code


class Unspeakable(Exception):
    """Of which no text can be made."""

    def __str__(self) -> str:
        raise LookupError("no words")


def fail_at_once(strategy: muster.Strategy, loss: Tensor) -> Tensor:
    raise Broken(7)


def fail_in_backward(strategy: muster.Strategy, loss: Tensor) -> Tensor:
    return FailsInBackward.apply(loss, Broken(7))


def fail_in_a_hook(strategy: muster.Strategy, loss: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> None:
        raise Broken(7)

    loss = loss * 2
    loss.register_hook(hook)
    return loss * 2


def fail_while_peers_reduce(strategy: muster.Strategy, loss: Tensor) -> Tensor:
    raise Broken(7)


def fail_while_peers_differentiate(strategy: muster.Strategy, loss: Tensor) -> Tensor:
    raise Broken(7)


FAILURES: list[Callable[[muster.Strategy, Tensor], Tensor]] = [
    fail_at_once,
    fail_in_backward,
    fail_in_a_hook,
    fail_while_peers_reduce,
    fail_while_peers_differentiate,
]
WHILE_PEERS_WAIT = ("fail_while_peers_reduce", "fail_while_peers_differentiate")


def failing(strategy: muster.Strategy, failure: str, failing_replica: int, failing_call: int) -> Any:
    fail = next(fn for fn in FAILURES if fn.__name__ == failure)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, _ = strategy.prepare(module, torch.optim.Adam(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.randn(16, 4))
    mine = strategy.first_replica <= failing_replica < strategy.first_replica + len(strategy.devices)
    calls = 0
    raised = []

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if fail is fail_while_peers_differentiate:
            loss = loss + strategy.reduce(loss, "mean") * 0.1
        if calls == failing_call and strategy.replica == failing_replica:
            loss = fail(strategy, loss)
        if fail is fail_while_peers_differentiate:
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + 0.01 * sum(gradient.square().sum() for gradient in gradients)
        if fail is fail_while_peers_reduce:
            loss = loss + strategy.reduce(loss, "mean") * 0.1
        return loss

    for calls in range(12):
        try:
            strategy.step(step, x)
        except Broken as error:
            assert mine
            raised.append((calls, f"Broken with code {error.code}", getattr(error, "__notes__", [])))
        except muster.RemoteError as error:
            assert not mine
            raised.append((calls, error.type, error.text, error.rank, error.replica))
    return raised, [p.detach() for p in module.parameters()], strategy.steps, [b.double() for b in module.buffers()]


@pytest.mark.parametrize("failure", [fn.__name__ for fn in FAILURES])
@pytest.mark.parametrize(("accumulate", "call"), [(1, 2), (3, 3), (3, 4), (3, 5)])
def test_an_exception_reaches_every_rank_and_training_goes_on(
    job: Launcher, failure: str, accumulate: int, call: int
) -> None:
    failing_replica = job.replicas - 1
    results = job(failing, failure, failing_replica, call, accumulate=accumulate)
    window_end = call - call % accumulate + accumulate - 1
    for rank, (raised, parameters, steps, buffers) in enumerate(results):
        ((when, name, *rest),) = raised
        if rank == len(results) - 1:
            assert (when, name) == (call, "Broken with code 7")
            (notes,) = rest
            if failure in ("fail_at_once", *WHILE_PEERS_WAIT):
                assert len(notes) == 1 and f"replica {failing_replica} of {job.replicas}" in notes[0]
        else:
            assert name == "Broken"
            assert rest == ["broken 7", len(results) - 1, failing_replica]
            assert when == window_end or (failure in WHILE_PEERS_WAIT and when == call)
        assert steps == 12 // accumulate - 1
        assert all(np.isfinite(p).all() for p in parameters)
        for a, b in zip([*parameters, *buffers], [*results[0][1], *results[0][3]], strict=True):
            assert np.array_equal(a, b)


def everyone_fails(strategy: muster.Strategy) -> str:
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.ones(8, 4))

    def step(x: Tensor) -> Tensor:
        raise Broken(strategy.replica)

    for _ in range(3):
        with pytest.raises(Broken) as caught:
            strategy.step(step, x)
        assert caught.value.code == strategy.first_replica
    assert strategy.step(lambda x: model(x).mean(), x).stepped
    return "fine"


def test_every_replica_may_fail_at_once(job: Launcher) -> None:
    job(everyone_fails)


def two_workers_fail_in_one_window(strategy: muster.Strategy) -> None:
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    call = 0
    remote = []
    own = []

    def step(x: Tensor) -> Tensor:
        if call == strategy.rank:
            raise Broken(call)
        return model(x).mean()

    for call in range(6):
        try:
            strategy.step(step, torch.ones(2, 4))
        except Broken:
            own.append(call)
        except muster.RemoteError as error:
            remote.append((call, error.rank))
    assert own == [strategy.rank]
    assert remote == [(2, 1 - strategy.rank)]
    assert strategy.steps == 1


def test_two_workers_may_fail_in_one_window(worker_job: Launcher) -> None:
    worker_job(two_workers_fail_in_one_window, accumulate=3)


def drops_and_fails(strategy: muster.Strategy) -> list[bool]:
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    loader = strategy.prepare(torch.utils.data.DataLoader(data, batch_size=4))
    stepped = []
    call = -1

    def step(x: Tensor) -> Tensor:
        if call == 3 and strategy.replica == strategy.num_replicas - 1:
            raise Broken(call)
        return model(x).mean()

    for _ in range(2):
        for (x,) in loader:
            call += 1
            try:
                stepped.append(strategy.step(step, x).stepped)
            except Broken:
                stepped.append(False)
    return stepped


def test_a_failure_in_a_window_that_is_dropped_anyway_leaves_the_ranks_in_step(job: Launcher) -> None:
    for stepped in job(drops_and_fails, accumulate=3, drop_incomplete=True):
        assert stepped == [False, False, True, False] * 2


def failing_run(strategy: muster.Strategy) -> None:
    x = part_of(strategy, torch.ones(8, 4))
    last = strategy.num_replicas - 1

    def fn(x: Tensor) -> Any:
        if strategy.replica == last:
            raise Broken(1)
        return strategy.reduce(x.sum(), "sum")

    mine = last < strategy.first_replica + len(strategy.devices)
    with pytest.raises(Broken if mine else muster.RemoteError, match="broken 1"):
        strategy.run(fn, x)
    assert list(strategy.run(lambda x: float(strategy.reduce(x.sum(), "sum")), x)) == [32.0] * len(strategy.devices)


def test_an_exception_in_run_reaches_those_who_wait_for_it(wide_job: Launcher) -> None:
    wide_job(failing_run)


def unfinished_collective(strategy: muster.Strategy) -> None:
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.ones(8, 4))

    def step(x: Tensor) -> Tensor:
        loss = model(x).mean()
        return loss if strategy.replica == 0 else loss + strategy.reduce(loss, "sum")

    with pytest.raises((muster.LayoutMismatch, muster.RemoteError)):
        strategy.step(step, x)
    assert strategy.step(lambda x: model(x).mean(), x).stepped


def test_a_collective_that_only_some_replicas_issue_is_refused(wide_job: Launcher) -> None:
    wide_job(unfinished_collective)


# --- signals ----------------------------------------------------------------------------------------------------------
def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("who", ["all", "first", "peer-waits"])
def test_ctrl_c_stops_a_step_within_a_second_and_the_strategy_stays_usable(replicas: int, who: str) -> None:
    with muster.MirroredStrategy(["cpu"] * replicas, timeout=30) as strategy:
        module = nn.Linear(4, 1)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.ones(8, 4)

        def step(x: Tensor) -> Tensor:
            if strategy.replica == 0 or who == "all":
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    time.sleep(0.01)
            loss = model(x).mean()
            return loss + strategy.reduce(loss, "mean") if who == "peer-waits" else loss

        for _ in range(2):
            started = time.monotonic()
            timer = interrupt_after(0.3)
            with pytest.raises(KeyboardInterrupt):
                strategy.step(step, x)
            assert time.monotonic() - started < 1.3
            timer.join()
            for _ in range(3):
                assert strategy.step(lambda x: model(x).mean(), x).stepped
        assert strategy.steps == 6


TRACED = """
import os, signal, sys, threading, time
import torch, muster

module = torch.nn.Linear(4, 1)
with muster.MirroredStrategy(["cpu"] * 2) as strategy:
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    def step(x):
        while True:
            time.sleep(0.01)

    try:
        strategy.step(step, torch.ones(8, 4))
    except KeyboardInterrupt:
        print("interrupted")
    if sys.argv[1] == "goes on":
        strategy.step(lambda x: model(x).mean(), torch.ones(8, 4))
sys.setprofile(lambda *_: None)
(lambda: None)()
sys.setprofile(None)
print("traced")
"""


@pytest.mark.parametrize("then", ["goes on", "ends"])
def test_what_is_traced_after_an_interrupt_ends(then: str) -> None:
    """CPython 3.11 stays in the first call as long as an exception is raised in a thread that does not come to it."""
    command = [sys.executable, "-c", TRACED, then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["interrupted", "traced"]


def test_after_an_interrupt_the_strategy_waits_for_a_replica_that_hears_nothing() -> None:
    with muster.MirroredStrategy(["cpu"] * 2, timeout=30) as strategy:
        module = nn.Linear(4, 1)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.ones(8, 4)
        held = threading.Lock()
        ended = threading.Event()

        def step(x: Tensor) -> Tensor:
            try:
                if strategy.replica == 0:
                    held.acquire()
                return model(x).mean()
            finally:
                if strategy.replica == 0:
                    ended.set()

        with held:
            timer = interrupt_after(0.2)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                strategy.step(step, x)
            assert time.monotonic() - started < 1.5
            timer.join()
            with pytest.raises(muster.CommError, match="still running"):
                strategy.step(lambda x: model(x).mean(), x)
        assert ended.wait(20)
        deadline = time.monotonic() + 20
        while strategy._core.busy and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert strategy.step(lambda x: model(x).mean(), x).stepped


def waiting_for_a_late_peer(in_barrier: bool) -> tuple[str, float]:
    strategy = muster.MultiWorkerMirroredStrategy.from_env(timeout=30)
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.ones(8, 4)

    def join() -> None:
        strategy.barrier() if in_barrier else strategy.step(lambda x: model(x).mean(), x)

    join()
    started = time.monotonic()
    if strategy.is_chief:
        timer = interrupt_after(0.3)
        with pytest.raises(KeyboardInterrupt):
            join()
        timer.join()
        return "interrupted", time.monotonic() - started
    time.sleep(1.5)  # late on purpose
    with pytest.raises(muster.CommError) as caught:
        join()
    return str(caught.value), 0.0


@pytest.mark.parametrize("in_barrier", [False, True])
def test_ctrl_c_ends_a_wait_for_other_workers_within_a_second(in_barrier: bool) -> None:
    (text, seconds), (reason, _) = run_ranks(2, waiting_for_a_late_peer, in_barrier)
    assert text == "interrupted"
    assert seconds < 1.3
    assert "interrupted" in reason or "worker 0" in reason


def stopping(strategy: muster.Strategy, how: str, failing: bool) -> list[int]:
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.ones(8, 4))
    seen = []

    def step(x: Tensor) -> Tensor:
        if failing and call == 4 and strategy.replica == 0:
            raise Broken(4)
        return model(x).mean()

    for call in range(8):
        if call == 4 and strategy.rank == strategy.num_workers - 1:
            if how == "stop":
                strategy.stop()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
        try:
            strategy.step(step, x)
        except (Broken, muster.RemoteError):
            assert (failing and call == 5 - strategy.rank) or call == 5 or call == 4
        if strategy.stopping:
            seen.append(call)
    return seen


@pytest.mark.parametrize("failing", [False, True])
def test_stop_turns_true_on_all_ranks_at_the_same_windows_end(job: Launcher, failing: bool) -> None:
    for seen in job(stopping, "stop", failing, accumulate=2):
        assert seen == [5, 6, 7]


def test_sigterm_stops_all_ranks_at_the_same_windows_end() -> None:
    # A signal is for a whole process, so these processes serve no other test.
    pool = WorkerPool(2)
    try:
        launcher = Launcher("workers-2", 2, 1, pool)
        for seen in launcher(stopping, "sigterm", False, accumulate=2):
            assert seen == [5, 6, 7]
    finally:
        pool.close()


def raising_what_no_text_holds(strategy: muster.Strategy, error: Exception, told: str) -> None:
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.randn(8, 4))
    last = strategy.num_replicas - 1
    is_mine = strategy.first_replica <= last < strategy.first_replica + len(strategy.devices)

    def step(x: Tensor) -> Tensor:
        if strategy.replica == last:
            raise error
        return model(x).square().mean()

    for call in (strategy.step, strategy.run):
        expected = type(error) if is_mine else muster.RemoteError
        with contextlib.nullcontext() if call == strategy.run and not is_mine else pytest.raises(expected) as raised:
            call(step, x)
        if not is_mine and raised is not None:
            assert raised.value.type == type(error).__name__
            assert raised.value.text == told
    assert strategy.step(lambda x: model(x).square().mean(), x).stepped


@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError("bad \udcff name"), "bad \\udcff name"), (Unspeakable(), "(its __str__ raises)")],
    ids=["surrogates", "no text"],
)
def test_exceptions_without_a_plain_text_leave_the_strategy_usable(job: Launcher, error: Exception, told: str) -> None:
    job(raising_what_no_text_holds, error, told)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_an_option_that_an_optimizer_cannot_step_with_is_named(fuse: bool, kind: Any, has_stepped: bool) -> None:
    with muster.MirroredStrategy(["cpu"], fuse=fuse) as strategy:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model, optimizer = strategy.prepare(net, kind([{"params": layer.parameters()} for layer in net], lr=0.1))

        def step() -> muster.StepResult:
            return strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))

        if has_stepped:
            step()
        group = optimizer.param_groups[1]
        for name in ("lr", "weight_decay", "betas" if kind is torch.optim.AdamW else "lr"):
            good = group.pop(name)
            with pytest.raises(muster.InvalidArgument, match=f"'{name}' of group 1 of {kind.__name__} is missing"):
                step()
            for bad in ("high", None, [1.0]):
                group[name] = bad
                with pytest.raises(muster.InvalidArgument, match=f"'{name}' of group 1 of {kind.__name__} is ") as told:
                    step()
                assert repr(bad) in str(told.value)
                assert f"one like {good!r}; set optimizer.param_groups[1]['{name}']" in str(told.value)
            group[name] = good
        assert step().stepped
