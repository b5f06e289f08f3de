"""What workers cost a parameter server: as many replicas in one worker, in some, and in a worker each.

Each case is a synchronous job of 8 CPU replicas that train a small MLP on one server, which is in this process. Counted
at the server while workers step: connections, threads, requests and pushes a step; timed: a step, quartiles over steps.
Bytes of gradients a step follow from the model: a worker pushes all of it once. A decision is that of as many workers,
for which this process speaks, and which push nothing.

    python benchmarks/server_replicas.py --out benchmarks/results
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.multiprocessing as mp
import typer
from torch import nn

import muster
from muster import _C
from muster.benchmarks.record import Out, record, write
from muster.benchmarks.rounds import quartiles
from muster.free_ports import free_ports

server: Any = _C._server

REPLICAS = 8
WIDTH = 512
ROWS = 32  # of all replicas together
DECISIONS = 100


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def work(rank: int, workers: int, port: int, address: str, steps: int, pipe: Any) -> None:
    """A worker, which steps as often as it is told; milliseconds of each step."""
    torch.set_num_threads(1)
    cluster = muster.Cluster(rank, workers, f"127.0.0.1:{port}", rank, [address])
    devices = ["cpu"] * (REPLICAS // workers)
    with muster.ParameterServerStrategy(cluster, devices, seed=1, threads_per_replica=1) as strategy:
        module = build()
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        x = torch.randn(ROWS // workers, WIDTH, generator=torch.Generator().manual_seed(rank))

        def step() -> None:
            strategy.step(lambda x: model(x).square().mean(), x)

        step()
        pipe.send([])
        while pipe.recv():
            times = []
            for _ in range(steps):
                began = time.perf_counter()
                step()
                times.append(1e3 * (time.perf_counter() - began))
            pipe.send(times)
        strategy.barrier()


class Job:
    """A server, and workers that have connected to it."""

    def __init__(self, workers: int, steps: int) -> None:
        self._context = mp.get_context("spawn")
        self._threads_before = threads()
        self.steps = steps
        self.address = server.free_address()
        self.running = server.ParameterServer("muster-server-" + self.address.split(":")[1])
        (port,) = free_ports(1)
        self._pipes, self._processes = [], []
        for rank in range(workers):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=work, args=(rank, workers, port, self.address, steps, there), daemon=True
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def measure(self) -> dict[str, Any]:
        """Counts of a step, and the milliseconds of all of them at the first worker."""
        before = server.stats(self.running)
        for pipe in self._pipes:
            pipe.send(True)
        times = [pipe.recv() for pipe in self._pipes]
        after = server.stats(self.running)
        counts = {what: (after[what] - before[what]) / self.steps for what in ("requests", "pushes")}
        return {
            **counts,
            "connections": after["connections"],
            "threads": threads() - self._threads_before,
            "ms": times[0],
        }

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join(60)


def decisions(workers: int, times: int) -> list[float]:
    """Milliseconds in which a server agrees with so many workers, which push nothing, on a step."""
    name = f"muster-benchmark-{os.getpid()}-{workers}-{time.monotonic_ns()}"
    running = server.ParameterServer(name)
    raw = server.RawWorkers(name, workers)
    raw.time_decisions(3)
    found = [1e3 * raw.time_decisions(1) for _ in range(times)]
    del raw, running
    return found


def threads() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/task").iterdir()))


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of turns.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 40,
    out: Out = None,
) -> None:
    """What 8 replicas cost a server, in one worker and in several."""
    assert threading.active_count() == 1
    gradient_bytes = sum(p.numel() * 4 for p in build().parameters())
    measured: dict[int, list[dict[str, Any]]] = {workers: [] for workers in (1, 2, 8)}
    for _ in range(rounds):
        for workers, found in measured.items():
            job = Job(workers, steps)
            found.append(job.measure())
            job.end()
    cases = {}
    for workers, found in measured.items():
        cases[f"{workers} x {REPLICAS // workers}"] = {
            "ms": quartiles([ms for each in found for ms in each["ms"]]),
            "gradient bytes a step": gradient_bytes * workers,
            "decision": {"ms": quartiles(decisions(workers, DECISIONS))},
            **{what: statistics.median(each[what] for each in found) for what in found[0] if what != "ms"},
        }
    result = record("server_replicas", rounds=rounds, steps=steps, replicas=REPLICAS, cases=cases)
    write(result, out)
    for name, case in cases.items():
        print(f"workers x replicas: {name}: {case}")


if __name__ == "__main__":
    typer.run(main)
