"""Random training programs do the same under plain torch and under every strategy (tests/differential/)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from differential import differences, modules
from differential.compare import Record, Seen, first_difference
from differential.differences import DIFFERENCES, Shape
from differential.grammar import derive
from differential.program import Program, term
from differential.script import script
from differential.shrink import shrunk
from differential.tester import Failure, Rejected, Tester, execute
from differential.tester import tester as make_tester

ROOT = Path(__file__).resolve().parents[2]
SHORT = range(40)
LONG = range(40, 2040)
IN_A_TEST = 5


@pytest.fixture(scope="module")
def tester() -> Iterator[Tester]:
    """Processes that all programs run in."""
    with make_tester() as made:
        yield made


def check(tester: Tester, seeds: range) -> None:
    rejected = 0
    for seed in seeds:
        found = tester.test(derive(seed))
        if isinstance(found, Rejected):
            rejected += 1
        elif isinstance(found, Failure):
            small = tester.shrunk(found)
            told = "\n    ".join([f"{small.first} and {small.second}: {small.where}", *small.texts])
            pytest.fail(f"seed {seed}: {told}\n\n{script(small.program)}", pytrace=False)
    assert rejected <= max(1, len(seeds) // 4)


@pytest.mark.parametrize("first", SHORT[::IN_A_TEST])
def test_programs_do_the_same_under_torch_and_every_strategy(tester: Tester, first: int) -> None:
    check(tester, range(first, first + IN_A_TEST))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", LONG[::50])
def test_many_programs_do_the_same_under_torch_and_every_strategy(tester: Tester, first: int) -> None:
    check(tester, range(first, first + 50))


# --- the tester itself ------------------------------------------------------------------------------------------------
def some_program() -> Program:
    return next(p for p in map(derive, range(1000)) if len(p.blocks) > 2 and len(p.events) > 8 and p.schedules)


def test_a_seed_is_a_program_for_good_and_the_pool_is_used() -> None:
    assert derive(7) == derive(7)
    programs = [derive(seed) for seed in range(400)]
    blocks = Counter(block.module.name for program in programs for block in program.blocks)
    assert len(blocks) >= 30
    assert len({event.name for program in programs for event in program.events}) >= 20
    assert set(blocks) <= set(modules.pool())


def test_a_failing_program_is_shrunk_to_what_makes_it_fail() -> None:
    program = some_program()
    wanted = program.blocks[1].module.name
    event = program.events[-2]

    def fails(smaller: Program) -> bool:
        return smaller.has_block(wanted) and event in smaller.events

    small = shrunk(program, fails, attempts=1000)
    assert fails(small)
    assert [block.module.name for block in small.blocks] == [wanted]
    assert small.events == (event,)
    assert small.schedules == ()


def test_a_script_does_what_the_tester_does(tmp_path: Path) -> None:
    program = replace(some_program(), events=(term("step", rows=5), term("look"), term("step", rows=4)), early=())
    (tmp_path / "program.py").write_text(script(program))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for job in ("torch", "mirrored-2"):
        done = subprocess.run(
            [sys.executable, "program.py", job],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        printed = dict(re.findall(r"^(\d+ .*?): (.*)$", done.stdout, re.MULTILINE))
        seen = execute(program, job).values
        assert list(printed) == list(seen)
        for label, value in seen.items():
            assert isinstance(value, Seen) or printed[label] == str(value)


@pytest.mark.parametrize(
    ("change", "limit"),
    [("bit", None), ("value", 1e-8), ("shape", 1e-8), ("label", 1e-8), ("end", 1e-8), ("text", 1e-8)],
)
def test_records_that_differ_are_told_apart(change: str, limit: float | None) -> None:
    def record(label: str = "loss", value: float = 1.0, rows: int = 2, raised: str = "Planned") -> Record:
        seen = Seen.of(torch.full((rows,), value, dtype=torch.float64))
        return Record({label: 1.0, "weight": seen, "raised": raised}, [])

    changed = {
        "bit": record(value=1.0 + 2**-52),
        "value": record(value=1.0 + 1e-7),
        "shape": record(rows=3),
        "label": record(label="norm"),
        "end": Record(dict(list(record().values.items())[:2]), []),
        "text": record(raised="refused"),
    }[change]
    assert first_difference(record(), record(), limit) == ""
    assert first_difference(changed, record(), limit) != ""
    assert (first_difference(changed, record(), 1e-8) == "") == (change == "bit")


def test_a_step_that_does_something_else_is_found(tester: Tester) -> None:
    program = replace(derive(0), blocks=(), loss="mse", events=(term("step", rows=5),), early=(), options=())
    program = replace(program, dtype="float64", autocast=False)
    other = replace(program, optimizers=(term("SGD", lr=0.1),))
    (a,) = tester._run(1, other, ["mirrored-2"])["mirrored-2"]
    (b,) = tester._run(1, replace(other, optimizers=(term("SGD", lr=0.1001),)), ["torch"])["torch"]
    (c,) = tester._run(1, other, ["torch"])["torch"]
    assert first_difference(a, b, 1e-8) != ""
    assert first_difference(a, c, 1e-8) == ""


# --- the table in the docs --------------------------------------------------------------------------------------------
def test_the_table_of_differences_in_the_docs_is_the_testers_list() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    rows = re.search(r"^## What is different from torch\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert rows, "docs/concepts.md has no section 'What is different from torch'"
    assert differences.table() in rows[1], f"the table should be:\n{differences.table()}"


def test_every_difference_concerns_a_program_that_is_derived() -> None:
    programs = [derive(seed) for seed in range(2040)]
    for difference in DIFFERENCES:
        assert any(difference.concerns(program, Shape(2)) for program in programs), difference.what
