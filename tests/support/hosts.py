"""Hosts that are network namespaces of this machine, joined by a bridge: each has an address and shares no socket with
the others. Making them needs root and iproute2."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.commands import needs

__all__ = ["Hosts", "hosts"]

TESTS = Path(__file__).resolve().parents[1]


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def _why_none() -> str:
    """Why no hosts can be made here, as in a sandbox; empty where they can. Without iproute2 it skips."""
    name = f"muster-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "true")
    except FileNotFoundError:
        needs(["ip"], "iproute2")
        raise
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made and entered: {error.stderr.strip()}"
    finally:
        subprocess.run(["sh", "-c", f"ip netns del {name}"], capture_output=True, check=False)
    return ""


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


class Hosts:
    """Some hosts, on one network."""

    def __init__(self, count: int) -> None:
        # Names of interfaces have at most 15 characters.
        self._id = f"{os.getpid() % 1_000_000}"
        self._names = [f"muster-{self._id}-{i}" for i in range(count)]
        self._next_port = 29_500

    def make(self) -> None:
        bridge = self._names[0]
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for i, name in enumerate(self._names):
            ours, theirs = f"m{self._id}h{i}", f"m{self._id}b{i}"
            _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
            _ip("link", "set", ours, "netns", name)
            _ip("link", "set", theirs, "netns", bridge)
            _ip("-n", bridge, "link", "set", theirs, "master", "bridge")
            _ip("-n", name, "link", "set", ours, "name", "eth0")
            _ip("-n", name, "addr", "add", f"{_address(i)}/24", "dev", "eth0")
            _ip("-n", bridge, "link", "set", theirs, "up")
        self.connect()

    def connect(self) -> None:
        """Brings up links that went down."""
        for name in self._names:
            _ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self._names:
            _ip("netns", "del", name, check=False)

    def name(self, host: int) -> str:
        """Of the network namespace."""
        return self._names[host]

    def address(self, host: int) -> str:
        return _address(host)

    def why_not_limit(self, rate: str) -> str:
        """Limits what each host sends to a rate as tc spells it; or why that cannot be had here."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        try:
            for name in self._names:
                _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        except subprocess.CalledProcessError as error:
            self.lift_limits()
            return f"links cannot be limited: {error.stderr.strip()}"
        return ""

    def lift_limits(self) -> None:
        for name in self._names:
            _ip("netns", "exec", name, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)

    def run(
        self, host_of_worker: Sequence[int], function: Callable[..., Any], *args: Any, timeout: float = 120
    ) -> list[Any]:
        """What `function` (of a module that workers can import) returns on each worker, or raises; an int where the
        process ended by that signal."""
        self._next_port += 1
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for rank, host in enumerate(host_of_worker):
                task = Path(folder, f"task-{rank}")
                task.write_bytes(pickle.dumps((function, args)))
                environment = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(
                        [str(TESTS), str(TESTS / "python"), os.environ.get("PYTHONPATH", "")]
                    ),
                    "MASTER_ADDR": _address(host_of_worker[0]),
                    "MASTER_PORT": str(self._next_port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(host_of_worker)),
                    "LOCAL_RANK": str(list(host_of_worker[:rank]).count(host)),
                }
                command = ["ip", "netns", "exec", self.name(host), sys.executable, "-m", "support.hosts", str(task)]
                processes.append(subprocess.Popen(command, env=environment))
            try:
                codes = [process.wait(timeout) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            results: list[Any] = []
            for rank, code in enumerate(codes):
                result = Path(folder, f"task-{rank}.result")
                results.append(pickle.loads(result.read_bytes()) if result.exists() else -code)
            return results


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """As many, until the context ends. Skips the test where none can be made."""
    if reason := _why_none():
        import pytest  # which workers on the hosts do without

        pytest.skip(reason)
    made = Hosts(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _work(task: Path) -> None:
    function, args = pickle.loads(task.read_bytes())
    try:
        result = function(*args)
    except Exception as error:
        result = error
    written = task.with_suffix(".part")
    try:
        written.write_bytes(pickle.dumps(result))
    except Exception:  # an exception that cannot be pickled
        written.write_bytes(pickle.dumps(RuntimeError(f"{type(result).__name__}: {result}")))
    written.rename(task.with_name(task.name + ".result"))


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
