"""What NCCL costs the host: collectives alone and whole windows, of one rank and of two ranks that share the GPU.

Two ranks of one GPU are two hosts to NCCL (NCCL_HOSTID) and talk over loopback: what their device takes says nothing,
what the calling thread takes does.

- `post_us`: of the calling thread for an all-reduce of 1 MB, from its call until it returns. `threads`: how many were
  made meanwhile, by 100 of them. `blocking`: NCCL's calls return when they are through (the default of Muster).
- `window_ms`: of the calling thread for a window, by Muster over NCCL and by DDP, for ranks that are alone.

    python benchmarks/gpu_nccl.py                  prints JSON
    python benchmarks/gpu_nccl.py --dry            on the CPU, over memory in place of NCCL: shows that it runs
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import muster
from muster.free_ports import free_ports

DRY = "--dry" in sys.argv
CALLS = 100


def last_thread() -> int:
    """The number of the newest thread of the system that this process can make now; numbers grow."""
    import threading

    numbers: list[int] = []
    thread = threading.Thread(target=lambda: numbers.append(threading.get_native_id()))
    thread.start()
    thread.join()
    return numbers[0]


def host_of_its_own(rank: int) -> None:
    """What a rank does first that shares its GPU with others: NCCL takes it for a host, reached by loopback."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_MNNVL_ENABLE="0")


def communicator(rank: int, size: int, port: int, blocking: bool) -> Any:
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    if DRY:
        return muster._C._comm.make_local(1)[0]
    torch.cuda.set_device(0)
    options = {"timeout": 60.0, "arena_bytes": 1 << 22, "blocking": blocking}
    return muster._C._comm.make_nccl(store, rank, size, torch.device("cuda", 0), **options)


def collectives(rank: int, size: int, port: int, blocking: bool) -> dict[str, Any]:
    """Of one rank."""
    host_of_its_own(rank)
    comm = communicator(rank, size, port, blocking)
    values = comm.allocate(1 << 18, torch.float32)
    for _ in range(10):
        comm.all_reduce(values).wait()
    if not DRY:
        torch.cuda.synchronize()
    taken = []
    before = last_thread()
    for _ in range(CALLS):
        began = time.perf_counter()
        work = comm.all_reduce(values)
        taken.append(1e6 * (time.perf_counter() - began))
        work.wait()
        if not DRY:
            torch.cuda.synchronize()
    made = last_thread() - before - 1
    comm.barrier().wait()
    return {"ranks": size, "blocking": blocking, "post_us": round(statistics.median(taken), 1), "threads": made}


def of_ranks(size: int, blocking: bool) -> dict[str, Any]:
    """The slower of the ranks."""
    (port,) = free_ports(1)
    with multiprocessing.get_context("spawn").Pool(size) as pool:
        found = pool.starmap(collectives, [(rank, size, port, blocking) for rank in range(size)], chunksize=1)
    return max(found, key=lambda of: of["post_us"])


def windows() -> dict[str, Any]:
    """Milliseconds of the calling thread, by quartiles, of a model with several buckets."""
    import gpu_step

    muster._C._comm.set_nccl_alone(not DRY)
    case = gpu_step.Case("100 tensors, 13 M")
    options = {"clip_norm": 1.0, "bucket_bytes": gpu_step.BUCKET_BYTES}
    with muster.MirroredStrategy(["cpu:0" if DRY else "cuda:0"], **options) as strategy:
        window = gpu_step.Window(strategy, case)
        columns = {"muster over nccl": window, "ddp": gpu_step.torch_window(case, gpu_step.with_ddp)}
        for _ in range(4):
            window()
        found = gpu_step.enqueue_ms(columns)
    return {"model": case.model, "buckets": gpu_step.buckets_of(window.module), **found}


def main() -> None:
    """Measures everything and prints it."""
    result: dict[str, Any] = {
        "collectives": [of_ranks(size, blocking) for size in ((1,) if DRY else (1, 2)) for blocking in (True, False)]
    }
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result["window_ms"] = pool.apply(windows)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
