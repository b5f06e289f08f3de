"""The time of a training step: Muster against DistributedDataParallel on Gloo and against no communication at all.

Two worker processes with one thread each. All columns live in the same two processes, each with its own copy of the
model, and take turns: a round gives every column one untimed and a few timed steps, and each round begins with another
column. A column's cost is the median over rounds of its time over that of the same module without communication in the
same round, so that a machine that slows down slows all of them. At the end the parameters are compared: the columns
that communicate must have learnt the same.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.loops import MakeOptimizer, ordinary, with_muster
from muster.benchmarks.models import MLP, SMALL_TENSORS, TINY, TRANSFORMER, Model
from muster.benchmarks.record import Out, known, need_gloo, publish, record
from muster.benchmarks.rounds import interleave, lasting
from muster.benchmarks.servers import PythonServer, Step, end, ports, turn
from muster.benchmarks.tables import BASE
from muster.benchmarks.tables import step_overhead as table

WORKERS = 2
TIMED_STEPS = 3
MIN_ROUNDS = 5
DDP = "DDP"
TUNED = {f"DDP tuned, {megabytes} MB buckets": megabytes for megabytes in (1, 25, 100)}
COLUMNS = (BASE, "muster", DDP, *TUNED)


sgd = partial(torch.optim.SGD, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """A model, a worker's share of the batch, and an optimizer."""

    model: Model
    rows: int
    optimizer: MakeOptimizer = sgd


CASES = {
    "2,000 small tensors": Case(SMALL_TENSORS, 32),
    "25 M MLP": Case(MLP, 32),
    "25 M MLP, AdamW(fused=True)": Case(MLP, 32, partial(torch.optim.AdamW, lr=1e-5, fused=True)),
    "10 M transformer": Case(TRANSFORMER, 4),
}


TRIAL = {"tiny": Case(TINY, 4)}


def columns_of(case: Case, strategy: muster.Strategy, modules: dict[str, nn.Module]) -> dict[str, Step]:
    torch.manual_seed(1 + strategy.rank)
    batch = case.model.batch(case.rows)

    def ddp(module: nn.Module, **options: Any) -> Step:
        return ordinary(case.model, module, case.optimizer, batch, DistributedDataParallel(module, **options))

    tuned = {"gradient_as_bucket_view": True, "static_graph": True}
    return {
        BASE: ordinary(case.model, modules[BASE], case.optimizer, batch),
        "muster": with_muster(case.model, modules["muster"], case.optimizer, batch, strategy),
        DDP: ddp(modules[DDP]),
        **{name: ddp(modules[name], bucket_cap_mb=megabytes, **tuned) for name, megabytes in TUNED.items()},
    }


def check_agreement(modules: dict[str, nn.Module]) -> None:
    """Raises unless all columns that communicate have learnt the same, and on every rank."""
    expected = parameters_of(modules[DDP])
    for name, module in modules.items():
        if name != BASE:
            torch.testing.assert_close(parameters_of(module), expected, rtol=1e-3, atol=1e-5, msg=f"{name} differs")
    chief = expected.clone()
    dist.broadcast(chief, 0)
    assert torch.equal(chief, expected)


def parameters_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@contextlib.contextmanager
def worker(rank: int, name: str, gloo: int, rendezvous: int) -> Iterator[dict[str, Step]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{gloo}", rank=rank, world_size=WORKERS)
    cluster = muster.Cluster(rank, WORKERS, f"127.0.0.1:{rendezvous}", rank)
    with muster.MultiWorkerMirroredStrategy(cluster, threads_per_replica=1, seed=0) as strategy:
        case = (CASES | TRIAL)[name]
        modules = {column: case.model.fresh() for column in COLUMNS}
        yield columns_of(case, strategy, modules)
        check_agreement(modules)
        dist.barrier()
    dist.destroy_process_group()


def measure(name: str, seconds: float) -> dict[str, Any]:
    """One model: each column's milliseconds per step and its cost, with quartiles."""
    gloo, rendezvous = ports(2)
    servers = [PythonServer(worker, rank, name, gloo, rendezvous) for rank in range(WORKERS)]
    turns = {column: partial(turn, servers, column, TIMED_STEPS) for column in COLUMNS}
    rounds = interleave(turns, lasting(seconds, MIN_ROUNDS))
    end(servers)
    module = (CASES | TRIAL)[name].model.build()
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "tensors": len(list(module.parameters())),
        "rounds": len(rounds[BASE]),
        "columns": {column: summary(per_round, rounds[BASE]) for column, per_round in rounds.items()},
    }


def summary(rounds: list[list[float]], base: list[list[float]]) -> dict[str, Any]:
    """Median and quartiles over steps, in milliseconds, and over rounds, relative to no communication."""
    steps = [step for timed in rounds for step in timed]
    ratios = [statistics.median(own) / statistics.median(other) for own, other in zip(rounds, base, strict=True)]
    return {
        "ms": [round(quartile, 3) for quartile in statistics.quantiles(steps, n=4)],
        "ratio": [round(quartile, 3) for quartile in statistics.quantiles(ratios, n=4)],
    }


def main(
    seconds: Annotated[float, typer.Option(help="Measured time for each model.")] = 60.0,
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; all when not given.")] = None,
    out: Out = None,
) -> None:
    """The time of a training step against DDP and against no communication."""
    need_gloo()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = record(
        "step_overhead",
        workers=WORKERS,
        optimizer="SGD(lr=1e-3) but where another one is named",
        models={name: measure(name, seconds) for name in known(models, CASES, "--models", TRIAL)},
    )
    publish(result, table(result), out)
