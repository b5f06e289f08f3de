"""Results as tables, for the terminal and for README.md."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

__all__ = [
    "BASE",
    "OVER_DROP_IN",
    "OVER_SLOWER",
    "TABLES",
    "Table",
    "after_backward",
    "allreduce",
    "checkpoints",
    "hooks",
    "host_memory",
    "memory",
    "scaling_efficiency",
    "step_overhead",
]

BASE = "no communication"
OVER_SLOWER = "muster over the slower process"
OVER_DROP_IN = "best DDP over muster's best DDP"
Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    texts: int = 0
    """How many of the first columns hold text; the others hold numbers."""

    def markdown(self) -> str:
        sides = ["---" if column < self.texts else "---:" for column in range(len(self.header))]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.header, sides, *self.rows)]
        return "\n".join([*lines, "", self.caption])

    def text(self) -> str:
        """For a terminal: columns as wide as their cells, under wrapped headers."""
        widths = []
        for heading, *cells in zip(self.header, *self.rows, strict=True):
            widths.append(max(len(text) for text in (*heading.split(), *cells)))
        wrapped = [textwrap.wrap(heading, width) for heading, width in zip(self.header, widths, strict=True)]
        lines = [*zip_longest(*wrapped, fillvalue=""), ["-" * width for width in widths], *self.rows]
        aligned = [
            "  ".join(
                f"{cell:<{width}}" if column < self.texts else f"{cell:>{width}}"
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*aligned, "", textwrap.fill(self.caption, 100)])


def step_overhead(result: Result) -> Table:
    """A row a job: its step without communication in milliseconds, and what that time becomes in each column."""
    caption = (
        f"Two replicas of one thread each on one host, {result['optimizer']}; step time over that of the same module "
        "without communication (of threads: two models that step and do not average): median (quartiles) over "
        "interleaved rounds, each column in processes of its own, which keep freed memory. Times of processes are "
        "means over both; the last column is over the slower one of each step without communication, for which "
        f"processes that average wait. {where(result)}"
    )
    texts = ["model", "language", "replicas"]
    further = [name for name in (OVER_DROP_IN, OVER_SLOWER) if any(name in case for case in result["cases"])]
    return by_case(result, texts, lambda column: f"{column['ms'][1]:.1f} ms", further, caption)


def after_backward(result: Result) -> Table:
    """A row a case: milliseconds of torch and of Muster, and torch's over Muster's."""
    header = ["parameter tensors", "intra-op threads", "torch", "muster", "torch's time over muster's"]
    rows = []
    for case in result["cases"]:
        theirs, ours = (case["ms"][column][1] for column in ("torch", "muster"))
        times = [f"{theirs:.1f} ms", f"{ours:.1f} ms", cell(case["torch over muster"])]
        rows.append([f"{case['tensors']:,}", str(case["threads"]), *times])
    caption = (
        f"{result['parameters'] / 1e6:.0f} M fp32 parameters: unscale, norm, clip, AdamW. Torch: GradScaler, "
        "clip_grad_norm_(foreach=True), AdamW(fused=True). Muster: flat AdamW, which moves "
        f"{result['bytes per parameter']} bytes a parameter. {where(result)}"
    )
    return Table(header, rows, caption)


def scaling_efficiency(result: Result) -> Table:
    """A row a model: samples per second of one replica, what they become in each column, Mirrored over bare threads."""
    caption = (
        f"The same global batch, {result['optimizer']}; samples per second over those of one replica on one thread: "
        f"median (quartiles) over interleaved rounds. {where(result)}"
    )
    return by_case(
        result,
        ["model", "language"],
        lambda column: f"{column['samples per second']:,.0f} samples/s",
        ["mirrored over bare threads"],
        caption,
    )


def by_case(
    result: Result, texts: list[str], absolute: Callable[[dict[str, Any]], str], further: list[str], caption: str
) -> Table:
    """A row a case: texts, its first column as it is, the ratios of the others, and further ones where it has them. The
    first case has all columns."""
    base, *columns = result["cases"][0]["columns"]
    rows = []
    for case in result["cases"]:
        found = case["columns"]
        ratios = [cell(found[column]["ratio"]) if column in found else "" for column in columns]
        ratios += [cell(case[name]) if name in case else "" for name in further]
        rows.append([*(case[text] for text in texts), absolute(found[base]), *ratios])
    return Table([*texts, base, *columns, *further], rows, caption, len(texts))


def allreduce(result: Result) -> Table:
    """A row a size: the time of an all-reduce, Gloo's over it, and its share of the memory's bandwidth."""
    ours = ("host", "local")
    rows = []
    for case in result["cases"]:
        times = [duration(case["us"][column][1]) for column in (*ours, "Gloo")]
        gains = [gain(case["Gloo over"][column]) for column in ours]
        shares = [percent(case["share of read+add"][column]) if "share of read+add" in case else "" for column in ours]
        rows.append([str(case["ranks"]), size(case["bytes"]), *times, *gains, *shares])
    header = ["ranks", "size", *ours, "Gloo", *(f"Gloo over {name}" for name in ours), "host's share", "local's share"]
    bandwidths = [case["read+add GB/s"][1] for case in result["cases"] if "read+add GB/s" in case]
    found = f", {min(bandwidths):.0f}–{max(bandwidths):.0f} GB/s" if bandwidths else ""
    caption = (
        "All-reduce (sum, fp32) between ranks of one host: processes (host), threads (local); median (quartiles) over "
        "interleaved rounds. The share is of the bandwidth with which a thread a core reads two buffers and writes "
        f"their sum to a third{found}; an all-reduce reads and writes each rank's buffer. {where(result)}"
    )
    return Table(header, rows, caption)


def memory(result: Result) -> Table:
    """A row a way to train."""
    rows = [[name, f"{added:.1f}"] for name, added in result["added"].items()]
    caption = (
        "Peak memory that training an MLP with AdamW and clipping adds to model and activations, from the second step "
        "on: gradients, optimizer states, buckets and what is temporary; with Muster also what was freed, which a "
        f"process on the CPU keeps (MUSTER_KEEP_FREED_MEMORY). {where(result)}"
    )
    return Table(["training", "bytes added per parameter"], rows, caption, texts=1)


def host_memory(result: Result) -> Table:
    """A row a way to train; the first one is what others are compared with."""
    parameters, base = result["parameters"], next(iter(result["ways"].values()))["peak"]
    rows = []
    for name, way in result["ways"].items():
        added = way["peak"] - way["before"]
        cells = [f"{bytes_ / 2**20:,.0f} MB" for bytes_ in (way["before"], added, way["peak"])]
        rows.append([name, *cells, f"{added / parameters:.1f}", f"{way['peak'] / base:.2f}"])
    header = ["training", "before it", "added", "in all", "bytes added per parameter", "in all, over DDP"]
    caption = (
        f"What a host holds while a transformer encoder of {parameters / 1e6:.0f} M parameters trains with AdamW on "
        f"{result['rows']} samples of {result['tokens']} words a replica: before it, with Python, torch and the model; "
        "and at the peak from the second step on, activations included. Memory that several processes see counts once. "
        "muster.optim's optimizers do not import torch.compile. "
        f"{where(result)}"
    )
    return Table(header, rows, caption, texts=1)


def hooks(result: Result) -> Table:
    """One row: backward without hooks, and what each column adds."""
    added = result["added ns"]
    cells = [microseconds(quartiles) for quartiles in (result["ns"], *added.values())]
    caption = (
        f"Time per parameter of backward through {result['parameters']:,} parameters of a few elements, and what is "
        "added to it: median (quartiles) over interleaved rounds. Hook: Muster's, one replica, while no bucket is "
        "complete; hook and packing: with all gradients copied into their bucket. DDP: one rank, in its hooks, which "
        f"copy each gradient; tuned: gradient_as_bucket_view, static_graph. {where(result)}"
    )
    return Table(["backward, no hooks", *(f"{name} adds" for name in added)], [cells], caption)


def parameter_server(result: Result) -> Table:
    """A row a way to push and pull, and one a way to ask for little: milliseconds, and rpc's times over them."""
    rows = []
    for name, what in (("push_pull", "push and pull"), ("step", "the same, with a step"), ("round_trip", "round trip")):
        measured = result[name]
        for column, found in measured["columns"].items():
            whole, *pieces = found["over"].values()
            gains = [cell(whole), cell(pieces[0]) if pieces else ""]
            rows.append([what, column, size(measured["bytes"]), f"{found['ms'][1]:.3g} ms", *gains])
    caption = (
        "One worker and its servers on one host, against torch.distributed.rpc (TensorPipe). Push and pull: gradients "
        "to the server, parameters back; with a step: plain SGD there in between; round trip: a few parameters. Muster "
        "keeps a push until it is durable and applies it once; where workers step together it also takes the norm of "
        f"the sums, which clipping needs. Median (quartiles) over interleaved rounds. {where(result)}"
    )
    header = ["task", "column", "bytes", "time", "rpc in one call over it", "rpc in 4 MB calls over it"]
    return Table(header, rows, caption, texts=2)


def checkpoints(result: Result) -> Table:
    """A row a task and a way to do it: its time, and Muster's over it."""
    rows = []
    for case in result["tasks"]:
        for number, (name, found) in enumerate(case["columns"].items()):
            ratio = "" if number == 0 else cell(found["ours over it"])
            rows.append([case["task"], name, duration(1e3 * found["ms"][1]), ratio])
    blocked, cpu = (shares([100 * value for value in each]) for each in result["a save's shares of the steps"].values())
    caption = (
        f"{result['bytes'] / 1e6:.0f} MB: an MLP under AdamW, one replica; {result['rows']} rows a step. Times until "
        "it is on the disk, and of writing, include fsync; the plain write is of the same bytes with their CRC-32, and "
        "flushed alike. Files that are read are in the page cache; Muster checks what it reads (CRC-32), safetensors "
        f"does not. save() blocks for {blocked} of the time of {result['steps']} steps; all of a save takes {cpu} of "
        "their CPU time. Median (quartiles) over interleaved rounds, on a machine that others use as well. "
        f"{where(result)}"
    )
    return Table(["task", "way", "time", "muster's time over it"], rows, caption, texts=2)


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


def microseconds(quartiles: list[float]) -> str:
    low, median, high = (value / 1e3 for value in quartiles)
    return f"{median:.2f} us ({low:.2f}–{high:.2f})"


def shares(percentages: list[float]) -> str:
    low, median, high = percentages
    return f"{median:.2f} % ({low:.2f}–{high:.2f})"


def percent(quartiles: list[float]) -> str:
    low, median, high = (100 * value for value in quartiles)
    return f"{median:.0f} % ({low:.0f}–{high:.0f})"


def where(result: Result) -> str:
    machine = result["machine"]
    return f"{result['date']}, {machine['cpu']} ({machine['cores']} cores), torch {result['versions']['torch']}."


def cell(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


TABLES: dict[str, Callable[[Result], Table]] = {
    "step_overhead": step_overhead,
    "after_backward": after_backward,
    "scaling_efficiency": scaling_efficiency,
    "allreduce": allreduce,
    "memory": memory,
    "host_memory": host_memory,
    "hooks": hooks,
    "parameter_server": parameter_server,
    "checkpoints": checkpoints,
}
"""Those of README.md and docs/checkpoints.md."""
