"""What `make gpu-check` does: builds the CUDA side for sm_90, runs tests/gpu and the GPU benchmarks, and writes
benchmarks/results/gpu-<date>.json. docs/gpu.md says what is needed and how to read it.

Works with the interpreter that runs it, its torch and the system's tools alone. Where there is no GPU it builds, where
nvcc and a CUDA build of torch exist, and says that nothing ran.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "gpu"
BENCHMARKS = ROOT / "benchmarks"
FILE_SECONDS = 180
"""Deadline of one file of tests or benchmarks."""


def has_cuda(torch: Path) -> bool:
    return (torch / "lib" / "libc10_cuda.so").exists()


def find_torch(other: Path | None) -> Path | None:
    """The folder of this interpreter's torch where it has CUDA, else `other`, which can be built against only."""
    spec = importlib.util.find_spec("torch")
    own = Path((spec.submodule_search_locations or [""])[0]) if spec else None
    return next((folder for folder in (own, other) if folder and has_cuda(folder)), None)


def gpu_of_this_machine() -> dict[str, Any] | None:
    """What torch says of device 0, if it can use one."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 2**30),
        "multiprocessors": properties.multi_processor_count,
    }


# --- running ----------------------------------------------------------------------------------------------------------


def call(command: list[str], *, log: Path | None = None, site: Path | None = None, **environment: str) -> int:
    """Its exit status; 124 past the deadline, when it and all that it started are killed."""
    variables = {**os.environ, **environment}
    if site is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(log or os.devnull, "w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, start_new_session=True, stdout=output if log else None
        )
        try:
            return process.wait(FILE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"gpu-check: {' '.join(command)} did not end in {FILE_SECONDS} s", flush=True)
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def build(folder: Path, torch: Path, jobs: str) -> None:
    """Raises CalledProcessError where it fails."""
    streams = ["nvcc", "-shared", "-O3", "-std=c++17", "-Xcompiler=-fPIC", "-cudart=shared", "-arch=sm_90"]
    for command in (
        [
            *("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DMUSTER_CUDA=ON", "-DMUSTER_PYTHON=ON"),
            *("-DCMAKE_CUDA_ARCHITECTURES=90-real", f"-DPython_EXECUTABLE={sys.executable}"),
            f"-DMusterTorch_ROOT={torch}",
        ],
        ["cmake", "--build", str(folder), "-j", jobs, "--target", "muster", "_C"],
        [sys.executable, str(ROOT / "tools" / "link_package.py"), str(folder), str(folder / "site")],
        [*streams, str(BENCHMARKS / "gpu_streams.cu"), "-o", str(folder / "gpu_streams.so")],
    ):
        subprocess.run(command, cwd=ROOT, check=True)


def pytest_command(file: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), str(file), *options]


def run_tests(folder: Path) -> dict[str, Any]:
    """Each file in a process of its own, so that one that breaks the device or hangs costs no other."""
    results = {}
    for file in sorted(TESTS.glob("test_*.py")):
        report = folder / f"{file.stem}.xml"
        report.unlink(missing_ok=True)
        status = call(pytest_command(file, f"--junitxml={report}"), site=folder / "site")
        results[file.stem] = {"status": status, **counts(report)}
    return results


def counts(report: Path) -> dict[str, Any]:
    """What a JUnit report says; nothing where pytest left none."""
    if not report.exists():
        return {}
    suite = ElementTree.parse(report).getroot()
    suite = suite if suite.tag == "testsuite" else suite[0]
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    reasons = sorted({skip.get("message", "") for skip in suite.iter("skipped")})
    return {**numbers, "skipped because": reasons, "seconds": round(float(suite.get("time", 0)), 1)}


def run_memcheck(folder: Path) -> dict[str, Any]:
    """The kernels' tests under compute-sanitizer, every tensor an allocation of its own."""
    if shutil.which("compute-sanitizer") is None:
        return {"status": 0, "skipped because": "compute-sanitizer was not found"}
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    command += pytest_command(TESTS / "test_kernels.py", "-m", "kernels", "-k", "not torch")
    began = time.perf_counter()
    status = call(command, site=folder / "site", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return {"status": status, "seconds": round(time.perf_counter() - began, 1)}


def run_benchmark(folder: Path, file: str, *arguments: str) -> Any:
    """What it prints on its last line; None where it fails."""
    log = folder / f"{file}.log"
    if call([sys.executable, str(BENCHMARKS / f"{file}.py"), *arguments], log=log, site=folder / "site"):
        print(log.read_text(), flush=True)
        return None
    return json.loads(log.read_text().splitlines()[-1])


# --- goals ------------------------------------------------------------------------------------------------------------


def goals(kernels: Any, windows: Any) -> list[dict[str, Any]]:
    """What must hold on a GPU, beside what was found; `found` is a median."""
    listed: list[dict[str, Any]] = []

    def at_least(what: str, found: float, least: float) -> None:
        listed.append({"goal": what, "found": found, "at least": least, "holds": found >= least})

    def at_most(what: str, found: float, most: float) -> None:
        listed.append({"goal": what, "found": found, "at most": most, "holds": found <= most})

    if kernels is not None:
        at_least("flat AdamW over its streams alone", kernels["adamw"]["streams over muster"][1], 0.92)
        for case in kernels["pack"]:
            if case["bytes a tensor"] >= 1 << 16 and not case["accumulate"]:
                what = f"pack of {case['bytes a tensor'] >> 10} KB {case['dtype']} tensors over a copy"
                at_least(what, case["copy over muster"][1], 0.85)
        for case in kernels["after all-reduce"]:
            what = f"torch's time after the all-reduce over Muster's, {case['tensors']} tensors"
            what += f", {case['parameters'] // 10**6} M parameters"
            at_least(what, case["torch over muster"][1], 1.5)
    for case in windows or ():
        where = f"{case['model']}, {case['micro-batches']} micro-batches"
        at_most(f"launches of a window: {where}", case["launches"], case["most launches"])
        at_most(f"host syncs of a window: {where}", case["host syncs"], 0)
    return listed


def write(folder: Path, gpu: dict[str, Any], seconds: dict[str, float]) -> bool:
    """Tests, memcheck and benchmarks, to the file of today; whether everything passed."""
    import torch

    began = time.perf_counter()
    tests = run_tests(folder)
    seconds["tests"] = round(time.perf_counter() - began, 1)
    print(f"gpu-check: tests took {seconds['tests']:.0f} s", flush=True)
    memcheck = run_memcheck(folder)
    began = time.perf_counter()
    kernels = run_benchmark(folder, "gpu_kernels", str(folder / "gpu_streams.so"))
    windows = run_benchmark(folder, "gpu_step")
    seconds["benchmarks"] = round(time.perf_counter() - began, 1)
    listed = goals(kernels, windows)
    today = datetime.date.today().isoformat()
    result = {
        "benchmark": "gpu",
        "date": today,
        "gpu": gpu,
        "machine": {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "versions": {
            "muster": (ROOT / "VERSION").read_text().strip(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "python": platform.python_version(),
        },
        "seconds": seconds,
        "tests": tests,
        "memcheck": memcheck,
        "goals": listed,
        "kernels": kernels,
        "windows": windows,
    }
    file = BENCHMARKS / "results" / f"gpu-{today}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    for goal in listed:
        bound = f"at least {goal['at least']}" if "at least" in goal else f"at most {goal['at most']}"
        print(f"  {'holds ' if goal['holds'] else 'MISSED'} {goal['goal']}: {goal['found']} ({bound})")
    for name, test in {**tests, "memcheck": memcheck}.items():
        print(f"  {'passed' if test['status'] == 0 else 'FAILED'} {name}: {json.dumps(test)}")
    print(f"gpu-check: {json.dumps(seconds)} seconds; wrote {file.relative_to(ROOT)}", flush=True)
    measured = kernels is not None and windows is not None
    passed = all(test["status"] == 0 for test in (*tests.values(), memcheck))
    return measured and passed and all(goal["holds"] for goal in listed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu", help="folder to build in")
    parser.add_argument("--torch", type=Path, help="a CUDA build of torch to build against, where this Python has none")
    parser.add_argument("--jobs", default=str(len(os.sched_getaffinity(0))), help="parallel compilers")
    options = parser.parse_args()
    os.environ["PATH"] += os.pathsep + "/usr/local/cuda/bin"

    gpu = gpu_of_this_machine()
    torch = find_torch(options.torch and options.torch.resolve())
    missing = "no CUDA build of torch" if torch is None else "no nvcc" if shutil.which("nvcc") is None else None
    if torch is None or missing:
        print(f"gpu-check: there is {missing}; nothing was built and nothing ran")
        return 0 if gpu is None else 1
    began = time.perf_counter()
    folder = options.build.resolve()
    try:
        build(folder, torch, options.jobs)
    except subprocess.CalledProcessError as error:
        print(f"gpu-check: the build failed: {error}")
        return 1
    seconds = {"build": round(time.perf_counter() - began, 1)}
    print(f"gpu-check: the build took {seconds['build']:.0f} s", flush=True)
    if gpu is None:
        print("gpu-check: there is no GPU; it was built and nothing ran")
        return 0
    return 0 if write(folder, gpu, seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
