"""Checkpoints as they are on the disk."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from muster import _C, saved_tree
from muster.errors import CheckpointError, InvalidArgument
from muster.kinds import is_count
from muster.saved_layout import FORMAT, Metadata
from muster.saved_optimizer import others_of
from muster.saved_tables import with_dense_weights
from muster.saved_tree import copied

__all__ = [
    "DCP_FORMAT",
    "Checkpoint",
    "NoCheckpoint",
    "check_folder",
    "folders_in",
    "is_part",
    "model_state",
    "module_in",
    "number_of",
    "numbered",
    "numbered_in",
    "optimizer_state",
    "pass_over",
    "read",
    "read_folder",
    "with_numbers",
]

_NAME = re.compile(r"snapshot-([0-9]{10,19})")
DCP_FORMAT = 1
"""Of what StorageWriter writes."""


class NoCheckpoint(CheckpointError):
    """There is none at the path."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and found to be good."""

    folder: Path
    tensors: dict[str, Tensor] = field(repr=False)
    metadata: Metadata

    @property
    def number(self) -> int | None:
        """None where its folder was renamed."""
        return number_of(self.folder)

    @property
    def kind(self) -> str:
        """Who wrote it, in words."""
        if "muster.format" in self.metadata:
            known = "" if self.is_of_strategy else f", of format {self.metadata['muster.format']}, not known here"
            return f"checkpoint of a strategy{known}"
        if "dcp.format" in self.metadata:
            return "checkpoint of torch.distributed.checkpoint"
        kind = self.metadata.get("kind")
        return f"snapshot of a {kind}" if isinstance(kind, str) else "snapshot of something else"

    @property
    def is_of_strategy(self) -> bool:
        """Whether `parts` can be asked for."""
        return self.metadata.get("muster.format") == FORMAT

    @property
    def is_known(self) -> bool:
        """Whether `document` can be asked for."""
        return self.is_of_strategy or self.metadata.get("dcp.format") == DCP_FORMAT

    def parts(self) -> dict[str, Any]:
        """What a strategy saved, by part; a part may be absent. Raises CheckpointError where none did, and where the
        document is damaged."""
        if not self.is_of_strategy:
            raise CheckpointError(
                f"'{self.folder}' is a {self.kind}; give a checkpoint that strategy.save() or this version's "
                "`muster checkpoint convert` wrote"
            )
        parts = self.document()
        if not isinstance(parts, dict):
            raise CheckpointError(f"the document of '{self.folder}' is no checkpoint's; load another one")
        return parts

    def document(self) -> Any:
        """The nested value that was saved. Raises CheckpointError where it is damaged."""
        try:
            return saved_tree.decode(str(self.metadata["content"]), self.tensors)
        except (KeyError, CheckpointError) as error:
            raise CheckpointError(f"the document of '{self.folder}' is damaged: {error}") from error


def folders_in(path: str | os.PathLike[str]) -> list[Path]:
    """The folders of the checkpoints at `path`, by number, the newest last.

    `path` is the folder that `Strategy.save` wrote to, or one checkpoint's in it, for which ``FOLDER/7`` is short.
    Raises NoCheckpoint where there is none.
    """
    path = Path(path)
    if path.is_dir():
        if number_of(path) is not None or (path / "manifest.json").exists():
            return [path]
        found = numbered_in(path)
        if found:
            return found
        of_servers = (each.name.removeprefix("server-") for each in path.glob("server-*") if numbered_in(each))
        if servers := [number for number in of_servers if number.isascii() and number.isdigit()]:
            raise NoCheckpoint(
                f"'{path}' holds the folders of parameter servers {_some(servers)}; give one of them: {path}/server-N"
            )
        raise NoCheckpoint(f"'{path}' holds no checkpoint; give the folder that strategy.save() wrote to")
    if path.name.isascii() and path.name.isdigit() and path.parent.is_dir():
        short = path.parent / numbered(int(path.name))
        if short.is_dir():
            return [short]
        there = [str(number_of(each)) for each in numbered_in(path.parent)]
        if there:
            raise NoCheckpoint(f"'{path.parent}' holds no checkpoint {path.name}; it has {_some(there)}")
    raise NoCheckpoint(f"'{path}' is no folder; give the folder that strategy.save() wrote to")


def numbered_in(folder: Path) -> list[Path]:
    """The folders of the checkpoints in a folder, by number, the newest last; none where there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(number, each) for each in folder.iterdir() if (number := number_of(each)) is not None]
    return [each for _, each in sorted(found)]


def numbered(number: int) -> str:
    """The name of a checkpoint's folder."""
    return f"snapshot-{number:010}"


def read_folder(folder: Path) -> Checkpoint:
    """Reads one checkpoint and checks all of it. Raises CheckpointError naming the file that is damaged."""
    tensors, metadata = _C._checkpoint.read_snapshot(folder)
    return Checkpoint(folder, tensors, metadata)


def check_folder(folder: Path) -> tuple[Metadata, dict[str, list[str]]]:
    """As read_folder, of the files that are here, and those that are not, by the host that wrote them."""
    found: tuple[Metadata, dict[str, list[str]]] = _C._checkpoint.check_snapshot(folder)
    return found


def is_part(folder: Path) -> bool:
    """Whether the folder is what one host wrote of a checkpoint whose manifest is on another host."""
    is_one: bool = _C._checkpoint.is_part_of_snapshot(folder)
    return is_one


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """The newest good checkpoint at `path` (see `folders_in`). Each damaged one is named in a warning and passed over.
    Raises CheckpointError where that leaves none."""
    folders = folders_in(path)
    while True:
        for folder in reversed(folders):
            try:
                return read_folder(folder)
            except CheckpointError as error:
                if len(folders) == 1 and folders_in(path) == folders:
                    raise
                pass_over(folder, error)
        # A job that goes on may have written others meanwhile, and removed these.
        before, folders = folders, folders_in(path)
        if number_of(folders[-1]) == number_of(before[-1]):
            raise CheckpointError(f"no checkpoint in '{path}' is good; the warnings say what is wrong with each")


def pass_over(folder: Path, error: CheckpointError) -> None:
    """Warns of a checkpoint that is damaged, or not signed, and says why."""
    logging.getLogger("muster").warning("checkpoint '%s' is passed over: %s", folder, error)


def model_state(path: str | os.PathLike[str], module: int = 0) -> dict[str, Tensor]:
    """The state_dict of a module, on the CPU, for `load_state_dict` of the plain module without a strategy.

    `path`: a folder that `Strategy.save` wrote to, for the newest good checkpoint in it, or one checkpoint's folder.
    `module`: which of the prepared modules, counted from 0. Raises CheckpointError where there is no good checkpoint,
    InvalidArgument where it holds no such module.
    """
    return module_in(read(path).parts(), module, path)


def module_in(parts: Mapping[str, Any], module: int, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """As `model_state`, of the parts of a checkpoint that was read from `path`."""
    return copied(dict(_one(with_dense_weights(parts), "modules", module, path)))


def optimizer_state(path: str | os.PathLike[str], optimizer: int = 0) -> dict[str, Any]:
    """The state_dict of an optimizer, with numbers for the parameters as torch.optim has them, for `load_state_dict`
    of an optimizer that was built over the same parameters in the same order.

    `path`: a folder that `Strategy.save` wrote to, for the newest good checkpoint in it, or one checkpoint's folder.
    `optimizer`: which of the prepared optimizers, counted from 0. Raises CheckpointError where there is no good
    checkpoint, InvalidArgument where it holds no such optimizer.
    """
    return copied(with_numbers(_one(with_dense_weights(read(path).parts()), "optimizers", optimizer, path)))


def with_numbers(saved: Mapping[str, Any]) -> dict[str, Any]:
    """torch.optim's state_dict of an optimizer in a checkpoint, which has the order of its parameters."""
    names = [name for group in saved["groups"] for name in group["params"]]
    numbers = {name: name if isinstance(name, int) else number for number, name in enumerate(names)}
    return {
        "state": {**{numbers[name]: values for name, values in saved["state"].items()}, **others_of(saved)},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["groups"]],
    }


def _one(parts: Mapping[str, Any], what: str, number: int, path: str | os.PathLike[str]) -> Any:
    there: Sequence[Any] = parts.get(what) or []
    if not is_count(number) or number >= len(there):
        held = f"{what} 0 to {len(there) - 1}" if len(there) > 1 else f"one of the {what}, 0" if there else f"no {what}"
        raise InvalidArgument(f"there is no {what[:-1]} {number!r} in the checkpoint of '{path}': it holds {held}")
    return there[number]


def number_of(folder: Path) -> int | None:
    """That of the checkpoint whose folder this is, by its name; None for a name that `numbered` does not give."""
    match = _NAME.fullmatch(folder.name)
    number = 0 if match is None else int(match[1])
    return number if 0 < number < 1 << 63 and folder.name == numbered(number) else None


def _some(numbers: list[str]) -> str:
    numbers = sorted(numbers, key=int)
    return ", ".join(numbers if len(numbers) <= 8 else [*numbers[:3], "...", *numbers[-3:]])
