"""CONTRIBUTING.md speaks the truth: each command in it exists, and something runs it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
CI = (ROOT / ".ci" / "run").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def make_targets() -> list[str]:
    return sorted(
        set(re.findall(r"`make ([a-z-]+)`", TEXT)) | {c.split()[1] for c in commands() if c.startswith("make")}
    )


def dry_run(target: str) -> str:
    """What `make target` would do on a machine where nothing is set up."""
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    return subprocess.run(
        ["make", "--dry-run", "VENV=/nonexistent/venv", target],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_every_target_of_the_makefile_is_described_and_the_reverse() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert set(make_targets()) == set(phony[1].split()) - {"package"}


@pytest.mark.parametrize("target", make_targets())
def test_a_target_is_a_recipe_whose_own_files_exist(target: str) -> None:
    recipe = dry_run(target)
    named = set(re.findall(r"\b((?:tools|examples|benchmarks)/[\w/.-]+\.(?:py|sh))\b", recipe))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_ci_runs_lint_and_test_in_a_fresh_environment() -> None:
    made = re.findall(r'make VENV="\$folder/venv" ([a-z]+(?:[ -][a-z]+)*)', CI)
    assert made == ["package dev", "lint-only", "test"]
    # As its recipe, which waits for the others: with -j prerequisites are made beside one another.
    assert re.search(r"^lint: package dev\n\t\$\(MAKE\) --no-print-directory lint-only$", MAKEFILE, re.MULTILINE)
    assert re.search(r"^docs: package dev\n\t\$\(MAKE\) --no-print-directory docs-only$", MAKEFILE, re.MULTILINE)
    assert re.search(r'^exit "\$status"$', CI, re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_block_command_is_run_by_ci_or_here() -> None:
    by_ci = {"make test", "make lint", ".ci/run"}
    here = {
        command for command in commands() if command.startswith(("build/muster_tests", ".venv/bin/python -m pytest"))
    }
    assert set(commands()) == by_ci | here
    for command in here:
        program, *arguments = shlex.split(command)
        if program.endswith("python"):
            assert all((ROOT / a).exists() for a in arguments if a.startswith("tests/"))


def test_the_single_test_commands_select_something(pytestconfig: pytest.Config) -> None:
    tags = [shlex.split(c)[1] for c in commands() if c.startswith("build/muster_tests")]
    sources = "".join(p.read_text() for p in (ROOT / "tests" / "cpp").rglob("*_test.cpp"))
    assert tags
    assert all(tag in sources for tag in tags)


def test_make_dist_lint_and_format_use_the_tools_of_the_requirements() -> None:
    pinned = {line.split("==")[0].replace("_", "-").lower() for line in requirements()}
    assert {"clang-format", "clang-tidy", "ruff", "mypy", "pytest", "cmake", "ninja", "build", "torch"} <= pinned


def requirements() -> list[str]:
    files = ("requirements-train.txt", "requirements-dev.txt")
    lines = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line != "-r requirements-train.txt"]


def test_requirements_are_pinned_exactly() -> None:
    assert [line for line in requirements() if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9.]*", line)] == []
