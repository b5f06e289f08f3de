"""What training an MLP with AdamW adds to memory, in bytes per parameter: Muster against torch's loop and DDP.

Each way has processes of its own. A process builds the model, runs one forward pass, notes its resident memory, trains
a step, and then some more, whose peak is taken. What is added is gradients, optimizer states, buckets and whatever is
temporary. With two workers it is what the host holds in all: each worker's own, and once what both see. Parameters that
moved into such memory are no addition.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.models import mlp
from muster.benchmarks.record import Out, publish, record
from muster.benchmarks.servers import Step
from muster.benchmarks.tables import memory as table
from muster.free_ports import free_ports

__all__ = ["Meter", "Place", "Ready", "in_processes", "main", "resident"]

T = TypeVar("T")

STEPS = 3
ROWS = 8
Batch = tuple[Tensor, Tensor]


def torch_step(model: nn.Module, batch: Batch, called: nn.Module | None = None) -> Step:
    forward = called or model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = batch

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(forward(x), y))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def muster_step(model: nn.Module, batch: Batch, strategy: muster.Strategy) -> Step:
    prepared, _ = strategy.prepare(model, torch.optim.AdamW(model.parameters()))
    return lambda: strategy.step(lambda x, y: F.mse_loss(prepared(x), y), *batch)


@dataclass(frozen=True)
class Place:
    """Which of how many processes, and where they meet."""

    rank: int
    workers: int
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


Ready = tuple[Step, Callable[[], object]]
"""A step, and a barrier of all processes."""


@contextlib.contextmanager
def by_torch(model: nn.Module, batch: Batch, place: Place) -> Iterator[Ready]:
    yield torch_step(model, batch), lambda: None


@contextlib.contextmanager
def by_ddp(model: nn.Module, batch: Batch, place: Place) -> Iterator[Ready]:
    dist.init_process_group("gloo", init_method=f"tcp://{place.address}", rank=place.rank, world_size=place.workers)
    yield torch_step(model, batch, DistributedDataParallel(model, gradient_as_bucket_view=True)), dist.barrier
    dist.destroy_process_group()


def by_mirrored(replicas: int, **options: Any) -> Callable[[nn.Module, Batch, Place], Any]:
    @contextlib.contextmanager
    def ready(model: nn.Module, batch: Batch, place: Place) -> Iterator[Ready]:
        devices = ["cpu"] * replicas
        with muster.MirroredStrategy(devices, clip_norm=1.0, threads_per_replica=1, **options) as strategy:
            yield muster_step(model, batch, strategy), strategy.barrier

    return ready


@contextlib.contextmanager
def by_workers(model: nn.Module, batch: Batch, place: Place) -> Iterator[Ready]:
    cluster = muster.Cluster(place.rank, place.workers, place.address, place.rank)
    with muster.MultiWorkerMirroredStrategy(cluster, clip_norm=1.0, threads_per_replica=1) as strategy:
        yield muster_step(model, batch, strategy), strategy.barrier


WAYS = {
    "torch: AdamW(fused=True), clip_grad_norm_": (1, by_torch),
    "muster: MirroredStrategy(clip_norm=1)": (1, by_mirrored(1)),
    "muster, fuse=False: the same, stepping from .grad": (1, by_mirrored(1, fuse=False)),
    "muster, two replicas: MirroredStrategy of two logical replicas": (1, by_mirrored(2)),
    "DDP, two workers: gradient_as_bucket_view=True, AdamW(fused=True); the host in all": (2, by_ddp),
    "muster, two workers: MultiWorkerMirroredStrategy(clip_norm=1); the host in all": (2, by_workers),
}
"""By name: how many processes, and what makes one ready to train."""


class Meter:
    """What this process holds beyond `before`: by default what it held when this was made."""

    def __init__(self, before: int | None = None) -> None:
        self._before = resident("status", "VmRSS") if before is None else before

    def reset(self) -> None:
        """Forgets the peak."""
        Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)

    def peak(self) -> int:
        """Of its own memory since reset(), and its part of the memory that it shares. What is shared must not have
        changed since: the kernel knows the peak of the sum alone."""
        own = resident("status", "VmHWM") - resident("status", "RssShmem") - self._before
        return own + resident("smaps_rollup", "Pss_Shmem")


def resident(file: str, name: str) -> int:
    """Bytes of this process, as a file of /proc/self counts them."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found, name
    return 1024 * int(found[1])


def measure_process(way: str, width: int, place: Place) -> int:
    """Bytes added."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp(width)
    batch = torch.randn(ROWS, width), torch.randn(ROWS, width)
    with torch.no_grad():
        model(batch[0])
    meter = Meter()
    with WAYS[way][1](model, batch, place) as (step, barrier):
        step()
        meter.reset()
        for _ in range(STEPS):
            step()
        barrier()
        added = meter.peak()
        barrier()  # what the others share with this process is counted before it goes
    return added


def in_processes(workers: int, measure: Callable[[Place], T]) -> list[T]:
    """What `measure` returns in each of so many processes of its own, which meet."""
    (port,) = free_ports(1)
    places = [Place(rank, workers, port) for rank in range(workers)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(measure, places))


def measure(way: str, width: int) -> float:
    """Bytes per parameter, over all processes."""
    added = sum(in_processes(WAYS[way][0], partial(measure_process, way, width)))
    return added / sum(parameter.numel() for parameter in mlp(width).parameters())


def main(
    width: Annotated[int, typer.Option(help="Of the MLP, which has 24 x width^2 parameters.")] = 1024,
    out: Out = None,
) -> None:
    """What training adds to memory, in bytes per parameter, against torch."""
    added = {way: round(measure(way, width), 2) for way in WAYS}
    result = record("memory", width=width, added=added)
    publish(result, table(result), out)
