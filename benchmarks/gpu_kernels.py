"""Kernels on a GPU against what the memory gives and against torch.

- `steps`: flat AdamW over 2.4 GB of state against a kernel without arithmetic over the same streams (gpu_streams.cu)
  and against torch's fused AdamW; other optimizers, types and numbers of tensors against their bytes alone.
- `pack`: gradients into a bucket, against torch's copy of as many bytes between two buffers; `pack on the host`: what a
  call costs the calling thread.
- `statistics`: of 1.2 GB of gradients, against torch's norm of them; `finish`: the end of a window by partial sums.
- `tree sum`: of 2, 4 and 8 sources into one.
- `after all-reduce`: statistics, window's end and AdamW, against torch's GradScaler.unscale_,
  clip_grad_norm_(foreach=True), AdamW(fused=True) and GradScaler.update; by the host's clock.

Columns take turns in one process, each round begins with another; a ratio is the median over rounds.

    python benchmarks/gpu_kernels.py STREAMS       prints JSON; STREAMS is gpu_streams.cu as a shared library
    python benchmarks/gpu_kernels.py --dry         small, on the CPU, without the streams: shows that it runs
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muster._C import kernels
from muster.benchmarks.rounds import Column, by_clock, quartiles, ratio, take_turns

DRY = "--dry" in sys.argv
ROUNDS, REPEATS = (2, 1) if DRY else (11, 10)
DEVICE = "cpu" if DRY else "cuda"
SHRINK = 1000 if DRY else 1
"""By how much a dry run is smaller."""
ROWS: dict[str, list[float]] = {
    "adam": [1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, 0, 0],
    "sgd": [0.1, 0.9, 0.0, 1e-2, 0, 0],
    "adagrad": [0.1, 0.0, 1e-10, 0.0, 0],
}
"""Of kernels::AdamGroup (AdamW), kernels::SgdGroup (momentum) and kernels::AdagradGroup."""
STATES = {"adam": 2, "sgd": 1, "adagrad": 1}


def stream() -> int:
    return 0 if DRY else torch.cuda.current_stream().cuda_stream


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


# --- measuring --------------------------------------------------------------------------------------------------------


def by_device(run: Column, repeats: int) -> float:
    """Milliseconds of the device's clock."""
    if DRY:
        return by_clock(run, repeats)
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
        synchronize()

    synchronize()
    return by_clock(until_done, 1) / repeats


def terabytes(count: float, ms: list[float]) -> float:
    """Per second, of the median."""
    return round(count / statistics.median(ms) / 1e9, 3)


def by_call(run: Column, repeats: int = 200) -> float:
    """Microseconds of the calling thread for one call, with a device that has nothing to do; a median."""
    times = []
    for _ in range(2 if DRY else repeats):
        synchronize()
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return round(statistics.median(times), 2)


# --- optimizers' steps ------------------------------------------------------------------------------------------------


def step(
    library: ctypes.CDLL | None,
    algorithm: str = "adam",
    parameters: int = 307_200_000,
    tensors: int = 300,
    dtype: torch.dtype = torch.float32,
    low: torch.dtype | None = None,
) -> dict[str, Any]:
    """One step of so many parameters, which writes copies in `low` too; ratios are of bandwidths, over the fastest of
    the bare kernels. `library` has those of AdamW in fp32."""
    n = parameters // SHRINK // tensors // 64 * 64  # as buckets align their slots
    count = n * tensors
    states = STATES[algorithm]
    gradient, parameter = (torch.randn(count, device=DEVICE, dtype=dtype) for _ in range(2))
    moments = [torch.zeros(count, device=DEVICE, dtype=dtype) for _ in range(states)]
    copies = None if low is None else torch.zeros(count, device=DEVICE, dtype=low)
    taken = torch.ones(1, device=DEVICE)

    def part(of: Tensor, i: int) -> Tensor:
        return of[i * n : (i + 1) * n]

    segments = [
        (
            part(gradient, i),
            part(parameter, i),
            None if copies is None else part(copies, i),
            [part(moment, i) for moment in moments],
            taken,
            None,
            0,
        )
        for i in range(tensors)
    ]
    steps = kernels.Steps(algorithm, segments, [ROWS[algorithm]])
    scalars = kernels.make_scalars(divisor=1024.0).to(DEVICE)
    columns: dict[str, Column] = {"muster": lambda: steps.run(scalars, stream=stream())}
    bare = [] if library is None else bare_columns(library, count)
    columns |= dict(bare)
    if library is not None or (DRY and algorithm == "adam"):
        columns["torch"] = torch_adamw([part(parameter, i) for i in range(tensors)], gradient.split(n))
    times = take_turns(columns, ROUNDS, by_device, REPEATS)
    moved = count * (dtype.itemsize * (1 + 2 + 2 * states) + (low.itemsize if low else 0))
    found = {
        "algorithm": algorithm,
        "dtype": str(dtype).removeprefix("torch."),
        "copies": str(low).removeprefix("torch."),
        "parameters": count,
        "tensors": tensors,
        "bytes": moved,
        "ms": {name: quartiles(values) for name, values in times.items()},
        "tb_per_s": {name: terabytes(moved, values) for name, values in times.items()},
    }
    if bare:
        best = min((name for name, _ in bare), key=lambda name: statistics.median(times[name]))
        found |= {"streams": best, "streams over muster": ratio(times[best], times["muster"])}
    if "torch" in times:
        found["torch over muster"] = ratio(times["torch"], times["muster"])
    return found


def bare_columns(library: ctypes.CDLL, count: int) -> list[tuple[str, Column]]:
    """Kernels over AdamW's streams that compute nothing."""
    arrays = [torch.zeros(count, device=DEVICE) for _ in range(4)]
    pointers = [ctypes.c_void_p(a.data_ptr()) for a in arrays]

    def bare(ahead: int) -> None:
        error = library.muster_adam_streams(
            *pointers, ctypes.c_uint64(4 * count), ctypes.c_int(ahead), ctypes.c_void_p(stream())
        )
        if error:
            raise RuntimeError(f"the bare kernel was not launched: CUDA error {error}")

    # The arrays live as long as the columns.
    return [(f"streams {ahead}", lambda ahead=ahead, _=arrays: bare(ahead)) for ahead in (1, 2, 4)]


def torch_adamw(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Column:
    leaves = [torch.nn.Parameter(p) for p in parameters]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    return torch.optim.AdamW(leaves, lr=1e-3, fused=True).step


# --- pack -------------------------------------------------------------------------------------------------------------


def pack(
    bytes_each: int, dtype: torch.dtype, *, accumulate: bool = False, total: int = (1 << 27) // SHRINK
) -> dict[str, Any]:
    """A bucket of fp32 from tensors of `bytes_each`; the copy moves as many bytes."""
    n = bytes_each // dtype.itemsize
    count = max(min(total // bytes_each, kernels.MAX_PACK_SOURCES), 1)
    sources = [torch.randn(n, device=DEVICE).to(dtype) for _ in range(count)]
    offsets = [i * n for i in range(count)]
    bucket = torch.zeros(n * count, device=DEVICE)
    packing = kernels.Packing(sources, offsets, [n] * count, bucket)
    moved = n * count * (dtype.itemsize + (8 if accumulate else 4))
    there, here = (torch.zeros(moved // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    times = take_turns(
        {
            "copy": lambda: there.copy_(here),
            "muster": lambda: packing.run(accumulate, 1.0, stream=stream()),
            "torch._foreach_copy_": foreach_copy(sources, bucket, n),
        },
        ROUNDS,
        by_device,
        REPEATS,
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


def pack_on_the_host(count: int) -> dict[str, Any]:
    """Microseconds of the calling thread for a call with so many small sources."""
    sources = [torch.randn(64, device=DEVICE) for _ in range(count)]
    bucket = torch.zeros(64 * count, device=DEVICE)
    packing = kernels.Packing(sources, [64 * i for i in range(count)], [64] * count, bucket)
    return {"tensors": count, "us": by_call(lambda: packing.run(False, 1.0, stream=stream()))}


# --- sums -------------------------------------------------------------------------------------------------------------


def gradient_statistics(count: int = 300_000_000 // SHRINK, tensors: int = 300) -> dict[str, Any]:
    """The norm's partial sums and whether all is finite, against torch's norm of one array."""
    gradient = torch.randn(count, device=DEVICE)
    stats = kernels.Statistics(list(gradient.split(count // tensors)))
    columns: dict[str, Column] = {
        "muster": lambda: stats.run(stream=stream()),
        "torch": lambda: torch.linalg.vector_norm(gradient),
    }
    times = take_turns(columns, ROUNDS, by_device, REPEATS)
    return {
        "bytes": 4 * count,
        "ms": {name: quartiles(values) for name, values in times.items()},
        "tb_per_s": {name: terabytes(4 * count, values) for name, values in times.items()},
    }


def finish(elements: int) -> dict[str, Any]:
    """Microseconds of the device for a window's end, by how many gradients there are statistics of."""
    stats = kernels.Statistics([torch.zeros(elements // SHRINK, device=DEVICE)])
    stats.run(stream=stream())
    counts, taken = torch.ones(1, dtype=torch.float64, device=DEVICE), torch.zeros(1, device=DEVICE)
    run = window_end(stats, counts, taken, kernels.make_scalars().to(DEVICE))
    times = take_turns({"muster": run}, ROUNDS, by_device, REPEATS)["muster"]
    return {"partials": stats.partials.numel(), "us": [round(1000 * ms, 2) for ms in quartiles(times)]}


def window_end(stats: Any, counts: Tensor, taken: Tensor, scalars: Tensor) -> Column:
    """kernels::finish_window over these statistics, which writes `scalars`."""
    scale = kernels.make_loss_scale(65536.0, 0).to(DEVICE)
    tail = torch.tensor([1.0, 0, 1, 0, 0, 0, 1, 0], dtype=torch.float64, device=DEVICE)
    report = torch.zeros(kernels.report_bytes(0), dtype=torch.uint8, device=DEVICE)
    sums = torch.empty(kernels.norm_sums_bytes, dtype=torch.uint8, device=DEVICE)
    options = (1.0, 1.0, 2.0, 0.5, 1 << 30)
    return lambda: kernels.finish_window(
        stats.partials, tail, counts, taken, options, scalars, scale, report, 0, sums, stream=stream()
    )


def tree_sum(sources: int, count: int = 100_000_000 // SHRINK) -> dict[str, Any]:
    """Of so many arrays into the first."""
    arrays = [torch.randn(count, device=DEVICE) for _ in range(sources)]
    run: Column = lambda: kernels.tree_sum(arrays, [arrays[0]], stream=stream())  # noqa: E731
    times = take_turns({"muster": run}, ROUNDS, by_device, REPEATS)["muster"]
    return {"sources": sources, "ms": quartiles(times), "tb_per_s": terabytes(4 * count * (sources + 1), times)}


# --- the phase after all-reduce ---------------------------------------------------------------------------------------


def torch_phase(parameters: list[Tensor], gradients: list[Tensor]) -> Column:
    leaves = [torch.nn.Parameter(p) for p in parameters]
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, fused=True)
    # Gradients stay as they are: a scale of one takes the same passes.
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.zeros((), device=DEVICE))
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient

    def phase() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(leaves, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    return phase


def muster_phase(parameters: list[Tensor], sums: list[Tensor]) -> Column:
    counts = torch.ones(len(sums), dtype=torch.float64, device=DEVICE)
    taken = torch.zeros(len(sums), device=DEVICE)
    segments = [
        (g, p, None, [torch.zeros_like(p), torch.zeros_like(p)], taken[i : i + 1], counts[i : i + 1], 0)
        for i, (g, p) in enumerate(zip(sums, parameters, strict=True))
    ]
    steps = kernels.Steps("adam", segments, [ROWS["adam"]])
    stats = kernels.Statistics(sums)
    scalars = kernels.make_scalars().to(DEVICE)
    end = window_end(stats, counts, taken, scalars)

    def phase() -> None:
        stats.run(stream=stream())
        end()
        steps.run(scalars, stream=stream())

    return phase


def after_all_reduce(parameters: int, tensors: int) -> dict[str, Any]:
    n = parameters // SHRINK // tensors

    def fresh(factor: float = 1.0) -> list[Tensor]:
        return [torch.randn(n, device=DEVICE) * factor for _ in range(tensors)]

    times = take_turns(
        {"torch": torch_phase(fresh(), fresh()), "muster": muster_phase(fresh(), fresh(65536.0))},
        ROUNDS,
        by_host,
        REPEATS,
    )
    return {
        "parameters": n * tensors,
        "tensors": tensors,
        "ms": {name: quartiles(values) for name, values in times.items()},
        "torch over muster": ratio(times["torch"], times["muster"]),
    }


def main(library: ctypes.CDLL | None) -> None:
    """Measures everything and prints it."""
    sizes = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 24]
    result: dict[str, Any] = {"steps": [step(library)]}
    for case in (
        {"tensors": 1000, "parameters": 100_000_000},
        {"dtype": torch.float64, "parameters": 100_000_000},
        {"low": torch.bfloat16, "parameters": 100_000_000},
        {"algorithm": "sgd", "parameters": 100_000_000},
        {"algorithm": "adagrad", "parameters": 100_000_000},
    ):
        result["steps"].append(step(None, **case))
    if not DRY:
        torch.cuda.empty_cache()
    result["pack"] = [pack(size, torch.float32) for size in sizes]
    result["pack"] += [pack(1 << 20, dtype) for dtype in (torch.bfloat16, torch.float16)]
    result["pack"].append(pack(1 << 20, torch.float32, accumulate=True))
    result["pack on the host"] = [pack_on_the_host(count) for count in (2, 100, kernels.MAX_PACK_SOURCES)]
    result["statistics"] = gradient_statistics()
    result["finish"] = [finish(elements) for elements in (1_000_000, 30_000_000, 1_000_000_000)]
    result["tree sum"] = [tree_sum(sources) for sources in (2, 4, 8)]
    result["after all-reduce"] = [
        after_all_reduce(parameters, tensors) for parameters in (25_000_000, 100_000_000) for tensors in (100, 1000)
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main(None if DRY else ctypes.CDLL(sys.argv[1]))
