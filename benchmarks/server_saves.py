"""What a checkpoint of a table on parameter servers costs: the longest step while servers write it, and memory.

One worker trains an embedding whose rows are on servers, each a process, with Adagrad, whose state is as large as the
rows. All rows are used once; then steps of the same size are timed without and with a checkpoint that is being written,
in turns. Memory is the resident one of servers and worker, sampled every 10 ms.

    python benchmarks/server_saves.py --rows 20000000 --dim 64 --folder /where/there/is/room --out benchmarks/results
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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import muster
from muster.benchmarks.record import Out, record, write
from muster.free_ports import free_ports

FILL = 500_000  # rows of a step that uses them first
STEPS = 200  # without a checkpoint, in a turn


class Resident:
    """The most memory that a process had while in the context, in bytes."""

    def __init__(self, process: int) -> None:
        self._file = Path(f"/proc/{process}/statm")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.before = self.most = self.now()

    def now(self) -> int:
        return int(self._file.read_text().split()[1]) * 4096

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, self.now())

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


def filled(strategy: muster.Strategy, rows: int, dim: int, batch: int) -> Callable[[], None]:
    """A step over some rows of a table, all of which were used before."""
    table = muster.ShardedEmbedding(rows, dim, mode="sum", seed=1, scale=0.01, on_servers=True)
    model, _ = strategy.prepare(table, torch.optim.Adagrad(table.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(0)

    def use(ids: Tensor) -> None:
        strategy.step(lambda ids: model(ids[:, None]).square().mean(), ids)

    for first in range(0, rows, FILL):
        use(torch.arange(first, min(first + FILL, rows)))
    return lambda: use(torch.randint(0, rows, (batch,), generator=generator))


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


def main(
    rows: Annotated[int, typer.Option(help="Of the table.")] = 1_500_000,
    dim: Annotated[int, typer.Option(help="Of a row.")] = 64,
    servers: Annotated[int, typer.Option(help="Processes that share the table.")] = 1,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Turns without and with a checkpoint.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="Where checkpoints are written, in a folder of its own.")] = None,
    out: Out = None,
) -> None:
    """Steps and memory while parameter servers write a checkpoint."""
    torch.set_num_threads(1)
    *addresses, store = [f"127.0.0.1:{port}" for port in free_ports(servers + 1)]
    serve = [sys.executable, "-m", "muster", "serve", "--address"]
    begun = [subprocess.Popen([*serve, address], stdout=subprocess.PIPE) for address in addresses]
    runs = Path(tempfile.mkdtemp(dir=folder))
    try:
        for process in begun:
            assert process.stdout is not None
            process.stdout.readline()
        cluster = muster.Cluster(0, 1, store, 0, addresses)
        with muster.ParameterServerStrategy(cluster, ["cpu"], threads_per_replica=1, timeout=600.0) as strategy:
            step = filled(strategy, rows, dim, batch)
            steps(step, lambda done: done == STEPS)
            all_processes = [os.getpid(), *(process.pid for process in begun)]
            with contextlib.ExitStack() as watching:
                watched = [watching.enter_context(Resident(process)) for process in all_processes]
                turns = [turn(strategy, step, runs) for _ in range(rounds)]
            size = sum(file.stat().st_size for file in runs.glob("*/*.safetensors"))
    finally:
        for process in begun:
            process.kill()
        shutil.rmtree(runs)
    memory = [{"before_mb": each.before / 1e6, "most_mb": each.most / 1e6} for each in watched]
    case = {"turns": turns, "checkpoint_mb": size / 1e6, "worker": memory[0], "servers": memory[1:]}
    write(record("server_saves", rows=rows, dim=dim, servers=servers, batch=batch, case=case), out)
    for each in turns:
        print(each)
    print(f"checkpoint: {size / 1e6:.0f} MB; the worker: {memory[0]}; servers: {memory[1:]}")


if __name__ == "__main__":
    typer.run(main)
