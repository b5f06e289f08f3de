"""An fp32 sum over ranks of one host: the host backend (processes) and the local one (threads) against Gloo.

All columns live in the same processes and take turns: a round gives every column its repeats once untimed and once
timed, and each round begins with another column. What is kept are quartiles over rounds, as rank 0 sees them. host and
local reduce memory that the group allocated, as training does, and are called from C++, as gradients are; Gloo's time
includes a call from Python. The values are zero: repeated sums would grow.

read+add is what the machine's memory gives: two buffers are read and their sum is written to a third, on a thread a
core. An all-reduce reads and writes every rank's buffer; its bytes a second over those of read+add are its share.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import muster
from muster import _C
from muster.benchmarks.record import Out, known, need_gloo, publish, record
from muster.benchmarks.rounds import by_clock, quartiles, ratio, take_turns
from muster.benchmarks.tables import allreduce as table
from muster.free_ports import free_ports

__all__ = ["main"]

comm: Any = _C._comm

KB, MB = 1 << 10, 1 << 20
REPEATS = {4: 300, 64 * KB: 300, 1 * MB: 60, 32 * MB: 4, 128 * MB: 2}  # by bytes
GLOO_REPEATS = {4: 50, 64 * KB: 20, 1 * MB: 15, 32 * MB: 2, 128 * MB: 1}
STREAMED = 32 * MB  # from here on memory is what counts

Turn = Callable[[], float]  # milliseconds of one operation


class Rank:
    """One process: its rank in the groups of processes; rank 0 also has all ranks of the group of threads."""

    def __init__(self, rank: int, ranks: int, ports: tuple[int, int]) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=ranks)
        mesh = comm.HostMesh(muster.Cluster(rank, ranks, f"127.0.0.1:{ports[1]}", rank))
        (self.host,) = mesh.make_group("benchmark")
        self.is_first = rank == 0
        self.local = comm.make_local(ranks, 60.0) if self.is_first else []
        self.threads = ThreadPoolExecutor(max(ranks, cores()))

    def turns(self, size: int) -> dict[str, Turn]:
        """What takes turns at this size; a turn is called by all processes together."""
        turns = {"host": self.host_turn(size), "local": self.local_turn(size), "Gloo": self.gloo_turn(size)}
        if size >= STREAMED:
            turns["read+add"] = self.read_add_turn(size)
        return turns

    def host_turn(self, size: int) -> Turn:
        tensor = self.host.allocate(size // 4, torch.float32)

        def turn() -> float:
            self.host.barrier().wait()
            return 1e3 * float(comm.time_all_reduce(self.host, tensor, REPEATS[size]))

        return turn

    def local_turn(self, size: int) -> Turn:
        tensors = [handle.allocate(size // 4, torch.float32) for handle in self.local]
        repeats = [REPEATS[size]] * len(tensors)
        return self.alone(lambda: 1e3 * self.on_threads(comm.time_all_reduce, self.local, tensors, repeats)[0])

    def gloo_turn(self, size: int) -> Turn:
        tensor = torch.zeros(size // 4)
        group = dist.group.WORLD
        assert group is not None

        def turn() -> float:
            group.barrier().wait()
            return by_clock(lambda: group.allreduce([tensor]).wait(), GLOO_REPEATS[size])

        return turn

    def read_add_turn(self, size: int) -> Turn:
        parts = [torch.zeros(size // 4).chunk(cores()) for _ in range(3)] if self.is_first else []

        def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            for _ in range(REPEATS[size]):
                torch.add(a, b, out=out)

        return self.alone(lambda: by_clock(lambda: self.on_threads(add, *parts), 1) / REPEATS[size])

    def alone(self, turn: Turn) -> Turn:
        """A turn of the first process, for which the others wait."""

        def waited() -> float:
            self.host.barrier().wait()
            milliseconds = turn() if self.is_first else 0.0
            self.host.barrier().wait()
            return milliseconds

        return waited

    def on_threads(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self.threads.map(function, *arguments))


def worker(rank: int, ranks: int, rounds: int, sizes: list[int], ports: tuple[int, int]) -> list[dict[str, Any]]:
    process = Rank(rank, ranks, ports)
    cases = []
    for size in sizes:
        times = take_turns(process.turns(size), rounds, clock=lambda turn, _: float(turn()))  # type: ignore[arg-type]
        cases += [case(ranks, size, times)] if process.is_first else []
    dist.barrier()
    dist.destroy_process_group()
    return cases


def case(ranks: int, size: int, times: dict[str, list[float]]) -> dict[str, Any]:
    ours = ("host", "local")
    result: dict[str, Any] = {
        "ranks": ranks,
        "bytes": size,
        "us": {name: quartiles([1e3 * value for value in values]) for name, values in times.items()},
        "Gloo over": {name: ratio(times["Gloo"], times[name]) for name in ours},
    }
    if "read+add" in times:
        moved = 2 * ranks / 3  # by an all-reduce, over what read+add moves
        result["share of read+add"] = {
            name: ratio([moved * value for value in times["read+add"]], times[name]) for name in ours
        }
        result["read+add GB/s"] = quartiles([3 * size / value / 1e6 for value in times["read+add"]])
    return result


def measure(ranks: int, rounds: int, sizes: list[int]) -> list[dict[str, Any]]:
    first, second = free_ports(2)
    with ProcessPoolExecutor(ranks, get_context("spawn")) as pool:
        futures = [pool.submit(worker, rank, ranks, rounds, sizes, (first, second)) for rank in range(ranks)]
        return [case for future in futures for case in future.result()]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="2 and 4 when not given.")] = None,
    sizes: Annotated[list[int] | None, typer.Option(help=f"In bytes, of {', '.join(map(str, REPEATS))}.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each size.", min=3)] = 15,
    out: Out = None,
) -> None:
    """All-reduce between ranks of one host, processes and threads, against Gloo."""
    need_gloo()
    chosen = known(sizes, REPEATS, "--sizes")
    result = record("allreduce", cases=[case for count in ranks or (2, 4) for case in measure(count, rounds, chosen)])
    publish(result, table(result), out)
