"""Passes over a loader whose workers may die: batches that parameter servers deal, whole and in order, to whichever
worker asks; and batches that the workers which are live divide among themselves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from muster.errors import Timeout
from muster.reader import Deal

__all__ = ["Dealer", "Dealing", "Members", "Sharing"]

_BETWEEN_ASKS = 0.02
"""Seconds."""
_WHOLE = Deal(1, 0, 1)


class Dealer(Protocol):
    """Who deals; see ``ServerClient::deal`` and ``end_pass``."""

    def deal(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> int | None:
        """The next batch of a pass; None where others still have some, and -1 once all are finished."""

    def end_pass(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> None:
        """Gives back what this worker was dealt and has not finished."""

    @property
    def patience(self) -> float:
        """Seconds to wait for other workers' batches."""


class Members(Protocol):
    """Who takes part in steps; equal on all workers between any two steps."""

    @property
    def rank(self) -> int:
        """This worker's."""

    @property
    def expected_members(self) -> Sequence[int]:
        """The ranks that are expected in the next step, ascending."""

    def pass_of_others(self, loader: int, epoch: int) -> Mapping[str, Any] | None:
        """For a worker that joined, what Sharing.standing said of the others' pass over a loader, and the `members` of
        that window; empty where they have left this epoch, None where they have not begun it. Connects, where no step
        has."""


class Dealing:
    """This worker's share of one pass over a loader whose batches are `batches`. A batch that went into a step is
    finished with that step; any other when the loop asks for the one after it."""

    def __init__(self, dealer: Dealer, loader: int, epoch: int, batches: Sequence[Any]) -> None:
        self._dealer = dealer
        self._place = (loader, epoch, len(batches))
        self._batches = batches
        self._ready: list[int] = []  # dealt, to be read next
        self._reading: deque[int] = deque()
        self._finished: list[int] = []  # without a step
        self._in_window: list[int] = []  # the open one
        self._current: int | None = None
        self.ended = False

    def to_read(self) -> Iterator[tuple[Any, Deal]]:
        """Dealt batches, which this worker has whole, as long as there are some."""
        while True:
            number = self._ready.pop() if self._ready else self._ask()
            if number is None:
                return
            self._reading.append(number)
            yield self._batches[number], _WHOLE

    def was_read(self) -> int:
        """The number of the batch that was read next."""
        return self._reading.popleft()

    def yielded(self, number: int) -> None:
        """The loop gets this batch."""
        self._current = number

    def lost(self, number: int) -> None:
        """This batch could not be read."""
        self._finished.append(number)

    def done(self) -> None:
        """The loop is through with what it got."""
        if self._current is not None:
            self._finished.append(self._current)
        self._current = None

    def stepped(self) -> tuple[int, int, int] | None:
        """The batch that the loop got, for a step that it goes into."""
        if self._current is None:
            return None
        number, self._current = self._current, None
        self._in_window.append(number)
        return self._place[0], self._place[1], number

    def settle(self, members: Sequence[int]) -> None:
        """The window was closed, of this worker's parts alone."""
        self._in_window.clear()

    def forget(self) -> None:
        """The window was dropped: what it had is finished with the next step, or when more is asked for."""

    def wait_for_more(self) -> bool:
        """Whether there are more to read; waits while other workers may still leave some."""
        # Of a window that was dropped, or is still open: this worker would wait for itself.
        self._finished += self._in_window
        self._in_window.clear()
        deadline = time.monotonic() + self._dealer.patience
        while not self.ended:
            number = self._ask()
            if number is not None:
                self._ready.append(number)
                return True
            if not self.ended and time.monotonic() > deadline:
                raise Timeout("other workers did not finish their batches in time; look at their logs")
            time.sleep(0 if self.ended else _BETWEEN_ASKS)
        return False

    def leave(self) -> None:
        """The loop was left before its end."""
        self.done()
        if not self.ended:
            self._dealer.end_pass(*self._place, self._take_finished())
        self.ended = True

    def _ask(self) -> int | None:
        number = self._dealer.deal(*self._place, self._take_finished())
        self.ended = number == -1
        return None if self.ended else number

    def _take_finished(self) -> list[int]:
        finished, self._finished = self._finished, []
        return finished


class Sharing:
    """A pass over `batches` that are divided over the workers which are live when a batch is asked for. What a worker
    had of a batch when it died is divided again, as a batch of its own, over the others."""

    def __init__(self, members: Members, batches: Iterator[Any], standing: Mapping[str, Any] | None = None) -> None:
        """`standing`: goes on where another worker's pass was in a window that was closed since."""
        self._members = members
        self._batches = batches
        self._taken = 0  # of `batches`
        self._again: deque[_Piece] = deque()
        self._promised: deque[_Shared] = deque()  # asked for by the others, not yet by this one
        self._asked: deque[_Shared] = deque()  # and not yielded
        self._num_read = 0  # of those
        self._current: _Shared | None = None
        self._open: list[_Shared] = []  # in the open window
        if standing is not None:
            self._take_over(standing)

    def standing(self) -> dict[str, Any]:
        """Where the pass is, as JSON, in the window that is open."""
        return {
            "taken": self._taken,
            "again": [piece.place for piece in self._again],
            "asked": [(shared.piece.place, shared.members) for shared in self._asked],
            "open": [(shared.piece.place, shared.members) for shared in self._open],
        }

    def _take_over(self, standing: Mapping[str, Any]) -> None:
        self._taken = standing["taken"]
        taken = list(islice(self._batches, self._taken))

        def piece_at(place: Sequence[int]) -> _Piece:
            number, begin, end = place
            return _Piece(_indices(taken[number])[begin:end], number, begin)

        def shared_at(entries: Sequence[Any]) -> list[_Shared]:
            return [_Shared(piece_at(place), tuple(members)) for place, members in entries]

        self._again.extend(map(piece_at, standing["again"]))
        self._promised.extend(shared_at(standing["asked"]))
        self._open = shared_at(standing["open"])
        self.settle(standing["members"])

    def to_read(self) -> Iterator[tuple[Any, Deal]]:
        """Batches and how they are divided, those of dead workers first."""
        while True:
            shared = self._promised.popleft() if self._promised else self._next()
            if shared is None:
                return
            self._asked.append(shared)
            yield shared.piece.indices, shared.part_of(self._members.rank)

    def _next(self) -> _Shared | None:
        if self._again:
            piece = self._again.popleft()
        else:
            batch = next(self._batches, _END)
            if batch is _END:
                return None
            piece = _Piece(_indices(batch), self._taken, 0)
            self._taken += 1
        return _Shared(piece, tuple(self._members.expected_members))

    def was_read(self) -> _Shared:
        """The batch that was read next."""
        self._num_read += 1
        return self._asked[self._num_read - 1]

    def yielded(self, batch: _Shared) -> None:
        """The loop gets this one."""
        self.lost(batch)
        self._current = batch

    def lost(self, batch: _Shared) -> None:
        """This one could not be read."""
        self._asked.remove(batch)
        self._num_read -= 1

    def done(self) -> None:
        """The loop is through with what it got."""
        self._current = None

    def stepped(self) -> None:
        """What the loop got goes into a step."""
        if self._current is not None:
            self._open.append(self._current)
        self._current = None

    def settle(self, members: Sequence[int]) -> None:
        """The window was made of the parts of these ranks."""
        for shared in self._open:
            for rank in set(shared.members).difference(members):
                part = shared.piece.cut(shared.part_of(rank))
                if len(part.indices):
                    self._again.append(part)
        self._open.clear()

    def forget(self) -> None:
        """The window was dropped, everywhere."""
        self._open.clear()

    def wait_for_more(self) -> bool:
        """Whether there are more to read."""
        return bool(self._again)

    def leave(self) -> None:
        """The loop was left before its end."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """Indices of a batch, from its `begin`-th on."""

    indices: Any
    number: int
    begin: int

    @property
    def place(self) -> tuple[int, int, int]:
        return self.number, self.begin, self.begin + len(self.indices)

    def cut(self, deal: Deal) -> _Piece:
        (part,) = deal.slices(len(self.indices), ())
        return _Piece(self.indices[part], self.number, self.begin + part.start)


@dataclass(frozen=True, eq=False)
class _Shared:
    piece: _Piece
    members: tuple[int, ...]

    def part_of(self, rank: int) -> Deal:
        """Nothing for one that is no member."""
        if rank not in self.members:
            size = len(self.piece.indices)
            return Deal(size + 1, size, 1)
        return Deal(len(self.members), self.members.index(rank), 1)


def _indices(batch: Any) -> Any:
    return batch if isinstance(batch, Sequence) or hasattr(batch, "__array__") else list(batch)


_END = object()
