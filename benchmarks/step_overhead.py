"""The time of a training step: Muster against DistributedDataParallel on Gloo and against no communication at all.

Two worker processes with one thread each. All columns live in the same two processes, each with its own copy of the
model, and take turns: a round gives every column one untimed and a few timed steps, and each round begins with another
column. A column's cost is the median over rounds of its time over that of the same module without communication in the
same round, so that a machine that slows down slows all of them. At the end the parameters are compared: the columns
that communicate must have learnt the same.

    python benchmarks/step_overhead.py            writes benchmarks/results/step_overhead-<date>.json, prints the table
    python benchmarks/table.py                    puts the newest result into README.md
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import typer
from record import keep, record
from rounds import rotated
from table import BASE
from table import step_overhead as markdown
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster

WORKERS = 2
TIMED_STEPS = 3
MIN_ROUNDS = 5

Step = Callable[[], Any]


class Transformer(nn.Module):
    """A causal language model over bytes."""

    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def small_tensors() -> nn.Module:
    return nn.Sequential(
        *itertools.chain.from_iterable((nn.Linear(16, 16), nn.Tanh()) for _ in range(1000)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024)
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, and this worker's share of the batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=1e-3
    )


CASES = {
    "2,000 small tensors": Case(small_tensors, lambda: (torch.randn(32, 16), torch.randn(32, 16)), F.mse_loss),
    "25 M MLP": Case(mlp, lambda: (torch.randn(32, 1024), torch.randn(32, 1024)), F.mse_loss),
    "25 M MLP, AdamW(fused=True)": Case(
        mlp,
        lambda: (torch.randn(32, 1024), torch.randn(32, 1024)),
        F.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, fused=True),
    ),
    "10 M transformer": Case(
        Transformer,
        lambda: (torch.randint(256, (4, 64)), torch.randint(256, (4, 64))),
        lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
    ),
}


@dataclass
class Column:
    """One way to train a copy of the model."""

    module: nn.Module
    step: Step


def ordinary(module: nn.Module, called: nn.Module, case: Case, x: Tensor, y: Tensor) -> Column:
    """The loop as it is written without Muster."""
    optimizer = case.optimizer(module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        case.loss(called(x), y).backward()
        optimizer.step()

    return Column(module, step)


def with_muster(module: nn.Module, strategy: muster.Strategy, case: Case, x: Tensor, y: Tensor) -> Column:
    model, _ = strategy.prepare(module, case.optimizer(module.parameters()))
    return Column(module, lambda: strategy.step(lambda x, y: case.loss(model(x), y), x, y))


def columns_of(case: Case, strategy: muster.Strategy) -> dict[str, Column]:
    torch.manual_seed(1 + strategy.rank)
    x, y = case.batch()

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return case.build()

    def ddp(**options: Any) -> Column:
        module = fresh()
        return ordinary(module, DistributedDataParallel(module, **options), case, x, y)

    alone = fresh()
    columns = {
        BASE: ordinary(alone, alone, case, x, y),
        "muster": with_muster(fresh(), strategy, case, x, y),
        "DDP": ddp(),
    }
    for megabytes in (1, 25, 100):
        name = f"DDP tuned, {megabytes} MB buckets"
        columns[name] = ddp(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=megabytes)
    return columns


def take_turns(columns: dict[str, Column], seconds: float) -> dict[str, list[list[float]]]:
    """Seconds of each timed step: by column, by round."""
    times: dict[str, list[list[float]]] = {name: [] for name in columns}
    started = time.perf_counter()
    for round_number in itertools.count():
        for name in rotated(list(columns), round_number):
            step = columns[name].step
            dist.barrier()
            step()
            timed = []
            for _ in range(TIMED_STEPS):
                began = time.perf_counter()
                step()
                timed.append(time.perf_counter() - began)
            times[name].append(timed)
        enough = torch.tensor(float(round_number >= MIN_ROUNDS and time.perf_counter() - started > seconds))
        dist.broadcast(enough, 0)
        if enough:
            # The first round learns the gradients' order and touches the memory.
            return {name: rounds[1:] for name, rounds in times.items()}
    raise AssertionError("a count ends by returning")


def check_agreement(columns: dict[str, Column]) -> None:
    """Raises unless all columns that communicate have learnt the same, and on every rank."""
    expected = parameters_of(columns["DDP"])
    for name, column in columns.items():
        if name != BASE:
            torch.testing.assert_close(parameters_of(column), expected, rtol=1e-3, atol=1e-5, msg=f"{name} differs")
    chief = expected.clone()
    dist.broadcast(chief, 0)
    assert torch.equal(chief, expected)


def parameters_of(column: Column) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in column.module.parameters()])


def worker(rank: int, name: str, seconds: float, ports: tuple[int, int], times: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=WORKERS)
    cluster = muster.Cluster(rank, WORKERS, f"127.0.0.1:{ports[1]}", rank)
    with muster.MultiWorkerMirroredStrategy(cluster, threads_per_replica=1, seed=0) as strategy:
        columns = columns_of(CASES[name], strategy)
        measured = take_turns(columns, seconds)
        check_agreement(columns)
        times.put((rank, measured))
        dist.barrier()
    dist.destroy_process_group()


def free_ports(count: int) -> Iterator[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    yield from [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()


def measure(name: str, seconds: float) -> dict[str, Any]:
    """One model: each column's milliseconds per step and its cost, with quartiles."""
    first, second = free_ports(2)
    times = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(worker, (name, seconds, (first, second), times), nprocs=WORKERS, join=False)
    # A queue holds little: it is emptied before the processes are joined.
    by_rank: dict[int, dict[str, list[list[float]]]] = {}
    while len(by_rank) < WORKERS:
        if times.empty():
            context.join(timeout=0.1)
        else:
            rank, measured = times.get()
            by_rank[rank] = measured
    while not context.join():
        pass
    module = CASES[name].build()
    rounds = {column: both_ranks([by_rank[rank][column] for rank in range(WORKERS)]) for column in by_rank[0]}
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "tensors": len(list(module.parameters())),
        "rounds": len(rounds[BASE]),
        "columns": {column: summary(per_round, rounds[BASE]) for column, per_round in rounds.items()},
    }


def both_ranks(by_rank: list[list[list[float]]]) -> list[list[float]]:
    """The mean over ranks of each step, by round."""
    return [[statistics.fmean(steps) for steps in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]


def summary(rounds: list[list[float]], base: list[list[float]]) -> dict[str, Any]:
    """Median and quartiles over steps, in milliseconds, and over rounds, relative to no communication."""
    steps = [1e3 * step for timed in rounds for step in timed]
    ratios = [statistics.median(own) / statistics.median(other) for own, other in zip(rounds, base, strict=True)]
    return {
        "ms": [round(quartile, 3) for quartile in statistics.quantiles(steps, n=4)],
        "ratio": [round(quartile, 3) for quartile in statistics.quantiles(ratios, n=4)],
    }


def main(
    seconds: Annotated[float, typer.Option(help="Measured time for each model.")] = 60.0,
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; all when not given.")] = None,
    write: Annotated[bool, typer.Option(help="Keep the result in benchmarks/results.")] = True,
) -> None:
    """Measures, prints the table and keeps the result."""
    os.environ["OMP_NUM_THREADS"] = "1"
    result = record(
        "step_overhead",
        workers=WORKERS,
        optimizer="SGD(lr=1e-3) but where another one is named",
        models={name: measure(name, seconds) for name in models or CASES},
    )
    if write:
        keep(result)
    print(markdown(result))


if __name__ == "__main__":
    typer.run(main)
