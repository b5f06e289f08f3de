"""gpu-check runs dry where there is no GPU: every stage small, on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_goals import goals, line_of  # noqa: E402
from gpu_result import Result, digest  # noqa: E402
from gpu_stages import STAGES, Surroundings, last_json  # noqa: E402

COMMAND = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--dry"]
NAMES = ["preflight", "build", "bits", "training", "host_syncs", "capture"]
NAMES += ["data", "nccl", "kernels", "steps", "memory", "profiles", "sanitizers"]
FACTS = {"date": "2026-12-01", "dry": False, "machine": {}, "versions": {}, "gpu": {"name": "NVIDIA H100 80GB HBM3"}}


def run(out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What it printed and wrote."""
    done = subprocess.run([*COMMAND, "--out", str(out), *options], capture_output=True, text=True, check=False)
    files = list(out.glob("gpu-*-dry.json"))
    return done, json.loads(files[0].read_text()) if files else {}


@pytest.mark.timeout(900)
def test_every_stage_runs_dry(tmp_path: Path) -> None:
    done, result = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert list(result["stages"]) == NAMES == [stage.name for stage in STAGES]
    for name, stage in result["stages"].items():
        assert stage["passed"], (name, stage)
    for name in ("bits", "training", "host_syncs", "nccl"):
        assert result["stages"][name]["tests"] > result["stages"][name]["skipped"]
    assert result["stages"]["kernels"]["found"]["steps"][0]["parameters"] > 0
    assert {log.suffix for log in (tmp_path / "gpu-logs").iterdir()} == {".log", ".xml"}


def test_stages_are_chosen_by_name(tmp_path: Path) -> None:
    _, result = run(tmp_path, "--only", "preflight,build", "--skip", "build")
    assert list(result["stages"]) == ["preflight"]
    assert "at" in result["stages"]["preflight"]
    assert {"sources", "commit"} <= {*result}
    assert "driver" in result["versions"]
    done, _ = run(tmp_path, "--only", "preflite")
    assert done.returncode != 0
    assert "no stage preflite; there are preflight, build" in done.stderr


def test_a_stage_past_the_budget_is_left_out(tmp_path: Path) -> None:
    done, result = run(tmp_path, "--only", "preflight,memory", "--budget", "10")
    assert done.returncode == 0
    assert result["stages"]["preflight"]["passed"]
    assert "it needs 60" in result["stages"]["memory"]["left out"]


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda kill: kill.name)
def test_children_end_with_it_and_the_result_stays(tmp_path: Path, kill: signal.Signals) -> None:
    command = [*COMMAND, "--out", str(tmp_path), "--only", "preflight,memory"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children: list[int] = []
    deadline = time.monotonic() + 60
    while len(children) < 2 and time.monotonic() < deadline:  # a benchmark and a process of its own
        time.sleep(0.1)
        children = [
            pid for pid in descendants(process.pid) if "gpu_memory" in command_of(pid) or "spawn" in command_of(pid)
        ]
    assert len(children) >= 2
    process.send_signal(kill)
    process.wait(30)
    deadline = time.monotonic() + 2  # sooner than they end by themselves
    while any(is_alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in children if is_alive(pid)]
    (file,) = tmp_path.glob("gpu-*-dry.json")
    assert json.loads(file.read_text())["stages"]["preflight"]["passed"]


def kept(out: Path, sources: str, **stages: Any) -> Result:
    """As a run of these stages leaves it."""
    result = Result(out, {**FACTS, "sources": sources})
    for name, found in stages.items():
        result.put(name, found, NAMES)
        result.write()
    return result


def test_runs_of_one_day_add_to_a_file(tmp_path: Path) -> None:
    kept(tmp_path, "a", steps={"passed": False}, preflight={"passed": True})
    kept(tmp_path, "a", kernels={"passed": True}, preflight={"left out": "no time"})
    result = kept(tmp_path, "a", steps={"passed": True}, memory={"left out": "no time"})
    result = kept(tmp_path, "a", steps={"passed": True, "again": 1}, memory={"passed": True})
    assert [file.name for file in tmp_path.iterdir()] == ["gpu-2026-12-01-h100.json"]
    assert json.loads(result.file.read_text())["stages"] == {
        "preflight": {"passed": True},
        "kernels": {"passed": True},
        "steps": {"passed": True, "again": 1, "earlier": [{"passed": False}, {"passed": True}]},
        "memory": {"passed": True},
    }


def test_other_code_begins_a_file_of_its_own(tmp_path: Path) -> None:
    kept(tmp_path, "a", steps={"passed": False})
    kept(tmp_path, "b", steps={"passed": True})
    kept(tmp_path, "c", steps={"passed": True})
    kept(tmp_path, "b", kernels={"passed": True})
    files = {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert {name: (of["sources"], list(of["stages"])) for name, of in files.items()} == {
        "gpu-2026-12-01-h100.json": ("a", ["steps"]),
        "gpu-2026-12-01-h100-2.json": ("b", ["kernels", "steps"]),
        "gpu-2026-12-01-h100-3.json": ("c", ["steps"]),
    }
    (tmp_path / "gpu-2026-12-01-h100.json").write_text("{ cut")
    assert kept(tmp_path, "a").file.name == "gpu-2026-12-01-h100-4.json"


def test_a_digest_is_of_what_is_measured(tmp_path: Path) -> None:
    for name in ("csrc/a.cu", "benchmarks/b.py", "benchmarks/results/c.json", "csrc/__pycache__/d.pyc", "docs/e.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    first = digest(root=tmp_path)
    for name in ("benchmarks/results/c.json", "csrc/__pycache__/d.pyc", "docs/e.md"):
        (tmp_path / name).write_text("2")
    assert digest(root=tmp_path) == first
    found = {first}
    for name in ("csrc/a.cu", "benchmarks/b.py"):
        (tmp_path / name).write_text("2")
        found.add(digest(root=tmp_path))
    (tmp_path / "csrc/a.cu").rename(tmp_path / "csrc/f.cu")
    assert len({*found, digest(root=tmp_path)}) == 4


def test_a_build_of_other_code_is_known(tmp_path: Path) -> None:
    there = Surroundings(out=tmp_path, build=tmp_path, torch=None, jobs="1", gpu=None, is_dry=False)
    assert not there.is_of_other_code
    (tmp_path / "built-from").write_text("something else")
    assert there.is_of_other_code


def test_a_goal_set_lower_says_what_was_asked() -> None:
    case = {"case": "two", "launches": 62, "most launches": 63, "asked launches": 11, "host syncs": 0, "enqueue_ms": {}}
    launches, syncs = goals({"steps": {"found": [case]}})
    assert launches["holds"]
    assert (launches["asked"], launches["reaches"]) == (11, False)
    assert "11 was asked, NOT REACHED" in line_of(launches)
    assert "asked" not in syncs


def test_what_a_benchmark_that_failed_printed_has_the_goals_that_it_reached() -> None:
    found = {"peak_mb": {"muster": [3.0], "muster over nccl": [5.0], "ddp": [4.0]}}
    listed = goals({"nccl": {"found": {"collective_us": {}}}, "memory": {"found": found}, "kernels": {"passed": False}})
    assert [goal["holds"] for goal in listed] == [True, False]


def test_what_a_benchmark_printed_before_it_failed_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[1]\n[1, 2]\n[1, 2,\nTraceback\n")
    assert last_json(log) == [1, 2]
    log.write_text("Traceback\n")
    assert last_json(log) is None


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for number in child.read_text().split():
            found += [int(number), *descendants(int(number))]
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()
