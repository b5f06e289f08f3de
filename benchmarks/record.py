"""What every benchmark keeps with its numbers, and where."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import muster

__all__ = ["Write", "publish", "record"]

Write = Annotated[bool, typer.Option(help="Keep the result in benchmarks/results.")]

RESULTS = Path(__file__).resolve().parent / "results"


def record(benchmark: str, **measured: Any) -> dict[str, Any]:
    """A result: what was measured, when, on which machine, with which versions."""
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "versions": {"muster": muster.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **measured,
    }


def publish(result: dict[str, Any], markdown: Callable[[dict[str, Any]], str], write: bool) -> None:
    """Prints the table and, where asked to, writes benchmarks/results/<benchmark>-<date>.json."""
    if write:
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"{result['benchmark']}-{result['date']}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": round(os.getloadavg()[0], 1),
    }
