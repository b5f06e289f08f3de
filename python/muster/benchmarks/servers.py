"""Processes that time training steps on command, so that one driver lets columns of several processes take turns."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Columns", "PythonServer", "Step", "end", "ports", "turn"]

Step = Callable[[], object]
Columns = AbstractContextManager[dict[str, Step]]


class PythonServer:
    """A spawned process with the columns that `make(*arguments)` opens; it closes them at its end."""

    def __init__(self, make: Callable[..., Columns], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, column: str, steps: int) -> None:
        """Lets the column make one untimed step and so many timed ones, without waiting for them."""
        self._connection.send((column, steps))

    def answer(self) -> list[float]:
        """Milliseconds of each timed step. Raises RuntimeError where the process has failed."""
        try:
            return list(self._connection.recv())
        except EOFError:
            raise RuntimeError("a measured process ended early; what it printed says why") from None

    def end(self) -> None:
        """Lets the process end; join() waits for it."""
        self._connection.close()

    def join(self) -> None:
        """Raises RuntimeError where the process failed."""
        self._process.join()
        if self._process.exitcode != 0:
            raise RuntimeError("a measured process failed at its end; what it printed says why")


def turn(servers: Sequence[PythonServer], column: str, steps: int) -> list[float]:
    """All servers' processes make the steps together: the mean over them of each step's milliseconds."""
    for server in servers:
        server.ask(column, steps)
    answers = [server.answer() for server in servers]
    return [statistics.fmean(step) for step in zip(*answers, strict=True)]


def end(servers: Sequence[PythonServer]) -> None:
    """Ends all together, since what they do at their end may be collective. Raises RuntimeError where one failed."""
    for server in servers:
        server.end()
    for server in servers:
        server.join()


def ports(count: int) -> Iterator[int]:
    """Free ones."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    yield from [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()


def _serve(connection: Connection, make: Callable[..., Columns], arguments: tuple[Any, ...]) -> None:
    with make(*arguments) as columns:
        while True:
            try:
                column, steps = connection.recv()
            except EOFError:
                return
            connection.send(_milliseconds(columns[column], steps))


def _milliseconds(step: Step, steps: int) -> list[float]:
    step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return times
