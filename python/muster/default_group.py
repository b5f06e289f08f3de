"""The default process group of torch.distributed, by which libraries see whether a program is alone."""

from __future__ import annotations

import logging
import os
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muster import _C
from muster.addresses import host_and_port
from muster.errors import CommError
from muster.gloo_interface import gloo_reaches

__all__ = ["DefaultGroup", "are_of_parent"]


class DefaultGroup:
    """The default group (Gloo) of a job's workers, where the program has made none: metrics, samplers and whoever else
    asks torch.distributed then see the ranks of the job. On one host the strategy itself does not use it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._process = os.getpid()

    @classmethod
    def of(cls, cluster: _C.Cluster, core: _C.StrategyCore, timeout: float) -> DefaultGroup | None:
        """Collective over workers. None where torch was built without torch.distributed, for a single worker, and where
        any worker has a default group already. Where the group cannot be made (Gloo finds no network interface, say) a
        warning says so and the job goes on without."""
        if core.num_workers == 1 or not dist.is_available():
            return None
        # A name of its own for each job: the store may be that of an earlier one.
        names = core.exchange_texts("" if dist.is_initialized() else uuid.uuid4().hex, "its constructor")
        if not all(names):
            return None
        try:
            return cls.make(cluster, names[0], timeout)
        except CommError as error:
            logging.getLogger("muster").warning(
                "%s; libraries that ask torch.distributed take each worker for the only one: call "
                "torch.distributed.init_process_group() before the strategy is made",
                error,
            )
            return None

    @classmethod
    def make(cls, cluster: _C.Cluster, name: str, timeout: float, *, of_several_hosts: bool = False) -> DefaultGroup:
        """Collective over workers; `name` is the job's own, no worker has a default group, and `of_several_hosts` says
        whether they are on several hosts. Raises CommError where the group cannot be made. Gloo listens on the
        interface by which this host reaches the rendezvous, unless the environment (GLOO_SOCKET_IFNAME) names another.
        """
        host, port = host_and_port(cluster.address)
        patience = timedelta(seconds=timeout)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, timeout=patience, wait_for_workers=False
            )
            with gloo_reaches(cluster.address, from_other_hosts=of_several_hosts):
                dist.init_process_group(
                    "gloo",
                    store=dist.distributed_c10d.PrefixStore(f"muster/torch.distributed/{name}", store),
                    rank=cluster.rank,
                    world_size=cluster.num_workers,
                    timeout=patience,
                )
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"torch.distributed could not be initialised for this job ({str(error).partition(chr(10))[0]})"
            ) from error
        return cls(dist.group.WORLD)

    def leave(self) -> None:
        """Takes the default group away, unless the program has put another there. Idempotent; no-op in a fork."""
        if are_of_parent(self, self._process):
            return
        group, self._group = self._group, None
        if group is not None and dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()


_OF_PARENTS: list[object] = []


def are_of_parent(groups: object, process: int) -> bool:
    """Whether `process`, which made `groups`, is another than this one, which was forked from it. They are kept then: a
    group's end waits for its threads, which are the parent's."""
    if os.getpid() == process:
        return False
    _OF_PARENTS.append(groups)
    return True
