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

from muster import _C
from muster.benchmarks import command
from muster.benchmarks.models import DIGITS, MLP, SMALL_TENSORS, TRANSFORMER
from muster.benchmarks.tables import Table

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "muster", "bench", *arguments]
    # Longer than its processes wait for one another, so that they say for what.
    return subprocess.run(line, capture_output=True, text=True, timeout=800)


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


@pytest.fixture(scope="module")
def cpp(programs: Path) -> Path:
    """Where those of benchmarks/cpp are."""
    return programs / "benchmarks"


@pytest.mark.timeout(900)
def test_step_overhead(tmp_path: Path, cpp: Path) -> None:
    models = ("--models", "tiny", "--models", "tiny, AdamW")
    result = result_of(tmp_path, "step_overhead", *models, "--seconds", "0", "--rounds", "3", "--cpp", str(cpp))
    kinds = [(language, replicas) for language in ("Python", "C++") for replicas in ("2 processes", "2 threads")]
    assert [(case["language"], case["replicas"]) for case in result["cases"]] == 2 * kinds
    assert result["cases"][-1]["model"] == "tiny, fused"
    for case in result["cases"]:
        assert case["rounds"] == 3
        assert {"no communication", "muster"} <= case["columns"].keys()
        assert all(are_quartiles(column[kind]) for column in case["columns"].values() for kind in ("ms", "ratio"))
        if case["replicas"] == "2 processes":
            assert are_quartiles(case["muster over the slower process"])
            assert case["muster over the slower process"][1] <= case["columns"]["muster"]["ratio"][1]
        if (case["replicas"], case["language"]) == ("2 processes", "Python"):
            assert {"muster's DDP", "muster's DDP tuned"} <= case["columns"].keys()
            assert are_quartiles(case["best DDP over muster's best DDP"])


@pytest.mark.timeout(900)
def test_scaling_efficiency(tmp_path: Path, cpp: Path) -> None:
    result = result_of(tmp_path, "scaling_efficiency", "--models", "tiny", "--rounds", "3", "--cpp", str(cpp))
    assert [case["language"] for case in result["cases"]] == ["Python", "C++"]
    for case in result["cases"]:
        assert are_quartiles(case["mirrored over bare threads"])
        assert all(column["samples per second"] > 0 for column in case["columns"].values())
        assert all(are_quartiles(column["ratio"]) for column in case["columns"].values())


def test_a_server_agrees_with_workers_that_are_connections_alone() -> None:
    server: Any = _C._server
    running = server.ParameterServer("raw-workers")
    raw = server.RawWorkers("raw-workers", 3)
    assert raw.time_decisions(2) > 0
    del raw, running


def test_cpp_that_is_not_built_is_said_in_one_line() -> None:
    done = bench("step_overhead", "--models", "tiny", "--seconds", "0", "--rounds", "3")
    assert done.returncode == 0
    assert "C++ is left out" in done.stderr
    assert "C++" not in done.stdout
    assert bench("step_overhead", "--cpp", str(ROOT)).returncode == 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["small", "mlp", "transformer", "digits"])
def test_the_cpp_models_are_those_of_python(cpp: Path, model: str) -> None:
    (same,) = (known for known in (DIGITS, MLP, SMALL_TENSORS, TRANSFORMER) if known.in_cpp == model)
    done = subprocess.run([str(cpp / "serve_steps"), "--shapes", model], capture_output=True, text=True, check=True)
    shapes = [" ".join(map(str, parameter.shape)) for parameter in same.build().parameters()]
    assert done.stdout.splitlines() == shapes


def test_after_backward(tmp_path: Path) -> None:
    result = result_of(tmp_path, "after_backward", "--parameters", "10000", "--rounds", "3")
    assert [(case["tensors"], case["threads"]) for case in result["cases"]] == [(30, 1), (30, 2), (1000, 1), (1000, 2)]
    assert all(are_quartiles(case["torch over muster"]) for case in result["cases"])


def test_hooks(tmp_path: Path) -> None:
    result = result_of(tmp_path, "hooks", "--parameters", "300", "--rounds", "9")
    assert are_quartiles(result["ns"])
    assert result["added ns"].keys() == {"hook", "hook and packing", "DDP", "DDP tuned"}
    assert all(sorted(values) == values for values in result["added ns"].values())


def test_memory(tmp_path: Path) -> None:
    result = result_of(tmp_path, "memory", "--width", "256")
    of_one, *others = result["added"].values()
    assert of_one >= 12  # a gradient and two moments of 4 bytes
    assert all(added > 8 for added in others)
    assert len(others) == 5


def test_host_memory(tmp_path: Path) -> None:
    ours = "muster, two workers: MultiWorkerMirroredStrategy"
    result = result_of(tmp_path, "host_memory", "--width", "64", "--layers", "1", "--rows", "1", "--ways", ours)
    assert list(result["ways"]) == ["DDP, two workers", ours]
    for way, adds in zip(result["ways"].values(), (2 * 12, 2 * 4 + 8), strict=True):  # gradients and two moments
        assert way["peak"] - way["before"] > adds * result["parameters"]


def test_checkpoints(tmp_path: Path) -> None:
    options = ("--width", "8", "--rows", "2", "--steps", "4", "--rounds", "3", "--loops", "3")
    result = result_of(tmp_path / "results", "checkpoints", *options, "--disk", str(tmp_path))
    assert result["bytes"] >= 12 * 24 * 8**2  # parameters and two moments of 4 bytes
    tasks = {task["task"]: task["columns"] for task in result["tasks"]}
    assert tasks.keys() == {
        "save: blocks",
        "save: writes",
        "save: until it is on the disk",
        "read all tensors",
        "load into the model and AdamW",
        "4 steps",
    }
    for columns in tasks.values():
        assert len(columns) > 1
        assert all(are_quartiles(column[kind]) for column in columns.values() for kind in ("ms", "ours over it"))
    assert all(map(are_quartiles, result["a save's shares of the steps"].values()))
    assert [folder.name for folder in tmp_path.iterdir()] == ["results"]  # it has removed what it wrote


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
