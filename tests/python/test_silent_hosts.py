"""Hosts that are stopped, killed or cut off are named by the workers of the others within the timeout. They are network
namespaces here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import muster
from support.hosts import Hosts

SECONDS = 8.0
"""The jobs' timeout: a third of it is longer than a busy machine holds up a thread."""
Raised = tuple[str, int, str, float]
"""The error's type, the rank that it names, its text, and the seconds from the loss to it."""


def _step_until_lost(lose: Callable[[int], None]) -> tuple[Raised, list[int]]:
    """What is raised once every worker has called `lose` with its rank, and the processes by rank."""
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=SECONDS) as strategy:
        model = torch.nn.Linear(64, 10)
        model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        processes = [int(pid) for pid in strategy.gather(torch.tensor([os.getpid()]))]
        for step in range(100_000):
            if step == 10:
                began = time.monotonic()
                lose(strategy.rank)
            try:
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), torch.randn(8, 64), torch.arange(8))
            except muster.CommError as error:
                seconds = time.monotonic() - began
                rank = error.rank if isinstance(error, muster.PeerLost) else -1
                return (type(error).__name__, rank, str(error), seconds), processes
            time.sleep(0.005)
    raise AssertionError("nobody was lost")


def _second_host_stops(rank: int) -> None:
    if rank >= 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def _second_host_is_killed(rank: int) -> None:
    if rank >= 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _first_host_is_cut_off(rank: int) -> None:
    if rank == 0:
        os.system("ip link set eth0 down")


def _stop_and_kill() -> tuple[Raised, Raised]:
    stopped, processes = _step_until_lost(_second_host_stops)
    if os.environ["RANK"] == "0":
        for process in processes[2:]:
            os.kill(process, signal.SIGCONT)
    return stopped, _step_until_lost(_second_host_is_killed)[0]


def test_a_host_that_stops_or_is_killed_is_named(two_hosts: Hosts) -> None:
    *survivors, third, fourth = two_hosts.run([0, 0, 1, 1], _stop_and_kill)
    assert third == fourth == signal.SIGKILL
    for (kind, rank, text, seconds), (kind_killed, rank_killed, text_killed, seconds_killed) in survivors:
        assert (kind, rank) == ("PeerLost", 2), text
        assert "worker 2 and worker 3 have given no sign of life for" in text
        assert seconds < SECONDS + 4
        assert kind_killed == "PeerLost", text_killed
        assert rank_killed in (2, 3), text_killed
        assert "given no sign of life for" in text_killed
        assert seconds_killed < SECONDS + 4


def _cut() -> Raised:
    return _step_until_lost(_first_host_is_cut_off)[0]


def test_a_host_that_is_cut_off_is_named_by_both_sides(two_hosts: Hosts) -> None:
    # The other host holds the bridge, which stays.
    results: list[Raised] = two_hosts.run([1, 1, 0, 0], _cut)
    two_hosts.connect()
    for number, (kind, rank, text, seconds) in enumerate(results):
        with_rendezvous = number < 2
        assert (kind, rank) == ("PeerLost", 2 if with_rendezvous else 0), text
        expected = "worker 2 and worker 3 have given no sign" if with_rendezvous else "the rendezvous, on the host of"
        assert expected in text
        assert seconds < SECONDS + 4
