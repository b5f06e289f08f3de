"""Workers on several hosts: who is where, and the process groups of torch.distributed between them."""

from __future__ import annotations

import os
import weakref
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore as _PrefixStore
from torch.distributed.distributed_c10d import _get_process_group_store

from muster import _C
from muster.default_group import DefaultGroup, are_of_parent
from muster.errors import CommError, InvalidArgument
from muster.gloo_interface import gloo_reaches

__all__ = ["HostsOfGroup", "SeveralHosts"]

_GROUPS = ("workers", "workers_results", "step", "gradients", "results")


class _Worker(NamedTuple):
    """What a worker tells the others before there are groups."""

    host: str
    """What tells its host, or its container, from others."""
    job: str
    """A name of its own for each job: the store may be that of an earlier one. That of rank 0 counts."""
    default: str
    """Its rank and size in the default group of torch.distributed; "none" where the program has made none."""


class SeveralHosts:
    """What a job whose workers are on several hosts communicates through between these: groups beside the default group
    of torch.distributed, which is the program's or, where it has none, made here (Gloo)."""

    def __init__(self, hosts: list[str], address: str, default: DefaultGroup | None, timeout: float) -> None:
        """Collective. `hosts`: by worker, what tells hosts apart. `address`: of the rendezvous. `default`: the default
        group, where it was made here. `timeout`: seconds that an operation of a group may take."""
        self.default_group = default
        self._process = os.getpid()
        self._groups: list[Any] = []
        self.parts: _C.SeveralHosts | None = None
        """What the C++ side takes; None once they are left."""
        self._beside = weakref.ref(dist.group.WORLD)
        try:
            # Where the program's default group listens, these do.
            with gloo_reaches(address, from_other_hosts=True) if default is not None else nullcontext():
                for _ in _GROUPS:
                    self._groups.append(_new_group(timeout))
        except BaseException:
            self.leave()
            raise
        self.parts = _C.SeveralHosts(hosts, **dict(zip(_GROUPS, self._groups, strict=True)))

    @classmethod
    def of(cls, cluster: _C.Cluster, timeout: float) -> SeveralHosts | None:
        """Collective over the cluster. None where all workers are on one host."""
        if cluster.num_workers == 1:
            return None
        mine = _Worker(_C.host_identity(), os.urandom(8).hex(), _rank_in_default_group())
        workers = [_Worker(*text.split()) for text in _C.tell_workers(cluster, " ".join(mine), timeout)]
        hosts = [worker.host for worker in workers]
        if len(set(hosts)) == 1:
            return None
        if not dist.is_available():
            raise InvalidArgument(
                "the workers are on several hosts, and this torch was built without torch.distributed, whose process "
                "groups they need; install one with it"
            )
        if all(worker.default == "none" for worker in workers):
            default = DefaultGroup.make(cluster, workers[0].job, timeout, of_several_hosts=True)
            return cls(hosts, cluster.address, default, timeout)
        for rank, worker in enumerate(workers):
            if worker.default != f"{rank}/{len(workers)}":
                raise InvalidArgument(
                    f"worker {rank} of {len(workers)} has {_in_words(worker.default)}, and workers on several hosts "
                    "reach one another through that group: initialise torch.distributed on all of them, with the ranks "
                    "of the job, or on none; or pass process_group="
                )
        return cls(hosts, cluster.address, None, timeout)

    def leave(self) -> None:
        """Takes the groups away, and the default group where it was made here. Idempotent; no-op in a fork."""
        if are_of_parent(self, self._process):
            return
        groups, self._groups = self._groups, []
        self.parts = None
        # They went with the default group, where that one is gone.
        if dist.is_initialized() and dist.group.WORLD is self._beside():
            for group in groups:
                dist.destroy_process_group(group)
        if self.default_group is not None:
            self.default_group.leave()


class HostsOfGroup:
    """The same between the ranks of a process group that the program has made: in the group's order, met through its
    store, and unknown to torch.distributed, which counts and names the groups that it knows of."""

    def __init__(self, hosts: list[str], group: dist.ProcessGroup, name: str, timeout: float) -> None:
        """Collective. `hosts`: by rank of `group`, what tells hosts apart. `name`: one that nothing else in the store
        has. `timeout`: seconds that an operation may take. Raises CommError where no groups can be made."""
        try:
            store = _PrefixStore(f"muster/{name}", _get_process_group_store(group))
            groups = {each: _gloo_group(_PrefixStore(each, store), group, timeout) for each in _GROUPS}
        except Exception as error:  # of a group without a store, a torch without Gloo, hosts that do not connect
            reason = str(error).partition("\n")[0]
            raise CommError(f"no process group between hosts can be made: {reason}") from error
        self.parts = _C.SeveralHosts(hosts, **groups, store=_PrefixStore("meeting", store))
        """What the C++ side takes."""


def _gloo_group(store: Any, beside: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """Of the ranks of `beside`, in their order."""
    rank, size = beside.rank(), beside.size()
    made = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout))
    gloo = dist.ProcessGroup.BackendType.GLOO
    made._register_backend(torch.device("cpu"), gloo, backend)
    made._set_default_backend(gloo)
    return made


def _rank_in_default_group() -> str:
    if not dist.is_available() or not dist.is_initialized():
        return "none"
    return f"{dist.get_rank()}/{dist.get_world_size()}"


def _in_words(default: str) -> str:
    if default == "none":
        return "no default group of torch.distributed, and others have one"
    rank, _, size = default.partition("/")
    return f"rank {rank} of {size} in the default group of torch.distributed"


def _new_group(timeout: float) -> Any:
    backend = "gloo" if dist.is_gloo_available() else None  # None: that of the default group
    try:
        return dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise CommError(
            f"the workers are on several hosts, and a process group between them could not be made: "
            f"{str(error).partition(chr(10))[0]}; check that the hosts reach one another on all ports, and name the "
            "network interface in GLOO_SOCKET_IFNAME"
        ) from error
