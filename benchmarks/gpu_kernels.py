"""Kernels on a GPU against what the memory gives and against torch.

- `adamw`: flat AdamW over 2.4 GB of state against a kernel without arithmetic over the same streams (gpu_streams.cu).
- `pack`: gradients into a bucket, against torch's copy of as many bytes between two buffers.
- `after all-reduce`: statistics, window's end and AdamW, against torch's GradScaler.unscale_,
  clip_grad_norm_(foreach=True), AdamW(fused=True) and GradScaler.update; by the host's clock.

Columns take turns in one process, each round begins with another; a ratio is the median over rounds.

    python benchmarks/gpu_kernels.py STREAMS       prints JSON; STREAMS is gpu_streams.cu as a shared library
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
from typing import Any

import torch
from torch import Tensor

from muster._C import kernels
from muster.benchmarks.rounds import Column, by_clock, quartiles, ratio, take_turns

ROUNDS = 15
ROW = [1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, 0, 0]
"""kernels::AdamGroup: AdamW."""


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


# --- measuring --------------------------------------------------------------------------------------------------------


def by_device(run: Column, repeats: int) -> float:
    """Milliseconds of the device's clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def by_host(run: Column, repeats: int) -> float:
    """Milliseconds from the first call until the device is done."""

    def until_done() -> None:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return by_clock(until_done, 1) / repeats


def terabytes(count: float, ms: list[float]) -> float:
    """Per second, of the median."""
    return round(count / statistics.median(ms) / 1e9, 3)


# --- flat AdamW -------------------------------------------------------------------------------------------------------


def adamw(library: ctypes.CDLL, parameters: int = 300_000_000, tensors: int = 300) -> dict[str, Any]:
    """One step of so many fp32 parameters; ratios are of bandwidths, over the fastest of the bare kernels."""
    n = parameters // tensors
    arrays = [torch.randn(parameters, device="cuda") for _ in range(2)]
    arrays += [torch.zeros(parameters, device="cuda") for _ in range(2)]
    gradient, parameter, first, second = arrays
    step = torch.ones(1, device="cuda")
    segments = [
        (
            gradient[i * n : (i + 1) * n],
            parameter[i * n : (i + 1) * n],
            None,
            [first[i * n : (i + 1) * n], second[i * n : (i + 1) * n]],
            step,
            None,
            0,
        )
        for i in range(tensors)
    ]
    steps = kernels.Steps("adam", segments, [ROW])
    scalars = kernels.make_scalars(divisor=1024.0).cuda()
    bare_arrays = [torch.zeros(parameters, device="cuda") for _ in range(4)]
    pointers = [ctypes.c_void_p(a.data_ptr()) for a in bare_arrays]

    def bare(ahead: int) -> None:
        error = library.muster_adam_streams(
            *pointers, ctypes.c_uint64(4 * parameters), ctypes.c_int(ahead), ctypes.c_void_p(stream())
        )
        if error:
            raise RuntimeError(f"the bare kernel was not launched: CUDA error {error}")

    columns: dict[str, Column] = {f"streams {ahead}": lambda ahead=ahead: bare(ahead) for ahead in (1, 2, 4)}
    columns["muster"] = lambda: steps.run(scalars, stream=stream())
    times = take_turns(columns, ROUNDS, by_device, 10)
    moved = 4 * parameters * (4 + 3)
    best = min((name for name in times if name != "muster"), key=lambda name: statistics.median(times[name]))
    return {
        "parameters": parameters,
        "tensors": tensors,
        "state_gb": 2 * 4 * parameters / 1e9,
        "bytes": moved,
        "ms": {name: quartiles(values) for name, values in times.items()},
        "tb_per_s": {name: terabytes(moved, values) for name, values in times.items()},
        "streams": best,
        "streams over muster": ratio(times[best], times["muster"]),
    }


# --- pack -------------------------------------------------------------------------------------------------------------


def pack(bytes_each: int, dtype: torch.dtype, *, accumulate: bool = False, total: int = 1 << 27) -> dict[str, Any]:
    """A bucket of fp32 from tensors of `bytes_each`; the copy moves as many bytes."""
    n = bytes_each // dtype.itemsize
    count = max(min(total // bytes_each, kernels.MAX_PACK_SOURCES), 1)
    sources = [torch.randn(n, device="cuda").to(dtype) for _ in range(count)]
    offsets = [i * n for i in range(count)]
    bucket = torch.zeros(n * count, device="cuda")
    packing = kernels.Packing(sources, offsets, [n] * count, bucket)
    moved = n * count * (dtype.itemsize + (8 if accumulate else 4))
    there, here = (torch.zeros(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = take_turns(
        {
            "copy": lambda: there.copy_(here),
            "muster": lambda: packing.run(accumulate, 1.0, stream=stream()),
            "torch._foreach_copy_": foreach_copy(sources, bucket, n),
        },
        ROUNDS,
        by_device,
        20,
    )
    return {
        "bytes a tensor": bytes_each,
        "dtype": str(dtype).removeprefix("torch."),
        "accumulate": accumulate,
        "tensors": count,
        "bytes": moved,
        "ms": {name: quartiles(values) for name, values in times.items()},
        "tb_per_s": {name: terabytes(moved, times[name]) for name in ("copy", "muster")},
        "copy over muster": ratio(times["copy"], times["muster"]),
    }


def foreach_copy(sources: list[Tensor], bucket: Tensor, n: int) -> Column:
    views = list(bucket.split(n))
    return lambda: torch._foreach_copy_(views, sources)


# --- the phase after all-reduce ---------------------------------------------------------------------------------------


def torch_phase(parameters: list[Tensor], gradients: list[Tensor]) -> Column:
    leaves = [torch.nn.Parameter(p) for p in parameters]
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, fused=True)
    # Gradients stay as they are: a scale of one takes the same passes.
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.zeros((), device="cuda"))
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient

    def phase() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(leaves, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    return phase


def muster_phase(parameters: list[Tensor], sums: list[Tensor]) -> Column:
    counts = torch.ones(len(sums), dtype=torch.float64, device="cuda")
    taken = torch.zeros(len(sums), device="cuda")
    segments = [
        (g, p, None, [torch.zeros_like(p), torch.zeros_like(p)], taken[i : i + 1], counts[i : i + 1], 0)
        for i, (g, p) in enumerate(zip(sums, parameters, strict=True))
    ]
    steps = kernels.Steps("adam", segments, [ROW])
    stats = kernels.Statistics(sums)
    scalars = kernels.make_scalars().cuda()
    scale = kernels.make_loss_scale(65536.0, 0).cuda()
    tail = torch.tensor([1.0, 0, 1, 0, 0, 0, 1, 0], dtype=torch.float64, device="cuda")
    report = torch.zeros(kernels.report_bytes(0), dtype=torch.uint8, device="cuda")
    options = (1.0, 1.0, 2.0, 0.5, 1 << 30)

    def phase() -> None:
        on = stream()
        stats.run(stream=on)
        kernels.finish_window(stats.partials, tail, counts, taken, options, scalars, scale, report, 0, stream=on)
        steps.run(scalars, stream=on)

    return phase


def after_all_reduce(parameters: int, tensors: int) -> dict[str, Any]:
    n = parameters // tensors

    def fresh(factor: float = 1.0) -> list[Tensor]:
        return [torch.randn(n, device="cuda") * factor for _ in range(tensors)]

    times = take_turns(
        {"torch": torch_phase(fresh(), fresh()), "muster": muster_phase(fresh(), fresh(65536.0))}, ROUNDS, by_host, 10
    )
    return {
        "parameters": n * tensors,
        "tensors": tensors,
        "ms": {name: quartiles(values) for name, values in times.items()},
        "torch over muster": ratio(times["torch"], times["muster"]),
    }


def main(library: str) -> None:
    """Measures everything and prints it."""
    sizes = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 24]
    result: dict[str, Any] = {"adamw": adamw(ctypes.CDLL(library))}
    torch.cuda.empty_cache()
    result["pack"] = [pack(size, torch.float32) for size in sizes]
    result["pack"] += [pack(1 << 20, torch.bfloat16), pack(1 << 20, torch.float32, accumulate=True)]
    result["after all-reduce"] = [
        after_all_reduce(parameters, tensors) for parameters in (25_000_000, 100_000_000) for tensors in (100, 1000)
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
