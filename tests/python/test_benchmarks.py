"""muster bench: each program runs, at sizes that say nothing, and leaves a result of its form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muster.benchmarks import command
from muster.benchmarks.tables import Table


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "muster", "bench", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=240)


def result_of(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """What the program writes; it prints its table beside it."""
    done = bench(name, *options, "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.iterdir()
    result: dict[str, Any] = json.loads(file.read_text())
    assert file.name == f"{name}-{result['date']}.json"
    assert result["benchmark"] == name
    assert {"cpu", "cores"} <= result["machine"].keys()
    assert {"muster", "torch", "python"} <= result["versions"].keys()
    assert name in done.stdout
    assert f"{result['machine']['cpu']}" in " ".join(done.stdout.split())
    return result


def are_quartiles(values: Sequence[float]) -> bool:
    return len(values) == 3 and 0 < values[0] <= values[1] <= values[2]


def test_allreduce(tmp_path: Path) -> None:
    result = result_of(tmp_path, "allreduce", "--ranks", "2", "--sizes", "4", "--rounds", "3")
    (case,) = result["cases"]
    assert (case["ranks"], case["bytes"]) == (2, 4)
    assert case["us"].keys() == {"host", "local", "Gloo"}
    assert all(map(are_quartiles, [*case["us"].values(), *case["Gloo over"].values()]))


def test_step_overhead(tmp_path: Path) -> None:
    result = result_of(tmp_path, "step_overhead", "--models", "tiny", "--seconds", "0")
    (measured,) = result["models"].values()
    assert measured["rounds"] == 5
    for column in measured["columns"].values():
        assert are_quartiles(column["ms"])
        assert are_quartiles(column["ratio"])


def test_scaling_efficiency(tmp_path: Path) -> None:
    result = result_of(tmp_path, "scaling_efficiency", "--models", "tiny", "--rounds", "3")
    (measured,) = result["models"].values()
    assert are_quartiles(measured["mirrored over bare threads"])
    for column in measured["columns"].values():
        assert column["samples per second"] > 0
        assert are_quartiles(column["ratio"])


def test_after_backward(tmp_path: Path) -> None:
    result = result_of(tmp_path, "after_backward", "--parameters", "10000", "--rounds", "3")
    assert [(case["tensors"], case["threads"]) for case in result["cases"]] == [(30, 1), (30, 2), (1000, 1), (1000, 2)]
    assert all(are_quartiles(case["torch over muster"]) for case in result["cases"])


def test_memory(tmp_path: Path) -> None:
    result = result_of(tmp_path, "memory", "--width", "256")
    of_one, *others = result["added"].values()
    assert of_one >= 12  # a gradient and two moments of 4 bytes
    assert all(added > 8 for added in others)
    assert len(others) == 5


def test_what_is_not_there_is_refused_in_words() -> None:
    done = bench("step_overhead", "--models", "25 M")
    assert done.returncode == 2
    assert "is none of" in done.stderr
    done = bench("--out", "somewhere", "memory")
    assert done.returncode == 2
    assert "behind the name" in done.stderr


def test_without_a_name_every_program_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command[4:])
        return subprocess.CompletedProcess(command, 1 if "memory" in command else 0)

    monkeypatch.setattr(command.subprocess, "run", run)
    done = CliRunner().invoke(command.app, ["--out", str(tmp_path)])
    assert [name for name, *_ in started] == list(command.PROGRAMS)
    assert all(options[-2:] == ["--out", str(tmp_path)] for options in started)
    assert done.exit_code == 1
    assert "failed: memory" in done.output


def test_a_table_is_aligned_in_text_and_in_markdown() -> None:
    table = Table(["model", "a long heading"], [["x", "1.0"], ["longer", "10.0"]], "Caption.", texts=1)
    assert table.text().splitlines() == [
        "model    a long",
        "        heading",
        "------  -------",
        "x           1.0",
        "longer     10.0",
        "",
        "Caption.",
    ]
    assert table.markdown().splitlines() == [
        "| model | a long heading |",
        "| --- | ---: |",
        "| x | 1.0 |",
        "| longer | 10.0 |",
        "",
        "Caption.",
    ]
