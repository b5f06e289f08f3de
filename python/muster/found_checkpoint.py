"""A strategy's checkpoint that was read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from muster import saved_tree
from muster.errors import CheckpointError
from muster.saved_layout import check_content, check_format, with_all_parts

__all__ = ["Found", "found_in"]


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
