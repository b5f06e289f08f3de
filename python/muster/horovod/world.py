"""Who this process is among those of the job, from what its launcher says, and how it finds the others."""

from __future__ import annotations

import functools
import os
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muster import _C
from muster.addresses import host_and_port
from muster.errors import InvalidArgument, Timeout
from muster.gloo_interface import gloo_reaches

__all__ = [
    "Place",
    "await_others",
    "check_ranks",
    "find_cluster",
    "group_over",
    "identity_of_job",
    "meeting_at_store",
    "open_store",
    "patience",
    "places",
    "stall_seconds",
    "this_host",
    "this_machine",
]

OCCUPIED = 10.0
"""Seconds that whoever has rank 0's port has to answer as a store does."""
CONNECTING = 5.0
"""Seconds that one attempt to reach rank 0's port may take."""
_stores: dict[tuple[str, int], Any] = {}
"""Stores of this process by address and rank: who hosts one hosts it until the process ends."""


@dataclass(frozen=True)
class Place:
    """Where a process is: its index among those of its host, and its host's among those that have such an index."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    """Whether every host has as many processes."""


def patience() -> float:
    """Seconds that the start waits for other processes."""
    return _seconds("HOROVOD_GLOO_TIMEOUT_SECONDS", 600.0)


def find_cluster(comm: Any) -> _C.Cluster:
    """The job as horovodrun's variables describe it, else as torchrun's, Slurm's or Open MPI's do; with a list of ranks
    as `comm`, those alone. Raises InvalidArgument."""
    cluster = _of_horovodrun() or _C.Cluster.from_env()
    if comm is None:
        return cluster
    if not isinstance(comm, Sequence):
        raise InvalidArgument(
            f"init(comm={type(comm).__name__}): MPI communicators are not used; pass a list of ranks, or None for all"
        )
    ranks = sorted(comm)
    if not ranks:
        return cluster
    if cluster.rank not in ranks or ranks[-1] >= cluster.num_workers:
        raise InvalidArgument(
            f"init(comm={ranks}) on rank {cluster.rank} of {cluster.num_workers}: name ranks of the job, and call it "
            "on those alone"
        )
    if len(ranks) == cluster.num_workers:
        return cluster
    if ranks[0] != 0:
        raise InvalidArgument(f"init(comm={ranks}): rank 0, where the others meet, must be one of them")
    place = ranks.index(cluster.rank), len(ranks), cluster.address, cluster.local_rank
    return _C.Cluster(*place, meeting=f"ranks {ranks}")


def _of_horovodrun() -> _C.Cluster | None:
    if "HOROVOD_RANK" not in os.environ or "HOROVOD_SIZE" not in os.environ:
        return None
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise InvalidArgument(
            "HOROVOD_ELASTIC=1: Horovod's elastic driver is not spoken to; start with torchrun --max-restarts"
        )
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    local_rank = int(os.environ.get("HOROVOD_LOCAL_RANK", "0"))
    if size == 1:
        return _C.Cluster(rank, size, "", local_rank)
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    elif "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ and "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
        server = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        address = _meet_at_horovodrun(rank, *server)
    else:
        raise InvalidArgument(
            "HOROVOD_RANK is set, but neither HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT nor MASTER_ADDR and MASTER_PORT, "
            "which say where ranks meet; set one of the two pairs"
        )
    return _C.Cluster(rank, size, address, local_rank)


@functools.cache
def _meet_at_horovodrun(rank: int, host: str, port: int) -> str:
    """Rank 0's address, the same at every start of this process: rank 0 leaves it with horovodrun's server, which keeps
    values by HTTP."""
    url = f"http://{host}:{port}/muster/address"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + patience()
    try:
        if rank == 0:
            with socket.create_connection((host, port), timeout=patience()) as connection:
                here = connection.getsockname()[0]  # as the server's host, and so the others, reach it
            with socket.socket() as free:
                free.bind(("", 0))
                address = f"{here}:{free.getsockname()[1]}"
            opener.open(urllib.request.Request(url, address.encode(), method="PUT"), timeout=patience()).close()
            return address
        while time.monotonic() < deadline:
            try:
                with opener.open(url, timeout=patience()) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
            time.sleep(0.05)
    except OSError as error:
        raise InvalidArgument(
            f"no server of horovodrun answers at HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT, {host}:{port} ({error}); set "
            "MASTER_ADDR and MASTER_PORT to a free port of rank 0's host instead"
        ) from error
    raise Timeout(
        f"rank 0 did not come within {patience():g} s (HOROVOD_GLOO_TIMEOUT_SECONDS); look at what it printed"
    )


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Raises InvalidArgument where `ranks` is no set of ranks of a job of `size` processes."""
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
        raise InvalidArgument(f"a process set of ranks {list(ranks)}: name ranks from 0 to {size - 1}, each once")


def open_store(cluster: _C.Cluster, generation: int) -> Any:
    """Where the ranks of `cluster` leave word for one another in their start number `generation`. Raises Timeout where
    rank 0 is not to be reached."""
    key = (cluster.address, cluster.rank)
    if key not in _stores:
        _stores[key] = _connect(cluster)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.distributed_c10d.PrefixStore(f"muster/horovod/{restart}/{generation}", _stores[key])


def await_others(store: Any, cluster: _C.Cluster) -> None:
    """Waits at `store`, of open_store(), until all ranks of `cluster` are there. Raises Timeout naming those that do
    not come."""
    keys = [f"here/{rank}" for rank in range(cluster.num_workers)]
    try:
        store.set(keys[cluster.rank], "")
        store.wait(keys, timedelta(seconds=patience()))
        return
    except dist.DistError as error:
        cause = error
    try:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except dist.DistError as error:
        raise Timeout(
            f"rank {cluster.rank} waits in init() for others, and rank 0, at whose store ({cluster.address}) they "
            "meet, has ended; look at what it printed, and start all ranks again"
        ) from error
    raise Timeout(
        f"ranks {missing} of {cluster.num_workers} did not come to init() within {patience():g} s "
        "(HOROVOD_GLOO_TIMEOUT_SECONDS); look at what they printed, or raise that variable where they begin later"
    ) from cause


def identity_of_job(cluster: _C.Cluster) -> str:
    """What all lives of a job have in common, and no other job has, where torchrun's agent hosts a store, which stays
    while processes are started again; "" elsewhere. After open_store()."""
    if cluster.launcher != "torchrun" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    store = _stores.get((cluster.address, cluster.rank))
    if store is None:  # of a process that is alone, as others of the job's lives may not be
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if cluster.num_workers > 1 or host is None or port is None:
            return ""
        try:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=patience()))  # type: ignore[attr-defined]
        except dist.DistError:
            return ""
    identity: bytes = store.compare_set("muster/horovod/job", "", uuid.uuid4().hex)
    return identity.decode()


def meeting_at_store(cluster: _C.Cluster) -> _C.Cluster:
    """`cluster`, in which rank 0 hosts no store besides that of open_store()."""
    host, port = host_and_port(cluster.address)
    return _C._cluster_from_environment(
        {
            "RANK": str(cluster.rank),
            "WORLD_SIZE": str(cluster.num_workers),
            "LOCAL_RANK": str(cluster.local_rank),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )


def _connect(cluster: _C.Cluster) -> Any:
    host, port = host_and_port(cluster.address)

    def make(is_master: bool, seconds: float) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=is_master, timeout=timedelta(seconds=seconds),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip

    try:
        if cluster.rank == 0 and not cluster.store_is_hosted:
            try:
                return make(True, patience())
            except dist.DistNetworkError:
                return make(False, OCCUPIED)  # a strategy of this process, or a default group, has it
        _await_listener(host, port)
        return make(False, patience())
    except (dist.DistError, OSError) as error:
        raise Timeout(
            f"rank {cluster.rank} cannot reach rank 0 at {cluster.address} within {patience():g} s "
            f"(HOROVOD_GLOO_TIMEOUT_SECONDS): {str(error).splitlines()[0]}; start rank 0, and check the address and "
            "the firewall"
        ) from error


def _await_listener(host: str, port: int) -> None:
    """Waits until somebody listens there: a TCPStore would wait for twice its timeout. Raises OSError."""
    deadline = time.monotonic() + patience()
    while True:
        remaining = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(min(remaining, CONNECTING), 0.1)).close()
            return
        except OSError:
            if remaining <= 0:
                raise
        time.sleep(min(0.1, remaining))


def group_over(store: Any, rank: int, size: int, timeout: float, address: str = "") -> Any:
    """A Gloo group of `size` processes that meet at `store`; what waits `timeout` seconds in it fails. It listens on
    the interface by which this host reaches `address` (host:port; "": on Gloo's own choice), unless one is named."""
    if "HOROVOD_GLOO_IFACE" in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["HOROVOD_GLOO_IFACE"])
    with gloo_reaches(address) if address else nullcontext():
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def this_host() -> str:
    """The host's name, as horovodrun says it or as it is."""
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def this_machine() -> str:
    """What is equal for processes that may share memory."""
    return f"{this_host()} {_C.host_identity()}"


def places(hosts: Sequence[str], local_ranks: Sequence[int]) -> list[Place]:
    """Of every rank, from its host and from what its launcher says of its place there; places are counted anew where
    two processes of a host were told the same."""
    order = list(dict.fromkeys(hosts))
    if len(set(zip(hosts, local_ranks, strict=True))) < len(hosts):
        local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    sizes = {host: hosts.count(host) for host in order}
    found = []
    for host, local in zip(hosts, local_ranks, strict=True):
        beside = [
            name for name in order if any(h == name and lr == local for h, lr in zip(hosts, local_ranks, strict=True))
        ]
        found.append(Place(local, sizes[host], beside.index(host), len(beside), len(set(sizes.values())) == 1))
    return found


def _seconds(name: str, otherwise: float, is_set: Callable[[float], bool] = lambda value: value > 0) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else otherwise
    except ValueError:
        raise InvalidArgument(f"{name}={text} is no number of seconds; set it to one, or unset it") from None
    return value if is_set(value) else otherwise


def stall_seconds() -> tuple[float, float]:
    """After how many seconds of waiting to warn, and to fail: as Horovod's variables say."""
    warn = _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        warn = float("inf")
    return warn, _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 1800.0)
