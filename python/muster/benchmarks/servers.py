"""Processes that time training steps on command, so that one driver lets columns of several processes take turns.

They are Python's, forked from one that has done nothing yet, or C++ programs that were built from benchmarks/cpp.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

__all__ = ["Columns", "Cpp", "CppServer", "PythonServer", "Server", "Step", "cpp_folder", "end", "turn"]

SERVE_STEPS = "serve_steps"
ENDED_EARLY = "a measured process ended early; what it printed says why"
FAILED_AT_ITS_END = "a measured process failed at its end; what it printed says why"

Cpp = Annotated[Path | None, typer.Option(help="Folder where benchmarks/cpp is built.", file_okay=False)]
Step = Callable[[], object]
Columns = AbstractContextManager[dict[str, Step]]


class Server(Protocol):
    """A process with columns."""

    def ask(self, column: str, steps: int) -> None:
        """Lets the column make one untimed step and so many timed ones, without waiting for them."""

    def answer(self) -> list[float]:
        """Milliseconds of each timed step. Raises RuntimeError where the process has failed."""

    def end(self) -> None:
        """Lets the process end; join() waits for it."""

    def join(self) -> None:
        """Raises RuntimeError where the process failed."""


class PythonServer:
    """A process with the columns that `make(*arguments)` opens; it closes them at its end."""

    def __init__(self, make: Callable[..., Columns], *arguments: Any) -> None:
        # Of a server that has imported torch once, and done nothing else.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["muster"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, column: str, steps: int) -> None:
        self._connection.send((column, steps))

    def answer(self) -> list[float]:
        try:
            return list(self._connection.recv())
        except EOFError:
            raise RuntimeError(ENDED_EARLY) from None

    def end(self) -> None:
        self._connection.close()

    def join(self) -> None:
        self._process.join()
        if self._process.exitcode != 0:
            raise RuntimeError(FAILED_AT_ITS_END)


class CppServer:
    """The program serve_steps of a folder where benchmarks/cpp is built; its source says what it takes."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        command = [str(folder / SERVE_STEPS), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def ask(self, column: str, steps: int) -> None:
        self._questions.write(f"{column} {steps}\n")
        self._questions.flush()

    def answer(self) -> list[float]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(ENDED_EARLY)
        return [float(milliseconds) for milliseconds in line.split()]

    def end(self) -> None:
        self._questions.close()

    def join(self) -> None:
        self._answers.close()
        if self._process.wait() != 0:
            raise RuntimeError(FAILED_AT_ITS_END)


def cpp_folder(folder: Path | None) -> Path | None:
    """The folder, checked and announced. Raises typer.BadParameter where nothing is built in it."""
    if folder is None:
        typer.echo("C++ is left out; build benchmarks/cpp as its CMakeLists.txt says, and pass --cpp FOLDER", err=True)
    elif not (folder / SERVE_STEPS).is_file():
        raise typer.BadParameter(f"{folder} has no {SERVE_STEPS}; build benchmarks/cpp there", param_hint="--cpp")
    return folder


def turn(servers: Sequence[Server], column: str, steps: int) -> list[list[float]]:
    """All servers' processes make the steps together: each step's milliseconds, by process."""
    for server in servers:
        server.ask(column, steps)
    answers = [server.answer() for server in servers]
    return [list(step) for step in zip(*answers, strict=True)]


def end(servers: Sequence[Server]) -> None:
    """Ends all together, since what they do at their end may be collective. Raises RuntimeError where one failed."""
    for server in servers:
        server.end()
    for server in servers:
        server.join()


def _serve(connection: Connection, make: Callable[..., Columns], arguments: tuple[Any, ...]) -> None:
    # A driver that fails ends its processes by SIGTERM, which strategies would take for stop().
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
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
