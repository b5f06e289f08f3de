"""Hosts that are network namespaces of this machine, joined by a bridge: each has an address and shares no socket with
the others. Making them needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from support.commands import needs
from support.ranks import environment, hear_interrupts, process_context

__all__ = ["Hosts", "hosts", "names_ended"]

# Of <sched.h> and <sys/mount.h>.
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
MS_REC = 0x4000
MS_SLAVE = 0x80000
MNT_DETACH = 2


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
        self, host_of_worker: Sequence[int], function: Callable[..., Any], *args: Any, timeout: float = 240
    ) -> list[Any]:
        """What `function` (of a module that workers can import) returns on each worker, or raises; an int where the
        process ended by that signal."""
        self._next_port += 1
        context = process_context()
        processes = []
        pipes: list[tuple[Connection, Connection]] = []
        for rank, host in enumerate(host_of_worker):
            variables = {
                **os.environ,
                **environment(rank, len(host_of_worker), self._next_port),
                "MASTER_ADDR": _address(host_of_worker[0]),
                "LOCAL_RANK": str(list(host_of_worker[:rank]).count(host)),
            }
            receiver, sender = context.Pipe(duplex=False)
            work = (self.name(host), variables, function, args, sender)
            processes.append(context.Process(target=_work, args=work))
            pipes.append((receiver, sender))
        deadline = time.monotonic() + timeout
        results: list[Any] = []
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            for rank, (process, (pipe, _)) in enumerate(zip(processes, pipes, strict=True)):
                assert pipe.poll(max(deadline - time.monotonic(), 0)), f"worker {rank} did not end in {timeout} s"
                try:
                    results.append(pickle.loads(pipe.recv_bytes()))
                except EOFError:
                    process.join(10)
                    results.append(-process.exitcode)
            for rank, process in enumerate(processes):
                process.join(max(deadline - time.monotonic(), 0))
                assert process.exitcode is not None, f"worker {rank} has its result and does not end"
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join(10)
        return results


def names_ended(worker: int, text: str) -> bool:
    """Whether an error says that a worker has ended: as its host saw it, or, where word of that comes late because the
    machine is busy, that it gives no sign of life."""
    ways = (f"worker {worker} ended (it was killed, crashed or exited)", f"worker {worker} has given no sign of life")
    return any(way in text for way in ways)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """As many, until the context ends. Skips the test where none can be made."""
    if reason := _why_none():
        pytest.skip(reason)
    made = Hosts(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _enter(name: str) -> None:
    """As `ip netns exec`: this process is on the host from here on, and finds its interfaces in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *args: Any) -> None:
        if getattr(libc, function)(*args) != 0:
            raise OSError(ctypes.get_errno(), function)

    with open(f"/var/run/netns/{name}") as namespace:
        call("setns", namespace.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)
    call("mount", b"", b"/", None, MS_REC | MS_SLAVE, None)
    libc.umount2(b"/sys", MNT_DETACH)  # which may not be mounted
    call("mount", name.encode(), b"/sys", b"sysfs", 0, None)


def _work(
    name: str, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...], result: Connection
) -> None:
    _enter(name)
    os.environ.update(variables)
    hear_interrupts()
    try:
        answer = function(*args)
    except Exception as error:
        answer = error
    try:
        pickled = pickle.dumps(answer)  # by pickle itself tensors travel whole: this process may end first
    except Exception:  # an exception that cannot be pickled
        pickled = pickle.dumps(RuntimeError(f"{type(answer).__name__}: {answer}"))
    result.send_bytes(pickled)
    result.close()
