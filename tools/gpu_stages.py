"""The stages of gpu_check.py, each of which runs by itself and says whether it passed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_result import COMPILED, ROOT, digest

TESTS = ROOT / "tests" / "gpu"
BENCHMARKS = ROOT / "benchmarks"
PR_SET_PDEATHSIG = 1
SUPERVISOR = 'trap "kill -9 0" TERM; "$@" & wait $!'
"""A shell that takes its whole process group with it when it is told to end, as it is when gpu-check dies."""
SANITIZED = "not torch and not more_tensors and not blocks_take"
"""Tests that compute-sanitizer is through with in time."""


def has_cuda(torch: Path) -> bool:
    return (torch / "lib" / "libc10_cuda.so").exists()


def find_torch(other: Path | None) -> Path | None:
    """The folder of this interpreter's torch where it has CUDA, else `other`, which can be built against only."""
    spec = importlib.util.find_spec("torch")
    own = Path((spec.submodule_search_locations or [""])[0]) if spec else None
    return next((folder for folder in (own, other) if folder and has_cuda(folder)), None)


def gpu_of_this_machine() -> dict[str, Any] | None:
    """What torch says of device 0, if it can use one; asked in another process, so that this one holds no context."""
    question = (
        "import json, torch\n"
        "p = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None\n"
        "print(json.dumps(p and {'name': p.name, 'capability': f'{p.major}.{p.minor}', "
        "'memory_gb': round(p.total_memory / 2**30), 'multiprocessors': p.multi_processor_count}))"
    )
    if importlib.util.find_spec("torch") is None:
        return None
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    answer: dict[str, Any] | None = json.loads(asked.stdout.splitlines()[-1])
    return answer


@dataclass
class Surroundings:
    """What stages run in and with."""

    out: Path
    """The folder of the result; logs and JUnit reports lie in a folder of it."""
    build: Path
    torch: Path | None
    jobs: str
    gpu: dict[str, Any] | None
    is_dry: bool
    deadline: float = 0.0
    """Of the stage that runs, by time.monotonic()."""

    @property
    def logs(self) -> Path:
        return self.out / "gpu-logs"

    @property
    def site(self) -> Path | None:
        """Where muster is imported from; None for the one that is installed."""
        return None if self.is_dry else self.build / "site"

    @property
    def is_of_other_code(self) -> bool:
        """Whether what was built says that it was built from other sources than are here."""
        note = self.build / "built-from"
        return not self.is_dry and note.exists() and note.read_text() != digest(COMPILED)

    def missing(self) -> str | None:
        """What a build lacks."""
        if self.torch is None:
            return "no CUDA build of torch"
        return "no nvcc" if shutil.which("nvcc") is None else None


# --- running ----------------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """In a child, between fork and exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def call(surroundings: Surroundings, log: str, command: Sequence[str], **environment: str) -> int:
    """Runs it, what it prints goes to logs/`log`.log; its exit status, 124 past the stage's deadline. It and all that
    it started have ended afterwards, and end when this process dies."""
    variables = {**os.environ, **environment}
    if surroundings.site is not None:
        variables["PYTHONPATH"] = os.pathsep.join(
            [str(surroundings.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    file = surroundings.logs / f"{log}.log"
    with open(file, "w") as output:
        process = subprocess.Popen(
            ["sh", "-c", SUPERVISOR, "sh", *command],
            cwd=ROOT,
            env=variables,
            process_group=0,
            preexec_fn=die_with_parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(max(surroundings.deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        lines = file.read_text(errors="replace").splitlines()
        print(f"  {log}: status {status}; the end of {file}:", *lines[-40:], sep="\n  | ", flush=True)
    return status


def counts(report: Path) -> dict[str, Any]:
    """What a JUnit report says; nothing where pytest left none."""
    if not report.exists():
        return {}
    suite = ElementTree.parse(report).getroot()
    suite = suite if suite.tag == "testsuite" else suite[0]
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    reasons = sorted({skip.get("message", "") for skip in suite.iter("skipped")})
    failed = [case.get("name") for case in suite.iter("testcase") if {"failure", "error"} & {part.tag for part in case}]
    return {**numbers, "skipped because": reasons, "failed": failed}


def pytest_command(names: Sequence[str], *options: str) -> list[str]:
    files = [str(TESTS / f"test_{name}.py") for name in names]
    return [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), *files, *options]


def run_tests(
    surroundings: Surroundings, name: str, *options: str, dry: str = "", also: Sequence[str] = (), **environment: str
) -> dict[str, Any]:
    """tests/gpu/test_`name`.py and those of `also`; of a dry run, what `dry` selects (pytest's -k), on the CPU."""
    report = surroundings.logs / f"test_{name}.xml"
    report.unlink(missing_ok=True)
    if surroundings.is_dry:
        options = ("--device", "cpu", "-k", dry)
    command = pytest_command((name, *also), f"--junitxml={report}", *options)
    status = call(surroundings, f"test_{name}", command, **environment)
    return {"passed": status == 0, "status": status, **counts(report)}


def run_benchmark(surroundings: Surroundings, name: str, *arguments: str) -> dict[str, Any]:
    """benchmarks/`name`.py; `found` is what it prints on its last line, whatever becomes of it afterwards."""
    if surroundings.is_dry:
        arguments = ("--dry",)
    status = call(surroundings, name, [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments])
    found = last_json(surroundings.logs / f"{name}.log")
    if status != 0:
        return {"passed": False, "status": status, **({} if found is None else {"found": found})}
    if found is None:
        return {"passed": False, "error": "its last line is no JSON"}
    return {"passed": True, "found": found}


def last_json(log: Path) -> Any:
    """Of the last line that holds any: a benchmark of many cases prints what it has after each."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return None


# --- stages -----------------------------------------------------------------------------------------------------------


def preflight(surroundings: Surroundings) -> dict[str, Any]:
    """What later stages need; those that are missing fail it by name."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    tools = ("nvcc", "g++", "cmake", "ninja", "nvidia-smi")
    there = {tool: shutil.which(tool) for tool in (*tools, "ncu", "compute-sanitizer")}
    there["Python.h"] = str(headers) if headers.exists() else None
    there["pytest"] = "found" if importlib.util.find_spec("pytest") else None
    if surroundings.torch is not None:
        nvidia = surroundings.torch.parent / "nvidia"
        for header in ("nccl.h", "zlib.h"):
            roots = (nvidia, Path("/usr/local/cuda"), Path("/usr/include"))
            there[header] = next((str(p) for root in roots if root.exists() for p in root.rglob(header)), None)
    room = shutil.disk_usage("/dev/shm")
    needed = () if surroundings.is_dry else (*tools, "Python.h", "pytest", "nccl.h", "zlib.h")
    missing = [name for name in needed if there.get(name) is None]
    found = sorted(name for name, place in there.items() if place is not None)
    return {"passed": not missing, "missing": missing, "there": found, "shm_free_gb": round(room.free / 2**30, 1)}


def build(surroundings: Surroundings) -> dict[str, Any]:
    """For the GPU's architecture; with the streams that benchmarks compare with."""
    if surroundings.is_dry:
        return {"passed": True, "dry": "the muster that is installed is used"}
    if missing := surroundings.missing():
        return {"passed": False, "error": f"there is {missing}"}
    folder = surroundings.build
    built_from = digest(COMPILED)
    capability = surroundings.gpu["capability"].replace(".", "") if surroundings.gpu else "90"
    streams = ["nvcc", "-shared", "-O3", "-std=c++17", "-Xcompiler=-fPIC", "-cudart=shared", f"-arch=sm_{capability}"]
    for name, command in {
        "configure": [
            *("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DMUSTER_CUDA=ON", "-DMUSTER_PYTHON=ON"),
            *(f"-DCMAKE_CUDA_ARCHITECTURES={capability}-real", f"-DPython_EXECUTABLE={sys.executable}"),
            *(f"-DMusterTorch_ROOT={surroundings.torch}", f"-DMUSTER_UNITY_GROUPS={2 * int(surroundings.jobs)}"),
        ],
        "build": ["cmake", "--build", str(folder), "-j", surroundings.jobs, "--target", "muster", "_C"],
        "link": [sys.executable, str(ROOT / "tools" / "link_package.py"), str(folder), str(folder / "site")],
        "streams": [*streams, str(BENCHMARKS / "gpu_streams.cu"), "-o", str(folder / "gpu_streams.so")],
    }.items():
        if status := call(surroundings, name, command):
            return {"passed": False, "status": status, "step": name}
    (folder / "built-from").write_text(built_from)
    return {"passed": True, "architecture": f"sm_{capability}"}


def bits(surroundings: Surroundings) -> dict[str, Any]:
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") and not surroundings.is_dry else []
    return run_tests(
        surroundings, "kernels", *parallel, dry="means or note_loss or wrong or reduce", OMP_NUM_THREADS="2"
    )


def training(surroundings: Surroundings) -> dict[str, Any]:
    return run_tests(surroundings, "training", dry="kept or metrics or infinite or stay or batch_norm")


def host_syncs(surroundings: Surroundings) -> dict[str, Any]:
    return run_tests(surroundings, "host_syncs", dry="trace")


def capture(surroundings: Surroundings) -> dict[str, Any]:
    return run_tests(surroundings, "capture", dry="replays")


def data(surroundings: Surroundings) -> dict[str, Any]:
    tests = run_tests(surroundings, "data", dry="whole and 1")
    costs = run_benchmark(surroundings, "gpu_data")
    return {**tests, "passed": tests["passed"] and costs["passed"], "found": costs.get("found")}


def nccl(surroundings: Surroundings) -> dict[str, Any]:
    dry = "bf16 and reduce or synchronised or sparse and not clipped"
    tests = run_tests(surroundings, "nccl", dry=dry, also=["ranks"])
    costs = run_benchmark(surroundings, "gpu_nccl")
    return {**tests, "passed": tests["passed"] and costs["passed"], "found": costs.get("found")}


def kernels(surroundings: Surroundings) -> dict[str, Any]:
    return run_benchmark(surroundings, "gpu_kernels", str(surroundings.build / "gpu_streams.so"))


def steps(surroundings: Surroundings) -> dict[str, Any]:
    return run_benchmark(surroundings, "gpu_step")


def memory(surroundings: Surroundings) -> dict[str, Any]:
    return run_benchmark(surroundings, "gpu_memory")


def profiles(surroundings: Surroundings) -> dict[str, Any]:
    return run_benchmark(surroundings, "gpu_profile", str(surroundings.build / "gpu_streams.so"))


def sanitizers(surroundings: Surroundings) -> dict[str, Any]:
    """The kernels' tests under each of compute-sanitizer's tools, with every tensor an allocation of its own."""
    if surroundings.is_dry or shutil.which("compute-sanitizer") is None:
        return {"passed": True, "skipped because": "compute-sanitizer was not found"}
    found: dict[str, Any] = {}
    for tool in ("memcheck", "racecheck", "synccheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        command += pytest_command(("kernels",), "-m", "kernels", "-k", SANITIZED)
        found[tool] = call(surroundings, tool, command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return {"passed": not any(found.values()), **found}


@dataclass(frozen=True)
class Stage:
    """A part of gpu-check."""

    name: str
    run: Callable[[Surroundings], dict[str, Any]]
    least_seconds: int
    """With less of the budget left it is not begun; what it takes on an H100, roughly."""
    most_seconds: int = 480
    ends_the_run: bool = False
    """Whether nothing after it can pass where it fails."""
    needs_build: bool = True


STAGES = [
    Stage("preflight", preflight, 1, needs_build=False),
    Stage("build", build, 60, ends_the_run=True, needs_build=False),
    Stage("bits", bits, 30),
    Stage("training", training, 20),
    Stage("host_syncs", host_syncs, 40),
    Stage("capture", capture, 12),
    Stage("data", data, 30),
    Stage("nccl", nccl, 220),
    Stage("kernels", kernels, 20),
    Stage("steps", steps, 120),
    Stage("memory", memory, 60),
    Stage("profiles", profiles, 15),
    Stage("sanitizers", sanitizers, 120),
]
