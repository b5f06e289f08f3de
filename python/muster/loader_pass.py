"""One pass over a prepared loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from muster.position import Position
from muster.reader import Ended, Parts, Skipped
from muster.stream_states import ReadBatch, StreamStates
from muster.streams import epoch_seed
from muster.tasks import DealtBatches, SharedBatches

if TYPE_CHECKING:
    from muster.loader import Loader

__all__ = ["Pass", "ReadAhead"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class ReadAhead:
    """A batch that the loop gets next."""

    value: Any
    part_rows: list[int] | None
    number: int | None = None  # what its pass knows it by
    read: ReadBatch | None = None  # of a loader whose readers have states


class Pass(Iterator[Any]):
    """One pass over a loader, with one batch read ahead.

    The loader does not hold it, so that leaving a loop early ends the DataLoader's worker processes at once.
    """

    def __init__(
        self,
        loader: Loader[Any],
        position: Position,
        streams: StreamStates,
        batches: DealtBatches | SharedBatches | None,
        results: Iterator[Parts | ReadBatch | Ended | Skipped],
    ) -> None:
        self._loader = loader
        self._position = position
        self._streams = streams
        self._batches = batches
        self._of_job = None if batches is None else batches.of_job
        self._hold = None if self._of_job is None else self._of_job.hold()
        self._results = results
        self._epoch = loader._epoch
        self._ended: set[int] = set()
        # Of a stream; those of data that is read by index do not come. Where readers have states, each knows its own.
        is_stream = isinstance(loader._loader.dataset, IterableDataset) and not loader._resume
        self._to_skip = position.num_yielded if is_stream else 0
        self._begun = False
        self._ahead: ReadAhead | Exception | None = None

    def __next__(self) -> Any:
        self._note_end(False)
        of_job = self._of_job
        if of_job is not None:
            of_job.done()
        if not self._begun:
            self._begun = True
            self._ahead = self._read(first=True)
        while self._ahead is None and of_job is not None and of_job.wait_for_more():
            seed = epoch_seed(self._loader._host.seed, self._loader._index, self._epoch)
            self._results = self._loader._results(self._epoch, seed, self._batches)
            self._ahead = self._read()
        batch = self._ahead
        if batch is None:
            self._loader._finished(self._position)
            if self._batches is not None:
                self._batches.end()
            raise StopIteration
        if isinstance(batch, Exception):
            self._ahead = None
            raise batch
        if of_job is not None and batch.number is not None:
            of_job.yielded(batch.number)
        self._ahead = self._read()
        self._position.yielded(batch.value, batch.part_rows)
        if batch.read is not None:
            self._streams.yielded(batch.read)
        self._note_end(self._ahead is None)
        return batch.value

    def _note_end(self, at_end: bool) -> None:
        if self._loader._position is self._position:
            self._loader.progress.at_end = at_end

    def _read(self, *, first: bool = False) -> ReadAhead | Exception | None:
        """The next batch, what went wrong in reading it, or None at the end. An error waits until it is asked for."""
        loader = self._loader
        found = _attempted(self._next_parts)
        read = found if isinstance(found, ReadBatch) else None
        parts = found.parts if isinstance(found, ReadBatch) else found
        more = parts is not None
        refusal = None
        if loader._sharded:
            more = loader._host.any_has_more(more)
            refusal = loader._refusal(needs_empty=parts is None) if more and first else None
        number = None if self._batches is None or parts is None else self._batches.was_read()
        if isinstance(parts, Exception):
            if self._of_job is not None and number is not None:
                self._of_job.lost(number)
            return parts
        if refusal is not None or not more:
            return refusal
        return _attempted(lambda: replace(loader._assembled(parts), number=number, read=read))

    def _next_parts(self) -> Parts | ReadBatch | None:
        while len(self._ended) < self._loader._num_readers:
            result = next(self._results, None)
            if result is None:
                break
            if isinstance(result, Ended):
                self._ended.add(result.worker)
            elif isinstance(result, Skipped) or self._to_skip > 0:
                self._to_skip -= 1  # a batch too, where a reader that was to pass over one was at its end
            else:
                return result
        return None


def _attempted(function: Callable[[], _T]) -> _T | Exception:
    try:
        return function()
    except Exception as error:
        return error
