"""Peak memory of training a 25 M-parameter model with AdamW: Muster against torch's loop, in bytes per parameter.

Each column is a process of its own: it builds the model, runs one forward pass, notes its resident memory, trains three
steps and notes the peak. What it adds is gradients, optimizer states, buckets and whatever is temporary.

    python benchmarks/memory.py                   writes benchmarks/results/memory-<date>.json, prints the table
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from models import mlp
from record import Write, publish, record

import muster

COLUMNS = {
    "torch": "AdamW(fused=True), clip_grad_norm_",
    "muster": "MirroredStrategy(clip_norm=1)",
    "muster, fuse=False": "the same, stepping from .grad",
    "muster, two replicas": "MirroredStrategy of two logical replicas",
}


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def added_bytes(column: str) -> float:
    """Peak over what the model needs, in bytes per parameter."""
    torch.set_num_threads(1)
    model = mlp()
    parameters = sum(p.numel() for p in model.parameters())
    x, y = torch.randn(8, 1024), torch.randn(8, 1024)
    with torch.no_grad():
        model(x)
    before = resident()
    if column == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    else:
        devices = ["cpu"] * (2 if column.endswith("replicas") else 1)
        options: dict[str, Any] = {"fuse": False} if column.endswith("False") else {}
        with muster.MirroredStrategy(devices, clip_norm=1.0, threads_per_replica=1, **options) as strategy:
            prepared, _ = strategy.prepare(model, torch.optim.AdamW(model.parameters()))
            for _ in range(3):
                strategy.step(lambda x, y: F.mse_loss(prepared(x), y), x, y)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - before) / parameters


def markdown(result: dict[str, Any]) -> str:
    """A row a column."""
    lines = ["| training | bytes added per parameter |", "| --- | ---: |"]
    lines += [f"| {name}: {COLUMNS[name]} | {added:.1f} |" for name, added in result["added"].items()]
    return "\n".join(lines)


def main(
    column: Annotated[str, typer.Option(help="Measure this one in this process, and print it.", hidden=True)] = "",
    write: Write = True,
) -> None:
    """Measures, prints the table and keeps the result."""
    if column:
        print(added_bytes(column))
        return
    added = {}
    for name in COLUMNS:
        done = subprocess.run([sys.executable, __file__, "--column", name], capture_output=True, text=True, check=True)
        added[name] = round(float(done.stdout), 2)
    result = record("memory", added=added)
    publish(result, markdown, write)


if __name__ == "__main__":
    typer.run(main)
