"""What every benchmark keeps with its numbers, and what it does with a result."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import typer

import muster
from muster.benchmarks.tables import Table

__all__ = ["Out", "known", "need_gloo", "publish", "record", "write"]

Out = Annotated[Path | None, typer.Option(help="Folder for the result as JSON.", file_okay=False)]
T = TypeVar("T")


def known(chosen: list[T] | None, of: Collection[T], option: str, unnamed: Collection[T] = ()) -> list[T]:
    """What an option chose, `of` when nothing. Raises typer.BadParameter for what is not there."""
    for value in chosen or ():
        if value not in of and value not in unnamed:
            raise typer.BadParameter(f"{value} is none of {', '.join(map(str, of))}", param_hint=option)
    return list(chosen or of)


def need_gloo() -> None:
    """Ends the program with one line where torch cannot serve as what is compared with."""
    if not (dist.is_available() and dist.is_gloo_available()):
        typer.echo("this torch is built without Gloo, which is compared with; install one that has it", err=True)
        raise typer.Exit(1)


def record(benchmark: str, **measured: Any) -> dict[str, Any]:
    """A result: what was measured, when, on which machine, with which versions."""
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "versions": {"muster": muster.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **measured,
    }


def publish(result: dict[str, Any], table: Table, out: Path | None) -> None:
    """Prints the table and writes the result."""
    typer.echo(f"\n{result['benchmark']}\n\n{table.text()}")
    write(result, out)


def write(result: dict[str, Any], out: Path | None) -> None:
    """Where a folder is given, writes <benchmark>-<date>.json there."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{result['benchmark']}-{result['date']}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        typer.echo(f"\nwrote {file}")


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
