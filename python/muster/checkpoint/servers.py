"""Snapshots that parameter servers keep, as a checkpoint: a model from their disks where the job is gone.

A server's snapshot has a tensor "server", which begins with what the job is (the server's number, and the plan: names,
shapes and strides of parameters, tables, how many servers there are), as the servers' messages have it
(csrc/server/protocol/messages/plan_fields.h). Other tensors are "<part>/<parameter>/<first element>", in the order in
which the parameter lies in memory, and "<rows, row_values or row_states>/<table>/<stripe>/<first row>".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint import reading
from muster.checkpoint.reading import Checkpoint
from muster.errors import CheckpointError, InvalidArgument
from muster.saved_layout import check_content, with_all_parts

__all__ = ["are_of_servers", "parts_of"]

_Pieces = dict[str, dict[int, Tensor]]

_KIND = "muster parameter server"
_LAYOUT = 4
"""Of the snapshots that are read here; servers write it into the manifest."""
_FIRST = "first"
"""In the manifest of the first snapshot of a job that began anew: those before are another one's."""
_ORIGIN = "origin"
"""In every manifest: which job's chief gave the values from which these came."""
_GROUP_BYTES = {0: 43, 1: 34, 2: 33}
"""Of a group's hyperparameters, by the optimizer's kind: Adam, SGD, Adagrad."""
_INITS = ("normal", "uniform")


@dataclass(frozen=True)
class _Parameter:
    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def from_memory(self, flat: Tensor) -> Tensor:
        """The parameter, of its elements in the order in which it lies in memory."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size > 1:
                if stride != expected:  # it has gaps, or overlaps: elements are in row-major order
                    return flat.view(self.sizes)
                expected *= size
        return flat.as_strided(self.sizes, self.strides).contiguous() if self.sizes else flat.view(())


@dataclass(frozen=True)
class _Table:
    name: str
    num_rows: int
    dim: int
    init: str
    scale: float
    seed: int


@dataclass(frozen=True)
class _Plan:
    """What all servers of a job hold, and which of them this is."""

    server: int
    parameters: tuple[_Parameter, ...]
    tables: tuple[_Table, ...]
    servers: int
    staleness: int

    def is_of_same_job(self, other: _Plan) -> bool:
        """Whether another server may hold the rest."""
        mine = (self.parameters, self.tables, self.servers, self.staleness)
        return mine == (other.parameters, other.tables, other.servers, other.staleness)


class _Wire:
    """Numbers and texts as messages between workers and servers have them."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0

    def number(self, kind: str) -> Any:
        """`kind`: as in struct."""
        (value,) = struct.unpack_from(f"<{kind}", self._text, self._at)
        self.skip(struct.calcsize(f"<{kind}"))
        return value

    def skip(self, count: int) -> None:
        self._at += count

    def items(self) -> range:
        """So many things that follow."""
        count = self.number("I")
        if count > len(self._text):
            raise ValueError("a list is longer than what holds it")
        return range(count)

    def numbers(self, kind: str) -> tuple[Any, ...]:
        return tuple(self.number(kind) for _ in self.items())

    def text(self) -> str:
        count = self.number("I")
        self.skip(count)
        if self._at > len(self._text):
            raise ValueError("a text is longer than what holds it")
        return self._text[self._at - count : self._at].decode()


def are_of_servers(sources: Sequence[Path]) -> bool:
    """Whether each is a folder of a server's snapshots, good or not."""
    try:
        folders = [reading.folders_in(source) for source in sources]
    except reading.NoCheckpoint:
        return False
    return all(any(_KIND in _text_of(folder / "manifest.json") for folder in each) for each in folders)


def parts_of(sources: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """The parts of a checkpoint: one module that has all parameters which the servers step, by their names there (those
    of a second module begin with its number), and tables. And what is not in it, or must be known, a line each.

    `sources`: the folder of each server's snapshots, in any order. Where workers stepped together, the newest step of
    which all have a good snapshot is taken, and else the newest of each. Raises CheckpointError where there is none,
    InvalidArgument for folders that are not of all servers of one job.
    """
    found = _newest_of_all(sources)
    plans = [_plan_of(each) for each in found]
    first = plans[0]
    for source, plan in zip(sources, plans, strict=True):
        if not plan.is_of_same_job(first):
            raise InvalidArgument(
                f"'{source}' is not of the job of '{sources[0]}'; give the folders of one job's servers"
            )
    there = sorted(plan.server for plan in plans)
    if there != list(range(first.servers)):
        raise InvalidArgument(
            f"the job had {first.servers} servers, and folders of {', '.join(map(str, there))} are given; give that of "
            "each once"
        )
    _check_origins(sources, found)
    pieces = [_by_name(each) for each in found]
    try:
        module = {each.name: each.from_memory(_whole(each, pieces)) for each in first.parameters}
        tables = [_rows_of(table, pieces) for table in first.tables]
    except (LookupError, RuntimeError) as error:
        raise CheckpointError(f"the snapshots do not hold what they say ({error}); take older ones") from error
    parts: dict[str, Any] = {"modules": [module], "tables": tables, "state": {}}
    check_content(with_all_parts(parts))
    notes = [
        "the optimizer's state is left out",
        "what servers do not hold is not there: buffers, parameters that are not stepped, second names of shared ones",
    ]
    if first.staleness:
        notes.append(
            "workers did not step together: each server's newest snapshot is taken, and those are not of one step"
        )
    return parts, notes


def _newest_of_all(sources: Sequence[Path]) -> list[Checkpoint]:
    """A good snapshot of each, all of the same step where steps are made together."""
    rest = [_good_ones(source) for source in sources]
    found = [next(each, None) for each in rest]
    while True:
        steps = {}
        for number, (source, snapshot) in enumerate(zip(sources, found, strict=True)):
            if snapshot is None:
                raise CheckpointError(
                    f"'{source}' has no good snapshot of a step that the other servers have; give the folders as the "
                    "servers left them"
                )
            step = _step_of(snapshot)
            if len(snapshot.tensors) > 1:  # a server that owns nothing may be behind
                steps[number] = step
        least = min(steps.values(), default=0)
        newer = [number for number, step in steps.items() if step > least]
        if not newer:
            return [snapshot for snapshot in found if snapshot is not None]
        for number in newer:
            found[number] = next(rest[number], None)


def _check_origins(sources: Sequence[Path], found: Sequence[Checkpoint]) -> None:
    origins = {
        snapshot.metadata.get(_ORIGIN): source
        for source, snapshot in zip(sources, found, strict=True)
        if len(snapshot.tensors) > 1  # else there are no values
    }
    if len(origins) > 1:
        one, other, *_ = origins.values()
        raise CheckpointError(
            f"'{one}' and '{other}' hold values of two jobs: one began anew with a checkpoint, and died before all "
            "servers had kept its values, or one folder is a copy from before; convert that checkpoint, or give "
            "folders of one time"
        )


def _good_ones(source: Path) -> Iterator[Checkpoint]:
    """The newest first; each damaged one is named in a warning. None from before a job that began anew."""
    for folder in reversed(reading.folders_in(source)):
        try:
            snapshot = reading.read_folder(folder)
        except CheckpointError as error:
            reading.pass_over(folder, error)
            continue
        yield snapshot
        if _FIRST in snapshot.metadata:
            return


def _step_of(snapshot: Checkpoint) -> int:
    metadata = snapshot.metadata
    if metadata.get("kind") != _KIND:
        raise CheckpointError(f"'{snapshot.folder}' is no snapshot of a parameter server; give a server's folder")
    step = metadata.get("step")
    if metadata.get("layout") != _LAYOUT or not isinstance(step, int):
        raise CheckpointError(f"'{snapshot.folder}' was written by another version of Muster; convert it with that one")
    return step


def _plan_of(snapshot: Checkpoint) -> _Plan:
    try:
        wire = _Wire(bytes(snapshot.tensors["server"].tolist()))
        server = wire.number("I")
        parameters = []
        for _ in wire.items():
            name = wire.text()
            wire.skip(1)  # the dtype: tensors have it
            parameters.append(_Parameter(name, wire.numbers("q"), wire.numbers("q")))
        wire.numbers("I")  # groups of parameters
        tables = []
        for _ in wire.items():
            name, num_rows, dim = wire.text(), wire.number("q"), wire.number("q")
            wire.skip(1)  # which server has which row: they are all read
            init, scale, seed = _INITS[wire.number("B")], wire.number("d"), wire.number("Q")
            tables.append(_Table(name, num_rows, dim, init, scale, seed))
            wire.skip(5)  # its group, and whether Adagrad is row-wise
        size = _GROUP_BYTES[wire.number("B")]
        wire.skip(size * len(wire.items()))
        servers = wire.number("I")
        wire.skip(4)  # workers
        return _Plan(server, tuple(parameters), tuple(tables), servers, wire.number("I"))
    except (struct.error, LookupError, ValueError) as error:
        raise CheckpointError(
            f"'{snapshot.folder}' does not say what the job is ({error}); take an older one"
        ) from error


def _by_name(snapshot: Checkpoint) -> _Pieces:
    """Pieces of what is called alike, with the numbers at the ends of their names, which are where they begin."""
    pieces: _Pieces = {}
    for name, tensor in snapshot.tensors.items():
        what, _, first = name.rpartition("/")
        if first.isdecimal():
            pieces.setdefault(what, {})[int(first)] = tensor
    return pieces


def _whole(parameter: _Parameter, of_servers: Sequence[_Pieces]) -> Tensor:
    found: dict[int, Tensor] = {}
    for pieces in of_servers:
        found |= pieces.get(f"parameter/{parameter.name}", {})
    there = 0
    for first in sorted(found):
        if first != there:
            break
        there += found[first].numel()
    if there != math.prod(parameter.sizes) or not found:
        raise CheckpointError(f"the snapshots lack elements of '{parameter.name}'; take older ones")
    return torch.cat([found[first].view(-1) for first in sorted(found)])


def _rows_of(table: _Table, of_servers: Sequence[_Pieces]) -> dict[str, Any]:
    """The table as `Strategy.save` writes it: rows of all servers and their stripes, ascending, without state."""
    rows, values = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, table.dim)]
    for pieces in of_servers:
        for name, found in pieces.items():
            what, _, stripe = name.rpartition("/")
            if what != f"rows/{table.name}":
                continue
            for first, tensor in found.items():
                rows.append(tensor)
                values.append(pieces[f"row_values/{table.name}/{stripe}"][first].view(-1, table.dim))
    order = torch.cat(rows).argsort()
    return {
        "places": [[0, table.name]],
        "num_rows": table.num_rows,
        "dim": table.dim,
        "init": table.init,
        "scale": table.scale,
        "seed": str(table.seed),
        "optimizer": None,
        "parameter": None,
        "rows": torch.cat(rows)[order],
        "values": torch.cat(values)[order],
        "step": None,
        "state": {},
    }


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
