"""README.md and docs/ speak the truth: what they show runs, and what they point at exists."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
MIRRORED = 'strategy = muster.MirroredStrategy(["cpu:0", "cpu:1"])'
WORKERS = "# strategy = muster.MultiWorkerMirroredStrategy.from_env()"
SERVERS = "# strategy = muster.ParameterServerStrategy.from_env()"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_quick_start_runs_and_the_other_line_prints_the_same(tmp_path: Path) -> None:
    (program,) = blocks("README.md", "python")
    (tmp_path / "train.py").write_text(program)
    printed = run(sys.executable, "train.py", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]

    assert MIRRORED in program
    assert WORKERS in program
    switched = program.replace(MIRRORED, "pass").replace(WORKERS, WORKERS.removeprefix("# "))
    (tmp_path / "train.py").write_text(switched)
    (command,) = re.findall(r"`(torchrun [^`]* train\.py)`", README)
    assert run(*command.split(), cwd=tmp_path) == printed


@pytest.mark.long
def test_the_quick_start_prints_the_same_with_a_parameter_server(tmp_path: Path) -> None:
    (program,) = blocks("README.md", "python")
    assert SERVERS in program
    switched = program.replace(MIRRORED, "pass").replace(SERVERS, SERVERS.removeprefix("# "))
    (tmp_path / "train.py").write_text(switched)
    (tmp_path / "mirrored.py").write_text(program)
    (command,) = re.findall(r"`(muster run [^`]* train\.py)`", README)
    assert run(*command.split(), cwd=tmp_path) == run(sys.executable, "mirrored.py", cwd=tmp_path)


def test_the_cpp_quick_start_is_the_example_that_the_packaging_test_builds() -> None:
    (program,) = blocks("README.md", "cpp")
    assert program == (ROOT / "examples" / "cpp" / "quick_start.cpp").read_text()


@pytest.mark.parametrize(("language", "source"), [("cpp", "digits.cpp"), ("cmake", "CMakeLists.txt")])
def test_the_pieces_of_the_guide_are_those_of_the_example_that_other_tests_run(language: str, source: str) -> None:
    whole = (ROOT / "examples" / "cpp" / source).read_text()
    pieces = blocks("docs/cpp.md", language)
    assert pieces
    assert [piece for piece in pieces if piece not in whole] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("README.md", "CONTRIBUTING.md")])
def test_the_blocks_of_a_page_run_as_one_program(page: str, tmp_path: Path) -> None:
    parts = blocks(page, "python")
    if parts:
        (tmp_path / "page.py").write_text("\n".join(parts))
        (command,) = re.findall(r"`(torchrun [^`]* page\.py)`", (ROOT / page).read_text()) or [
            f"{sys.executable} page.py"
        ]
        run(*command.split(), cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#:]+)\)", prose)
    assert {target for target in targets if not ((ROOT / page).parent / target).exists()} == set()


def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_newest_results() -> None:
    tool = table()
    pages = [page.read_text() for page in tool.PAGES]
    assert sorted(name for page in pages for _, name, _ in tool.MARKED.findall(page)) == sorted(tool.TABLES)
    assert [tool.updated(page) for page in pages] == pages
