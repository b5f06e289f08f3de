"""A strategy's checkpoint that was read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from muster import saved_tree
from muster.checkpoint import reading
from muster.errors import CheckpointError, InvalidArgument
from muster.saved_layout import Metadata, check_content, check_format, with_all_parts

__all__ = ["Found", "check_is_path", "found_in"]


@dataclass(frozen=True)
class Found:
    """One that was read."""

    tensors: dict[str, Tensor]
    document: str
    name: str
    """Of its folder."""
    content: dict[str, Any] | None = None
    """The document's value: what the checkpoint holds, by part; None where another rank decoded it."""
    lineage: str = ""
    """What it has in common with those that it goes on from; the chief's alone."""

    def place(self, path: str | os.PathLike[str]) -> Path:
        """Its folder, where `path` asked for it: by itself, or by the folder that it is in."""
        asked = Path(path)
        return asked if asked.name == self.name else asked / self.name


def found_in(tensors: dict[str, Tensor], metadata: Metadata, place: Path) -> Found:
    """Raises CheckpointError where a snapshot is none of a strategy, or is damaged."""
    check_format(metadata, place.parent)
    document = str(metadata.get("content"))
    try:
        content: dict[str, Any] = with_all_parts(saved_tree.decode(document, tensors))
        check_content(content)
    except CheckpointError as error:
        raise CheckpointError(f"'{place}' cannot be loaded: {error}") from error
    return Found(tensors, document, place.name, content, str(metadata.get("muster.lineage", "")))


def check_is_path(call: str, folder: str | os.PathLike[str]) -> None:
    """Raises InvalidArgument for what `call` cannot take for the path of a folder."""
    if not isinstance(folder, str | os.PathLike):
        raise InvalidArgument(f"{call}() was given {folder!r}; give it the path of the checkpoints' folder")
    path = os.fspath(folder)
    if not path:
        raise InvalidArgument(f"{call}() was given an empty path; name the folder of the checkpoints")
    if "://" in path:
        raise InvalidArgument(
            f"{call}({path!r}): checkpoints are in folders; mount the storage, and give the path there"
        )
    if call == "save" and reading.number_of(Path(path)) is not None:
        raise InvalidArgument(f"'{path}' is called as one checkpoint; give save() '{Path(path).parent}'")
