"""Memory that is freed stays with a process that has a strategy, unless its environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = 20
PAGES = 4096  # of a gradient of 16 MiB

PROGRAM = f"""
import resource
import torch
import muster

with muster.MirroredStrategy(["cpu"]) as strategy:
    print("stay with this process" in strategy.explain())
    def step():
        return torch.ones(1 << 22).sum()
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({STEPS}):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MUSTER_KEEP_FREED_MEMORY": "0"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
    ],
    ids=["unset", "refused", "tuned by a variable", "tuned by tunables"],
)
def test_freed_memory_stays(variables: dict[str, str]) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "MUSTER_"))}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=own | variables, capture_output=True, text=True, check=True
    )
    stays, faults = run.stdout.split()
    assert stays == str(not variables)
    # A fixed threshold sends every block back; glibc's default one learns in time from what is freed.
    if stays == "True":
        assert int(faults) < STEPS * PAGES / 4
    elif "MUSTER_KEEP_FREED_MEMORY" not in variables:
        assert int(faults) > STEPS * PAGES / 2
