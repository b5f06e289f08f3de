"""What a process keeps of a strategy that it leaves, and what its children get: signals, sockets, memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muster
from support.ranks import environment, free_port, hear_interrupts, process_context, run_ranks


def exit_code_of(fn: Callable[..., None], *args: Any) -> int:
    """Of a process that calls it."""
    process = process_context().Process(target=fn, args=args)
    process.start()
    process.join(30)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join(10)
        raise AssertionError("the process did not end")
    return int(code)


def mirrored() -> tuple[muster.Strategy, nn.Module]:
    strategy = muster.MirroredStrategy(["cpu"] * 2, timeout=20.0)
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return strategy, model


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def wait_for_ever() -> None:
    threading.Event().wait(60)


def with_a_forked_child() -> None:
    strategy, _ = mirrored()
    child = multiprocessing.get_context("fork").Process(target=wait_for_ever, daemon=True)
    child.start()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM, child.exitcode
    # This process itself still takes it for stop().
    terminate()
    assert not strategy.closed


def test_a_forked_child_ends_at_sigterm() -> None:
    assert exit_code_of(with_a_forked_child) == 0


def with_open_strategies(num_closed: int) -> None:
    strategies = [mirrored()[0], mirrored()[0]]
    for strategy in strategies[:num_closed]:
        strategy.close()
    terminate()


@pytest.mark.parametrize(("num_closed", "code"), [(1, 0), (2, -signal.SIGTERM)])
def test_sigterm_has_its_default_action_once_no_strategy_is_open(num_closed: int, code: int) -> None:
    assert exit_code_of(with_open_strategies, num_closed) == code


def with_a_handler_of_its_own() -> None:
    strategy, _ = mirrored()
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    strategy.close()
    terminate()
    assert heard == [1]


def test_close_leaves_a_handler_of_the_users_alone() -> None:
    assert exit_code_of(with_a_handler_of_its_own) == 0


def training(looks_after: int, terminated_at: int) -> None:
    """Five steps, of which those from a number on are followed by a look at `stopping`."""
    strategy, model = mirrored()
    x = torch.ones(4, 4)
    for step in range(5):
        if step == terminated_at:
            terminate()
        strategy.step(lambda x: model(x).mean(), x)
        if step >= looks_after and strategy.stopping:
            os._exit(7)
    os._exit(8)


@pytest.mark.parametrize(
    ("looks_after", "terminated_at", "code"),
    [
        (0, 0, 7),
        (0, 3, 7),
        (2, 3, 7),
        (9, 0, -signal.SIGTERM),
        (9, 3, -signal.SIGTERM),
        (9, 9, 8),
    ],
)
def test_sigterm_ends_a_program_that_never_looks_at_stopping(looks_after: int, terminated_at: int, code: int) -> None:
    assert exit_code_of(training, looks_after, terminated_at) == code


def listening_inodes(port: int) -> set[str]:
    """Sockets that listen at a port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def descriptors_of_a_program() -> tuple[bool, bool]:
    """Whether somebody listens where workers met, and whether a program that was executed since holds that socket."""
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=20.0) as strategy:
        listening = listening_inodes(int(os.environ["MASTER_PORT"]))
        with subprocess.Popen(["sleep", "60"], close_fds=False) as program:
            held = {os.readlink(link) for link in Path(f"/proc/{program.pid}/fd").iterdir()}
            program.kill()
        strategy.barrier()
        return bool(listening), bool(listening & held)


def test_a_program_that_is_executed_does_not_inherit_the_port() -> None:
    assert run_ranks(2, descriptors_of_a_program) == [(True, False)] * 2


def shared_memory_in_core_dumps() -> list[str]:
    """Shared mappings that a core dump would have."""
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=20.0) as strategy:
        module = nn.Linear(512, 512)
        model, _ = strategy.prepare(module, torch.optim.Adam(module.parameters()))
        strategy.step(lambda x: model(x).square().mean(), torch.randn(8, 512))
        lines = Path("/proc/self/smaps").read_text().splitlines()
        strategy.barrier()
    dumped = []
    name = ""
    num_ours = 0
    for line in lines:
        first = line.partition(" ")[0]
        if not first.endswith(":"):
            name = line
        elif first == "VmFlags:" and "memfd:muster" in name:
            num_ours += 1
            if "dd" not in line.split():
                dumped.append(name)
    assert num_ours > 3
    return dumped


def test_core_dumps_leave_shared_memory_out() -> None:
    assert run_ranks(2, shared_memory_in_core_dumps) == [[], []]


def meeting_alone(rank: int, port: int) -> None:
    os.environ.update(environment(rank, 2, port))
    hear_interrupts()
    threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        muster.MultiWorkerMirroredStrategy.from_env(timeout=20.0)
    assert time.monotonic() - started < 1.5


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_wait_for_workers_to_meet(rank: int) -> None:
    assert exit_code_of(meeting_alone, rank, free_port()) == 0
