"""Puts the newest result of each benchmark into README.md or a page of docs/, between its markers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from muster.benchmarks.tables import TABLES

__all__ = ["MARKED", "PAGES", "TABLES", "updated"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "checkpoints.md"]
MARKED = re.compile(r"(<!-- (\w+): .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def newest(benchmark: str) -> dict[str, Any] | None:
    """The result with the latest date, if there is one."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"{benchmark}-*.json"))
    return json.loads(files[-1].read_text()) if files else None


def updated(text: str) -> str:
    """`text` with the table of each benchmark's newest result, or nothing, between its markers."""

    def table(match: re.Match[str]) -> str:
        result = newest(match[2])
        return f"{match[1]}{'' if result is None else TABLES[match[2]](result).markdown() + chr(10)}{match[3]}"

    return MARKED.sub(table, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text()))
