"""Communicators over process groups that only Python can make, and their Python bindings."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import muster
from muster import _C
from support.ranks import Ranks, run_ranks

comm: Any = _C._comm
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def _group(kind: str, **options: Any) -> list[Any]:
    """This process's handles of a job-wide group."""
    if kind == "host":
        return list(comm.HostMesh(muster.Cluster.from_env(), timeout=60.0).make_group("test"))
    dist.init_process_group("gloo")
    if kind == "hierarchical":
        return list(comm.make_hierarchical(dist.group.WORLD, 2, True, 60.0))
    return [comm.make_c10d(dist.group.WORLD, options.get("check", kind == "checked"), 60.0)]


def _in_threads(handles: list[Any], body: Any) -> None:
    errors: list[BaseException] = []

    def run(handle: Any) -> None:
        try:
            body(handle)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _collectives(c: Any) -> None:
    ranks = range(c.size)
    for dtype in DTYPES:
        for n in (0, 1, 17, 1025, 300_003):
            for op, expected in (("sum", sum(r + 1 for r in ranks)), ("max", c.size), ("min", 1)):
                tensor = torch.full((n,), c.rank + 1, dtype=dtype)
                c.all_reduce(tensor, op).wait()
                assert tensor.eq(expected).all()
            c.broadcast(tensor.fill_(c.rank), c.size - 1).wait()
            assert tensor.eq(c.size - 1).all()
        gather = c.all_gather(torch.full((3 + c.rank, 2), c.rank, dtype=dtype))
        gather.wait()
        for r, part in enumerate(gather.outputs()):
            assert part.shape == (3 + r, 2)
            assert part.eq(r).all()
        output = torch.zeros(5, dtype=dtype)
        c.reduce_scatter(output, torch.arange(5 * c.size).to(dtype)).wait()
        assert output.equal((torch.arange(5) + 5 * c.rank).to(dtype) * c.size)
    works = [c.all_reduce(torch.full((n,), 1.0)) for n in range(1, 5_000, 100)]
    for work in reversed(works):
        work.wait()
    c.barrier().wait()


def _scopes(c: Any) -> None:
    for step in range(6):
        c.begin_scope(step)
        absent = step % c.size
        if step == 5 and c.rank == 0:
            c.end_scope("failed", "ValueError: bad label")
        elif step == 5:
            with pytest.raises(muster.RemoteError, match="bad label") as caught:
                c.all_reduce(torch.ones(10)).wait()
            assert caught.value.replica == 0
            c.end_scope("failed", "because of rank 0")
        elif c.rank == absent:
            c.end_scope("absent")
        else:
            tensor = torch.full((40_000,), float(2**c.rank))
            c.all_reduce(tensor).wait()
            assert tensor.eq(sum(2**r for r in range(c.size) if r != absent)).all()
            gather = c.all_gather(torch.tensor(c.rank))
            gather.wait()
            assert [None if part is None else int(part) for part in gather.outputs()] == [
                None if r == absent else r for r in range(c.size)
            ]
            c.end_scope("finished")
    tensor = torch.ones(3)
    c.all_reduce(tensor).wait()
    assert tensor.eq(c.size).all()


def _suite(kind: str) -> None:
    handles = _group(kind)
    _in_threads(handles, _collectives)
    _in_threads(handles, _scopes)


@pytest.mark.parametrize("kind", ["plain", "checked", "hierarchical", "host"])
def test_collectives_and_scopes(kind: str) -> None:
    run_ranks(3 if kind == "checked" else 2, _suite, kind)


def _mismatch() -> str:
    (c,) = _group("checked")
    with pytest.raises(muster.LayoutMismatch) as caught:
        c.all_reduce(torch.ones(10 + 2 * c.rank)).wait()
    with pytest.raises(muster.LayoutMismatch):
        c.barrier()
    return str(caught.value)


def test_a_checked_group_names_both_requests() -> None:
    for text in run_ranks(2, _mismatch):
        assert "rank 0 asked for all_reduce(sum) of 10 Float" in text
        assert "rank 1 for all_reduce(sum) of 12 Float" in text


def _stay_until_rank_0_is_done() -> None:
    """A rank that leaves ends its peers' waits: this one stays, connected, until rank 0 has seen what it waits for."""
    store = dist.distributed_c10d._get_default_store()
    store.wait(["rank 0 is done"], datetime.timedelta(seconds=60))
    store.set("rank 1 knows", "")


def _let_rank_1_leave() -> None:
    """The store is in rank 0's process, which stays until the other one has read that it may leave."""
    store = dist.distributed_c10d._get_default_store()
    store.set("rank 0 is done", "")
    store.wait(["rank 1 knows"], datetime.timedelta(seconds=60))


def _late() -> None:
    (c,) = _group("plain")
    if c.rank == 0:
        with pytest.raises(muster.Timeout, match=r"all_reduce.*raise `timeout`"):
            c.all_reduce(torch.ones(10)).wait(0.3)
        with pytest.raises(muster.Timeout):
            c.barrier()
        _let_rank_1_leave()
    else:
        _stay_until_rank_0_is_done()


def test_a_late_rank_of_a_process_group_is_a_timeout() -> None:
    run_ranks(2, _late)


def _abort() -> None:
    (c,) = _group("plain")
    if c.rank == 0:
        threading.Timer(0.1, lambda: c.abort("the user pressed Ctrl-C")).start()
        with pytest.raises(muster.CommError, match="Ctrl-C"):
            c.all_reduce(torch.ones(10)).wait()
        _let_rank_1_leave()
    else:
        _stay_until_rank_0_is_done()


def test_abort_ends_a_wait_on_a_process_group() -> None:
    run_ranks(2, _abort)


def _until_a_peer_dies(kind: str) -> tuple[str, float]:
    (c,) = _group(kind)
    tensor = c.allocate(100_000, torch.float32)
    c.all_reduce(tensor).wait()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(muster.CommError) as caught:
        for _ in range(100_000):
            c.all_reduce(tensor).wait()
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - start


def test_a_killed_worker_is_named_within_five_seconds() -> None:
    for result in Ranks(3, _until_a_peer_dies, "host").results()[::2]:
        text, seconds = result
        assert text.startswith("PeerLost: worker 1")
        assert seconds < 5


def test_a_killed_worker_of_a_process_group_ends_the_wait() -> None:
    text, seconds = Ranks(2, _until_a_peer_dies, "plain").results()[0]
    assert text.startswith("CommError: all_reduce at rank 0 failed in its process group")
    assert seconds < 5


def test_local_groups_release_the_gil() -> None:
    _in_threads(comm.make_local(2, 30.0), _collectives)
