"""Ports for processes that are still to be started."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_ports"]

_FIRST = 10_000


def free_ports(count: int) -> list[int]:
    """TCP ports that are free on loopback, below those that the system hands out: until a process listens on one,
    nobody gets it who asks for any."""
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = handed_out if handed_out > _FIRST + 1000 else 60_000
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(_FIRST, last)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found
