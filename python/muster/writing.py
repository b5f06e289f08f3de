"""Checkpoints on their way to the disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from muster import _C
from muster.errors import CheckpointError, Error

__all__ = ["Writing"]

_POLL = 0.002  # seconds between two looks at whether a checkpoint is written

_File = tuple[int, int]  # device and inode

_locks: dict[int, _File] = {}
"""Descriptors of the locks that this process holds on folders, and their files."""


class Writing:
    """Writes one checkpoint after another. It knows nothing of its strategy, which it outlives."""

    def __init__(self) -> None:
        self._writer: _C.SnapshotWriter | None = None
        self._made_with: tuple[Path, int | None] | None = None
        """The folder and `keep` of the writer."""
        self._lock: int | None = None
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
            self._let_go()
            self._writer, self._made_with = _C.SnapshotWriter(made_with[0], keep), made_with
        with _as_checkpoint_error(made_with[0]):
            self._writer.write_copy(tensors, metadata)
        if self._lock is None:
            self._lock = _note_lock(made_with[0] / "lock")

    def finish(self) -> None:
        """Waits until the last checkpoint is written; raises CheckpointError, once, where it could not be. Ctrl-C ends
        the wait, and not the writing."""
        if self._writer is None or self._made_with is None:
            return
        while not self._writer.is_done:
            time.sleep(_POLL)
        folder, _ = self._made_with
        try:
            with _as_checkpoint_error(folder):
                self._writer.wait()
        except CheckpointError:
            if _is_gone(folder / "life"):
                self._let_go()  # the lock went with it: the next checkpoint makes the folder anew and claims it
            raise

    def end(self) -> None:
        """As finish(), and lets the folder go. No-op in a fork of the process."""
        if not self.is_of_this_process:
            return
        try:
            self.finish()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            _locks.pop(self._lock, None)
        self._lock = self._writer = None


@contextlib.contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """What the system refused, in words that say which folder."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f"cannot write to the folder '{folder}': {error}; check its permissions and the space on its disk"
        ) from error


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return False


def _note_lock(path: Path) -> int | None:
    """Finds this process's descriptor of a lock; None where it cannot be told."""
    with contextlib.suppress(OSError):
        file = _file_of(os.stat(path))
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if _file_of(os.fstat(number)) == file:
                    _locks[number] = file
                    return number
    return None


def _file_of(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino


def _drop_locks() -> None:
    """In a fork. A lock is held until all who have it open are gone: a worker of a DataLoader that outlives a killed
    process by seconds would keep the folder from the job that is started next."""
    for number, file in _locks.items():
        with contextlib.suppress(OSError):
            if _file_of(os.fstat(number)) == file:
                nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(nothing, number, inheritable=False)  # the number stays taken: its owner closes it
                os.close(nothing)
    _locks.clear()


os.register_at_fork(after_in_child=_drop_locks)
