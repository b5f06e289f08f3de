"""A step enqueues its work and returns: the host waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_trace import RANGE, read_trace, trace
from small_training import Training, batches, virtual

import muster

WARM_STEPS = 6
CASES: list[dict[str, Any]] = [
    {},
    {"clip_norm": 1.0},
    {"precision": "bf16"},
    {"precision": "fp16", "clip_norm": 1.0},
    {"accumulate": 3},
    {"keep_gradients": True},
    {"model": "batch norm"},
    {"model": "attention", "precision": "bf16"},
]


@pytest.fixture(params=[(case, replicas) for replicas in (1, 2) for case in CASES], ids=str)
def training(request: pytest.FixtureRequest, gpu: torch.device) -> Iterator[Training]:
    """A training that has taken its first windows."""
    case, replicas = request.param
    options = {name: value for name, value in case.items() if name != "model"}
    with muster.MirroredStrategy(virtual(gpu, replicas), **options) as strategy:
        made = Training(strategy, gpu, model=case.get("model", "linear"))
        for _ in range(WARM_STEPS):
            made.step(*batches(2, gpu)[0])
        torch.cuda.synchronize()
        yield made


def test_the_trace_of_a_step_holds_no_wait(training: Training) -> None:
    x, y = batches(2, training.strategy.device)[0]

    def window() -> None:
        for _ in range(3):
            training.step(x, y)

    seen = trace(window)
    assert seen.kernels
    assert seen.waits == []
    assert seen.pageable_copies == []


def test_steps_return_behind_a_sleeping_device(training: Training) -> None:
    x, y = batches(2, training.strategy.device)[0]
    cycles = cycles_of_a_second()
    asleep = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    asleep.record()
    began = time.perf_counter()
    results = [training.step(x, y) for _ in range(3)]
    took = time.perf_counter() - began
    assert not asleep.query(), "the device woke up before the steps had returned"
    assert took < 0.1
    assert all(bool(torch.isfinite(r.loss)) for r in results)


def test_torch_sees_no_synchronisation(training: Training) -> None:
    x, y = batches(2, training.strategy.device)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training.step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def cycles_of_a_second() -> int:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 100_000_000
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return int(cycles * 1000 / begin.elapsed_time(end))


# --- the checks can fail ----------------------------------------------------------------------------------------------


def test_a_wait_is_seen(gpu: torch.device) -> None:
    values = torch.ones(100, device=gpu)
    values.sum().item()
    seen = trace(lambda: values.sum().item())
    assert seen.waits
    assert trace(lambda: torch.ones(1000).to(gpu, non_blocking=True)).pageable_copies


def event(category: str, name: str, ts: float, correlation: int | None = None, dur: float = 1) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def test_a_trace_is_read_within_its_range() -> None:
    seen = read_trace(
        [
            event("user_annotation", RANGE, 100, dur=50),
            event("gpu_user_annotation", RANGE, 120, dur=90),
            event("cuda_runtime", "cudaLaunchKernel", 110, 1),
            event("kernel", "pack", 300, 1),
            event("cuda_runtime", "cudaMemcpyAsync", 120, 2),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 310, 2),
            event("cuda_driver", "cuLaunchKernelEx", 125, 3),
            event("kernel", "gemm", 320, 3),
            event("cuda_runtime", "cudaMemsetAsync", 130, 4),
            event("gpu_memset", "Memset (Device)", 330, 4),
            event("cuda_runtime", "cudaStreamSynchronize", 140, 5),
            event("cuda_runtime", "cudaStreamWaitEvent", 141, 6),
            event("cuda_runtime", "cudaLaunchKernel", 151, 7),
            event("kernel", "after", 340, 7),
            event("cuda_runtime", "cudaDeviceSynchronize", 160, 8),
        ]
    )
    assert seen.kernels == ["pack", "gemm"]
    assert seen.pageable_copies == ["Memcpy HtoD (Pageable -> Device)"]
    assert seen.waits == ["cudaStreamSynchronize"]
    assert seen.launches == 4


def test_a_trace_without_cuda_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="CUPTI"):
        read_trace([event("user_annotation", RANGE, 100, dur=50)])
