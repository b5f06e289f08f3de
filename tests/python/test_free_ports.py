"""Ports for processes that are still to be started."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from muster.free_ports import free_ports

DRAWS = """
import random, sys
from muster.free_ports import free_ports
drawn = iter(map(int, sys.argv[1:]))
random.SystemRandom.randrange = lambda *_: next(drawn)
print(*free_ports(1))
"""


def test_they_are_those_that_the_system_hands_out_to_nobody() -> None:
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = free_ports(20)
    assert len(set(found)) == 20
    assert handed_out < 11_000 or max(found) < handed_out
    assert not set(found) & set(range(20_000, 30_000)), "where jobs meet whose launcher names no port"


def test_two_processes_get_no_port_twice_before_anybody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_ports(2)
    drawn = iter([first, second, *free_ports(1)])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
    with pytest.raises(StopIteration):
        free_ports(1)  # all of them were given
    monkeypatch.undo()
    line = [sys.executable, "-c", DRAWS, str(first), "12321", "12322", "12323"]
    found = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert int(found) in (12321, 12322, 12323)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_who_listens_at_any_address_has_its_port(family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1" if family == socket.AF_INET else "::1", 0), family=family) as server:
        drawn = iter([server.getsockname()[1], free + 1, free + 2, free + 3])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert free_ports(1)[0] in (free + 1, free + 2, free + 3)


def test_a_process_listens_on_a_port_that_is_held() -> None:
    for port in free_ports(2):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "nobody listens yet"
        for address in ("127.0.0.1", ""):
            with socket.create_server((address, port)):
                socket.create_connection(("127.0.0.1", port)).close()
        for libuv in (True, False):
            dist.TCPStore("127.0.0.1", port, 1, True, use_libuv=libuv).set("key", "value")
