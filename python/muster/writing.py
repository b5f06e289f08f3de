"""Checkpoints on their way to the disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from muster import _C
from muster.errors import CheckpointError
from muster.saved_layout import Metadata

__all__ = ["Writing"]


class _Begun(NamedTuple):
    """A checkpoint whose writing has begun: in which folder, its tensors' bytes, when by the monotonic clock, and its
    metadata."""

    folder: Path
    size: int
    at: float
    metadata: Metadata


class _Written(NamedTuple):
    """A checkpoint that is there: its own folder, its tensors' bytes, when it was written, and its metadata."""

    folder: Path
    size: int
    at: float
    metadata: Metadata


_POLL = 0.002  # seconds between two looks at whether a checkpoint is written


class Writing:
    """Writes one checkpoint after another. It knows nothing of its strategy, which it outlives."""

    def __init__(self) -> None:
        self._writer: _C.SnapshotWriter | None = None
        self._made_with: tuple[Path, int | None] | None = None
        """The folder and `keep` of the writer."""
        self._pid = os.getpid()
        self._begun: _Begun | None = None
        """The last one."""
        self._written: _Written | None = None
        """The last one that was."""
        self._newest: dict[Path, _Written] = {}
        """The last one that was written to each folder."""
        self._failure = ""
        """Of the last one, where it went wrong."""
        self._untold: CheckpointError | None = None
        """The same, until it was raised."""

    @property
    def is_of_this_process(self) -> bool:
        """False in a fork, where no thread writes."""
        return os.getpid() == self._pid

    def write(self, folder: Path, keep: int | None, tensors: dict[str, Tensor], metadata: Metadata) -> None:
        """Copies the tensors and begins to write, once the last checkpoint is written. Raises CheckpointError where
        that went wrong, or the folder cannot be used."""
        writer = self._writer_to(folder, keep)
        with self._noted_failure():
            writer.write_copy(tensors, metadata)
        self._note_begun(sum(tensor.nbytes for tensor in tensors.values()), metadata)

    def announce(
        self, folder: Path, keep: int | None, core: _C.StrategyCore, lineage: str
    ) -> tuple[_C.JointSnapshot, str]:
        """Begins a checkpoint of `lineage` that all ranks of `core` write, once the last one is written, and what they
        are to be told. Raises CheckpointError where that went wrong, or the folder cannot be used."""
        joint = _C.JointSnapshot(self._writer_to(folder, keep), core)
        try:
            with self._noted_failure():
                return joint, joint.announce(lineage)
        except CheckpointError:
            self._let_go_of_gone()
            raise

    def copy(self, joint: _C.JointSnapshot, looked: Sequence[str]) -> bool:
        """Copies this rank's part. False where the chief is to write alone. Raises CheckpointError where the folder of
        this rank's host cannot be used."""
        try:
            return joint.copy(looked)
        except CheckpointError:
            self._let_go_of_gone()
            raise

    def start(self, joint: _C.JointSnapshot, size: int, metadata: Metadata, patience: float) -> None:
        """Begins to write this rank's part of a checkpoint of `size` bytes; its copies are made. The chief waits for
        others from which something comes in `patience` seconds."""
        joint.start(metadata, patience)
        self._note_begun(size, metadata)

    @contextlib.contextmanager
    def with_servers(self, folder: Path, keep: int | None, core: _C.StrategyCore) -> Iterator[_C.CutWriting | None]:
        """Here parameter servers have begun to write their parts of a checkpoint, and stand-ins for these come from the
        core; None where they cannot write to that folder. Raises as write(). What was not given to write_rest() at the
        end is given up."""
        writer = self._writer_to(folder, keep)
        try:
            with self._noted_failure():
                cut = _C.CutWriting(writer, core)
        except CheckpointError:
            self._let_go_of_gone()
            raise
        try:
            yield cut if cut.is_begun else None
        finally:
            cut.close()

    def write_rest(self, cut: _C.CutWriting, tensors: Mapping[str, Tensor | _C.Run], metadata: Metadata) -> None:
        """Copies the tensors but for stand-ins and begins to write them, in with_servers()."""
        rest = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        with self._noted_failure():
            cut.start(rest, metadata)
        self._note_begun(sum(tensor.nbytes for tensor in rest.values()), metadata)

    def _writer_to(self, folder: Path, keep: int | None) -> _C.SnapshotWriter:
        """Waits for the last checkpoint."""
        self.finish()
        made_with = (folder.absolute(), keep)
        if self._writer is None or self._made_with != made_with:
            self._writer = None  # which lets the folder go
            self._writer, self._made_with = _C.SnapshotWriter(made_with[0], keep), made_with
        return self._writer

    def _note_begun(self, size: int, metadata: Metadata) -> None:
        assert self._made_with is not None
        self._begun = _Begun(self._made_with[0], size, time.monotonic(), metadata)

    def _let_go_of_gone(self) -> None:
        if self._made_with is not None and _is_gone(self._made_with[0] / "life"):
            self._writer = None  # the lock went with it: the next checkpoint makes the folder anew and claims it

    @contextlib.contextmanager
    def _noted_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._failure = str(error)
            raise

    def finish(self) -> None:
        """Waits until the last checkpoint is written; raises CheckpointError, once, where it could not be. Ctrl-C ends
        the wait, and not the writing."""
        if self._writer is None or self._made_with is None:
            return
        self.wait()
        self._settle()
        error, self._untold = self._untold, None
        if error is None:
            return
        self._let_go_of_gone()
        raise error

    def wait(self) -> None:
        """Waits until nothing is being written; what went wrong is for the next finish()."""
        while self.is_of_this_process and self._writer is not None and not self._writer.is_done:
            time.sleep(_POLL)

    def explain(self) -> str:
        """In words: the last checkpoint, or that one is being written, and what went wrong; empty where none was."""
        from muster.checkpoint.describing import size_text  # which knows this package

        if not self.is_of_this_process:
            return ""
        lines = []
        if self._writer is not None and self._begun is not None and not self._writer.is_done:
            folder, size, began, _ = self._begun
            lines.append(
                f"one of {size_text(size)} is being written to '{folder}' for {time.monotonic() - began:.1f} s"
            )
        else:
            self._settle()
        if self._failure:
            lines.append(f"the last one could not be written: {self._failure}")
        if self._written is not None:
            folder, size, at, _ = self._written
            when = datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")
            which = "the one before" if lines else "the last one"
            lines.append(f"{which}, '{folder}' ({size_text(size)}), was written at {when}")
        return f"checkpoints: {'; '.join(lines)}\n" if lines else ""

    def _settle(self) -> None:
        """Notes what became of the one that was begun last, which is done."""
        if self._writer is None or self._begun is None:
            return
        (folder, size, _, metadata), self._begun = self._begun, None
        try:
            self._writer.wait()
        except CheckpointError as error:
            self._failure, self._untold = str(error), error
            return
        self._failure = ""
        own = self._writer.written
        if own == Path():  # the chief's, of which this rank wrote a part
            return
        with contextlib.suppress(OSError):  # it may be taken away at any time
            self._written = self._newest[folder] = _Written(own, size, _time_of(own), metadata)

    def metadata_of(self, checkpoint: Path) -> Metadata | None:
        """The metadata of the checkpoint in that folder, where it is the last one that this process wrote there."""
        written = self._newest.get(checkpoint.absolute().parent)
        if written is None or written.folder != checkpoint.absolute():
            return None
        with contextlib.suppress(OSError):
            return written.metadata if _time_of(checkpoint) == written.at else None
        return None

    def end(self) -> None:
        """As finish(), and lets the folder go. No-op in a fork of the process."""
        if not self.is_of_this_process:
            return
        try:
            self.finish()
        finally:
            if self._writer is not None and self._writer.is_done:  # else the wait was interrupted
                self._writer = None


def _time_of(checkpoint: Path) -> float:
    return (checkpoint / "manifest.json").stat().st_mtime


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return False
