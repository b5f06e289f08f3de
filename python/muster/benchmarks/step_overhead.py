"""The time of a training step: Muster against the same module without communication, and against DDP over Gloo.

Three kinds of job, each of two replicas with one thread: worker processes in Python, replicas in threads of one
process, and both of these in C++. All columns of a job live in the same processes, each with its own copy of the model,
and take turns: a round gives every column one untimed and a few timed steps, and each round begins with another column.
A column's cost is the median over rounds of its time over that of the same module without communication in the same
round, so that a machine that slows down slows all of them. Steps of processes are averaged over the processes. Where
their cores are not equally fast at any time, because other machines' work shares them, say, processes that average wait
for the slower one at every step: Muster's time is also given over that of the slower process without communication. At
the end the parameters are compared: what communicates must have learnt the same.

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
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.free_ports import free_ports
from muster.benchmarks.loops import BareThreads, MakeOptimizer, on_threads, ordinary, parts_of, with_muster
from muster.benchmarks.models import MLP, SMALL_TENSORS, TINY, TRANSFORMER, Model
from muster.benchmarks.record import Out, known, need_gloo, publish, record
from muster.benchmarks.rounds import interleave, lasting, quartiles, ratio
from muster.benchmarks.servers import Cpp, CppServer, PythonServer, Server, Step, cpp_folder, end, turn
from muster.benchmarks.tables import BASE, OVER_SLOWER
from muster.benchmarks.tables import step_overhead as table

__all__ = ["main"]

REPLICAS = 2
TIMED_STEPS = 3
MUSTER = "muster"
DDP = "DDP"
TUNED = {f"DDP tuned, {megabytes} MB buckets": megabytes for megabytes in (1, 25, 100)}
WORKER_COLUMNS = (BASE, MUSTER, DDP, *TUNED)
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


# --- in Python --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(rank: int, name: str, gloo: int, rendezvous: int) -> Iterator[dict[str, Step]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{gloo}", rank=rank, world_size=REPLICAS)
    cluster = muster.Cluster(rank, REPLICAS, f"127.0.0.1:{rendezvous}", rank)
    with muster.MultiWorkerMirroredStrategy(cluster, threads_per_replica=1, seed=0) as strategy:
        case = (CASES | TRIAL)[name]
        modules = {column: case.model.fresh() for column in WORKER_COLUMNS}
        columns = columns_of(case, strategy, modules)
        for _ in range(AGREED_STEPS):
            for step in columns.values():
                step()
        check_agreement(modules)
        yield columns
        check_ranks(modules)
        dist.barrier()
    dist.destroy_process_group()


def columns_of(case: Case, strategy: muster.Strategy, modules: dict[str, nn.Module]) -> dict[str, Step]:
    torch.manual_seed(1 + strategy.rank)
    batch = case.model.batch(case.rows)
    optimizer = case.optimizer()

    def ddp(module: nn.Module, **options: Any) -> Step:
        return ordinary(case.model, module, optimizer, batch, DistributedDataParallel(module, **options))

    tuned = {"gradient_as_bucket_view": True, "static_graph": True}
    return {
        BASE: ordinary(case.model, modules[BASE], optimizer, batch),
        MUSTER: with_muster(case.model, modules[MUSTER], optimizer, batch, strategy),
        DDP: ddp(modules[DDP]),
        **{name: ddp(modules[name], bucket_cap_mb=megabytes, **tuned) for name, megabytes in TUNED.items()},
    }


def check_agreement(modules: dict[str, nn.Module]) -> None:
    """Raises unless all columns that communicate have learnt the same. Only of few steps: on a batch that is learnt by
    heart, AdamW blows rounding up."""
    expected = parameters_of(modules[DDP])
    for name, module in modules.items():
        if name != BASE:
            torch.testing.assert_close(parameters_of(module), expected, rtol=1e-3, atol=1e-5, msg=f"{name} differs")


def check_ranks(modules: dict[str, nn.Module]) -> None:
    """Raises unless every column that communicates has learnt the same on every rank."""
    for name, module in modules.items():
        if name == BASE:
            continue
        own = parameters_of(module)
        chief = own.clone()
        dist.broadcast(chief, 0)
        assert torch.equal(chief, own), f"{name} differs between ranks"


def parameters_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@contextlib.contextmanager
def replicas(name: str) -> Iterator[dict[str, Step]]:
    case = (CASES | TRIAL)[name]
    torch.manual_seed(1)
    batch = case.model.batch(REPLICAS * case.rows)
    optimizer = case.optimizer()
    bare = [ordinary(case.model, case.model.fresh(), optimizer, part) for part in parts_of(batch, REPLICAS)]
    with muster.MirroredStrategy(["cpu"] * REPLICAS, threads_per_replica=1, seed=0) as strategy:
        mirrored = with_muster(case.model, case.model.fresh(), optimizer, batch, strategy)
        yield {BASE: BareThreads(bare), MUSTER: on_threads(1, mirrored)}


# --- the driver -------------------------------------------------------------------------------------------------------


def jobs(name: str, cpp: Path | None) -> Iterator[tuple[str, str, str, Mapping[str, str], list[Server]]]:
    """Row, language and replicas of each job, what its columns are called where they run, and its processes."""
    case = (CASES | TRIAL)[name]
    gloo, rendezvous = free_ports(2)
    workers: list[Server] = [PythonServer(worker, rank, name, gloo, rendezvous) for rank in range(REPLICAS)]
    yield name, "Python", PROCESSES, {column: column for column in WORKER_COLUMNS}, workers
    yield name, "Python", THREADS, {BASE: BASE, MUSTER: MUSTER}, [PythonServer(replicas, name)]
    for row, optimizer in (case.in_cpp or {name: "sgd"}).items() if cpp else ():
        assert cpp is not None
        fixed = (cpp, case.model.in_cpp, optimizer, case.lr)
        (port,) = free_ports(1)
        columns = {BASE: "alone", MUSTER: "workers"}
        workers = [
            CppServer(*fixed, case.rows, rank, f"127.0.0.1:{port}", *columns.values()) for rank in range(REPLICAS)
        ]
        yield row, "C++", PROCESSES, columns, workers
        columns = {BASE: "stepping_threads", MUSTER: "mirrored"}
        yield row, "C++", THREADS, columns, [CppServer(*fixed, REPLICAS * case.rows, 0, "-", *columns.values())]


def measure(name: str, seconds: float, least: int, cpp: Path | None) -> Iterator[dict[str, Any]]:
    """A model's jobs: each column's milliseconds per step and its cost, with quartiles."""
    module = (CASES | TRIAL)[name].model.build()
    for row, language, kind, columns, servers in jobs(name, cpp):
        turns = {column: partial(turn, servers, there, TIMED_STEPS) for column, there in columns.items()}
        rounds = interleave(turns, lasting(seconds, least))
        end(servers)
        means = {column: over_processes(statistics.fmean, per_round) for column, per_round in rounds.items()}
        case = {
            "model": row,
            "language": language,
            "replicas": kind,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "tensors": len(list(module.parameters())),
            "rounds": len(rounds[BASE]),
            "columns": {column: summary(per_round, means[BASE]) for column, per_round in means.items()},
        }
        if len(servers) > 1:
            case[OVER_SLOWER] = ratio(medians(means[MUSTER]), medians(over_processes(max, rounds[BASE])))
        yield case


def over_processes(one_of: Callable[[list[float]], float], rounds: Sequence[list[list[float]]]) -> list[list[float]]:
    """One number a step, by round, of one a process."""
    return [[one_of(step) for step in steps] for steps in rounds]


def medians(rounds: Sequence[list[float]]) -> list[float]:
    return [statistics.median(steps) for steps in rounds]


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
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = known(models, CASES, "--models", TRIAL)
    result = record(
        "step_overhead",
        optimizer="SGD(lr=1e-3) but where another one is named",
        cases=[case for name in chosen for case in measure(name, seconds, rounds, built)],
    )
    publish(result, table(result), out)
