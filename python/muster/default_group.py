"""The default process group of torch.distributed, by which libraries see whether a program is alone."""

from __future__ import annotations

import logging
import os
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muster import _C

__all__ = ["DefaultGroup"]


class DefaultGroup:
    """The default group (Gloo) of a job's workers, where the program has made none: metrics, samplers and whoever else
    asks torch.distributed then see the ranks of the job. The strategy itself does not use it."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def of(cls, cluster: _C.Cluster, core: _C.StrategyCore, timeout: float) -> DefaultGroup | None:
        """Collective over workers. None where torch was built without torch.distributed, for a single worker, and where
        any worker has a default group already. Where the group cannot be made (Gloo finds no network interface, say) a
        warning says so and the job goes on without."""
        if core.num_workers == 1 or not dist.is_available():
            return None
        # A name of its own for each job: the store may be that of an earlier one.
        names = core.exchange_texts("" if dist.is_initialized() else uuid.uuid4().hex)
        if not all(names):
            return None
        host, _, port = cluster.address.rpartition(":")
        patience = timedelta(seconds=timeout)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host.strip("[]"), int(port), timeout=patience, wait_for_workers=False
            )
            dist.init_process_group(
                "gloo",
                store=dist.distributed_c10d.PrefixStore(f"muster/torch.distributed/{names[0]}", store),
                rank=core.rank,
                world_size=core.num_workers,
                timeout=patience,
            )
        except (RuntimeError, ValueError) as error:
            logging.getLogger("muster").warning(
                "torch.distributed could not be initialised for this job (%s), so that libraries which ask it take "
                "each worker for the only one; call torch.distributed.init_process_group() before the strategy is made",
                str(error).partition("\n")[0],
            )
            return None
        return cls(dist.group.WORLD)

    def end(self, process: int) -> None:
        """When the strategy that `process` made is gone: as leave(), but for forked processes."""
        if os.getpid() == process:
            self.leave()

    def leave(self) -> None:
        """Takes the default group away, unless the program has put another in its place. Idempotent."""
        if dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()
