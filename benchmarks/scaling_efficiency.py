"""The same global work on one replica and on two: samples per second, relative to one replica on one thread.

"two bare threads" do forward and backward of a half batch each on a model of their own, and neither average nor step:
what two cores can give. "mirrored" averages and steps as well. "two intra-op threads" is one process with torch's own
parallelism, "two processes, DDP" is DistributedDataParallel over Gloo. Columns take turns within a round; the second
process sleeps while the first one measures.

    python benchmarks/scaling_efficiency.py       writes benchmarks/results/scaling_efficiency-<date>.json
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import typer
from record import keep, record
from rounds import quartiles, rotated
from step_overhead import Transformer, free_ports
from table import scaling_efficiency as markdown
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster

REPLICAS = 2
BASE = "one replica, one thread"
BARE = "two bare threads"
MIRRORED = "mirrored, two replicas"
DDP = "two processes, DDP"


def digits_model() -> nn.Module:
    """That of examples/python/digits.py."""
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Case:
    """A model and a global batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    seconds_per_turn: float = 0.4

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


CASES = {
    "digits": Case(digits_model, lambda: (torch.randn(256, 1, 8, 8), torch.randint(10, (256,)))),
    "10 M transformer": Case(
        Transformer, lambda: (torch.randint(256, (8, 64)), torch.randint(256, (8, 64))), seconds_per_turn=2
    ),
}


def fresh(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-4)


def ordinary(
    case: Case, x: Tensor, y: Tensor, module: nn.Module, called: nn.Module, threads: int
) -> Callable[[], None]:
    optimizer = sgd(module)

    def step() -> None:
        torch.set_num_threads(threads)
        optimizer.zero_grad()
        case.loss(called, x, y).backward()
        optimizer.step()

    return step


class BareThreads:
    """Threads that stay, each with a model and a part of the batch: step() lets all do one forward and backward."""

    def __init__(self, case: Case, x: Tensor, y: Tensor) -> None:
        self._started = threading.Barrier(REPLICAS + 1)
        self._ended = threading.Barrier(REPLICAS + 1)
        parts = zip(x.chunk(REPLICAS), y.chunk(REPLICAS), strict=True)
        for part in parts:
            threading.Thread(target=self._serve, args=(case, fresh(case), *part), daemon=True).start()

    def _serve(self, case: Case, module: nn.Module, x: Tensor, y: Tensor) -> None:
        torch.set_num_threads(1)
        while True:
            self._started.wait()
            module.zero_grad()
            case.loss(module, x, y).backward()
            self._ended.wait()

    def step(self) -> None:
        self._started.wait()
        self._ended.wait()


def mirrored(case: Case, x: Tensor, y: Tensor) -> Callable[[], None]:
    strategy = muster.MirroredStrategy(["cpu"] * REPLICAS, threads_per_replica=1, seed=0)
    module = fresh(case)
    model, _ = strategy.prepare(module, sgd(module))

    def step() -> None:
        strategy.step(lambda x, y: case.loss(model, x, y), x, y)

    return step


def timed(step: Callable[[], None], seconds: float) -> float:
    """Steps per second."""
    step()
    began = time.perf_counter()
    for count in itertools.count(1):
        step()
        spent = time.perf_counter() - began
        if spent >= seconds:
            return count / spent
    raise AssertionError("a count ends by returning")


def counted(step: Callable[[], None], seconds: float) -> float:
    """The same where all processes must make as many steps."""
    count = torch.tensor(max(1, round(timed_once(step) * seconds)))
    dist.broadcast(count, 0)
    began = time.perf_counter()
    for _ in range(int(count)):
        step()
    return int(count) / (time.perf_counter() - began)


def timed_once(step: Callable[[], None]) -> float:
    step()
    began = time.perf_counter()
    step()
    return 1 / (time.perf_counter() - began)


def worker(rank: int, name: str, rounds: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=REPLICAS)
    case = CASES[name]
    torch.manual_seed(1)
    x, y = case.batch()
    module = fresh(case)
    part = (x.chunk(REPLICAS)[rank], y.chunk(REPLICAS)[rank])
    ddp = ordinary(case, *part, module, DistributedDataParallel(module), 1)
    alone: dict[str, Callable[[], None]] = {}
    if rank == 0:
        one, two = fresh(case), fresh(case)
        alone = {
            BASE: ordinary(case, x, y, one, one, 1),
            BARE: BareThreads(case, x, y).step,
            MIRRORED: mirrored(case, x, y),
            "one process, two intra-op threads": ordinary(case, x, y, two, two, REPLICAS),
        }
    measured: dict[str, list[float]] = {column: [] for column in (*alone, DDP)}
    for number in range(rounds + 1):
        for column in rotated(list(alone), number) if alone else ():
            measured[column].append(timed(alone[column], case.seconds_per_turn))
        dist.barrier()
        measured[DDP].append(counted(ddp, case.seconds_per_turn))
    if rank == 0:
        results.put({column: values[1:] for column, values in measured.items()})
    dist.barrier()
    os._exit(0)  # the bare threads wait for ever


def measure(name: str, rounds: int) -> dict[str, Any]:
    (port,) = free_ports(1)
    results = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(worker, (name, rounds, port, results), nprocs=REPLICAS, join=False)
    while results.empty():
        context.join(timeout=0.1)
    steps = results.get()
    while not context.join():
        pass
    samples = len(CASES[name].batch()[0])
    return {
        "samples": samples,
        "columns": {
            column: {
                "samples per second": round(samples * statistics.median(values), 1),
                "ratio": quartiles([a / b for a, b in zip(values, steps[BASE], strict=True)]),
            }
            for column, values in steps.items()
        },
        "mirrored over bare threads": quartiles([a / b for a, b in zip(steps[MIRRORED], steps[BARE], strict=True)]),
    }


def main(
    rounds: Annotated[int, typer.Option(help="Timed rounds of each model.")] = 15,
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; all when not given.")] = None,
    write: Annotated[bool, typer.Option(help="Keep the result in benchmarks/results.")] = True,
) -> None:
    """Measures, prints the table and keeps the result."""
    os.environ["OMP_NUM_THREADS"] = "1"
    result = record(
        "scaling_efficiency",
        optimizer="SGD(lr=1e-4)",
        models={name: measure(name, rounds) for name in models or CASES},
    )
    if write:
        keep(result)
    print(markdown(result))


if __name__ == "__main__":
    typer.run(main)
