"""What `make gpu-check` does, in stages: looks at the machine, builds the CUDA side for its GPU, runs tests/gpu and the
GPU benchmarks, and writes gpu-<date>-<gpu>.json after every stage, to which later runs of the day add theirs where the
code is the same. docs/gpu.md says what is needed and how to read it.

Works with the interpreter that runs it, its torch and the system's tools alone. Where there is no GPU it builds, where
nvcc and a CUDA build of torch exist, and says that nothing ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_goals import goals, line_of
from gpu_result import Result, commit, digest, driver
from gpu_stages import ROOT, STAGES, Stage, Surroundings, find_torch, gpu_of_this_machine


def machine(surroundings: Surroundings) -> dict[str, Any]:
    """Where, with what and of which code the stages run."""
    import torch

    nccl = torch.cuda.nccl.version() if torch.version.cuda is not None else ()
    return {
        "machine": {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "versions": {
            "muster": (ROOT / "VERSION").read_text().strip(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl)),
            "python": platform.python_version(),
            "driver": None if surroundings.is_dry else driver(),
        },
        "gpu": surroundings.gpu,
        "sources": digest(),
        "commit": commit(),
    }


def chosen_stages(only: Sequence[str], skip: Sequence[str]) -> list[Stage]:
    """In their order. Raises SystemExit where a name is none of a stage."""
    names = [stage.name for stage in STAGES]
    if unknown := {*only, *skip} - {*names}:
        raise SystemExit(f"gpu-check: there is no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [stage for stage in STAGES if (not only or stage.name in only) and stage.name not in skip]


def run_stages(stages: Sequence[Stage], surroundings: Surroundings, budget: float) -> bool:
    """Runs them, and writes the result after each; whether all passed and all goals hold. A stage for which less of the
    budget (seconds) is left than it needs is left out, which is no failure."""
    began = time.perf_counter()
    facts = {"benchmark": "gpu", "date": datetime.date.today().isoformat(), "dry": surroundings.is_dry}
    result = Result(surroundings.out, {**facts, **machine(surroundings)})
    if result.stages:
        print(f"gpu-check: adds to {result.file}, which has {', '.join(result.stages)}", flush=True)
    order = [stage.name for stage in STAGES]
    passed = True

    def keep(stage: Stage, found: dict[str, Any]) -> None:
        result.put(stage.name, found, order)
        result.content["goals"] = [] if surroundings.is_dry else goals(result.stages)
        result.write()

    for stage in stages:
        left = budget - (time.perf_counter() - began)
        if left < stage.least_seconds:
            keep(stage, {"left out": f"{left:.0f} s were left; it needs {stage.least_seconds}"})
            print(f"gpu-check: {stage.name} is left out: {left:.0f} s of the budget are left", flush=True)
            continue
        print(f"gpu-check: {stage.name}", flush=True)
        start = time.perf_counter()
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        surroundings.deadline = time.monotonic() + min(left, stage.most_seconds)
        try:
            if stage.needs_build and surroundings.is_of_other_code:
                raise RuntimeError("what was built is of other code: run the stage build first")
            found = stage.run(surroundings)
        except Exception as error:
            found = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        found |= {"at": at, "seconds": round(time.perf_counter() - start, 1)}
        keep(stage, found)
        print(f"  {summary(found)}", flush=True)
        passed &= bool(found["passed"])
        if not found["passed"] and stage.ends_the_run:
            break
    listed = result.content["goals"]
    for goal in listed:
        print(f"  {line_of(goal)}", flush=True)
    print(f"gpu-check: wrote {result.file}", flush=True)
    return passed and all(goal["holds"] for goal in listed)


def summary(found: dict[str, Any]) -> str:
    """A line for the reader who waits."""
    counted = {name: value for name, value in found.items() if isinstance(value, int | float | str)}
    return ("passed " if found["passed"] else "FAILED ") + json.dumps({**counted, "passed": found["passed"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="stages to run, with commas between them; all without it")
    parser.add_argument("--skip", default="", help="stages to leave out")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="of all stages together")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of result and logs")
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu", help="folder to build in")
    parser.add_argument("--torch", type=Path, help="a CUDA build of torch to build against, where this Python has none")
    parser.add_argument("--jobs", default=str(len(os.sched_getaffinity(0))), help="parallel compilers")
    parser.add_argument("--dry", action="store_true", help="each stage small, on the CPU, with the muster installed")
    options = parser.parse_args()
    stages = chosen_stages(*([name for name in text.split(",") if name] for text in (options.only, options.skip)))
    os.environ["PATH"] += os.pathsep + "/usr/local/cuda/bin"

    surroundings = Surroundings(
        out=options.out.resolve(),
        build=options.build.resolve(),
        torch=find_torch(options.torch and options.torch.resolve()),
        jobs=options.jobs,
        gpu=None if options.dry else gpu_of_this_machine(),
        is_dry=options.dry,
    )
    surroundings.logs.mkdir(parents=True, exist_ok=True)
    if surroundings.gpu is None and not options.dry:
        stages = [stage for stage in stages if stage.name == "build"]
        if missing := surroundings.missing():
            print(f"gpu-check: there is {missing}; nothing was built and nothing ran")
            return 0
        print("gpu-check: there is no GPU; it is built and nothing runs")
        surroundings.deadline = time.monotonic() + 3600
        return 0 if all(stage.run(surroundings)["passed"] for stage in stages) else 1
    return 0 if run_stages(stages, surroundings, options.budget) else 1


if __name__ == "__main__":
    sys.exit(main())
