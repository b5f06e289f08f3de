"""muster bench."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from muster.benchmarks import (
    after_backward,
    allreduce,
    checkpoints,
    hooks,
    host_memory,
    memory,
    scaling_efficiency,
    step_overhead,
)
from muster.benchmarks.record import Out
from muster.benchmarks.servers import Cpp

__all__ = ["app"]

PROGRAMS: dict[str, Callable[..., None]] = {
    "allreduce": allreduce.main,
    "step_overhead": step_overhead.main,
    "scaling_efficiency": scaling_efficiency.main,
    "after_backward": after_backward.main,
    "hooks": hooks.main,
    "memory": memory.main,
    "host_memory": host_memory.main,
    "checkpoints": checkpoints.main,
}
WITH_CPP = {"step_overhead", "scaling_efficiency"}
# What AdamW gains is after_backward's matter.
STEP_MODELS = [word for model in step_overhead.CASES if "AdamW" not in model for word in ("--models", model)]
SHORT = {
    "allreduce": ["--ranks", "2", "--rounds", "5"],
    "step_overhead": [*STEP_MODELS, "--seconds", "2", "--rounds", "3"],
    "scaling_efficiency": ["--rounds", "3"],
    "after_backward": ["--rounds", "8"],
    "hooks": ["--rounds", "50"],
    "checkpoints": ["--width", "512", "--steps", "20", "--rounds", "5", "--loops", "3"],
}
"""Options of the short set; it takes less than 5 minutes on two cores."""

app = typer.Typer()
for name, program in PROGRAMS.items():
    app.command(name)(program)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context, cpp: Cpp = None, out: Out = None) -> None:
    """Measures Muster on this machine against the best existing way: the short set, or one program in full."""
    if context.invoked_subcommand is not None:
        if out is not None or cpp is not None:
            raise typer.BadParameter(f"options belong behind the name: muster bench {context.invoked_subcommand} ...")
        return
    failed = [name for name in PROGRAMS if _run(name, cpp, out)]
    if failed:
        typer.echo(f"\nfailed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _run(name: str, cpp: Path | None, out: Path | None) -> int:
    """Each in a process of its own: what one leaves behind meets no other."""
    options = list(SHORT.get(name, []))
    for option, folder in {"--cpp": cpp if name in WITH_CPP else None, "--out": out}.items():
        options += [option, str(folder)] if folder else []
    return subprocess.run([sys.executable, "-m", "muster", "bench", name, *options]).returncode
