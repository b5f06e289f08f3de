"""Puts the newest result of benchmarks/step_overhead.py into README.md, between its markers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- step_overhead: .*? -->\n).*?(<!-- end -->)", re.DOTALL)
BASE = "no communication"


def newest() -> dict[str, Any] | None:
    """The result with the latest date, if there is one."""
    files = sorted((ROOT / "benchmarks" / "results").glob("step_overhead-*.json"))
    return json.loads(files[-1].read_text()) if files else None


def markdown(result: dict[str, Any]) -> str:
    """A row a model: its step without communication in milliseconds, and what that time becomes in each column."""
    models = result["models"]
    columns = [column for column in next(iter(models.values()))["columns"] if column != BASE]
    lines = [
        f"| model | {BASE} | {' | '.join(columns)} |",
        f"| --- | ---: |{' ---: |' * len(columns)}",
    ]
    for name, measured in models.items():
        base = measured["columns"][BASE]["ms"][1]
        cells = [cell(measured["columns"][column]["ratio"]) for column in columns]
        lines.append(f"| {name} | {base:.1f} ms | {' | '.join(cells)} |")
    machine, versions = result["machine"], result["versions"]
    caption = (
        f"{result['workers']} processes of one thread each on one host, {result['optimizer']}; step time over that of "
        "the same module without communication: median (quartiles) over interleaved rounds. "
        f"{result['date']}, {machine['cpu']} ({machine['cores']} cores), torch {versions['torch']}."
    )
    lines += ["", caption]
    return "\n".join(lines)


def cell(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


def updated(text: str, result: dict[str, Any] | None) -> str:
    """`text` with the table of `result`, or nothing, between the markers."""
    table = "" if result is None else f"{markdown(result)}\n"
    return MARKED.sub(lambda match: f"{match[1]}{table}{match[2]}", text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(), newest()))
