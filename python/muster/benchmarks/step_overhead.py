"""The time of a training step: Muster against the same module without communication, and against DDP over Gloo.

Three kinds of job, each of two replicas with one thread: worker processes in Python, replicas in threads of one
process, and both of these in C++. A job's columns take turns, each in processes of its own, as in a user's job: in one
process a column finds a heap that the others have used, which costs many small tensors up to a tenth of a step. A round
gives every column one untimed and a few timed steps, and each round begins with another column. A column's cost is the
median over rounds of its time over that of the same module without communication in the same round, so that a machine
that slows down slows all of them. All processes keep memory that is freed, as one with a strategy does by itself: what
that saves, a fifth of a step with large gradients, is no matter of communication.

Steps of processes are averaged over the processes. Where their cores are not equally fast at any time, because other
machines' work shares them, say, processes that average wait for the slower one at every step: Muster's time is also
given over that of the slower process without communication. What communicates must learn the same: parameters are
compared after a few steps, and those of a column's ranks at the end.

Columns of DDP, torch's and Muster's, run the same loop, with backward by hand; the faster one of torch's is also given
over the faster one of Muster's.

Threads without communication have a model and an optimizer each, and step without averaging. Replicas of one process
share their parameters, which exist and are stepped once: they may be faster than that.

C++ has no fused AdamW in torch::optim: one row compares with torch::optim::AdamW, another with at::_fused_adamw_, the
kernel behind AdamW(fused=True) in Python, called by hand.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.loops import BareThreads, MakeOptimizer, on_threads, ordinary, parts_of, with_muster
from muster.benchmarks.models import MLP, SMALL_TENSORS, TINY, TRANSFORMER, Model
from muster.benchmarks.record import Out, known, need_gloo, publish, record
from muster.benchmarks.rounds import interleave, lasting, quartiles, ratio
from muster.benchmarks.servers import Cpp, CppServer, PythonServer, Running, Server, Step, cpp_folder
from muster.benchmarks.tables import BASE, OVER_DROP_IN, OVER_SLOWER
from muster.benchmarks.tables import step_overhead as table
from muster.free_ports import free_ports

__all__ = ["CASES", "main"]

REPLICAS = 2
TIMED_STEPS = 3
MUSTER = "muster"
DDP = "DDP"
TUNED = {f"DDP tuned, {megabytes} MB buckets": megabytes for megabytes in (1, 25, 100)}
DROP_IN = "muster's DDP"
DROP_IN_TUNED = "muster's DDP tuned"
COMMUNICATING = (MUSTER, DDP, *TUNED, DROP_IN, DROP_IN_TUNED)
KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc's variables for what core/heap.cpp sets."""
PROCESSES = f"{REPLICAS} processes"
THREADS = f"{REPLICAS} threads"


@dataclass(frozen=True)
class Case:
    """A model, a replica's share of the batch, and an optimizer; in C++ rows of other names and their optimizers."""

    model: Model
    rows: int
    name: str = "SGD"
    lr: float = 1e-3
    in_cpp: Mapping[str, str] | None = None

    def optimizer(self) -> MakeOptimizer:
        if self.name == "SGD":
            return partial(torch.optim.SGD, lr=self.lr)
        return partial(torch.optim.AdamW, lr=self.lr, fused=True)


ADAMW_IN_CPP = {"25 M MLP, torch::optim::AdamW": "adamw", "25 M MLP, at::_fused_adamw_": "fused_adamw"}
CASES = {
    "2,000 small tensors": Case(SMALL_TENSORS, 32),
    "25 M MLP": Case(MLP, 32),
    "25 M MLP, AdamW(fused=True)": Case(MLP, 32, "AdamW", 1e-5, ADAMW_IN_CPP),
    "10 M transformer": Case(TRANSFORMER, 4),
}
TRIAL = {"tiny": Case(TINY, 4), "tiny, AdamW": Case(TINY, 4, "AdamW", 1e-5, {"tiny, fused": "fused_adamw"})}
AGREED_STEPS = 5
TIMEOUT = timedelta(seconds=120)
"""Of what processes wait for: where one of them stands still, the others say so."""


# --- in Python --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bare_worker(rank: int, name: str) -> Iterator[dict[str, Step]]:
    torch.set_num_threads(1)
    case = (CASES | TRIAL)[name]
    yield {BASE: ordinary(case.model, case.model.fresh(), case.optimizer(), batch_of(case, rank))}


@contextlib.contextmanager
def worker(rank: int, name: str, column: str, gloo: int, rendezvous: int) -> Iterator[dict[str, Step]]:
    """Of a column that communicates."""
    torch.set_num_threads(1)
    number = COMMUNICATING.index(column)
    own = REPLICAS * number + rank
    init = f"tcp://127.0.0.1:{gloo}"
    world_size = REPLICAS * len(COMMUNICATING)
    dist.init_process_group("gloo", init_method=init, rank=own, world_size=world_size, timeout=TIMEOUT)
    groups = [
        dist.new_group(list(range(first, first + REPLICAS))) for first in range(0, dist.get_world_size(), REPLICAS)
    ]
    case = (CASES | TRIAL)[name]
    module = case.model.fresh()
    batch = batch_of(case, rank)
    optimizer = case.optimizer()
    with contextlib.ExitStack() as stack:
        if column == MUSTER:
            cluster = muster.Cluster(rank, REPLICAS, f"127.0.0.1:{rendezvous}", rank)
            timeout = TIMEOUT.total_seconds()
            strategy = muster.MultiWorkerMirroredStrategy(cluster, threads_per_replica=1, seed=0, timeout=timeout)
            step = with_muster(case.model, module, optimizer, batch, stack.enter_context(strategy))
        else:
            tuned: dict[str, Any] = {}
            if column in TUNED or column == DROP_IN_TUNED:
                tuned = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": TUNED.get(column)}
            wrapper = muster.DistributedDataParallel if column.startswith(DROP_IN) else DistributedDataParallel
            ddp = wrapper(module, process_group=groups[number], **tuned)
            step = ordinary(case.model, module, optimizer, batch, ddp)
        for _ in range(AGREED_STEPS):
            step()
        check_agreement(column, module)
        yield {column: step}
        check_ranks(column, module, groups[number])
        dist.barrier()
    dist.destroy_process_group()


def batch_of(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + rank)
    return case.model.batch(case.rows)


def check_agreement(column: str, module: nn.Module) -> None:
    """Collective over all that communicate. Raises unless the column has learnt what DDP has. Only of few steps: on a
    batch that is learnt by heart, AdamW blows rounding up."""
    own = parameters_of(module)
    expected = own.clone()
    dist.broadcast(expected, REPLICAS * COMMUNICATING.index(DDP))
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5, msg=f"{column} differs from {DDP}")


def check_ranks(column: str, module: nn.Module, ranks: dist.ProcessGroup) -> None:
    """Collective over the column's processes. Raises unless it has learnt the same on every rank."""
    own = parameters_of(module)
    chief = own.clone()
    dist.broadcast(chief, REPLICAS * COMMUNICATING.index(column), group=ranks)
    assert torch.equal(chief, own), f"{column} differs between ranks"


def parameters_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@contextlib.contextmanager
def replicas(name: str, column: str) -> Iterator[dict[str, Step]]:
    case = (CASES | TRIAL)[name]
    torch.manual_seed(1)
    batch = case.model.batch(REPLICAS * case.rows)
    optimizer = case.optimizer()
    if column == BASE:
        parts = parts_of(batch, REPLICAS)
        yield {BASE: BareThreads([ordinary(case.model, case.model.fresh(), optimizer, part) for part in parts])}
        return
    with muster.MirroredStrategy(["cpu"] * REPLICAS, threads_per_replica=1, seed=0) as strategy:
        yield {MUSTER: on_threads(1, with_muster(case.model, case.model.fresh(), optimizer, batch, strategy))}


# --- the driver -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A row of the table, and for each of its columns what it is called where it runs and its processes."""

    row: str
    language: str
    replicas: str
    columns: Mapping[str, tuple[str, Sequence[Server]]]


def jobs(name: str, cpp: Path | None) -> Iterator[Job]:
    """Each has ended before the next one starts."""
    case = (CASES | TRIAL)[name]
    gloo, rendezvous = free_ports(2)
    workers = {BASE: [PythonServer(bare_worker, rank, name) for rank in range(REPLICAS)]}
    for column in COMMUNICATING:
        workers[column] = [PythonServer(worker, rank, name, column, gloo, rendezvous) for rank in range(REPLICAS)]
    yield Job(name, "Python", PROCESSES, {column: (column, servers) for column, servers in workers.items()})
    threads = {column: (column, [PythonServer(replicas, name, column)]) for column in (BASE, MUSTER)}
    yield Job(name, "Python", THREADS, threads)
    for row, optimizer in (case.in_cpp or {name: "sgd"}).items() if cpp else ():
        assert cpp is not None
        start = partial(CppServer, cpp, case.model.in_cpp, optimizer, case.lr)
        (port,) = free_ports(1)
        yield Job(
            row,
            "C++",
            PROCESSES,
            {
                BASE: ("alone", [start(case.rows, rank, "-", "alone") for rank in range(REPLICAS)]),
                MUSTER: (
                    "workers",
                    [start(case.rows, rank, f"127.0.0.1:{port}", "workers") for rank in range(REPLICAS)],
                ),
            },
        )
        in_cpp = {BASE: "stepping_threads", MUSTER: "mirrored"}
        rows = REPLICAS * case.rows
        yield Job(
            row, "C++", THREADS, {column: (there, [start(rows, 0, "-", there)]) for column, there in in_cpp.items()}
        )


def measure(name: str, seconds: float, least: int, cpp: Path | None) -> Iterator[dict[str, Any]]:
    """A model's jobs: each column's milliseconds per step and its cost, with quartiles."""
    module = (CASES | TRIAL)[name].model.build()
    for job in jobs(name, cpp):
        typer.echo(f"{job.row}, {job.language}, {job.replicas}", err=True)
        with Running([server for _, servers in job.columns.values() for server in servers]) as running:
            turns = {
                column: partial(running.turn, servers, there, TIMED_STEPS)
                for column, (there, servers) in job.columns.items()
            }
            rounds = interleave(turns, lasting(seconds, least))
        means = {column: over_processes(statistics.fmean, per_round) for column, per_round in rounds.items()}
        case = {
            "model": job.row,
            "language": job.language,
            "replicas": job.replicas,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "tensors": len(list(module.parameters())),
            "rounds": len(rounds[BASE]),
            "columns": {column: summary(per_round, means[BASE]) for column, per_round in means.items()},
        }
        if job.replicas == PROCESSES:
            if DROP_IN in means:
                theirs, ours = (fastest(means, names) for names in ((DDP, *TUNED), (DROP_IN, DROP_IN_TUNED)))
                case[OVER_DROP_IN] = ratio(medians(theirs), medians(ours))
            case[OVER_SLOWER] = ratio(medians(means[MUSTER]), medians(over_processes(max, rounds[BASE])))
        yield case


def over_processes(one_of: Callable[[list[float]], float], rounds: Sequence[list[list[float]]]) -> list[list[float]]:
    """One number a step, by round, of one a process."""
    return [[one_of(step) for step in steps] for steps in rounds]


def medians(rounds: Sequence[list[float]]) -> list[float]:
    return [statistics.median(steps) for steps in rounds]


def fastest(rounds: Mapping[str, Sequence[list[float]]], names: Sequence[str]) -> Sequence[list[float]]:
    """The rounds of that column of `names` whose median step is the shortest."""
    return min((rounds[name] for name in names), key=lambda column: statistics.median(medians(column)))


def summary(rounds: Sequence[list[float]], base: Sequence[list[float]]) -> dict[str, Any]:
    """Median and quartiles over steps, in milliseconds, and over rounds, relative to no communication."""
    return {
        "ms": quartiles([step for steps in rounds for step in steps]),
        "ratio": ratio(medians(rounds), medians(base)),
    }


def main(
    seconds: Annotated[float, typer.Option(help="Measured time for each model, language and kind of replica.")] = 60.0,
    rounds: Annotated[int, typer.Option(help="Timed rounds at least.", min=3)] = 5,
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; all when not given.")] = None,
    cpp: Cpp = None,
    out: Out = None,
) -> None:
    """The time of a training step against DDP and against no communication."""
    need_gloo()
    built = cpp_folder(cpp)
    os.environ.update(KEEPS_FREED_MEMORY, OMP_NUM_THREADS="1")
    chosen = known(models, CASES, "--models", TRIAL)
    result = record(
        "step_overhead",
        optimizer="SGD(lr=1e-3) but where another one is named",
        cases=[case for name in chosen for case in measure(name, seconds, rounds, built)],
    )
    publish(result, table(result), out)
