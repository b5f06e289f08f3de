"""Addresses of processes, as launchers and users write them."""

from __future__ import annotations

__all__ = ["host_and_port", "host_of"]


def host_of(address: str) -> str:
    """Of a `host:port`; an IPv6 address without the brackets that it has there. "" of no address."""
    return address.rpartition(":")[0].strip("[]")


def host_and_port(address: str) -> tuple[str, int]:
    """Of a `host:port`, as `host_of`."""
    return host_of(address), int(address.rpartition(":")[2])
