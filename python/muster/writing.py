"""Checkpoints on their way to the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor

from muster import _C
from muster.errors import CheckpointError

__all__ = ["Writing"]

_POLL = 0.002  # seconds between two looks at whether a checkpoint is written


class Writing:
    """Writes one checkpoint after another. It knows nothing of its strategy, which it outlives."""

    def __init__(self) -> None:
        self._writer: _C.SnapshotWriter | None = None
        self._made_with: tuple[Path, int | None] | None = None
        """The folder and `keep` of the writer."""
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False in a fork, where no thread writes."""
        return os.getpid() == self._pid

    def write(
        self, folder: Path, keep: int | None, tensors: dict[str, Tensor], metadata: dict[str, str | int | float]
    ) -> None:
        """Copies the tensors and begins to write, once the last checkpoint is written. Raises CheckpointError where
        that went wrong, or the folder cannot be used."""
        self.finish()
        made_with = (folder.absolute(), keep)
        if self._writer is None or self._made_with != made_with:
            self._writer = None  # which lets the folder go
            self._writer, self._made_with = _C.SnapshotWriter(made_with[0], keep), made_with
        self._writer.write_copy(tensors, metadata)

    def finish(self) -> None:
        """Waits until the last checkpoint is written; raises CheckpointError, once, where it could not be. Ctrl-C ends
        the wait, and not the writing."""
        if self._writer is None or self._made_with is None:
            return
        while not self._writer.is_done:
            time.sleep(_POLL)
        folder, _ = self._made_with
        try:
            self._writer.wait()
        except CheckpointError:
            if _is_gone(folder / "life"):
                self._writer = None  # the lock went with it: the next checkpoint makes the folder anew and claims it
            raise

    def end(self) -> None:
        """As finish(), and lets the folder go. No-op in a fork of the process."""
        if not self.is_of_this_process:
            return
        try:
            self.finish()
        finally:
            self._writer = None


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return False
