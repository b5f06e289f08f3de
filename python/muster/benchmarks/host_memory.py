"""What a host holds in all while a transformer encoder of BERT's kind trains with AdamW: Muster beside torch's DDP.

Each way has processes of its own. A process imports what it needs and builds the model; what the host holds then is the
same for all ways. It trains a step, and then some more, whose peak is taken. Memory that several processes see counts
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.memory import Meter, Place, Ready, in_processes, resident
from muster.benchmarks.record import Out, known, need_gloo, publish, record
from muster.benchmarks.servers import Step
from muster.benchmarks.tables import host_memory as table

__all__ = ["main"]

STEPS = 3
WORDS = 30_522  # of BERT's vocabulary
TOKENS = 64
Batch = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """A transformer over words, and a classifier of their mean."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classes = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.layers(self.words(words)).mean(1))
        return logits


def torch_step(model: nn.Module, batch: Batch, called: nn.Module, **options: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    words, classes = batch

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(called(words), classes))
        optimizer.step()

    return step


def muster_step(
    model: nn.Module,
    batch: Batch,
    strategy: muster.Strategy,
    optimizer: type[torch.optim.AdamW] = muster.optim.AdamW,
) -> Step:
    prepared, _ = strategy.prepare(model, optimizer(model.parameters()))
    return lambda: strategy.step(lambda words, classes: F.cross_entropy(prepared(words), classes), *batch)


@contextlib.contextmanager
def by_ddp(
    model: nn.Module, batch: Batch, place: Place, *, parallel: type[nn.Module], fused: bool = False, **options: Any
) -> Iterator[Ready]:
    dist.init_process_group("gloo", init_method=f"tcp://{place.address}", rank=place.rank, world_size=place.workers)
    yield torch_step(model, batch, parallel(model, **options), fused=fused), dist.barrier
    dist.destroy_process_group()


@contextlib.contextmanager
def by_workers(model: nn.Module, batch: Batch, place: Place, **options: Any) -> Iterator[Ready]:
    cluster = muster.Cluster(place.rank, place.workers, place.address, place.rank)
    with muster.MultiWorkerMirroredStrategy(cluster, threads_per_replica=1) as strategy:
        yield muster_step(model, batch, strategy, **options), strategy.barrier


@contextlib.contextmanager
def by_threads(model: nn.Module, batch: Batch, place: Place) -> Iterator[Ready]:
    both = torch.cat([batch[0]] * 2), torch.cat([batch[1]] * 2)
    with muster.MirroredStrategy(["cpu"] * 2, threads_per_replica=1) as strategy:
        yield muster_step(model, both, strategy), strategy.barrier


DDP = "DDP, two workers"
WAYS: dict[str, tuple[int, Callable[..., Any]]] = {
    DDP: (2, partial(by_ddp, parallel=DistributedDataParallel)),
    "DDP, two workers: gradient_as_bucket_view=True, AdamW(fused=True)": (
        2,
        partial(by_ddp, parallel=DistributedDataParallel, gradient_as_bucket_view=True, fused=True),
    ),
    "muster.DistributedDataParallel, two workers": (2, partial(by_ddp, parallel=muster.DistributedDataParallel)),
    "muster, two workers: MultiWorkerMirroredStrategy": (2, by_workers),
    "muster, two workers: the same, torch.optim.AdamW": (2, partial(by_workers, optimizer=torch.optim.AdamW)),
    "muster, two replicas of one process: MirroredStrategy": (1, by_threads),
}
"""By name: how many processes, and what makes one ready to train."""


def measure_process(way: str, width: int, layers: int, rows: int, place: Place) -> tuple[int, int]:
    """Bytes of this process before it trains, and at its peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Encoder(width, layers)
    generator = torch.Generator().manual_seed(place.rank)
    batch = torch.randint(WORDS, (rows, TOKENS), generator=generator), torch.randint(2, (rows,), generator=generator)
    before = resident("status", "RssAnon") + resident("smaps_rollup", "Pss_Shmem")
    meter = Meter(before=0)
    with WAYS[way][1](model, batch, place) as (step, barrier):
        step()
        meter.reset()
        for _ in range(STEPS):
            step()
        barrier()
        peak = meter.peak() - resident("status", "RssFile")
        # Of both, at one time: other processes that load the same libraries come and go.
        files = resident("smaps_rollup", "Pss_File")
        barrier()  # what the others share with this process is counted before it goes
    return before + files, peak + files


def measure(way: str, width: int, layers: int, rows: int) -> tuple[int, int]:
    """Bytes over all processes, before and at the peak."""
    found = in_processes(WAYS[way][0], partial(measure_process, way, width, layers, rows))
    return sum(before for before, _ in found), sum(peak for _, peak in found)


def main(
    width: Annotated[int, typer.Option(help="Of the encoder; a multiple of 64.", min=64)] = 384,
    layers: Annotated[int, typer.Option(help="Of the encoder.", min=1)] = 10,
    rows: Annotated[int, typer.Option(help=f"Samples of {TOKENS} words in a replica's batch.", min=1)] = 8,
    ways: Annotated[list[str] | None, typer.Option(help="Only these, beside DDP as it comes.")] = None,
    out: Out = None,
) -> None:
    """What a host with two workers holds in all while a transformer of 30 M parameters trains, against torch's DDP."""
    need_gloo()
    parameters = sum(parameter.numel() for parameter in Encoder(width, layers).parameters())
    found = {}
    for way in [DDP, *(way for way in known(ways, WAYS, "--ways") if way != DDP)]:
        before, peak = measure(way, width, layers, rows)
        found[way] = {"before": before, "peak": peak}
    result = record("host_memory", parameters=parameters, rows=rows, tokens=TOKENS, ways=found)
    publish(result, table(result), out)
