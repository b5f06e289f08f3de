"""A worker that gives up on others or leaves: what it has is its own then, and errors say whether it is whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from support.ranks import Ranks, process_context, run_ranks

STEPS_BEFORE = 3


def shared(tensors: list[Tensor]) -> list[bool]:
    """Whether each lies in memory that other processes map, too."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:muster" in line:
            first, _, last = line.partition(" ")[0].partition("-")
            ranges.append((int(first, 16), int(last, 16)))
    return [any(first <= tensor.data_ptr() < last for first, last in ranges) for tensor in tensors]


def memory_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, and the state that workers of a host share."""
    return [
        *module.parameters(),
        *(values[name] for values in optimizer.state.values() for name in values if name != "step"),
    ]


def values_of(tensors: list[Tensor]) -> list[Any]:
    return [tensor.detach().clone() for tensor in tensors]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class Job:
    """A worker's strategy, model and optimizer, some steps on."""

    def __init__(self, *, steps: int = STEPS_BEFORE, timeout: float = 2.0) -> None:
        torch.manual_seed(0)
        self.strategy = muster.MultiWorkerMirroredStrategy.from_env(timeout=timeout, threads_per_replica=1)
        self.module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
        self.model, self.optimizer = self.strategy.prepare(
            self.module, torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        )
        self.x = torch.randn(8, 256)
        for _ in range(steps):
            self.step()

    def step(self) -> muster.StepResult:
        return self.strategy.step(lambda x: self.model(x).square().mean(), self.x + self.strategy.rank)

    def memory(self) -> list[Tensor]:
        return memory_of(self.module, self.optimizer)


def before_stepping(strategy: muster.Strategy, call: Callable[[], object]) -> None:
    """Calls `call` once in the next step of this process: when its window has ended, and the optimizer has not stepped.

    Signals are looked at there; the next one is sent so soon after each look that one is always pending."""
    steps = strategy.steps
    looks, delay = 0, 1e-5  # seconds

    def send_soon() -> None:
        # Once: signals at an interval would be handled within one another on a slow machine, without end.
        signal.setitimer(signal.ITIMER_REAL, delay)

    def look(*_: object) -> None:
        nonlocal looks, delay
        looks += 1
        if looks > 1:  # the machine is so slow that the next signal came before the look ended
            delay *= 2
        if strategy.steps > steps:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            call()
        else:
            send_soon()
        looks -= 1

    signal.signal(signal.SIGALRM, look)
    send_soon()


def with_a_late_peer(place: str, gave_up: Any, has_tried: Any) -> tuple[Any, ...]:
    """Rank 1 comes to a place of a step once rank 0 has given up on it."""
    job = Job()
    strategy = job.strategy
    if strategy.rank == 1:
        if place == "before it steps":
            before_stepping(strategy, lambda: gave_up.wait(30))
        else:
            job.model.module.register_forward_pre_hook(lambda *_: gave_up.wait(30) and None)
        with pytest.raises(muster.CommError) as caught:
            job.step()
        has_tried.set()
        return caught.value.parameters, *shared(job.memory())
    before = values_of(job.memory())
    assert all(shared(job.memory()))
    with pytest.raises(muster.Timeout) as caught:
        job.step()
    is_as_before = equal(job.memory(), before)
    after = values_of(job.memory())
    strategy.close()
    gave_up.set()
    assert has_tried.wait(30)
    steps = {float(values["step"]) for values in job.optimizer.state.values()}
    is_alone = not any(shared(job.memory()))
    return (
        caught.value.parameters,
        caught.value.parameters in str(caught.value),
        is_as_before,
        is_alone,
        equal(job.memory(), after),
        steps,
    )


def test_a_late_worker_stores_nothing_into_one_that_gave_up() -> None:
    context = process_context()
    results = Ranks(2, with_a_late_peer, "before it steps", context.Event(), context.Event()).results(60)
    parameters, _, is_as_before, is_alone, is_unchanged, _ = results[0]
    assert (parameters, is_as_before, is_alone, is_unchanged) == ("torn", False, True, True)
    assert results[1][0] == "torn"
    assert not any(results[1][1:])


def test_parameters_are_whole_where_nobody_had_begun_to_step() -> None:
    context = process_context()
    results = Ranks(2, with_a_late_peer, "in forward", context.Event(), context.Event()).results(60)
    assert results[0] == ("whole", True, True, True, True, {float(STEPS_BEFORE)})
    assert results[1][0] == "whole"
    assert not any(results[1][1:])


def with_a_peer_that_dies_before_the_first_step() -> tuple[Any, ...] | None:
    job = Job(steps=0, timeout=120.0)  # the other process may be slow to reach the step in which it dies
    if job.strategy.rank == 1:
        before_stepping(job.strategy, lambda: os._exit(0))
    before = values_of(list(job.module.parameters()))
    with pytest.raises(muster.PeerLost) as caught:
        job.step()
    assert caught.value.rank == 1
    steps = [float(values["step"]) for values in job.optimizer.state.values()]
    return caught.value.parameters, equal(list(job.module.parameters()), before), steps, *shared(job.memory())


def test_a_first_step_that_nobody_began_leaves_no_state() -> None:
    parameters, is_as_before, steps, *are_shared = run_ranks(2, with_a_peer_that_dies_before_the_first_step)[0]
    assert (parameters, is_as_before, any(steps), any(are_shared)) == ("whole", True, False, False)


def after_close() -> tuple[bool, bool, bool]:
    """What a forked child writes, and whether anything stays shared or changes with close()."""
    job = Job()
    memory = job.memory()
    before = values_of(memory)
    job.strategy.close()
    is_kept = equal(memory, before) and equal(job.memory(), before)
    is_alone = not any(shared(job.memory()))
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            next(job.module.parameters())[0, 0] = 7  # one element: torch's threads are not here
        os._exit(0)
    os.waitpid(child, 0)
    return is_kept, is_alone, equal(job.memory(), before)


def test_after_close_parameters_and_state_are_the_processs_own() -> None:
    assert run_ranks(2, after_close) == [(True, True, True)] * 2


def test_errors_outside_of_steps_say_whole() -> None:
    assert muster.PeerLost("gone", 1).parameters == "whole"
    assert muster.Timeout("late").parameters == "whole"
