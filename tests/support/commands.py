"""Commands as real processes, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = "MUSTER_TEST_MARK"


def needs(programs: Sequence[str], packages: str) -> None:
    """Skips where they are not installed, but not in CI, whose set-up installs them (tools/setup_system.sh)."""
    if programs and os.environ.get("CI") != "true":
        import pytest  # which processes that tests start do without

        pytest.skip(f"{', '.join(programs)} not found: apt-get install {packages}")


class Processes:
    """A command, whose descendants are known by a variable of the environment; they end with the context."""

    def __init__(self, command: Sequence[object], folder: Path | None = None, **variables: str) -> None:
        self._mark = f"{MARK}={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        environment = {name: value for name, value in os.environ.items() if name != "MUSTER_SERVERS"}
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env={**environment, name: value, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        self.process.communicate(timeout=10)

    def line(self) -> str:
        """The next line of what it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        """Waits for its end, and that of all who print where it does; exit code, output, errors."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def processes(self, word: str = "", variable: str = "") -> list[int]:
        """Itself and its descendants, as far as they live, have the word in their command line, and the variable
        ("NAME=value") in their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            wanted = {self._mark.encode(), variable.encode()} - {b""}
            if state != b"Z" and wanted <= set(environment) and word in command:
                found.append(int(folder.name))
        return found


class Command(Processes):
    """`muster ARGUMENT...`."""

    def __init__(self, *arguments: object, **variables: str) -> None:
        super().__init__([sys.executable, "-m", "muster", *arguments], **variables)


def wait_until(holds: Callable[[], object], what: str, timeout: float = 240) -> None:
    """Polls until `holds()`; AssertionError at the timeout."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not in {timeout} s: {what}"
        time.sleep(0.02)
