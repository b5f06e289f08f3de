"""The network interface that Gloo listens on, which it takes from this host's name unless it is told."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from muster.addresses import host_and_port
from muster.errors import CommError

__all__ = ["gloo_reaches"]

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@contextmanager
def gloo_reaches(address: str, *, from_other_hosts: bool = False) -> Iterator[None]:
    """Process groups that are made within listen on the interface by which this host reaches `address` (host:port),
    unless the environment (GLOO_SOCKET_IFNAME) names another; for an IPv6 address, on Gloo's own choice. Raises
    CommError where they are to be reached `from_other_hosts` and that interface is the loopback: the name of rank 0's
    host often is 127.0.1.1 there."""
    interface = None if _VARIABLE in os.environ else _interface_to(*host_and_port(address))
    if from_other_hosts and interface == "lo":
        raise CommError(
            f"{address} leads to this host's loopback interface, where workers on other hosts do not reach it; set "
            "MASTER_ADDR to an address of rank 0's host on their network, or GLOO_SOCKET_IFNAME to the interface"
        )
    if interface is None:
        yield
        return
    os.environ[_VARIABLE] = interface
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def _interface_to(host: str, port: int) -> str | None:
    """The interface by which packets leave; None where it is not known, and for IPv6. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
            if family != socket.AF_INET:
                return None
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(found) == own:
                    return name
    except OSError:
        pass
    return None
