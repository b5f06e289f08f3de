"""What NCCL costs: the host's time, the device's memory and a job's first steps, of one rank and of two ranks that
share the GPU.

Two ranks of one GPU are two hosts to NCCL (NCCL_HOSTID) and talk over loopback: what their device takes says nothing,
what the calling thread takes does.

- `collectives`: `post_us` of the calling thread for an all-reduce of 1 MB, from its call until it returns. `threads`:
  how many were made meanwhile, by 100 of them. `blocking`: NCCL's calls return when they are through (the default of
  Muster).
- `communicators`: the first of a process, which a job makes, and a second: seconds to make one, and megabytes of the
  device by the driver, for one rank: once it is made, once it has reduced 1 MB, and beyond its bytes for memory that it
  registers.
- `first steps`: seconds from the beginning until everything is prepared and until the device is through with steps 1
  and 2; `close_us`: of the calling thread from the end of a window's backward pass to the end of the step (for DDP the
  clipping and the optimizer).
- `window_ms`: of the calling thread for a window, by Muster over NCCL and by DDP, for ranks that are alone.

    python benchmarks/gpu_nccl.py                  prints JSON, what it has after each part; the last line has all
    python benchmarks/gpu_nccl.py --dry            on the CPU, over memory in place of NCCL: shows that it runs
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from muster.benchmarks.rounds import quartiles
from muster.free_ports import free_ports

DRY = "--dry" in sys.argv
CALLS = 100
STEPS = 4 if DRY else 30
WARM_STEPS = 2 if DRY else 10
MB = 2**20
WAIT = datetime.timedelta(seconds=60)
MODEL = "100 tensors, 13 M"


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


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def store_of(rank: int, size: int, port: int) -> dist.Store:
    """What a rank does second: it meets the others."""
    if not DRY:
        torch.cuda.set_device(0)
    return dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=WAIT)


def communicator(store: dist.Store, rank: int, size: int, blocking: bool = True) -> Any:
    if DRY:
        return muster._C._comm.make_local(1)[0]
    options = {"timeout": 60.0, "arena_bytes": 1 << 22, "blocking": blocking}
    return muster._C._comm.make_nccl(store, rank, size, torch.device("cuda", 0), **options)


def collectives(rank: int, size: int, port: int, blocking: bool) -> dict[str, Any]:
    """Of one rank."""
    host_of_its_own(rank)
    comm = communicator(store_of(rank, size, port), rank, size, blocking)
    values = comm.allocate(1 << 18, torch.float32)
    for _ in range(10):
        comm.all_reduce(values).wait()
    synchronize()
    taken = []
    before = last_thread()
    for _ in range(CALLS):
        began = time.perf_counter()
        work = comm.all_reduce(values)
        taken.append(1e6 * (time.perf_counter() - began))
        work.wait()
        synchronize()
    made = last_thread() - before - 1
    comm.barrier().wait()
    return {"ranks": size, "blocking": blocking, "post_us": round(statistics.median(taken), 1), "threads": made}


kept: list[dist.Store] = []
"""Stores that live as long as the process."""


def communicators(rank: int, size: int, port: int) -> dict[str, Any]:
    """Of one rank, what two take that it makes one after the other."""
    host_of_its_own(rank)
    store = store_of(rank, size, port)
    values = torch.ones(1 << 18, device="cpu" if DRY else "cuda")
    meetings = 0

    def meet() -> None:
        nonlocal meetings
        meetings += 1
        if store.add(f"at {meetings}", 1) == size:
            store.set(f"all at {meetings}", "")
        store.wait([f"all at {meetings}"])

    def used() -> float:
        """Megabytes of the device, while no rank does anything, for each rank."""
        synchronize()
        meet()
        free, total = (0, 0) if DRY else torch.cuda.mem_get_info()
        meet()
        return (total - free) / MB / size

    found: dict[str, Any] = {"ranks": size, "each": []}
    alive = []
    for number in range(2):
        before = used()
        began = time.perf_counter()
        comm = communicator(dist.PrefixStore(str(number), store), rank, size)
        seconds = time.perf_counter() - began
        made = used()
        comm.all_reduce(values).wait()
        reduced = used()
        alive.append((comm, comm.allocate(1 << 20, torch.float32)))
        amounts = {
            "made_mb": made - before,
            "reduced_mb": reduced - made,
            "window_mb": used() - reduced - (0 if DRY else 4),
        }
        found["each"].append({"seconds": round(seconds, 3), **{name: round(mb, 1) for name, mb in amounts.items()}})
    meet()
    kept.append(store)  # rank 0 hosts it, and others may still wait for its answer
    return found


# --- a job's steps ----------------------------------------------------------------------------------------------------


class Clock:
    """When a backward pass ended."""

    ended = 0.0

    def watch(self, loss: Tensor) -> Tensor:
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._note))
        return loss

    def _note(self) -> None:
        self.ended = time.perf_counter()


def first_steps(rank: int, size: int, port: int, way: str) -> dict[str, Any]:
    """Of one rank; `way` is "muster" or "ddp"."""
    host_of_its_own(rank)
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    if not DRY:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # a context, which is not what is measured
    return {"ranks": size, "way": way, **(steps_of_muster if way == "muster" else steps_of_ddp)(rank, size, port)}


def timed(step: Callable[[], object], clock: Clock, began: float) -> dict[str, Any]:
    """Of a step, whose backward pass the clock watches, of a job that began then."""
    synchronize()
    seconds = [time.perf_counter() - began]
    for _ in range(2):
        step()
        synchronize()
        seconds.append(time.perf_counter() - began)
    closes = []
    for number in range(WARM_STEPS + STEPS):
        step()
        if number >= WARM_STEPS:
            closes.append(1e6 * (time.perf_counter() - clock.ended))
        synchronize()
    return {"seconds": [round(value, 3) for value in seconds], "close_us": quartiles(closes)}


def steps_of_muster(rank: int, size: int, port: int) -> dict[str, Any]:
    import gpu_step

    muster._C._comm.set_nccl_alone(not DRY)
    clock = Clock()
    began = time.perf_counter()
    options = {"clip_norm": 1.0, "bucket_bytes": gpu_step.BUCKET_BYTES, "timeout": 60.0}
    devices = ["cpu:0" if DRY else "cuda:0"]
    with muster.MultiWorkerMirroredStrategy.from_env(devices, **options) as strategy:
        window = gpu_step.Window(strategy, gpu_step.Case(MODEL))
        x, y = (t + rank for t in window.batch)
        return timed(
            lambda: strategy.step(lambda x, y: clock.watch(F.mse_loss(window.model(x), y)), x, y), clock, began
        )


def steps_of_ddp(rank: int, size: int, port: int) -> dict[str, Any]:
    began = time.perf_counter()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=WAIT)
    dist.init_process_group("gloo" if DRY else "nccl", store=store, rank=rank, world_size=size)
    # The model ends in it: torch's class may wait forever if it ends after its group.
    found = timed_ddp(began)
    dist.destroy_process_group()
    return found


def timed_ddp(began: float) -> dict[str, Any]:
    import gpu_step

    clock = Clock()
    module, x, y = gpu_step.made(MODEL)
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        clock.watch(F.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()

    return timed(step, clock, began)


def windows(*_: int) -> dict[str, Any]:
    """Milliseconds of the calling thread, by quartiles, of a model with several buckets."""
    found = timed_windows()  # DDP's model ends in it, as in steps_of_ddp
    dist.destroy_process_group()
    return found


def timed_windows() -> dict[str, Any]:
    import gpu_step

    muster._C._comm.set_nccl_alone(not DRY)
    case = gpu_step.Case(MODEL)
    options = {"clip_norm": 1.0, "bucket_bytes": gpu_step.BUCKET_BYTES}
    with muster.MirroredStrategy(["cpu:0" if DRY else "cuda:0"], **options) as strategy:
        window = gpu_step.Window(strategy, case)
        columns = {"muster over nccl": window, "ddp": gpu_step.torch_window(case, gpu_step.with_ddp)}
        for _ in range(4):
            window()
        found = gpu_step.enqueue_ms(columns)
    return {"model": case.model, "buckets": gpu_step.buckets_of(window.module), **found}


class Processes:
    """Of ranks. Each measurement has new ones; of a dry run all are by the same two, since starting them takes long."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._shared = self._context.Pool(2) if DRY else None

    def run(self, size: int, measure: Callable[..., dict[str, Any]], *arguments: Any) -> list[dict[str, Any]]:
        """What each rank found."""
        (port,) = free_ports(1)
        tasks = [(rank, size, port, *arguments) for rank in range(size)]
        if self._shared is not None:
            return self._shared.starmap(measure, tasks, chunksize=1)
        with self._context.Pool(size) as pool:
            return pool.starmap(measure, tasks, chunksize=1)


def main() -> None:
    """Measures everything and prints it."""
    processes = Processes()
    result: dict[str, Any] = {"collectives": [], "communicators": [], "first steps": []}

    def keep(what: str, found: Any) -> None:
        if isinstance(result.get(what), list):
            result[what].append(found)
        else:
            result[what] = found
        print(json.dumps(result), flush=True)

    for size, blocking in ((1, True), (1, False), (2, True), (2, False))[: 1 if DRY else None]:
        found = processes.run(size, collectives, blocking)
        keep("collectives", max(found, key=lambda of: float(of["post_us"])))
    keep("window_ms", processes.run(1, windows)[0])
    for size in (2,) if DRY else (1, 2):
        keep("communicators", processes.run(size, communicators)[0])
        for way in ("muster", "ddp"):
            found = processes.run(size, first_steps, way)
            keep("first steps", max(found, key=lambda of: float(of["seconds"][-1])))


if __name__ == "__main__":
    main()
