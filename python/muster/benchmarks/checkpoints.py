"""What checkpoints cost, for an MLP under AdamW: saving beside torch.save and torch.distributed.checkpoint.async_save,
writing beside a plain write, loading beside safetensors, and what a save adds to a loop that trains.

All of a task take turns in one process, on one folder, whose files are in the page cache when they are read. A save has
two times: for how long it blocks its caller, and until all is on the disk, fsync included. The plain write is of the
same bytes in pieces of 4 MB, each followed by its CRC-32 (zlib), and flushed as Muster's are. What another one left to
be written to the disk is flushed, and its files removed, before the next one begins.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor

import muster
from muster.benchmarks.models import mlp
from muster.benchmarks.record import Out, publish, record
from muster.benchmarks.rounds import fixed, interleave, quartiles, ratio
from muster.benchmarks.tables import checkpoints as table
from muster.checkpoint import reading

__all__ = ["main"]

PIECE = 4 << 20
FLUSHED = 256 << 20
"""Bytes after which a file is flushed on the way."""
OURS = "muster"
Times = tuple[float, float]
"""Milliseconds: blocked, and in all."""


class Job:
    """An MLP that is trained under AdamW with one replica."""

    def __init__(self, strategy: muster.Strategy, width: int, rows: int) -> None:
        torch.manual_seed(0)
        module = mlp(width)
        self.strategy = strategy
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        self._model, self._optimizer = strategy.prepare(module, optimizer)
        self._batch = torch.randn(rows, width), torch.randn(rows, width)
        self.step()  # which makes the optimizer's state

    def step(self) -> None:
        self.strategy.step(lambda x, y: F.mse_loss(self._model(x), y), *self._batch)

    def save(self, folder: Path) -> Times:
        """Into a folder that then holds no checkpoint."""
        began = time.perf_counter()
        self.strategy.save(folder)
        blocked = time.perf_counter()
        self.finish()
        ended = time.perf_counter()
        for written in folder.glob("snapshot-*"):
            shutil.rmtree(written)
        return 1e3 * (blocked - began), 1e3 * (ended - began)

    def finish(self) -> None:
        """Waits until what is being written is there."""
        self.strategy._saving.writing.finish()

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what the model and the optimizer hold."""
        found = {f"model.{name}": value.clone() for name, value in self._model.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": value.clone() for name, value in state.items()}
        return found


# --- saving ---


def by_torch(tensors: Mapping[str, Tensor], path: Path) -> Times:
    began = time.perf_counter()
    torch.save(dict(tensors), path)
    blocked = time.perf_counter()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    ended = time.perf_counter()
    path.unlink()
    return 1e3 * (blocked - began), 1e3 * (ended - began)


def by_async_save(tensors: Mapping[str, Tensor], folder: Path, stager: Any = None) -> Times:
    """With a stager that is kept its memory is used again, as Muster's is."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    began = time.perf_counter()
    saved: Any = async_save(dict(tensors), checkpoint_id=folder, no_dist=True, async_stager=stager)
    blocked = time.perf_counter()
    saved.result()
    ended = time.perf_counter()
    shutil.rmtree(folder)
    return 1e3 * (blocked - began), 1e3 * (ended - began)


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def by_plain_write(tensors: Mapping[str, Tensor], path: Path) -> Times:
    began = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    flushed = 0
    for tensor in tensors.values():
        view, crc = bytes_of(tensor), 0
        while view:
            count = os.write(file, view[:PIECE])
            crc = zlib.crc32(view[:count], crc)
            view, flushed = view[count:], flushed + count
            if flushed >= FLUSHED:
                os.fdatasync(file)
                flushed = 0
    os.fsync(file)
    os.close(file)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(parent)
    os.close(parent)
    ended = time.perf_counter()
    path.unlink()
    return 0.0, 1e3 * (ended - began)


def measure_saving(job: Job, tensors: Mapping[str, Tensor], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """How long a save blocks, and how long it takes to write what it copied."""
    turns: dict[str, Callable[[], Times]] = {
        OURS: lambda: job.save(folder / "muster"),
        "torch.save": lambda: by_torch(tensors, folder / "saved.pt"),
        "plain write, CRC-32": lambda: by_plain_write(tensors, folder / "plain"),
    }
    if dist.is_available():
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions(False, False, False, False))  # as async_save makes one
        turns["async_save"] = lambda: by_async_save(tensors, folder / "theirs")
        turns["async_save, one stager"] = lambda: by_async_save(tensors, folder / "theirs", stager)
    times = interleave(turns, fixed(rounds))
    blocked = {name: [each[0] for each in values] for name, values in times.items() if name != "plain write, CRC-32"}
    written = {OURS: [whole - before for before, whole in times[OURS]]}
    written["plain write, CRC-32"] = [whole for _, whole in times["plain write, CRC-32"]]
    whole = {name: [each[1] for each in times[name]] for name in blocked}
    return [
        compared("save: blocks", blocked),
        compared("save: writes", written),
        compared("save: until it is on the disk", whole),
    ]


# --- loading ---


def timed(read: Callable[[], object]) -> float:
    """What it returns is let go afterwards."""
    began = time.perf_counter()
    kept = read()
    took = time.perf_counter() - began
    del kept
    return 1e3 * took


def measure_loading(job: Job, tensors: dict[str, Tensor], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """How long it takes to read all tensors, and to read them into a model and its optimizer."""
    job.strategy.save(folder)
    job.finish()
    (snapshot,) = folder.glob("snapshot-*")
    read = {OURS: lambda: timed(lambda: reading.read_folder(snapshot))}
    load = {OURS: lambda: timed(lambda: job.strategy.load(folder))}
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        typer.echo("safetensors is not installed, and left out; pip install safetensors", err=True)
    else:
        shards = sorted(snapshot.glob("*.safetensors"))
        theirs = folder / "theirs.safetensors"
        save_file(tensors, theirs)

        def mapped() -> list[Tensor]:
            return [tensor for shard in shards for tensor in load_file(shard).values()]

        def checked() -> list[Tensor]:
            found = [tensor.clone() for tensor in mapped()]
            for tensor in found:
                zlib.crc32(bytes_of(tensor))
            return found

        def loaded() -> None:
            for name, tensor in load_file(theirs).items():
                tensors[name].copy_(tensor)

        read["safetensors, mapped: not read yet"] = lambda: timed(mapped)
        read["safetensors, in memory"] = lambda: timed(lambda: [tensor.clone() for tensor in mapped()])
        read["safetensors, in memory, CRC-32"] = lambda: timed(checked)
        load["safetensors"] = lambda: timed(loaded)
    return [
        compared("read all tensors", interleave(read, fixed(rounds))),
        compared("load into the model and AdamW", interleave(load, fixed(rounds))),
    ]


# --- training ---


def measure_training(
    job: Job, folder: Path, steps: int, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Steps with one save among them and without; and the shares of the steps' time for which a save blocks, and of the
    process's CPU time in them that a save takes by itself, which others on the machine disturb less."""

    def turn(saves: bool) -> tuple[float, float, float]:
        began, began_cpu, blocked = time.perf_counter(), time.process_time(), 0.0
        for step in range(steps):
            job.step()
            if saves and step == steps // 4:
                before = time.perf_counter()
                job.strategy.save(folder)
                blocked = time.perf_counter() - before
        job.finish()
        took, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        for written in folder.glob("snapshot-*"):
            shutil.rmtree(written)
        if saves:
            return 1e3 * took, blocked / took, 0.0
        began_cpu = time.process_time()
        job.save(folder)
        return 1e3 * took, 0.0, (time.process_time() - began_cpu) / cpu

    ours, other = "muster, one save", "muster, none"
    found = interleave({ours: lambda: turn(True), other: lambda: turn(False)}, fixed(rounds))
    task = compared(f"{steps} steps", {name: [each[0] for each in values] for name, values in found.items()})
    shares = {
        "blocked": quartiles([blocked for _, blocked, _ in found[ours]]),
        "CPU time": quartiles([cpu for _, _, cpu in found[other]]),
    }
    return [task], shares


def compared(task: str, times: Mapping[str, list[float]]) -> dict[str, Any]:
    """Milliseconds, and those of the first column over those of each."""
    ours = next(iter(times.values()))
    columns = {name: {"ms": quartiles(values), "ours over it": ratio(ours, values)} for name, values in times.items()}
    return {"task": task, "columns": columns}


@contextmanager
def folder_on(disk: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-", dir=disk) as folder:
        yield Path(folder)


def main(
    width: Annotated[int, typer.Option(help="Of the MLP, which has 24 x width^2 parameters.", min=4)] = 1180,
    rows: Annotated[int, typer.Option(help="Of a batch.", min=1)] = 64,
    steps: Annotated[int, typer.Option(help="Of the loop that trains, with one save.", min=4)] = 100,
    rounds: Annotated[int, typer.Option(help="Timed rounds of saving and loading.", min=3)] = 12,
    loops: Annotated[int, typer.Option(help="Timed rounds of the loop that trains.", min=3)] = 5,
    disk: Annotated[Path | None, typer.Option(help="A folder on the disk to write to.", file_okay=False)] = None,
    out: Out = None,
) -> None:
    """What checkpoints cost, against torch's and safetensors' ways."""
    with folder_on(disk) as folder, muster.MirroredStrategy(["cpu"]) as strategy:
        job = Job(strategy, width, rows)
        tensors = job.tensors()
        size = sum(tensor.nbytes for tensor in tensors.values())
        tasks = measure_saving(job, tensors, folder, rounds)
        tasks += measure_loading(job, tensors, folder / "loading", rounds)
        del tensors
        training, shares = measure_training(job, folder / "training", steps, loops)
    result = record(
        "checkpoints",
        bytes=size,
        rows=rows,
        steps=steps,
        **{"a save's shares of the steps": shares},
        tasks=tasks + training,
    )
    publish(result, table(result), out)
