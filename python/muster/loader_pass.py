"""One pass over a prepared loader."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from muster.copies import Arrival
from muster.errors import InvalidArgument
from muster.position import Position
from muster.reader import Ended, Parts, Skipped, Unread
from muster.stream_states import ReadBatch, StreamStates
from muster.tasks import DealtBatches, SharedBatches

__all__ = ["Pass", "PassWatch", "ReadAhead", "Reads"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class ReadAhead:
    """A batch that the loop gets next."""

    value: Any
    part_rows: list[int] | None
    number: int | None = None  # what its pass knows it by
    read: ReadBatch | None = None  # of a loader whose readers have states
    arrivals: Sequence[Arrival] = ()


@dataclass(frozen=True)
class Failed:
    """In place of a batch that could not be read: raised when that is asked for."""

    error: Exception
    number: int | None = None  # as of a ReadAhead
    ends: bool = False  # the pass


@dataclass(frozen=True)
class Reads:
    """What a pass needs of its loader."""

    position: Position
    streams: StreamStates
    batches: DealtBatches | SharedBatches | None
    num_readers: int
    to_skip: int
    """Batches of a stream that come and are passed over."""
    reads_ahead: bool
    """Whether a batch is read before the one ahead of it is given out: else where somebody needs to know the end."""
    num_batches: int | None
    """Of the pass, where that is known for certain."""
    goes_on: bool
    """Whether it does behind a batch that could not be read: where no other rank has parts of the same batches."""
    is_sharded: bool
    begin: Callable[[], Iterator[Parts | ReadBatch | Ended | Skipped | Unread]]
    """Reads from the beginning of `batches`; called again where other workers' come to them."""
    note_advance: Callable[[], None]
    """Another batch was asked for."""
    note_yield: Callable[[bool], int]
    """Whether the batch that is yielded is the last; returns its number among those that the loader yielded."""
    note_end: Callable[[], None]
    """The batch that was yielded last has turned out to be the last."""
    finish: Callable[[], None]
    check: Callable[[], None]
    """Raises InvalidArgument where the loader was loaded since the pass began."""
    any_has_more: Callable[[bool], bool]
    """As of LoaderHost."""
    refusal: Callable[[bool], InvalidArgument | None]
    """Collective: an error where a worker needs an empty part, which is given, and has none to model it on."""
    assembled: Callable[[Parts | None], ReadAhead]
    """The batch of parts; an empty one of None."""


class Pass(Iterator[Any]):
    """One pass over a loader.

    The loader does not hold it, so that leaving a loop early ends the DataLoader's worker processes at once.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._of_job = None if reads.batches is None else reads.batches.of_job
        self._hold = None if self._of_job is None else self._of_job.hold()
        self._results = reads.begin()
        self._ended: set[int] = set()
        self._to_skip = reads.to_skip
        self._begun = False
        self._reading = threading.RLock()
        """Held to read: replicas' threads may ask for the end, and threads of the program's advance the pass."""
        self._is_read = False
        self._ahead: ReadAhead | Failed | None = None
        """The next batch, once it is read; None at the end."""

    def __next__(self) -> Any:
        self._reads.check()
        self._reads.note_advance()
        if self._of_job is not None:
            self._of_job.done()
        with self._reading:
            return self._next()

    def _next(self) -> Any:
        of_job = self._of_job
        if not self._is_read:
            self._ahead = self._read(first=not self._begun)
            self._begun = self._is_read = True
        while self._ahead is None and of_job is not None and of_job.wait_for_more():
            self._results = self._reads.begin()
            self._ahead = self._read()
        batch = self._ahead
        if batch is None:
            self._reads.position.note_end()
            self._reads.finish()
            if self._reads.batches is not None:
                self._reads.batches.end()
            raise StopIteration
        if isinstance(batch, Failed):
            if of_job is not None and batch.number is not None:
                of_job.lost(batch.number)
            self._ahead = None
            if self._reads.goes_on and not batch.ends:
                self._pass_over(batch)
            raise batch.error
        if of_job is not None and batch.number is not None:
            of_job.yielded(batch.number)
        if self._reads.reads_ahead:
            self._ahead = self._read()
            is_last = self._ahead is None
        else:
            self._is_read = False
            is_last = self._reads.position.num_yielded + 1 == self._reads.num_batches
        number = self._reads.note_yield(is_last)
        self._reads.position.yielded(batch.value, batch.part_rows, number, is_last=is_last)
        if batch.read is not None:
            self._reads.streams.yielded(batch.read)
        for arrival in batch.arrivals:
            arrival.join()
        return batch.value

    def look_ahead(self) -> None:
        """Reads the next batch where that is needed to know whether the one that was yielded last is the last."""
        if self._reads.reads_ahead or self._reads.num_batches is not None:
            return
        with self._reading:
            if self._is_read or not self._begun:
                return
            self._ahead = self._read()
            self._is_read = True
            if self._ahead is None:
                self._reads.position.note_end()
                self._reads.note_end()

    def _pass_over(self, failed: Failed) -> None:
        """As torch's loaders do: who catches the error gets what comes after it."""
        self._reads.position.num_yielded += 1
        if not self._reads.reads_ahead:
            self._is_read = False
            return
        try:
            self._ahead = self._read()
        except Exception as error:
            raise error from failed.error

    def _read(self, *, first: bool = False) -> ReadAhead | Failed | None:
        """The next batch, what went wrong in reading it, or None at the end. An error waits until it is asked for."""
        reads = self._reads
        found = _attempted(self._next_parts)
        read = found if isinstance(found, ReadBatch) else None
        parts = found.parts if isinstance(found, ReadBatch) else found.error if isinstance(found, Unread) else found
        more = parts is not None
        refusal = None
        if reads.is_sharded:
            more = reads.any_has_more(more)
            refusal = reads.refusal(parts is None) if more and first else None
        number = None if reads.batches is None or parts is None else reads.batches.numbers.of(parts)
        if isinstance(parts, Exception):
            return Failed(parts, number, ends=not isinstance(found, Unread))
        if refusal is not None or not more:
            return None if refusal is None else Failed(refusal, ends=True)
        batch = _attempted(lambda: replace(reads.assembled(parts), number=number, read=read))
        return Failed(batch, number, ends=parts is None) if isinstance(batch, Exception) else batch

    def _next_parts(self) -> Parts | ReadBatch | Unread | None:
        while len(self._ended) < self._reads.num_readers:
            result = next(self._results, None)
            if result is None:
                break
            if isinstance(result, Ended):
                self._ended.add(result.worker)
                self._reads.streams.ended(result.worker, result.state)
            elif isinstance(result, Skipped) or self._to_skip > 0:
                self._to_skip -= 1  # a batch too, where a reader that was to pass over one was at its end
            else:
                return result
        return None


class PassWatch:
    """Whether a pass, which its loader does not hold, is there, and what was done since it is gone."""

    def __init__(self, watched: Pass, steps: Callable[[], int], leave: Callable[[], None]) -> None:
        """`steps`: how many the job has made; InvalidArgument once nobody knows. `leave` is called when it is gone."""
        self._steps = steps
        self._leave = leave
        self._at_end: int | None = None
        self._pass = weakref.ref(watched, self._note_end)

    def look_ahead(self) -> None:
        """Finds out whether the batch that it yielded last is its last, where it is there."""
        watched = self._pass()
        if watched is not None:
            watched.look_ahead()

    def was_left(self) -> bool:
        """Whether it is gone, and a step was made since."""
        return self._at_end is not None and self._steps() > self._at_end

    def _note_end(self, _: object) -> None:
        self._leave()
        with contextlib.suppress(InvalidArgument):
            self._at_end = self._steps()


def _attempted(function: Callable[[], _T]) -> _T | Exception:
    try:
        return function()
    except Exception as error:
        return error
