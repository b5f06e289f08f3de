"""What Nsight Compute (ncu) says of the kernels: memory throughput, occupancy, registers, waves, bytes.

python benchmarks/gpu_profile.py               prints JSON; says that ncu was not found where it is not
python benchmarks/gpu_profile.py --dry         runs the kernels once on the CPU, without ncu
python benchmarks/gpu_profile.py --kernels     what ncu watches
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from typing import Any

METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "dram__bytes.sum": "bytes",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active %",
    "launch__registers_per_thread": "registers",
    "launch__waves_per_multiprocessor": "waves",
    "launch__grid_size": "blocks",
}
NAME = re.compile(r"\w+_kernel(?:<[^(]*>)?")
"""Of a kernel, without its namespaces and parameters."""


def run_kernels() -> None:
    """Each kernel of a window a few times."""
    import torch
    from gpu_kernels import DEVICE, DRY, kernels, muster_phase, stream

    n = 4096 if DRY else 1_000_000
    tensors = 4 if DRY else 50
    parameters = [torch.randn(n, device=DEVICE) for _ in range(tensors)]
    sums = [torch.randn(n, device=DEVICE) for _ in range(tensors)]
    bucket = torch.zeros(n * tensors, device=DEVICE)
    packing = kernels.Packing(sums, [i * n for i in range(tensors)], [n] * tensors, bucket)
    phase = muster_phase(parameters, sums)
    for _ in range(2):
        packing.run(False, 1.0, stream=stream())
        packing.run(True, 1.0, stream=stream())
        phase()
        kernels.tree_sum([bucket, bucket.clone()], [bucket], stream=stream())


def read(text: str) -> list[dict[str, Any]]:
    """The last profile of each kernel of Muster in ncu's CSV."""
    rows = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, Any]] = {}
    launches: dict[str, str] = {}
    for row in csv.DictReader(io.StringIO("\n".join(rows))):
        name, launch = NAME.findall(row["Kernel Name"])[-1], row["ID"]
        if launches.get(name) != launch:
            launches[name], found[name] = launch, {"kernel": name}
        value = row["Metric Value"].replace(",", "")
        found[name][METRICS[row["Metric Name"]]] = f"{value} {row['Metric Unit']}".strip()
    return list(found.values())


def main() -> None:
    """Runs this file's kernels under ncu and prints what it says."""
    if "--dry" in sys.argv or "--kernels" in sys.argv:
        run_kernels()
        print(json.dumps([]))
        return
    if shutil.which("ncu") is None:
        print(json.dumps({"left out": "ncu was not found"}))
        return
    watched = [sys.executable, __file__, "--kernels"]
    ours = "regex:^(pack|grad_stats|norm_sums|finish_window|step|tree_sum)_kernel"
    # The clocks stay as they are: not every user may set them.
    asked = ["--csv", "--clock-control", "none", "--metrics", ",".join(METRICS), "--kernel-name", ours]
    command = ["ncu", *asked, "--", *watched]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"ncu ended with {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    print(json.dumps(read(done.stdout)))


if __name__ == "__main__":
    main()
