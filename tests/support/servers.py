"""Parameter servers of this process, and workers of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import muster
from muster import _C


class Servers:
    """Parameter servers in this process; `addresses` is what MUSTER_SERVERS would say."""

    def __init__(self, number: int, snapshots: Path | None = None) -> None:
        self._folders = ["" if snapshots is None else str(snapshots / str(s)) for s in range(number)]
        self.addresses = [_C._server.free_address() for _ in range(number)]
        self.running: list[Any] = [self._start(s) for s in range(number)]

    def _start(self, server: int) -> Any:
        name = "muster-server-" + self.addresses[server].split(":")[1]
        return _C._server.ParameterServer(name, self._folders[server])

    def restart(self, server: int) -> None:
        """Ends one and starts it again from its snapshots."""
        self.running[server] = None
        self.running[server] = self._start(server)


def on_servers(addresses: list[str], **options: Any) -> muster.ParameterServerStrategy:
    """A worker of the job that the environment describes."""
    here = muster.Cluster.from_env()
    cluster = muster.Cluster(here.rank, here.num_workers, here.address, here.local_rank, addresses)
    return muster.ParameterServerStrategy(cluster, **options)


def alone(**options: Any) -> muster.ParameterServerStrategy:
    """The only worker of a job, which hosts its server."""
    return muster.ParameterServerStrategy(muster.Cluster(0, 1, ""), seed=3, threads_per_replica=1, **options)
