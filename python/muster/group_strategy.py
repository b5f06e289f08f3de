"""A strategy between the ranks of a process group of torch.distributed, made without any variables of a launcher."""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from muster import _C
from muster.errors import LayoutMismatch
from muster.free_ports import free_ports
from muster.gloo_interface import own_address_to
from muster.several_hosts import SeveralHosts
from muster.strategy import MultiWorkerMirroredStrategy

__all__ = ["GroupStrategy", "compare", "host"]

T = TypeVar("T")

_MOST_ON_A_HOST = 256
"""Ranks of one host that its memory brings together."""
_known: MutableMapping[Any, dict[torch.device, GroupStrategy]] = weakref.WeakKeyDictionary()


class GroupStrategy(MultiWorkerMirroredStrategy):
    """Averages gradients between the ranks of a process group, each with one device.

    Ranks of one host reduce through its memory; between hosts that have several each, sums of a host travel, through
    process groups beside the group; all others reduce through the group itself. The group serves to agree on that, and
    on where they meet. There is one such strategy a group and device; it lives as long as the group.
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

    @classmethod
    def _met(cls, group: dist.ProcessGroup, device: torch.device) -> GroupStrategy:
        rank, size = group.rank(), group.size()
        everyones = _gather((host(), _address() if rank == 0 else "", os.geteuid()), group)
        hosts = [f"{host} {user}" for host, _, user in everyones]
        address = everyones[0][1]
        num_hosts = len(set(hosts))
        most = max(map(hosts.count, hosts))
        timeout = _timeout(group, device)
        between: Any = group
        way = f"the process group ({group.name()})"
        if most <= _MOST_ON_A_HOST and num_hosts == 1:
            address = f"127.0.0.1:{address.rpartition(':')[2]}"
            between = None
            way = "memory of this host"
        elif 1 < most <= _MOST_ON_A_HOST and device.type == "cpu":
            between = SeveralHosts(hosts, address, None, timeout, dist.get_process_group_ranks(group))
            way = f"memory of each host, and process groups between {num_hosts} hosts"
        cluster = _C.Cluster(rank, size, address, hosts[:rank].count(hosts[rank]))
        made = cls(cluster, [device], process_group=between, timeout=timeout)
        made.way = way
        return made

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Collective: the dense `.grad` of each of `parameters` becomes its mean over ranks; it stays None where it is
        None on all."""
        self._core.average_gradients_of(parameters)

    def add_nothing(self, parameters: Sequence[nn.Parameter]) -> None:
        """Collective: the part in average() of a rank that has no gradients of `parameters`."""
        self._core.add_no_gradients_of(parameters)


def compare(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Collective over `group`: raises LayoutMismatch, on all of its ranks, naming the first of `lines` that differs."""
    first, *others = _gather(list(lines), group)
    for rank, theirs in enumerate(others, 1):
        for a, b in itertools.zip_longest(first, theirs, fillvalue="nothing"):
            if a != b:
                raise LayoutMismatch(
                    f"the models of the ranks differ: rank 0 has {a}, rank {rank} has {b}; build the same model on "
                    "every rank"
                )


def _gather(mine: T, group: dist.ProcessGroup) -> list[T]:
    everyones = [mine] * group.size()
    if group.size() > 1:
        dist.all_gather_object(everyones, mine, group=group)
    return everyones


def host() -> str:
    """What processes that can share memory have in common: one kernel, and one network to find each other in."""
    return _C.host_identity()


def _address() -> str:
    """Where other ranks reach this one, at a port that is free."""
    port = free_ports(1)[0]
    master = os.environ.get("MASTER_ADDR", "")
    own = own_address_to(master, port) if master else None
    if own is None:
        name = socket.getfqdn()
    elif ipaddress.ip_address(own).is_loopback:  # it is this host, under a name that others know
        name = master
    else:
        name = own
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's own, in seconds."""
    return float(group._get_backend(device).options._timeout.total_seconds())
