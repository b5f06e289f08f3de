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
COMMAND = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--dry"]
STAGES = ["preflight", "build", "bits", "training", "host_syncs", "capture"]
STAGES += ["data", "nccl", "kernels", "steps", "memory", "profiles", "sanitizers"]


def run(out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What it printed and wrote."""
    done = subprocess.run([*COMMAND, "--out", str(out), *options], capture_output=True, text=True, check=False)
    files = list(out.glob("gpu-*-dry.json"))
    return done, json.loads(files[0].read_text()) if files else {}


def test_every_stage_runs_dry(tmp_path: Path) -> None:
    done, result = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert list(result["stages"]) == STAGES
    for name, stage in result["stages"].items():
        assert stage["passed"], (name, stage)
    for name in ("bits", "training", "host_syncs"):
        assert result["stages"][name]["tests"] > result["stages"][name]["skipped"]
    assert result["stages"]["kernels"]["found"]["steps"][0]["parameters"] > 0
    assert {log.suffix for log in (tmp_path / "gpu-logs").iterdir()} == {".log", ".xml"}


def test_stages_are_chosen_by_name(tmp_path: Path) -> None:
    _, result = run(tmp_path, "--only", "preflight,build", "--skip", "build")
    assert list(result["stages"]) == ["preflight"]
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
