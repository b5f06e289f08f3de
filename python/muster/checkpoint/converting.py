"""Checkpoints to and from the files of others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster import _C
from muster.checkpoint import importing, reading, servers
from muster.checkpoint.importing import Order
from muster.errors import CheckpointError, InvalidArgument
from muster.saved_optimizer import others_of
from muster.saved_tables import with_dense_weights

__all__ = ["from_others", "from_servers", "is_checkpoint", "to_safetensors", "to_torch", "torch_value"]

_OWN = ("model", "optimizer")


def is_checkpoint(path: Path) -> bool:
    """Whether there is one of Muster's, good or not."""
    try:
        return bool(reading.folders_in(path))
    except reading.NoCheckpoint:
        return False


def from_servers(sources: list[Path], target: Path) -> tuple[Path, list[str]]:
    """A new checkpoint of the snapshots that all servers of a job keep; see `servers.parts_of`."""
    _check_new(target)
    parts, notes = servers.parts_of(sources)
    return importing.write(target, parts, [source.absolute() for source in sources]), notes


def _check_new(target: Path) -> None:
    """Raises InvalidArgument for a folder that holds checkpoints."""
    if is_checkpoint(target):
        raise InvalidArgument(
            f"'{target}' holds checkpoints, before which load() would take what is written there; give a new folder"
        )


def to_safetensors(sources: list[Path], target: Path, module: int = 0) -> list[str]:
    """Writes a module's tensors to a file of the safetensors format. What is left out, a line each."""
    parts, notes = _parts_of(sources)
    state = reading.module_in(parts, module, sources[0])
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    with _beside(target) as folder:
        (shard,) = _C._checkpoint.write_snapshot(folder, tensors, {}, shard_bytes=2**63).glob("*.safetensors")
        shard.replace(target)
    return notes + [f"'{name}' is left out: it is no tensor" for name in state if name not in tensors]


def to_torch(sources: list[Path], target: Path) -> list[str]:
    """Writes `torch_value` with torch.save. What is left out, a line each."""
    parts, notes = _parts_of(sources)
    value = torch_value(parts)
    with _beside(target) as folder:
        torch.save(value, folder / "saved")
        (folder / "saved").replace(target)
    return notes


def _parts_of(sources: list[Path]) -> tuple[dict[str, Any], list[str]]:
    """Of a checkpoint, or of the snapshots that servers keep; and what is not in it."""
    return servers.parts_of(sources) if servers.are_of_servers(sources) else (reading.read(sources[0]).parts(), [])


def torch_value(parts: Mapping[str, Any], *, numbers: bool = True) -> dict[str, Any]:
    """What plain torch takes: "model" and "optimizer", state_dicts, or lists of them where there are several; "steps";
    and what the user named. Without `numbers` optimizers have names of parameters."""
    value: dict[str, Any] = {}
    parts = with_dense_weights(parts)
    modules = [dict(module) for module in parts.get("modules") or ()]
    optimizers = [
        reading.with_numbers(each)
        if numbers
        else {"state": {**each["state"], **others_of(each)}, "param_groups": each["groups"]}
        for each in parts.get("optimizers") or ()
    ]
    for name, states in zip(_OWN, (modules, optimizers), strict=True):
        if states:
            value[name] = states[0] if len(states) == 1 else states
    if parts.get("strategy") is not None:
        value["steps"] = parts["strategy"]["steps"]
    for name, each in (parts.get("state") or {}).items():
        # Those of other names keep them.
        value[f"{name}_" if name in (*_OWN, "steps") and name in value else name] = each.get(
            "object", each.get("value")
        )
    return value


def from_others(order: Order) -> tuple[Path, list[str]]:
    """As `importing.convert`, in a process of its own. Raises CheckpointError."""
    for source in order.sources:
        if is_checkpoint(Path(source)):
            raise InvalidArgument(
                f"'{source}' is Muster's already: to take it elsewhere, name a TARGET that ends in .safetensors or .pt"
            )
    _check_new(Path(order.target))
    program = [sys.executable, "-P", "-m", "muster.checkpoint.importing", order.text()]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(program, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        how = f"signal {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"code {done.returncode}"
        last = done.stderr.strip().splitlines()[-1:]
        raise CheckpointError(f"the process that read {', '.join(order.sources)} ended with {how}: {''.join(last)}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return Path(answer["folder"]), answer["notes"]


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder on the target's disk: the target is there whole or not at all."""
    if not target.parent.is_dir():
        raise CheckpointError(f"there is no folder '{target.parent}' to write '{target.name}' to; make it")
    with tempfile.TemporaryDirectory(prefix=".converted-", dir=target.parent) as folder:
        yield Path(folder)
