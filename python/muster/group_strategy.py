"""A strategy between the ranks of a process group of torch.distributed, made without any variables of a launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from muster import _C
from muster.errors import CommError, LayoutMismatch
from muster.free_ports import free_ports
from muster.gloo_interface import gloo_reaches
from muster.options import device_names, options_of
from muster.several_hosts import HostsOfGroup
from muster.strategy import MultiWorkerMirroredStrategy, Strategy

__all__ = ["GroupStrategy", "compare", "host"]

T = TypeVar("T")

_MOST_ON_A_HOST = 256
"""Ranks of one host that its memory brings together."""
_known: MutableMapping[Any, dict[torch.device, GroupStrategy]] = weakref.WeakKeyDictionary()


class GroupStrategy(MultiWorkerMirroredStrategy):
    """Averages gradients between the ranks of a process group, each with one device.

    Ranks of one host reduce through its memory; between hosts that have several each, sums of a host travel, through
    process groups beside the group; all others reduce through the group itself. GPUs reduce through NCCL, and tell one
    another the rest through groups beside it, which serve the CPU as the group need not. The group serves to agree on
    that, and on where they meet. There is one such strategy a group and device; it lives as long as the group.
    """

    way = ""
    """What gradients go through, in words."""

    @classmethod
    def over(cls, group: dist.ProcessGroup, device: torch.device) -> GroupStrategy:
        """Collective, the first time: that of `group` and `device`."""
        of_group = _known.setdefault(group, {})
        if device not in of_group:
            of_group[device] = cls._met(group, device)
        return of_group[device]

    def __init__(
        self,
        cluster: _C.Cluster,
        device: torch.device,
        between: HostsOfGroup | dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        """`between`: what ranks that are not on one host reach one another through. Collective."""
        hosts = between.parts if isinstance(between, HostsOfGroup) else None
        group = between if hosts is None else None
        chosen = options_of({"timeout": timeout})
        core = _C.make_multi_worker(cluster, device_names([device]), asdict(chosen), group, hosts)
        Strategy.__init__(self, core, chosen)
        self._groups = None
        _C.let_sigterm_end()  # there is no `stopping` here

    @classmethod
    def _met(cls, group: dist.ProcessGroup, device: torch.device) -> GroupStrategy:
        rank, size = group.rank(), group.size()
        told = (host(), _address() if rank == 0 else "", os.geteuid(), os.urandom(8).hex())
        everyones = _gather(told, group, device)
        hosts = [f"{host} {user}" for host, _, user, _ in everyones]
        address, name = everyones[0][1], everyones[0][3]
        timeout = _timeout(group, device)
        most = max(map(hosts.count, hosts))
        between: HostsOfGroup | dist.ProcessGroup | None = group
        way = f"the process group ({group.name()})"
        if most <= _MOST_ON_A_HOST and len(set(hosts)) == 1:
            between, address = None, f"127.0.0.1:{address.rpartition(':')[2]}"
            way = "memory of this host"
        elif most <= _MOST_ON_A_HOST and (most > 1 or device.type == "cuda"):
            with gloo_reaches(address) if device.type == "cuda" else contextlib.nullcontext():
                found, problem = _hosts_of(group, hosts, name, timeout, device)
            if found is None:
                _check_serves_cpu(group, device, problem)
                way += f", since {problem}"
            else:
                between = found
                way = "NCCL" if device.type == "cuda" else "memory of each host"
                way += f", and process groups between {len(set(hosts))} hosts"
        else:
            _check_serves_cpu(group, device, f"a host has {most} ranks, of at most {_MOST_ON_A_HOST}")
        cluster = _C.Cluster(rank, size, address, hosts[:rank].count(hosts[rank]), meeting=name)
        made = cls(cluster, device, between, timeout)
        made.way = way
        return made

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Collective: the dense `.grad` of each of `parameters` becomes its mean over ranks; it stays None where it is
        None on all."""
        self._core.average_gradients_of(parameters)

    def add_nothing(self, parameters: Sequence[nn.Parameter]) -> None:
        """Collective: the part in average() of a rank that has no gradients of `parameters`."""
        self._core.add_no_gradients_of(parameters)

    def gradient_memory(self, parameters: Sequence[nn.Parameter]) -> _C.GradientMemory | None:
        """Where gradients of `parameters` had best come; None: it does not matter."""
        return self._core.gradient_memory(parameters)


def compare(lines: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> None:
    """Collective over `group`, whose ranks each have a `device`: raises LayoutMismatch, on all of its ranks, naming the
    first of `lines` that differs."""
    first, *others = _gather(list(lines), group, device)
    for rank, theirs in enumerate(others, 1):
        for a, b in itertools.zip_longest(first, theirs, fillvalue="nothing"):
            if a != b:
                raise LayoutMismatch(
                    f"the models of the ranks differ: rank 0 has {a}, rank {rank} has {b}; build the same model on "
                    "every rank"
                )


def _gather(mine: T, group: dist.ProcessGroup, device: torch.device) -> list[T]:
    everyones = [mine] * group.size()
    if group.size() > 1:
        # What an NCCL group sends goes by way of the current device, which a script need not have set.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            dist.all_gather_object(everyones, mine, group=group)
    return everyones


def host() -> str:
    """What processes that can share memory have in common: one kernel, and one network to find each other in."""
    return _C.host_identity()


def _hosts_of(
    group: dist.ProcessGroup, hosts: list[str], name: str, timeout: float, device: torch.device
) -> tuple[HostsOfGroup | None, str]:
    """Collective: what goes between the hosts of a group; None, and why, where any rank cannot have it."""
    found, problem = None, ""
    try:
        found = HostsOfGroup(hosts, group, name, timeout)
    except CommError as error:
        problem = f"on rank {group.rank()} {error}"
    problems = list(filter(None, _gather(problem, group, device)))
    return (None, problems[0]) if problems else (found, "")


def _check_serves_cpu(group: dist.ProcessGroup, device: torch.device, problem: str) -> None:
    """Raises CommError where what ranks with GPUs tell one another has no way."""
    if device.type == "cuda" and "cpu" not in dist.get_backend_config(group):
        raise CommError(
            f"ranks with GPUs on several hosts tell one another things through process groups (Gloo), and {problem}; "
            'name the network interface in GLOO_SOCKET_IFNAME, or call init_process_group("cpu:gloo,cuda:nccl")'
        )


@cache
def _address() -> str:
    """Where rank 0 can be reached, at a port that was free: all groups of which this is rank 0 meet there."""
    return f"{socket.getfqdn()}:{free_ports(1)[0]}"


def _timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's own, in seconds."""
    return float(group._get_backend(device).options._timeout.total_seconds())
