"""All-reduce latency: the local and host backends against Gloo, interleaved in one run.

Each round measures every backend at every size once; the table shows the median over rounds and, in brackets, the
range. `host (private)` reduces ordinary tensors, which the host backend stages; `host` and `local` reduce memory that
the group allocated, as training does.

    python benchmarks/allreduce.py --ranks 4      writes benchmarks/results/allreduce-<date>.json, prints the table
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from record import keep, record

import muster
from muster import _C

comm: Any = _C._comm
SIZES = {4: 2000, 64 << 10: 500, 1 << 20: 100, 32 << 20: 6}  # bytes: repetitions


def time_muster(handle: Any, tensor: torch.Tensor, repeats: int) -> float:
    handle.all_reduce(tensor, "max").wait()
    handle.barrier().wait()
    start = time.perf_counter()
    for _ in range(repeats):
        handle.all_reduce(tensor, "max").wait()
    return (time.perf_counter() - start) / repeats * 1e6


def time_gloo(tensor: torch.Tensor, repeats: int) -> float:
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return (time.perf_counter() - start) / repeats * 1e6


def time_local(ranks: int, size: int, repeats: int) -> float:
    handles = comm.make_local(ranks, 60.0)
    times = [0.0] * ranks

    def run(rank: int) -> None:
        times[rank] = time_muster(handles[rank], handles[rank].allocate(size // 4, torch.float32), repeats)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times[0]


def worker(rank: int, ranks: int, ports: list[int], rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    (host,) = comm.HostMesh(muster.Cluster(rank, ranks, f"127.0.0.1:{ports[1]}")).make_group("benchmark")
    measured: dict[str, dict[int, list[float]]] = {}

    def note(name: str, size: int, value: float) -> None:
        measured.setdefault(name, {}).setdefault(size, []).append(value)

    for _ in range(rounds):
        for size, repeats in SIZES.items():
            private = torch.ones(size // 4)
            note("gloo", size, time_gloo(private, max(1, repeats // 4)))
            note("host", size, time_muster(host, host.allocate(size // 4, torch.float32), repeats))
            note("host (private)", size, time_muster(host, private, repeats))
            dist.barrier()
            if rank == 0:
                note("local", size, time_local(ranks, size, repeats))
            dist.barrier()
    if rank == 0:
        results.put(measured)
    host.barrier().wait()
    dist.destroy_process_group()


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def main(
    ranks: Annotated[int, typer.Option(help="Processes, and threads.")] = 2,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each size.")] = 7,
    write: Annotated[bool, typer.Option(help="Keep the result in benchmarks/results.")] = True,
) -> None:
    """Measures, prints the table and keeps the result."""
    context = mp.get_context("spawn")
    results = context.Queue()
    ports = free_ports(2)
    processes = [context.Process(target=worker, args=(rank, ranks, ports, rounds, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    measured = results.get(timeout=600)
    for process in processes:
        process.join()

    print(f"{ranks} ranks, fp32, us per all-reduce: median (range) of {rounds} rounds; gain over Gloo")
    for size in SIZES:
        gloo = statistics.median(measured["gloo"][size])
        for name, sizes in measured.items():
            median = statistics.median(sizes[size])
            spread = f"({min(sizes[size]):.1f}-{max(sizes[size]):.1f})"
            print(f"{size:>10} B  {name:<15} {median:>10.1f} {spread:<22} {gloo / median:>6.1f}x")
    if write:
        keep(record("allreduce", ranks=ranks, unit="us", rounds=measured))


if __name__ == "__main__":
    typer.run(main)
