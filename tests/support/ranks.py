"""Real processes as ranks of a job, for tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from muster.free_ports import free_ports


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    return free_ports(1)[0]


def hear_interrupts() -> None:
    """What a shell runs in the background ignores SIGINT, and so do its children: tests of Ctrl-C need it heard."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def process_context() -> Any:
    """Processes of it have imported what most tests do before they begin, which takes seconds in each otherwise. Their
    environment is that of the first one's start, unless they are given another."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "muster", "pytest", "sklearn.datasets"])
    return context


def _main(variables: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...], result: Connection) -> None:
    os.environ.update(variables)
    hear_interrupts()
    try:
        result.send((True, fn(*args)))
    except BaseException:
        result.send((False, traceback.format_exc()))
    result.close()


class Ranks:
    """`num_ranks` processes running ``fn(*args)``; results come back by rank."""

    def __init__(self, num_ranks: int, fn: Callable[..., Any], *args: Any) -> None:
        self._context = process_context()
        self._port = free_port()
        self._num_ranks = num_ranks
        self._work = (fn, args)
        started = [self._start(rank) for rank in range(num_ranks)]
        self.processes = [process for process, _ in started]
        self._pipes = [pipe for _, pipe in started]

    def _start(self, rank: int) -> tuple[Any, Connection]:
        receiver, sender = self._context.Pipe(duplex=False)
        variables = self.variables(rank)
        process = self._context.Process(target=_main, args=(variables, *self._work, sender), daemon=True)
        process.start()
        sender.close()
        return process, receiver

    def variables(self, rank: int) -> dict[str, str]:
        """The environment of a rank."""
        return {**os.environ, **environment(rank, self._num_ranks, self._port)}

    def restart(self, *ranks: int, timeout: float = 60) -> None:
        """Waits for the end of these ranks, and starts them again in the same environment."""
        for rank in ranks:
            self.processes[rank].join(timeout)
            assert self.processes[rank].exitcode is not None, f"rank {rank} lives on"
        for rank in ranks:
            self.replace(rank)

    def replace(self, rank: int) -> None:
        """Starts a rank again whatever became of its process, whose result is lost."""
        self.processes[rank], self._pipes[rank] = self._start(rank)

    def results(self, timeout: float = 240) -> list[Any]:
        """Each rank's result, or the exception that a rank raised as text; a rank that was killed gives None."""
        results: list[Any] = [None] * len(self._pipes)
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        try:
            while waiting:
                ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish in {timeout} s")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = waiting.pop(pipe)
                    try:
                        fine, results[rank] = pipe.recv()
                    except EOFError:
                        continue
                    if not fine:
                        raise AssertionError(f"rank {rank} failed:\n{results[rank]}")
        finally:
            for process in self.processes:
                if process.is_alive() and waiting:
                    process.kill()
            for process in self.processes:
                process.join(10)
        return results


def run_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """Runs ``fn(*args)`` in `num_ranks` processes with torchrun's variables set; the results by rank."""
    return Ranks(num_ranks, fn, *args).results(timeout)
