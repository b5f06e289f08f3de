"""Ports for processes that are still to be started."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections import deque
from pathlib import Path

__all__ = ["free_ports"]

_FIRST = 10_000
_OF_JOBS = range(20_000, 30_000)
"""Where jobs meet whose launcher names none: port_of() of csrc/core/cluster.cpp."""
_HELD_FOR = 120.0
"""Seconds in which the process that a port is for has begun to listen."""

_held: deque[tuple[float, socket.socket]] = deque()
"""The sockets that hold ports, and when each is closed, the oldest first."""
_holding = threading.Lock()


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody uses on this host, below those that the system hands out, so that a port stays free until a
    process listens on it. None of them is one that a job derives from its number. No other call, of whatever process,
    gives one of them while this process holds it: until its next call after two minutes, or its end."""
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = handed_out if handed_out > _FIRST + 1000 else 60_000
    found: list[int] = []
    with _holding:
        while _held and _held[0][0] < time.monotonic():
            _held.popleft()[1].close()
        while len(found) < count:
            port = random.SystemRandom().randrange(_FIRST, last)
            holder = None if port in _OF_JOBS else _hold(port)
            if holder:
                _held.append((time.monotonic() + _HELD_FOR, holder))
                found.append(port)
    return found


def _hold(port: int) -> socket.socket | None:
    """A socket bound to the port at every address of this host, or None where another one is. It does not listen: who
    binds with SO_REUSEADDR, as servers do, takes the port in spite of it; who binds without it, as here, does not."""
    holder = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    if holder.family == socket.AF_INET6:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        holder.bind(("", port))
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
