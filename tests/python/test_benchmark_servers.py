"""Processes that time steps for a driver: none is left, or waited for, where one of them has failed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from muster.benchmarks import servers as benchmark_servers
from muster.benchmarks.servers import CppServer, PythonServer, Running, Server, Step
from muster.free_ports import free_ports


@contextlib.contextmanager
def meeting(port: int, at_the_end: bool, process_ids: Path) -> Iterator[dict[str, Step]]:
    """One that waits, where no signal is heard, for a process that never comes."""
    (process_ids / str(os.getpid())).touch()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    if not at_the_end:
        store.wait(["never set"])
    yield {"a": lambda: None}
    store.wait(["never set"])


@contextlib.contextmanager
def failing(at_the_end: bool) -> Iterator[dict[str, Step]]:
    if not at_the_end:
        os._exit(1)
    yield {"a": lambda: None}
    os._exit(1)


@contextlib.contextmanager
def standing_still() -> Iterator[dict[str, Step]]:
    benchmark_servers.STANDS_STILL = 0.5
    yield {"a": lambda: time.sleep(60)}


def lives(process_id: int) -> bool:
    state = Path(f"/proc/{process_id}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("at_the_end", "error"), [(False, "ended early"), (True, "failed at its end")])
def test_a_process_that_failed_ends_those_that_wait_for_it(tmp_path: Path, at_the_end: bool, error: str) -> None:
    (port,) = free_ports(1)
    servers = [PythonServer(meeting, port, at_the_end, tmp_path), PythonServer(failing, at_the_end)]
    with pytest.raises(RuntimeError, match=error), Running(servers) as running:
        running.turn(servers[:1], "a", 1)
    waiting = [int(file.name) for file in tmp_path.iterdir()]
    assert len(waiting) <= 1
    assert not any(map(lives, waiting))


def test_a_driver_that_failed_ends_its_processes(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    servers = [PythonServer(meeting, port, True, tmp_path)]
    with pytest.raises(KeyboardInterrupt), Running(servers) as running:
        assert len(running.turn(servers, "a", 3)) == 3
        raise KeyboardInterrupt
    (waiting,) = [int(file.name) for file in tmp_path.iterdir()]
    assert not lives(waiting)


def test_a_process_that_stands_still_is_not_waited_for() -> None:
    servers = [PythonServer(standing_still)]
    with pytest.raises(RuntimeError, match="ended early"), Running(servers) as running:
        running.turn(servers, "a", 1)


@pytest.mark.parametrize(
    ("script", "error"),
    [("exit 1", "ended early"), ("read question; echo 0.5; cat > /dev/null; exit 1", "failed at its end")],
)
def test_a_program_that_failed_is_told_of(tmp_path: Path, script: str, error: str) -> None:
    program = tmp_path / "serve_steps"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    servers: list[Server] = [CppServer(tmp_path)]
    with pytest.raises(RuntimeError, match=error), Running(servers) as running:
        time.sleep(0.2)  # the question finds a pipe that is broken, or an end
        assert running.turn(servers, "a", 1) == [[0.5]]
