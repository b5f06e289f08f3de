"""What training an MLP with AdamW adds to memory, in bytes per parameter: Muster against torch's loop and DDP.

Each way has processes of its own. A process builds the model, runs one forward pass, notes its resident memory, gets
ready to train and trains three steps. What is added is gradients, optimizer states, buckets and whatever is temporary.
With two workers it is what the host holds in all, memory that both see counted once; parameters that move into such
memory are no addition, a second copy of them is.

The kernel knows the peak of a process, and by the page who shares what is there at one moment. So peaks are taken for
stretches (getting ready, and each step) and what is shared at their ends: with workers the sum is an upper bound, and
exact from the second step on, when shared memory does not change.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.models import mlp
from muster.benchmarks.record import Out, publish, record
from muster.benchmarks.servers import Step, ports
from muster.benchmarks.tables import memory as table

__all__ = ["main"]

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
    """Of this process: the peaks of stretches, and its share of the memory that it maps together with others."""

    def __init__(self) -> None:
        self._before = self._status("VmRSS")
        self._seen = self._status("RssShmem")
        self.stretches: list[int] = []
        self._reset_peak()

    def note(self) -> None:
        """Ends a stretch."""
        seen = self._status("RssShmem")
        own = self._status("VmHWM") - min(seen, self._seen) - self._before
        self.stretches.append(own + self._bytes("smaps_rollup", "Pss_Shmem"))
        self._seen = seen
        self._reset_peak()

    def _reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)

    def _status(self, name: str) -> int:
        return self._bytes("status", name)

    def _bytes(self, file: str, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
        return 1024 * int(found[1]) if found else 0


def measure_process(way: str, width: int, place: Place) -> list[int]:
    """Bytes added, by stretch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp(width)
    batch = torch.randn(ROWS, width), torch.randn(ROWS, width)
    with torch.no_grad():
        model(batch[0])
    meter = Meter()
    with WAYS[way][1](model, batch, place) as (step, barrier):
        for number in range(STEPS + 1):
            if number > 0:
                step()
            barrier()
            meter.note()
            barrier()
    return meter.stretches


def measure(way: str, width: int) -> float:
    """Bytes per parameter: the largest sum over processes of a stretch."""
    workers, _ = WAYS[way]
    (port,) = ports(1)
    places = [Place(rank, workers, port) for rank in range(workers)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        by_process = list(pool.map(measure_process, [way] * workers, [width] * workers, places))
    return max(map(sum, zip(*by_process, strict=True))) / sum(p.numel() for p in mlp(width).parameters())


def main(
    width: Annotated[int, typer.Option(help="Of the MLP, which has 24 x width^2 parameters.")] = 1024,
    out: Out = None,
) -> None:
    """What training adds to memory, in bytes per parameter, against torch."""
    added = {way: round(measure(way, width), 2) for way in WAYS}
    result = record("memory", width=width, added=added)
    publish(result, table(result), out)
