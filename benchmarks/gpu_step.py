"""A whole window on a GPU: what the host and the device are asked for, and its time against torch's own loop.

`launches`: kernels, copies and fills of a window of k micro-batches less those of the k forward and backward passes
alone; they are bounded by (k + 2) x buckets + 5.

    python benchmarks/gpu_step.py                  prints JSON
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_kernels import ROUNDS, by_host
from gpu_trace import trace
from torch import Tensor, nn

import muster
from muster._C import _FlatLayout
from muster.benchmarks.rounds import quartiles, ratio, take_turns

BUCKET_BYTES = 8 << 20
FIRST_BUCKET_BYTES = 1 << 20
MODELS: dict[str, Callable[[], nn.Module]] = {
    "4 tensors, 17 M": lambda: nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)),
    "100 tensors, 13 M": lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(50))),
    "1,000 tensors, 8 M": lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(500))),
}


def data_of(module: nn.Module, rows: int = 64) -> tuple[Tensor, Tensor]:
    parameters = [p for p in module.parameters() if p.dim() == 2]
    return torch.randn(rows, parameters[0].size(1)).cuda(), torch.randn(rows, parameters[-1].size(0)).cuda()


def buckets_of(module: nn.Module) -> int:
    """Of the layout after the first step, when gradients come in reverse."""
    named = list(module.named_parameters())
    order = list(range(len(named)))[::-1]
    return len(_FlatLayout(named, order, BUCKET_BYTES, FIRST_BUCKET_BYTES).buckets)


class Window:
    """A window of `k` micro-batches of a fresh model, by Muster."""

    def __init__(self, strategy: muster.Strategy, build: Callable[[], nn.Module], k: int) -> None:
        torch.manual_seed(0)
        self.module = build().cuda()
        self.strategy = strategy
        self.model, _ = strategy.prepare(self.module, torch.optim.AdamW(self.module.parameters(), lr=1e-3))
        self.batch = data_of(self.module)
        self.k = k

    def __call__(self) -> None:
        for _ in range(self.k):
            self.strategy.step(lambda x, y: F.mse_loss(self.model(x), y), *self.batch)


def bare_passes(build: Callable[[], nn.Module], k: int) -> Callable[[], None]:
    """Forward and backward alone."""
    module = build().cuda()
    x, y = data_of(module)

    def run() -> None:
        for _ in range(k):
            F.mse_loss(module(x), y).backward()
            for parameter in module.parameters():
                parameter.grad = None

    return run


def torch_window(build: Callable[[], nn.Module], k: int) -> Callable[[], None]:
    """What the loop is without Muster: fused AdamW, a norm and clipping."""
    module = build().cuda()
    x, y = data_of(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        for _ in range(k):
            (F.mse_loss(module(x), y) / k).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()

    return run


def measure(name: str, k: int) -> dict[str, Any]:
    build = MODELS[name]
    options: dict[str, Any] = {"accumulate": k, "clip_norm": 1.0, "bucket_bytes": BUCKET_BYTES}
    with muster.MirroredStrategy(["cuda:0"], **options) as strategy:
        window = Window(strategy, build, k)
        passes = bare_passes(build, k)
        for _ in range(4):
            window()
            passes()
        whole, alone = trace(window), trace(passes)
        buckets = buckets_of(window.module)
        torch.cuda.synchronize()
        began = time.perf_counter()
        window()
        enqueued = (time.perf_counter() - began) * 1e3
        times = take_turns({"torch": torch_window(build, k), "muster": window, "passes": passes}, ROUNDS, by_host, 10)
    return {
        "model": name,
        "micro-batches": k,
        "buckets": buckets,
        "launches": whole.launches - alone.launches,
        "most launches": (k + 2) * buckets + 5,
        "launches of the passes": alone.launches,
        "host syncs": len(whole.waits) + len(whole.pageable_copies),
        "enqueue_ms": round(enqueued, 3),
        "ms": {column: quartiles(values) for column, values in times.items()},
        "torch over muster": ratio(times["torch"], times["muster"]),
    }


def main() -> None:
    """Measures every model and prints it."""
    print(json.dumps([measure(name, k) for name in MODELS for k in (1, 4)]))


if __name__ == "__main__":
    main()
