"""Ports for processes that are still to be started."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_ports"]

_FIRST = 10_000
_OF_JOBS = range(20_000, 30_000)
"""Where jobs meet whose launcher names none: port_of() of csrc/core/cluster.cpp."""


def free_ports(count: int) -> list[int]:
    """TCP ports that are free on loopback, below those that the system hands out: until a process listens on one,
    nobody gets it who asks for any. None of them is one that a job derives from its number."""
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = handed_out if handed_out > _FIRST + 1000 else 60_000
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(_FIRST, last)
        if port in _OF_JOBS:
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found
