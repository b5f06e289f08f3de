"""A strategy's checkpoint that was read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from muster import saved_tree
from muster.checkpoint.reading import numbered
from muster.errors import CheckpointError, InvalidArgument
from muster.saved_layout import check_content, check_format, with_all_parts

__all__ = ["Found", "check_holds_checkpoints", "check_is_path", "found_in"]


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


def found_in(tensors: dict[str, Tensor], metadata: dict[str, str | int | float], place: Path) -> Found:
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
    path = os.fspath(folder)
    if not path:
        raise InvalidArgument(f"{call}() was given an empty path; name the folder of the checkpoints")
    if "://" in path:
        raise InvalidArgument(
            f"{call}({path!r}): checkpoints are in folders; mount the storage, and give the path there"
        )


def check_holds_checkpoints(folder: str | os.PathLike[str]) -> None:
    """Raises InvalidArgument for the path of one checkpoint, which would be taken for a folder without any."""
    path = Path(folder)
    # os.path's, which are False where the folder cannot be looked into: that is said where it is read.
    is_short = path.name.isdigit() and os.path.isdir(path.parent / numbered(int(path.name)))
    if (is_short and not os.path.exists(path)) or os.path.exists(path / "manifest.json"):
        raise InvalidArgument(
            f"'{path}' is one checkpoint, and load() takes the newest one of a folder: give it '{path.parent}', or, to "
            "begin with this one, another folder with a copy of it"
        )
