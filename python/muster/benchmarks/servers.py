"""Processes that time training steps on command, so that one driver lets columns of several processes take turns.

They are Python's, forked from one that has done nothing yet, or C++ programs that were built from benchmarks/cpp.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

__all__ = ["Cpp", "CppServer", "PythonServer", "Running", "Server", "Step", "cpp_folder"]

SERVE_STEPS = "serve_steps"
ENDED_EARLY = "a measured process ended early; what it printed says why"
FAILED_AT_ITS_END = "a measured process failed at its end; what it printed says why"
STANDS_STILL = 400.0
"""Seconds after which a process of Python that has not answered, begun or ended prints where it stands, and ends."""

Cpp = Annotated[Path | None, typer.Option(help="Folder where benchmarks/cpp is built.", file_okay=False)]
Step = Callable[[], object]
Columns = AbstractContextManager[dict[str, Step]]


class Server(Protocol):
    """A process with columns."""

    def ask(self, column: str, steps: int) -> None:
        """Lets the column make one untimed step and so many timed ones, without waiting for them."""

    def fileno(self) -> int:
        """Of what can be read once there is an answer, or the process has ended; see select()."""

    def answer(self) -> list[float]:
        """Milliseconds of each timed step. Raises RuntimeError where the process has ended."""

    def end(self) -> None:
        """Lets the process end."""

    def exit_code(self) -> int | None:
        """None while the process runs."""

    def kill(self) -> None:
        """Ends the process at once, whatever it waits for, and waits for its end."""


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

    def fileno(self) -> int:
        return self._connection.fileno()

    def answer(self) -> list[float]:
        try:
            return list(self._connection.recv())
        except (EOFError, ConnectionError):
            raise RuntimeError(ENDED_EARLY) from None

    def end(self) -> None:
        self._connection.close()

    def exit_code(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


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

    def fileno(self) -> int:
        return self._answers.fileno()

    def answer(self) -> list[float]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(ENDED_EARLY)
        return [float(milliseconds) for milliseconds in line.split()]

    def end(self) -> None:
        self._questions.close()

    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with contextlib.suppress(BrokenPipeError):  # of what was not read
            self._questions.close()


def cpp_folder(folder: Path | None) -> Path | None:
    """The folder, checked and announced. Raises typer.BadParameter where nothing is built in it."""
    if folder is None:
        typer.echo("C++ is left out; build benchmarks/cpp as its CMakeLists.txt says, and pass --cpp FOLDER", err=True)
    elif not (folder / SERVE_STEPS).is_file():
        raise typer.BadParameter(f"{folder} has no {SERVE_STEPS}; build benchmarks/cpp there", param_hint="--cpp")
    return folder


class Running:
    """Servers that may wait for one another, until the end of a with statement. There it lets all end together, since
    what they do at their end may be collective, and waits for it; where one of them, or this process, has failed, it
    ends them at once. Raises RuntimeError where one failed."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            for server in self._servers:
                server.kill()

    def turn(self, servers: Sequence[Server], column: str, steps: int) -> list[list[float]]:
        """The processes of these servers make the steps together: each step's milliseconds, by process."""
        with contextlib.suppress(ConnectionError):  # of one that has ended
            for server in servers:
                server.ask(column, steps)
        answers: dict[Server, list[float]] = {}
        while len(answers) < len(servers):
            for server in select.select(self._servers, [], [])[0]:
                if server in answers or server not in servers:
                    raise RuntimeError(ENDED_EARLY)  # nobody asked it
                answers[server] = server.answer()
        return [list(step) for step in zip(*(answers[server] for server in servers), strict=True)]

    def _end(self) -> None:
        for server in self._servers:
            server.end()
        while (codes := [server.exit_code() for server in self._servers]).count(0) < len(codes):
            if any(codes):
                raise RuntimeError(FAILED_AT_ITS_END)
            time.sleep(0.02)


def _serve(connection: Connection, make: Callable[..., Columns], arguments: tuple[Any, ...]) -> None:
    # A driver that fails ends its processes by SIGTERM, which strategies would take for stop().
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    faulthandler.dump_traceback_later(STANDS_STILL, exit=True)
    with make(*arguments) as columns:
        while True:
            faulthandler.cancel_dump_traceback_later()  # the driver may take its time
            try:
                column, steps = connection.recv()
            except EOFError:
                break
            faulthandler.dump_traceback_later(STANDS_STILL, exit=True)
            connection.send(_milliseconds(columns[column], steps))
        faulthandler.dump_traceback_later(STANDS_STILL, exit=True)


def _milliseconds(step: Step, steps: int) -> list[float]:
    step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return times
