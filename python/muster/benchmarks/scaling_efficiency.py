"""The same global work on one replica and on two: samples per second, relative to one replica on one thread.

"two bare threads" do forward and backward of a half batch each on a model of their own, and neither average nor step:
what two cores can give. "mirrored" averages and steps as well. "two intra-op threads" is one process with torch's own
parallelism, "two processes, DDP" is DistributedDataParallel over Gloo. Columns take turns within a round; the second
process sleeps while the first one measures. In C++ the same, without DDP, which is Python's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.loops import BareThreads, Batch, on_threads, ordinary, parts_of, with_muster, without_step
from muster.benchmarks.models import DIGITS, TINY, TRANSFORMER, Model
from muster.benchmarks.record import Out, known, need_gloo, publish, record
from muster.benchmarks.rounds import fixed, interleave, ratio
from muster.benchmarks.servers import Cpp, CppServer, PythonServer, Running, Server, Step, cpp_folder
from muster.benchmarks.tables import scaling_efficiency as table
from muster.free_ports import free_ports

__all__ = ["main"]

REPLICAS = 2
BASE = "one replica, one thread"
BARE = "two bare threads"
MIRRORED = "mirrored, two replicas"
INTRA_OP = "one process, two intra-op threads"
DDP = "two processes, DDP"
ALONE = (BASE, BARE, MIRRORED, INTRA_OP)
sgd = partial(torch.optim.SGD, lr=1e-4)


@dataclass(frozen=True)
class Case:
    """A model and the size of a global batch."""

    model: Model
    rows: int
    seconds_per_turn: float


CASES = {"digits": Case(DIGITS, 256, 0.4), "10 M transformer": Case(TRANSFORMER, 8, 1)}


TRIAL = {"tiny": Case(TINY, 4, 0.01)}


def alone(model: Model, batch: Batch) -> dict[str, Step]:
    """The columns of one process."""
    strategy = muster.MirroredStrategy(["cpu"] * REPLICAS, threads_per_replica=1, seed=0)
    return {
        BASE: on_threads(1, ordinary(model, model.fresh(), sgd, batch)),
        BARE: BareThreads([without_step(model, model.fresh(), part) for part in parts_of(batch, REPLICAS)]),
        MIRRORED: with_muster(model, model.fresh(), sgd, batch, strategy),
        INTRA_OP: on_threads(REPLICAS, ordinary(model, model.fresh(), sgd, batch)),
    }


@contextlib.contextmanager
def worker(rank: int, name: str, port: int) -> Iterator[dict[str, Step]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=REPLICAS)
    case = (CASES | TRIAL)[name]
    model = case.model
    torch.manual_seed(1)
    batch = model.batch(case.rows)
    module = model.fresh()
    ddp = ordinary(model, module, sgd, parts_of(batch, REPLICAS)[rank], DistributedDataParallel(module))
    yield {DDP: on_threads(1, ddp), **(alone(model, batch) if rank == 0 else {})}
    dist.barrier()
    os._exit(0)  # the bare threads wait for ever


class Turn:
    """Steps per second of a column; as many steps as fill the time by the speed of the turn before."""

    def __init__(self, running: Running, servers: list[Server], column: str, seconds: float) -> None:
        self._running = running
        self._servers = servers
        self._column = column
        self._seconds = seconds
        self._steps = 1

    def __call__(self) -> float:
        steps = self._running.turn(self._servers, self._column, self._steps)
        speed = 1e3 * len(steps) / sum(statistics.fmean(processes) for processes in steps)
        self._steps = max(1, round(self._seconds * speed))
        return speed


def in_python(name: str, rounds: int) -> dict[str, list[float]]:
    """Steps per second of each column, by round."""
    (port,) = free_ports(1)
    servers: list[Server] = [PythonServer(worker, rank, name, port) for rank in range(REPLICAS)]
    seconds = (CASES | TRIAL)[name].seconds_per_turn
    with Running(servers) as running:
        turns = {column: Turn(running, servers[:1], column, seconds) for column in ALONE}
        return interleave({**turns, DDP: Turn(running, servers, DDP, seconds)}, fixed(rounds))


def in_cpp(name: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """The same in C++."""
    case = (CASES | TRIAL)[name]
    columns = {BASE: "alone", BARE: "threads", MIRRORED: "mirrored", INTRA_OP: "two_intra_op"}
    server = CppServer(folder, case.model.in_cpp, "sgd", 1e-4, case.rows, 0, "-", *columns.values())
    with Running([server]) as running:
        turns = {column: Turn(running, [server], there, case.seconds_per_turn) for column, there in columns.items()}
        return interleave(turns, fixed(rounds))


def summary(name: str, language: str, steps: dict[str, list[float]]) -> dict[str, Any]:
    case = (CASES | TRIAL)[name]
    return {
        "model": name,
        "language": language,
        "samples": case.rows,
        "columns": {
            column: {
                "samples per second": round(case.rows * statistics.median(values), 1),
                "ratio": ratio(values, steps[BASE]),
            }
            for column, values in steps.items()
        },
        "mirrored over bare threads": ratio(steps[MIRRORED], steps[BARE]),
    }


def measure(name: str, rounds: int, cpp: Path | None) -> Iterator[dict[str, Any]]:
    yield summary(name, "Python", in_python(name, rounds))
    if cpp is not None:
        yield summary(name, "C++", in_cpp(name, rounds, cpp))


def main(
    rounds: Annotated[int, typer.Option(help="Timed rounds of each model.", min=3)] = 15,
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; all when not given.")] = None,
    cpp: Cpp = None,
    out: Out = None,
) -> None:
    """The same global work on one replica and on two, against bare threads and DDP."""
    need_gloo()
    built = cpp_folder(cpp)
    os.environ["OMP_NUM_THREADS"] = "1"
    result = record(
        "scaling_efficiency",
        optimizer="SGD(lr=1e-4)",
        cases=[case for name in known(models, CASES, "--models", TRIAL) for case in measure(name, rounds, built)],
    )
    publish(result, table(result), out)
