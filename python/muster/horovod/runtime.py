"""The job while it is initialised: who this process is, and an engine for each process set that it belongs to."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from muster import _C
from muster.errors import Error, InvalidArgument
from muster.horovod.engine import Engine, Stalls
from muster.horovod.requests import Request
from muster.horovod.transport import GroupTransport, HostTransport, Transport
from muster.horovod.world import (
    Place,
    await_others,
    check_ranks,
    find_cluster,
    group_over,
    identity_of_job,
    meeting_at_store,
    open_store,
    patience,
    places,
    stall_seconds,
    this_host,
    this_machine,
)

__all__ = ["begin", "end", "is_running", "running"]

_current: Runtime | None = None
_starts = 0
"""How often this process has begun a job: ranks that begin again meet under the next number."""


class Runtime:
    """This process's part of the job. Process sets are numbered in the order in which they were added, from 0 on, which
    is that of all ranks."""

    def __init__(self, comm: Any, sets: Sequence[Sequence[int]], generation: int) -> None:
        """Collective. `comm` as of init(); `sets` are the ranks of process sets besides that of all; `generation`
        counts the starts of the job in this process."""
        cluster = find_cluster(comm)
        self.rank: int = cluster.rank
        """Of this process."""
        self.size: int = cluster.num_workers
        """Processes of the job."""
        self._address = cluster.address
        for ranks in sets:
            check_ranks(ranks, self.size)
            if len(ranks) == self.size:
                raise InvalidArgument(f"a process set of ranks {list(ranks)} is the global one; use global_process_set")
        self._stalls = Stalls(*stall_seconds())
        self._store = open_store(cluster, generation) if self.size > 1 else None
        if self._store is not None:
            await_others(self._store, cluster)
        self.job = identity_of_job(cluster)
        """As of identity_of_job()."""
        self._mutex = threading.Lock()
        self.sets: dict[int, list[int]] = {0: list(range(self.size))}
        """The job's ranks in each process set."""
        self._engines: dict[int, Engine] = {}
        self._added = 0
        transport = self._transport_of_all(cluster)
        here = json.dumps([this_host(), cluster.local_rank, [list(ranks) for ranks in sets]]).encode()
        everyone = [json.loads(message) for message in transport.exchange(here)]
        if any(theirs != everyone[0][2] for _, _, theirs in everyone):
            raise InvalidArgument("init(process_sets=...) differs between ranks; give the same sets on every rank")
        self.place: Place = places([host for host, _, _ in everyone], [local for _, local, _ in everyone])[self.rank]
        """Of this process on its host."""
        self._engines[0] = Engine(transport, self.sets[0], self.rank, self._stalls)
        self._engines[0].on_ready = self._change_sets
        for ranks in sets:
            self._add(ranks)

    def engine(self, process_set: int) -> Engine:
        """Of a set that this process belongs to. Raises InvalidArgument for others."""
        with self._mutex:
            engine = self._engines.get(process_set)
        if engine is not None:
            return engine
        ranks = self.sets.get(process_set)
        if ranks is None:
            raise InvalidArgument(f"there is no process set {process_set}; add it on all ranks with add_process_set()")
        raise InvalidArgument(f"rank {self.rank} is not in process set {process_set}, {ranks}: call it on those alone")

    def change_sets(self, kind: str, ranks: Sequence[int]) -> int | None:
        """Collective over all ranks: adds or removes (`kind`) the set of `ranks`. Its number; None where that cannot
        be: it exists already, or does not."""
        engine = self._engines[0]
        pending = engine.submit(Request(kind, "process_set", ranks=tuple(ranks)), [], [])
        number: int | None = engine.wait(pending)
        return number

    def close(self, reason: str) -> None:
        """Ends all engines; what is under way fails with `reason`."""
        with self._mutex:
            engines = list(self._engines.values())
        for engine in engines:
            engine.close(reason)

    def _change_sets(self, request: Request) -> int | None:
        ranks = list(request.ranks)
        number = next((number for number, members in self.sets.items() if members == ranks), None)
        if request.kind == "add_process_set":
            return self._add(ranks) if number is None else None
        if number:
            with self._mutex:
                del self.sets[number]
                engine = self._engines.pop(number, None)
            if engine is not None:
                engine.close(f"process set {number} was removed")
        return number or None

    def _add(self, ranks: Sequence[int]) -> int:
        self._added += 1
        number = self._added
        engine = None
        if self.rank in ranks:
            transport = self._over_group(f"set/{number}", ranks) if len(ranks) > 1 else _alone()
            engine = Engine(transport, ranks, self.rank, self._stalls)
        with self._mutex:
            self.sets[number] = list(ranks)
            if engine is not None:
                self._engines[number] = engine
        return number

    def _over_group(self, name: str, ranks: Sequence[int]) -> GroupTransport:
        assert self._store is not None
        store = dist.distributed_c10d.PrefixStore(name, self._store)
        place = ranks.index(self.rank)
        return GroupTransport(group_over(store, place, len(ranks), self._stalls.fail_after, self._address))

    def _transport_of_all(self, cluster: _C.Cluster) -> Transport:
        """Through common memory where all processes are on one machine."""
        if self.size == 1:
            return _alone()
        group = self._over_group("set/0", self.sets[0])
        if len(set(group.exchange(this_machine().encode()))) > 1:
            return group
        communicator, why = None, ""
        try:
            mesh = _C._comm.HostMesh(meeting_at_store(cluster), timeout=self._stalls.fail_after)
            (communicator,) = mesh.make_group("muster.horovod")
        except Error as error:
            why = str(error)
        reasons = [message.decode() for message in group.exchange(why.encode())]
        if not any(reasons) and communicator is not None:
            return HostTransport(communicator, group)
        logging.getLogger("muster").info("muster.horovod: processes share no memory: %s", max(reasons))
        return group


def _alone() -> Transport:
    group = group_over(dist.HashStore(), 0, 1, patience())  # type: ignore[attr-defined]
    return GroupTransport(group)


def is_running() -> bool:
    """Between begin() and end()."""
    return _current is not None


def running() -> Runtime:
    """The job. Raises ValueError where there is none."""
    if _current is None:
        raise InvalidArgument("muster.horovod has not been initialized; use hvd.init()")
    return _current


def begin(comm: Any, sets: Sequence[Sequence[int]]) -> Runtime:
    """Collective: begins a job, unless one is running."""
    global _current, _starts
    if _current is None:
        _starts += 1
        _current = Runtime(comm, sets, _starts)
    return _current


def end() -> None:
    """Ends the job, if one is running."""
    global _current
    if _current is not None:
        ended, _current = _current, None
        ended.close(f"rank {ended.rank} has called hvd.shutdown()")
