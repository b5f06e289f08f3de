"""Memory of a GPU over a job's first steps and over many: Muster, Muster over NCCL, DDP of one process, torch's loop.

- `peak_mb`: most of the device's memory that was in use during steps 1 to 5, less what it was before the model. What
  the driver says (NCCL's memory is not torch's), so each way has a process of its own.
- `growth_mb`: how much the device's memory, and the host's pinned memory, grew by over steps after the first 100.

    python benchmarks/gpu_memory.py                prints JSON
    python benchmarks/gpu_memory.py --dry          small, on the CPU, where nothing is counted: shows that it runs
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import muster

DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
WIDTH, LAYERS = (32, 4) if DRY else (2048, 48)
STEPS = 20 if DRY else 1000
MB = 2**20
Step = Callable[[], object]


def used() -> float:
    """Megabytes of the device that are in use by anybody."""
    if DRY:
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MB


def pinned() -> float:
    """Megabytes of pinned memory that torch holds."""
    return 0.0 if DRY else torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / MB


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)


def batch_for(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Of a model whose layers are as wide as its first one."""
    width = next(module.parameters()).shape[-1]
    return torch.randn(64, width, device=DEVICE), torch.randn(64, width, device=DEVICE)


def muster_step(module: nn.Module, over_nccl: bool) -> Step:
    muster._C._comm.set_nccl_alone(over_nccl)
    strategy = muster.MirroredStrategy(["cpu:0" if DRY else "cuda:0"], clip_norm=1.0)
    model, _ = strategy.prepare(module, torch.optim.AdamW(module.parameters()))
    x, y = batch_for(module)
    return lambda: strategy.step(lambda x, y: loss_of(model, x, y), x, y)


def torch_step(module: nn.Module, wraps: bool) -> Step:
    if wraps:
        dist.init_process_group("gloo" if DRY else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True) if wraps else module
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    x, y = batch_for(module)

    def run() -> None:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()

    return run


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "torch": lambda module: torch_step(module, wraps=False),
    "ddp": lambda module: torch_step(module, wraps=True),
    "muster": lambda module: muster_step(module, over_nccl=False),
    "muster over nccl": lambda module: muster_step(module, over_nccl=not DRY),
}


def peaks(way: str) -> list[float]:
    """After each of five steps, the most that torch's cache and NCCL had taken. A cache gives nothing back by itself,
    so what is in use after a step is the peak until then."""
    before = used()
    step = WAYS[way](deep())
    found = []
    for _ in range(5):
        step()
        found.append(round(used() - before, 1))
    return found


def growth_of_dense() -> dict[str, float]:
    """Over many steps of a small model."""
    step = muster_step(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(DEVICE), over_nccl=False)
    return growth("dense", lambda number: step())


def growth_of_sparse() -> dict[str, float]:
    """Over many steps whose sparse gradients have another number of rows each."""
    module = nn.Embedding(50_000, 16, sparse=True).to(DEVICE)
    strategy = muster.MirroredStrategy(["cpu:0" if DRY else "cuda:0"])
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

    def run(step: int) -> None:
        rows = torch.arange(1000 + 7 * (step * 37 % 500), device=DEVICE)
        strategy.step(lambda rows: model(rows).square().mean(), rows)

    return growth("sparse", run)


def growth(name: str, run: Callable[[int], object]) -> dict[str, float]:
    """Of the memory, by steps after the first 100."""
    early = STEPS // 10
    for step in range(early):
        run(step)
    device, host = used(), pinned()
    for step in range(early, STEPS):
        run(step)
    return {
        f"{name} steps, device": round(used() - device, 1),
        f"{name} steps, pinned": round(pinned() - host, 1),
    }


def main() -> None:
    """Measures everything, each in a process of its own, and prints it."""
    result: dict[str, Any] = {
        "parameters": LAYERS * (WIDTH + 1) * WIDTH,
        "peak_mb": {},
        "growth_mb": {},
        "steps": STEPS,
    }
    context = multiprocessing.get_context("spawn")
    for way in ("ddp", "muster") if DRY else WAYS:
        with context.Pool(1) as pool:
            result["peak_mb"][way] = pool.apply(peaks, (way,))
    for measured in (growth_of_dense, growth_of_sparse):
        with context.Pool(1) as pool:
            result["growth_mb"] |= pool.apply(measured)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
