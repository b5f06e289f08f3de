"""A whole window on a GPU: what the host and the device are asked for, and its time against torch's own loop, against
DDP of one process over NCCL, against its own replay from a CUDA graph, and against one replica where it has two.

`launches`: kernels, copies and fills of a window of k micro-batches less those of the forward and backward passes of
its replicas alone; they are bounded by (k x replicas + 2) x buckets + 5, and 2 for each replica where several average
buffers. `asked launches` is what the project asked for: (k + 2) x buckets + 5, however many replicas. `enqueue_ms`: the
host's time for a window, with a device that has nothing to do. `us beyond one replica`: of a window's time.

    python benchmarks/gpu_step.py                  prints JSON, what it has after each case; the last line has all
    python benchmarks/gpu_step.py --dry            small, on the CPU, where nothing is launched: shows that it runs

Ends with 1 where a window could not be captured in a graph; all else was measured then.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_kernels import DEVICE, DRY, by_host, synchronize
from gpu_trace import Trace, trace
from torch import Tensor, nn

import muster
from muster._C import _FlatLayout
from muster.benchmarks.rounds import Column, quartiles, ratio, take_turns

ROUNDS, REPEATS = (2, 1) if DRY else (7, 3)
BUCKET_BYTES = 8 << 20
FIRST_BUCKET_BYTES = 1 << 20
ROWS = 4 if DRY else 64
SHRINK = 16 if DRY else 1


class Attention(nn.Module):
    """An encoder of a transformer over sequences of 32."""

    def __init__(self, width: int = 512 // SHRINK, layers: int = 6) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def convolutions(width: int = 64 // SHRINK, layers: int = 30) -> nn.Module:
    """Convolutions each with batch norm, whose buffers are 90."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts)


def linear(width: int, count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width // SHRINK, width // SHRINK) for _ in range(count)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "4 tensors, 33 M": (lambda: linear(4096, 2), (4096 // SHRINK,)),
    "100 tensors, 13 M": (lambda: linear(512, 50), (512 // SHRINK,)),
    "1,000 tensors, 8 M": (lambda: linear(128, 500), (128 // SHRINK,)),
    "transformer, 19 M": (Attention, (32, 512 // SHRINK)),
    "batch norm, 1 M": (convolutions, (64 // SHRINK, 14, 14)),
}
"""Each with the shape of a row of its data, which is that of its output too."""


@dataclass
class Case:
    """What is measured."""

    model: str
    k: int = 1
    replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    schedules: bool = False
    """Whether each window has another learning rate."""

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        options += ", a learning-rate schedule" if self.schedules else ""
        return f"{self.model}, {self.k} micro-batches, {self.replicas} replicas{options}"


CASES = [
    *(Case(model) for model in MODELS),
    Case("100 tensors, 13 M", k=4),
    Case("100 tensors, 13 M", replicas=2),
    Case("100 tensors, 13 M", options={"keep_gradients": True}),
    Case("100 tensors, 13 M", schedules=True),
    Case("batch norm, 1 M", replicas=2),
    Case("transformer, 19 M", replicas=2),
    Case("transformer, 19 M", options={"precision": "bf16"}),
    Case("transformer, 19 M", options={"precision": "fp16"}),
]
DRY_CASES = [CASES[0], Case("batch norm, 1 M", replicas=2), Case("100 tensors, 13 M", schedules=True)]


def made(model: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, and a batch with what its output should be."""
    torch.manual_seed(0)
    build, shape = MODELS[model]
    return build().to(DEVICE), *(torch.randn(ROWS, *shape, device=DEVICE) for _ in range(2))


def buckets_of(module: nn.Module) -> int:
    """Of the layout after the first step, when gradients come in reverse."""
    named = list(module.named_parameters())
    order = list(range(len(named)))[::-1]
    return len(_FlatLayout(named, order, BUCKET_BYTES, FIRST_BUCKET_BYTES).buckets)


class Window:
    """A window of a case, by Muster."""

    def __init__(self, strategy: muster.Strategy, case: Case) -> None:
        self.module, *self.batch = made(case.model)
        self.strategy = strategy
        self.model, optimizer = strategy.prepare(self.module, torch.optim.AdamW(self.module.parameters(), lr=1e-3))
        self.k = case.k
        self.schedule = schedule_of(case, optimizer)

    def __call__(self) -> None:
        for _ in range(self.k):
            self.strategy.step(lambda x, y: F.mse_loss(self.model(x), y), *self.batch)
        self.schedule()


def schedule_of(case: Case, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """What follows each window."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999).step if case.schedules else lambda: None


def strategy_of(case: Case, replicas: int) -> muster.MirroredStrategy:
    """On so many replicas of the GPU."""
    options = {"accumulate": case.k, "clip_norm": 1.0, "bucket_bytes": BUCKET_BYTES, **case.options}
    return muster.MirroredStrategy([f"cpu:{i}" for i in range(replicas)] if DRY else ["cuda:0"] * replicas, **options)


@contextlib.contextmanager
def one_replica(case: Case) -> Iterator[Column]:
    """The same batch, by one replica."""
    with strategy_of(case, 1) as strategy:
        yield Window(strategy, case)


@contextlib.contextmanager
def replay(case: Case) -> Iterator[Column]:
    """A window as a CUDA graph has it; of a dry run, as it is taken."""
    with strategy_of(case, 1) as strategy:
        window = Window(strategy, case)
        if DRY:
            yield window
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                window()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            window()
        yield graph.replay
        synchronize()
        graph.reset()


def autocast(case: Case) -> Any:
    """As the precision of the case has it; torch's autocast for one pass."""
    chosen = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.options.get("precision", ""))
    return torch.autocast(DEVICE, chosen, enabled=chosen is not None)


def bare_passes(case: Case) -> Column:
    """Forward and backward alone, of each replica."""
    module, x, y = made(case.model)
    parts = list(zip(x.chunk(case.replicas), y.chunk(case.replicas), strict=True))

    def run() -> None:
        for _ in range(case.k):
            for x, y in parts:
                with autocast(case):
                    loss = F.mse_loss(module(x), y)
                loss.backward()
                for parameter in module.parameters():
                    parameter.grad = None

    return run


def torch_window(case: Case, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> Column:
    """What the loop is without Muster: fused AdamW, a norm and clipping, and a scaler for fp16."""
    module, x, y = made(case.model)
    model = wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, enabled=case.options.get("precision") == "fp16")
    schedule = schedule_of(case, optimizer)

    def run() -> None:
        optimizer.zero_grad()
        for _ in range(case.k):
            with autocast(case):
                loss = F.mse_loss(model(x), y) / case.k
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        schedule()

    return run


def with_ddp(module: nn.Module) -> nn.Module:
    """As DDP has it where one process is alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo" if DRY else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(module)


def enqueue_ms(columns: dict[str, Column]) -> dict[str, list[float]]:
    """The host's time for each, by quartiles."""

    def clock(run: Column, repeats: int) -> float:
        total = 0.0
        for _ in range(repeats):
            synchronize()
            began = time.perf_counter()
            run()
            total += time.perf_counter() - began
        synchronize()
        return 1e3 * total / repeats

    return {name: quartiles(values) for name, values in take_turns(columns, ROUNDS, clock, REPEATS).items()}


def traced(run: Column) -> Trace:
    """Of a dry run nothing, since nothing is launched."""
    return Trace([], [], 0, []) if DRY else trace(run)


def measure(case: Case) -> dict[str, Any]:
    is_plain = case.k == 1 and case.replicas == 1
    found: dict[str, Any] = {"case": str(case)}
    with strategy_of(case, case.replicas) as strategy, contextlib.ExitStack() as stack:
        window = Window(strategy, case)
        passes = bare_passes(case)
        for _ in range(4):
            window()
            passes()
        whole, alone = traced(window), traced(passes)
        buckets = buckets_of(window.module)
        averaging = 2 * case.replicas if case.replicas > 1 and any(True for _ in window.module.buffers()) else 0
        columns: dict[str, Column] = {"muster": window, "torch": torch_window(case), "passes": passes}
        if is_plain:
            columns["ddp"] = torch_window(case, with_ddp)
        if case.replicas > 1:
            columns["one replica"] = stack.enter_context(one_replica(case))
        if is_plain and not case.schedules:  # a replay has the learning rate of the captured window
            try:
                columns["replay"] = stack.enter_context(replay(case))
            except (RuntimeError, muster.Error) as error:
                found["no replay"] = f"{type(error).__name__}: {error}"
        enqueued = enqueue_ms(columns)
        times = take_turns(columns, ROUNDS, by_host, REPEATS)
    found |= {
        "buckets": buckets,
        "launches": whole.launches - alone.launches,
        "most launches": (case.k * case.replicas + 2) * buckets + 5 + averaging,
        "asked launches": (case.k + 2) * buckets + 5,
        "launches of the passes": alone.launches,
        "host syncs": len(whole.waits) + len(whole.pageable_copies),
        "enqueue_ms": enqueued,
        "ms": {column: quartiles(values) for column, values in times.items()},
    }
    if "one replica" in times:
        pairs = zip(times["muster"], times["one replica"], strict=True)
        found["us beyond one replica"] = quartiles([1e3 * (several - one) for several, one in pairs])
        found["muster over one replica"] = ratio(times["muster"], times["one replica"])
    others = [name for name in ("torch", "ddp", "replay") if name in times]
    return found | {f"{name} over muster": ratio(times[name], times["muster"]) for name in others}


def main() -> int:
    """Measures every case and prints it."""
    if DRY:
        torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for case in DRY_CASES if DRY else CASES:
        found.append(measure(case))
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any("no replay" in case for case in found))


if __name__ == "__main__":
    sys.exit(main())
