"""Puts the newest result of each benchmark into README.md, between its markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- (\w+): .*? -->\n).*?(<!-- end -->)", re.DOTALL)
BASE = "no communication"


def newest(benchmark: str) -> dict[str, Any] | None:
    """The result with the latest date, if there is one."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"{benchmark}-*.json"))
    return json.loads(files[-1].read_text()) if files else None


def step_overhead(result: dict[str, Any]) -> str:
    """A row a model: its step without communication in milliseconds, and what that time becomes in each column."""
    caption = (
        f"{result['workers']} processes of one thread each on one host, {result['optimizer']}; step time over that of "
        f"the same module without communication: median (quartiles) over interleaved rounds. {where(result)}"
    )
    return by_model(result, lambda column: f"{column['ms'][1]:.1f} ms", {}, caption)


def after_backward(result: dict[str, Any]) -> str:
    """A row a case: milliseconds of torch and of Muster, and torch's over Muster's."""
    lines = [
        "| parameter tensors | intra-op threads | torch | muster | torch's time over muster's |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in result["cases"]:
        theirs, ours = (case["ms"][column][1] for column in ("torch", "muster"))
        lines.append(
            f"| {case['tensors']:,} | {case['threads']} | {theirs:.1f} ms | {ours:.1f} ms | "
            f"{cell(case['torch over muster'])} |"
        )
    caption = (
        f"{result['parameters'] / 1e6:.0f} M fp32 parameters: unscale, norm, clip, AdamW. Torch: GradScaler, "
        "clip_grad_norm_(foreach=True), AdamW(fused=True). Muster: flat AdamW, which moves "
        f"{result['bytes per parameter']} bytes a parameter. {where(result)}"
    )
    return "\n".join([*lines, "", caption])


def scaling_efficiency(result: dict[str, Any]) -> str:
    """A row a model: samples per second of one replica, what they become in each column, Mirrored over bare threads."""
    name = "mirrored over bare threads"
    further = {name: [measured[name] for measured in result["models"].values()]}
    caption = (
        f"The same global batch, {result['optimizer']}; samples per second over those of one replica on one thread: "
        f"median (quartiles) over interleaved rounds. {where(result)}"
    )
    return by_model(result, lambda column: f"{column['samples per second']:,.0f} samples/s", further, caption)


def by_model(
    result: dict[str, Any],
    absolute: Callable[[dict[str, Any]], str],
    further: dict[str, list[list[float]]],
    caption: str,
) -> str:
    """A row a model: its first column as it is, the ratios of the others, and further ones, each of one for a model."""
    models = result["models"]
    base, *columns = next(iter(models.values()))["columns"]
    header = [base, *columns, *further]
    lines = [f"| model | {' | '.join(header)} |", f"| --- |{' ---: |' * len(header)}"]
    for number, (name, measured) in enumerate(models.items()):
        ratios = [measured["columns"][column]["ratio"] for column in columns]
        ratios += [values[number] for values in further.values()]
        cells = [absolute(measured["columns"][base]), *map(cell, ratios)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", caption])


def allreduce(result: dict[str, Any]) -> str:
    """A row a size: the time of an all-reduce, Gloo's over it, and its share of the memory's bandwidth."""
    lines = [
        "| ranks | size | host | local | Gloo | Gloo over host | Gloo over local | host's share | local's share |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    ours = ("host", "local")
    for case in result["cases"]:
        times = [duration(case["us"][column][1]) for column in (*ours, "Gloo")]
        gains = [gain(case["Gloo over"][column]) for column in ours]
        shares = [percent(case["share of read+add"][column]) if "share of read+add" in case else "" for column in ours]
        lines.append(f"| {' | '.join([str(case['ranks']), size(case['bytes']), *times, *gains, *shares])} |")
    bandwidths = [case["read+add GB/s"][1] for case in result["cases"] if "read+add GB/s" in case]
    caption = (
        "All-reduce (sum, fp32) between ranks of one host: processes (host), threads (local); median (quartiles) over "
        "interleaved rounds. The share is of the bandwidth with which a thread a core reads two buffers and writes "
        f"their sum to a third, {min(bandwidths):.0f}–{max(bandwidths):.0f} GB/s; an all-reduce reads and writes each "
        f"rank's buffer. {where(result)}"
    )
    return "\n".join([*lines, "", caption])


def duration(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.1f} ms"


def size(count: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if count >= unit:
            return f"{count // unit} {name}"
    return f"{count} B"


def gain(quartiles: list[float]) -> str:
    low, median, high = (f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in quartiles)
    return f"{median} ({low}–{high})"


def percent(quartiles: list[float]) -> str:
    low, median, high = (100 * value for value in quartiles)
    return f"{median:.0f} % ({low:.0f}–{high:.0f})"


def where(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{result['date']}, {machine['cpu']} ({machine['cores']} cores), torch {result['versions']['torch']}."


def cell(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "step_overhead": step_overhead,
    "after_backward": after_backward,
    "scaling_efficiency": scaling_efficiency,
    "allreduce": allreduce,
}


def updated(text: str) -> str:
    """`text` with the table of each benchmark's newest result, or nothing, between its markers."""

    def table(match: re.Match[str]) -> str:
        result = newest(match[2])
        return f"{match[1]}{'' if result is None else TABLES[match[2]](result) + chr(10)}{match[3]}"

    return MARKED.sub(table, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
