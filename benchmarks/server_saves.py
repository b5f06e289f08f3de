"""What a checkpoint of a table on parameter servers costs, or their snapshots: the longest step while servers write
them, and memory.

One worker trains an embedding whose rows are on servers, each a process, with Adagrad, whose state is as large as the
rows. All rows are used once; then steps of the same size are timed without and with a checkpoint that is being written,
in turns, or, with --snapshot-every, a minute each on new servers that keep no snapshots and on new ones that do. Memory
is the resident one of servers and worker, sampled every 10 ms.

    python benchmarks/server_saves.py --rows 20000000 --dim 64 --folder /where/there/is/room --out benchmarks/results
    python benchmarks/server_saves.py --snapshot-every 6 --pause 20
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import muster
from muster.benchmarks.record import Out, record, write
from muster.free_ports import free_ports

FILL = 50_000  # rows of a step that uses them first
STEPS = 200  # without a checkpoint, in a turn
MINUTE = 60.0  # seconds
Fill = Callable[[muster.Strategy], Callable[[], None]]


class Resident:
    """The most memory that a process had of its own while in the context, and with what it shares (the worker's log of
    pushes, in both processes, and files), in bytes."""

    def __init__(self, process: int) -> None:
        self._file = Path(f"/proc/{process}/statm")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.before = self.most = self.now()

    def now(self) -> tuple[int, int]:
        _, resident, shared = (int(pages) * 4096 for pages in self._file.read_text().split()[:3])
        return resident - shared, resident

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            own, resident = self.now()
            self.most = max(self.most[0], own), max(self.most[1], resident)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def is_writing(strategy: muster.Strategy) -> bool:
    return "being written" in strategy.explain()


def steps(step: Callable[[], None], until: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each step."""
    times: list[float] = []
    while not until(len(times)):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def filled(strategy: muster.Strategy, rows: int, dim: int, batch: int, pause: float) -> Callable[[], None]:
    """A step over some rows of a table, all of which were used before, in a loop that does other things, too."""
    table = muster.ShardedEmbedding(rows, dim, mode="sum", seed=1, scale=0.01, on_servers=True)
    model, _ = strategy.prepare(table, torch.optim.Adagrad(table.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(0)

    def use(ids: Tensor) -> None:
        strategy.step(lambda ids: model(ids[:, None]).square().mean(), ids)

    for first in range(0, rows, FILL):
        use(torch.arange(first, min(first + FILL, rows)))

    def step() -> None:
        time.sleep(1e-3 * pause)
        use(torch.randint(0, rows, (batch,), generator=generator))

    return step


def turn(strategy: muster.Strategy, step: Callable[[], None], folder: Path) -> dict[str, Any]:
    without = steps(step, lambda done: done == STEPS)
    began = time.perf_counter()
    strategy.save(folder, keep=1)
    blocked = 1e3 * (time.perf_counter() - began)
    within = steps(step, lambda _: not is_writing(strategy))
    return {
        "blocked_ms": blocked,
        "seconds": time.perf_counter() - began,
        "steps": len(within),
        "median_ms": {"without": statistics.median(without), "within": statistics.median(within)},
        "longest_ms": {"without": max(without), "within": max(within)},
    }


@contextlib.contextmanager
def job(servers: int, *options: str) -> Iterator[tuple[muster.Strategy, list[int]]]:
    """A worker, and the processes of it and of its new servers."""
    *addresses, store = [f"127.0.0.1:{port}" for port in free_ports(servers + 1)]
    serve = [sys.executable, "-m", "muster", "serve", *options, "--address"]
    begun = [subprocess.Popen([*serve, address], stdout=subprocess.PIPE) for address in addresses]
    try:
        for process in begun:
            assert process.stdout is not None
            process.stdout.readline()
        cluster = muster.Cluster(0, 1, store, 0, addresses)
        with muster.ParameterServerStrategy(cluster, ["cpu"], threads_per_replica=1, timeout=600.0) as strategy:
            yield strategy, [os.getpid(), *(process.pid for process in begun)]
    finally:
        for process in begun:
            process.kill()
            process.wait()


@contextlib.contextmanager
def watched(processes: list[int]) -> Iterator[list[Resident]]:
    with contextlib.ExitStack() as watching:
        yield [watching.enter_context(Resident(process)) for process in processes]


def in_mb(memory: list[Resident]) -> dict[str, Any]:
    each = [
        {
            when: {"own_mb": own / 1e6, "resident_mb": resident / 1e6}
            for when, (own, resident) in (("before", process.before), ("most", process.most))
        }
        for process in memory
    ]
    return {"worker": each[0], "servers": each[1:]}


def checkpoints(servers: int, rounds: int, folder: Path, fill: Fill) -> dict[str, Any]:
    with job(servers) as (strategy, processes):
        step = fill(strategy)
        steps(step, lambda done: done == STEPS)
        with watched(processes) as memory:
            turns = [turn(strategy, step, folder) for _ in range(rounds)]
    size = sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))
    return {"turns": turns, "checkpoint_mb": size / 1e6, **in_mb(memory)}


def minute(servers: int, fill: Fill, *options: str) -> dict[str, Any]:
    with job(servers, *options) as (strategy, processes):
        step = fill(strategy)
        steps(step, lambda done: done == STEPS)
        with watched(processes) as memory:
            ends = time.perf_counter() + MINUTE
            times = steps(step, lambda _: time.perf_counter() > ends)
    return {"steps": len(times), "median_ms": statistics.median(times), "longest_ms": max(times), **in_mb(memory)}


def snapshots(servers: int, rounds: int, every: float, folder: Path, fill: Fill) -> dict[str, Any]:
    turns = []
    for number in range(rounds):
        its = folder / str(number)
        kept = ("--snapshots", str(its), "--snapshot-every", str(every))
        turns.append({"without": minute(servers, fill), "within": minute(servers, fill, *kept)})
        shutil.rmtree(its)
    return {"every_s": every, "turns": turns}


def main(
    rows: Annotated[int, typer.Option(help="Of the table.")] = 1_500_000,
    dim: Annotated[int, typer.Option(help="Of a row.")] = 64,
    servers: Annotated[int, typer.Option(help="Processes that share the table.")] = 1,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 1024,
    pause: Annotated[float, typer.Option(help="Milliseconds before each step.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Turns without and with what is written.")] = 3,
    snapshot_every: Annotated[float | None, typer.Option(help="Seconds; snapshots instead of checkpoints.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where all is written, in a folder of its own.")] = None,
    out: Out = None,
) -> None:
    """Steps and memory while parameter servers write a checkpoint or snapshots."""
    torch.set_num_threads(1)
    runs = Path(tempfile.mkdtemp(dir=folder))
    fill = partial(filled, rows=rows, dim=dim, batch=batch, pause=pause)
    try:
        if snapshot_every is None:
            case = checkpoints(servers, rounds, runs, fill)
        else:
            case = snapshots(servers, rounds, snapshot_every, runs, fill)
    finally:
        shutil.rmtree(runs)
    write(record("server_saves", rows=rows, dim=dim, servers=servers, batch=batch, pause_ms=pause, case=case), out)
    for key, value in case.items():
        for line in value if key == "turns" else [f"{key}: {value}"]:
            print(line)


if __name__ == "__main__":
    typer.run(main)
