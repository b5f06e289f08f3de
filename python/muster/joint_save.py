"""A checkpoint that all workers write, each a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from muster import _C, saved_tree
from muster.flat_state import giving_runs
from muster.saved_content import SavedContent
from muster.saved_layout import Metadata
from muster.writing import Writing

__all__ = ["JointSave"]


class JointSave:
    """One such checkpoint. Its methods are called on every rank in their order, as parts of a collective: each is
    local, and what it gives is told to all before the next."""

    def __init__(
        self,
        core: _C.StrategyCore,
        writing: Writing,
        content: SavedContent,
        given: Mapping[str, Any],
        metadata_of: Callable[[str], Metadata],
    ) -> None:
        """`given`: what it holds beside `content`. `metadata_of`: of a document."""
        self._core = core
        self._writing = writing
        self._content = content
        self._given = given
        self._metadata_of = metadata_of
        self._joint: _C.JointSnapshot | None = None
        self._document = ""
        self._size = 0
        """Of this rank's tensors, in bytes, and of those that are divided, whole."""

    def announce(self, folder: Path, keep: int | None, lineage: str) -> str:
        """Begins a checkpoint of `lineage`."""
        self._joint, text = self._writing.announce(folder, keep, self._core, lineage)
        return text

    def look(self, announced: Sequence[str], random: Mapping[str, Tensor]) -> str:
        """What this rank has of it. `random`: of SavedContent.random()."""
        with giving_runs():
            content = {**self._content.of(random), **self._given}
        if self._core.rank != 0:
            content = {part: content[part] for part in ("modules", "optimizers")}
        self._document, tensors = saved_tree.encode_in_place(content)
        divided = {name: run for name, run in tensors.items() if isinstance(run, _C.Run)}
        whole = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        alike = self._content.alike(whole)
        chiefs = {name: tensor for name, tensor in whole.items() if name not in alike}
        self._size = sum(tensor.nbytes for tensor in whole.values()) + sum(run.whole_bytes for run in divided.values())
        return self._begun.look(announced, chiefs, alike, divided)

    def copy(self, looked: Sequence[str]) -> bool:
        """Copies this rank's part. False where the chief is to write alone."""
        return self._writing.copy(self._begun, looked)

    def start(self, patience: float) -> None:
        """Begins to write what was copied; see Writing.start."""
        self._writing.start(self._begun, self._size, self._metadata_of(self._document), patience)

    def close(self) -> None:
        """Gives up what was not started."""
        if self._joint is not None:
            self._joint.close()

    @property
    def _begun(self) -> _C.JointSnapshot:
        assert self._joint is not None
        return self._joint
