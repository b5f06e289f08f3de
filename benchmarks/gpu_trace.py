"""What a piece of code asks of the GPU and whether it waits for it, read from torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

RANGE = "traced by gpu_trace"
WAIT = re.compile(
    r"^cu(da)?(Device|Stream|Event|Ctx)Synchronize|^cudaMemcpy(2D|3D)?$|^cuMemcpy\w+(?<!Async)_v2$"
    r"|^cuda(Malloc|HostAlloc|MallocHost|Free|FreeHost)$"
)
"""Calls that wait for the device, or may."""


@dataclass(frozen=True)
class Trace:
    """What was enqueued between the beginning and the end of a piece of code, by any thread."""

    kernels: list[str]
    copies: list[str]
    """Names say from where to where, and whether host memory is pageable (then the host waits)."""
    fills: int
    waits: list[str]
    """Calls in which the host waits for the device."""

    @property
    def launches(self) -> int:
        return len(self.kernels) + len(self.copies) + self.fills

    @property
    def pageable_copies(self) -> list[str]:
        return [name for name in self.copies if "Pageable" in name]


def trace(run: Callable[[], object]) -> Trace:
    """Runs it under the profiler. Raises RuntimeError where the profiler sees no device (CUPTI is missing)."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(RANGE):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return read_trace(json.loads(file.read_text())["traceEvents"])


def read_trace(events: Sequence[dict[str, Any]]) -> Trace:
    """Of a Chrome trace: what calls within the range enqueued, and which of them wait."""
    ranges = [e for e in events if e.get("name") == RANGE and e.get("cat") == "user_annotation"]
    if len(ranges) != 1:
        raise RuntimeError(f"the trace holds {len(ranges)} ranges named '{RANGE}'; trace one piece of code at a time")
    begin = float(ranges[0]["ts"])
    end = begin + float(ranges[0]["dur"])
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= float(e["ts"]) <= end]
    if not calls:
        raise RuntimeError("the profiler saw no call of CUDA; is CUPTI installed?")
    issued = {e["args"]["correlation"] for e in calls if "correlation" in e.get("args", {})}
    work = [e for e in events if e.get("args", {}).get("correlation") in issued]

    def named(category: str) -> list[str]:
        return [str(e["name"]) for e in work if e.get("cat") == category]

    return Trace(
        kernels=named("kernel"),
        copies=named("gpu_memcpy"),
        fills=len(named("gpu_memset")),
        waits=[str(e["name"]) for e in calls if WAIT.search(str(e["name"]))],
    )
