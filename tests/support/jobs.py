"""Scenarios on every strategy: functions of a strategy, run in this process or in worker processes that stay."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

import muster
from support.ranks import environment, free_port, process_context

Scenario = Callable[..., Any]


def plain(value: Any) -> Any:
    """The value with arrays for tensors, which do not outlive the process that they come from."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy().copy() if not value.is_sparse else plain(value.to_dense())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


def _serve(rank: int, num_ranks: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            port, fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment(rank, num_ranks, port))
        try:
            answer = (True, plain(fn(*args, **kwargs)))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


class WorkerPool:
    """Processes that run one function after another as ranks of a job; each call is a job of its own. A call that does
    not end in time costs the processes, which the next one starts again."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def call(self, fn: Callable[..., Any], *args: Any, timeout: float = 90, **kwargs: Any) -> list[Any]:
        """``fn(*args, **kwargs)`` on every rank, with torchrun's variables set; the results by rank."""
        if not self._processes:
            self._start()
        port = free_port()
        for pipe in self._pipes:
            pipe.send((port, fn, args, kwargs))
        results: list[Any] = [None] * self.num_ranks
        failures = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                self.close()
                raise AssertionError("\n".join([f"ranks {sorted(waiting.values())} did not finish", *failures]))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    fine, results[rank] = False, "the process ended"
                if not fine:
                    failures.append(f"rank {rank} failed:\n{results[rank]}")
                    deadline = min(deadline, time.monotonic() + 15)
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        context = process_context()
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.num_ranks, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(10)
        self._processes, self._pipes = [], []


def _as_worker(replicas: int, scenario: Scenario, args: Sequence[Any], options: dict[str, Any]) -> Any:
    with muster.MultiWorkerMirroredStrategy.from_env(["cpu"] * replicas, **options) as strategy:
        return scenario(strategy, *args)


@dataclass(frozen=True)
class Launcher:
    """Runs a scenario on one shape of job: `workers` processes (none: this process) of `local_replicas` each."""

    name: str
    workers: int
    local_replicas: int
    pool: WorkerPool | None = None

    @property
    def replicas(self) -> int:
        """Replicas of the whole job."""
        return max(self.workers, 1) * self.local_replicas

    def __call__(self, scenario: Scenario, *args: Any, **options: Any) -> list[Any]:
        """``scenario(strategy, *args)`` in every process of the job; the results by rank."""
        options = {"seed": 3, "threads_per_replica": 1, "timeout": 60.0, "keep_gradients": True, **options}
        if self.pool is None:
            with muster.MirroredStrategy(["cpu"] * self.local_replicas, **options) as strategy:
                return [plain(scenario(strategy, *args))]
        return self.pool.call(_as_worker, self.local_replicas, scenario, args, options)


def make_job(name: str, two_workers: WorkerPool) -> Launcher:
    """mirrored-<replicas>, workers-2 or workers-2x2."""
    kind, _, shape = name.partition("-")
    if kind == "mirrored":
        return Launcher(name, 0, int(shape))
    return Launcher(name, 2, 2 if shape.endswith("x2") else 1, two_workers)


def part_of(strategy: muster.Strategy, batch: Any) -> Any:
    """This worker's share of a batch that every rank has whole, divided as a loader divides it."""
    from muster.batch import part_sizes, split

    sizes = part_sizes(len(batch[0] if isinstance(batch, tuple) else batch), strategy.num_replicas)
    parts = split(batch if isinstance(batch, tuple) else (batch,), strategy.num_replicas, sizes)
    first = strategy.first_replica
    mine = parts[first : first + len(strategy.devices)]
    columns = tuple(muster.PerReplica(column) for column in zip(*mine, strict=True))
    return columns if isinstance(batch, tuple) else columns[0]
