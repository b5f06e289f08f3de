"""muster run: the workers and the parameter servers of a job, on this host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from muster._C import _server
from muster.errors import PeerLost
from muster.serve import LOOK

__all__ = ["run"]

TRIES = 10.0
"""Seconds that a server which was started again has to live for that to be done once more."""
LAST_SNAPSHOT = 120.0
"""Seconds that a server may go on at its end without reading or writing anything of snapshots."""
ORPHANS = 30.0
"""Seconds that workers without torchrun's agent have to end, as with it."""
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ELF = b"\x7fELF"
"""How an executable begins (elf(5))."""


class Server:
    """A process of `muster serve`, at one address through all its lives."""

    def __init__(self, address: str, snapshots: Path | None) -> None:
        self.address = address
        self._snapshots = snapshots
        self._listens_since: float | None = None
        self._is_restarted = False
        self._is_lost = False
        self._moved = 0
        self._last_progress = 0.0
        self._is_killed = False
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "muster", "serve", "--address", self.address, "--until-stdin-ends"]
        if self._snapshots is not None:
            command += ["--snapshots", str(self._snapshots)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def listens(self) -> bool:
        """Whether workers can reach it; starts it again where it died. Raises PeerLost where that is no use."""
        assert self._process.stdout is not None
        is_said = self._listens_since is None and select.select([self._process.stdout], [], [], 0)[0]
        if is_said and self._process.stdout.readline():
            self._listens_since = time.monotonic()
        if (code := self._process.poll()) is not None:
            self._start_again(code)
        return self._listens_since is not None

    def _start_again(self, code: int) -> None:
        died = self._died(code)
        self._is_lost = True
        if self._listens_since is None:
            raise PeerLost(f"{died} before it listened; what it printed says why")
        if self._snapshots is None:
            raise PeerLost(f"{died}, and what it held with it; with --snapshots FOLDER it would be started again")
        if self._is_restarted and time.monotonic() - self._listens_since < TRIES:
            raise PeerLost(f"{died} again, soon after it was started again; what it printed says why")
        _say(f"{died}; it is started again from {self._snapshots}")
        self._is_lost, self._is_restarted, self._listens_since = False, True, None
        self.close()
        self._start()

    def _died(self, code: int) -> str:
        return f"parameter server {self.address} died ({_describe(code)})"

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask_to_end(self) -> bool:
        """Returns whether an end is to come."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._last_progress = time.monotonic()
        return not self._is_lost

    def has_ended(self) -> bool:
        """After ask_to_end(). Kills it where it has made no progress for too long."""
        if self._process.poll() is not None:
            return True
        moved = _bytes_moved(self._process.pid)
        if moved > self._moved:
            self._moved, self._last_progress = moved, time.monotonic()
        elif time.monotonic() - self._last_progress > LAST_SNAPSHOT:
            self.kill(f"wrote nothing for {LAST_SNAPSHOT:g} s at its end")
        return False

    def kill(self, why: str) -> None:
        """After ask_to_end(). Once."""
        if self._is_killed:
            return
        _say(f"parameter server {self.address} {why}, and is killed")
        self._process.kill()
        self._is_killed = True

    def ended_well(self) -> bool:
        """After has_ended()."""
        self.close()
        code = self._process.returncode
        if code != 0 and self._listens_since is None:
            _say(f"{self._died(code)} before it listened; what it printed says why")
        elif code != 0:
            _say(f"parameter server {self.address} failed at its end ({_describe(code)}); its last snapshot may be old")
        return code == 0

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def run(
    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM", help="The training script, with -m the module, with --no-python any program."
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Its arguments.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    servers: Annotated[int, typer.Option(min=0, max=256, help="Parameter servers.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="PROGRAM is a module.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="PROGRAM is started as it is, without Python: a C++ one.")
    ] = False,
    snapshots: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder of the servers' snapshots: a server that dies is started again, and so is a job.",
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all workers are started again after one has failed.")
    ] = 0,
    bind: Annotated[
        Literal["none", "numa", "cores"],
        typer.Option(
            help="Give each worker the cores of its memory node, or cores of its own, and one GPU if there are any."
        ),
    ] = "none",
) -> None:
    """Runs a training script, or a program, with parameter servers on this host; ends with the workers' exit code."""
    kind = _kind(program, module, no_python)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    # What outlives torchrun's agent becomes a child of this process, which can end it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    running: list[Server] = []
    try:
        for index, address in enumerate(_free_addresses(servers)):
            running.append(Server(address, snapshots and snapshots / f"server-{index}"))
        command = [str(workers), str(max_restarts), bind, kind, program, *(arguments or [])]
        code = _train(command, running, signals)
    except PeerLost as error:
        _say(str(error))
        code = 1
    finally:
        fine = _end_servers(running, signals)
    raise typer.Exit(code or (0 if fine else 1))


def _kind(program: str, module: bool, no_python: bool) -> str:
    """As muster.agent takes it. Raises typer.BadParameter for what cannot be started so."""
    if module and no_python:
        raise typer.BadParameter("a module is Python: give -m or --no-python, not both", param_hint="--no-python")
    if module:
        return "module"
    if no_python:
        if shutil.which(program) is None:
            there = os.path.isfile(program)
            remedy = f"make it so: chmod +x {program}" if there else "give its path, or one that PATH leads to"
            if there and os.sep not in program and os.access(program, os.X_OK):
                remedy = f"one of this folder is ./{program}"
            raise typer.BadParameter(f"{program} is no program that can be executed; {remedy}", param_hint="PROGRAM")
        return "program"
    with contextlib.suppress(OSError), open(program, "rb") as file:  # Python says best why it cannot read a script
        if file.read(len(ELF)) == ELF:
            raise typer.BadParameter(f"{program} is no script; start it with --no-python", param_hint="PROGRAM")
    return "script"


def _free_addresses(count: int) -> Iterable[str]:
    addresses: dict[str, None] = {}
    while len(addresses) < count:
        addresses[_server.free_address()] = None
    return addresses


def _train(command: list[str], servers: list[Server], signals: list[int]) -> int:
    """Runs the workers once all servers listen; returns their exit code. Raises PeerLost, when they have ended."""
    environment = {name: value for name, value in os.environ.items() if name != "MUSTER_SERVERS"}
    environment.setdefault("MUSTER_JOB", uuid.uuid4().hex)
    if servers:
        environment["MUSTER_SERVERS"] = ",".join(server.address for server in servers)
    # In a session of its own it gets each signal once, from here; torch's agent drops its workers at a second one.
    # It imports torch while the servers do, and begins when it is told.
    told, tell = os.pipe()
    agent = subprocess.Popen(
        [sys.executable, "-P", "-m", "muster.agent", str(os.getpid()), str(told), *command],
        env=environment,
        start_new_session=True,
        pass_fds=[told],
    )
    os.close(told)
    died: PeerLost | None = None
    has_begun = asked_to_end = False
    while (code := agent.poll()) is None:
        listening: list[bool] = []
        if died is None:  # workers that end save before
            try:
                listening = [server.listens() for server in servers]
            except PeerLost as error:
                died = error
        if not asked_to_end:
            if asked_to_end := bool(signals) or died is not None:
                number = signals[0] if signals else signal.SIGTERM
                agent.send_signal(number if has_begun else signal.SIGKILL)  # it has no workers yet
            elif all(listening) and not has_begun:
                with contextlib.suppress(BrokenPipeError):  # its exit code says why
                    os.write(tell, b"begin")
                has_begun = True
        time.sleep(LOOK)
    os.close(tell)
    if asked_to_end or code < 0:
        _end_orphans({server.pid for server in servers})
    if died is not None and not signals:
        raise died
    if died is not None:
        _say(str(died))
    if asked_to_end and not has_begun:
        return 128 + signals[0]
    if code < 0 and not asked_to_end:
        _say(f"torchrun's agent died ({_describe(code)}), and the job with it; the system's log may say why")
    return code if code >= 0 else 128 - code


def _end_servers(servers: list[Server], signals: list[int]) -> bool:
    """Waits for their last snapshots; who sends another signal meanwhile will not wait."""
    heard = len(signals)
    asked = [server for server in servers if server.ask_to_end()]
    while remaining := [server for server in asked if not server.has_ended()]:
        if len(signals) > heard:
            for server in remaining:
                server.kill("was still writing its last snapshot at another signal")
        time.sleep(LOOK)
    fine = [server.ended_well() for server in asked]
    return all(fine)


def _bytes_moved(pid: int) -> int:
    """Read and written by a process, of files of any kind; 0 where the system does not say (proc_pid_io(5))."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"])
    return 0


def _end_orphans(known: set[int]) -> None:
    deadline = time.monotonic() + ORPHANS
    asked: set[int] = set()
    while (orphans := _children() - known) and time.monotonic() < deadline + ORPHANS:
        is_late = time.monotonic() > deadline
        for pid in orphans if is_late else orphans - asked:
            os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        asked |= orphans
        for pid in orphans:
            os.waitpid(pid, os.WNOHANG)
        time.sleep(LOOK)


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():  # the name may be cut anywhere
                found.add(int(stat.parent.name))
    return found


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"


def _say(text: str) -> None:
    typer.echo(f"muster run: {text}", err=True)
