"""Batches that parameter servers deal, whole and in order, to whichever worker asks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from muster.errors import Timeout

__all__ = ["Dealer", "Dealing"]

_BETWEEN_ASKS = 0.02
"""Seconds."""


class Dealer(Protocol):
    """Who deals; see ``ServerClient::deal`` and ``end_pass``."""

    def deal(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> int | None:
        """The next batch of a pass; None where others still have some, and -1 once all are finished."""

    def end_pass(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> None:
        """Gives back what this worker was dealt and has not finished."""

    @property
    def patience(self) -> float:
        """Seconds to wait for other workers' batches."""


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
        self._current: int | None = None
        self.ended = False

    def to_read(self) -> Iterator[Any]:
        """Dealt batches, as long as there are some."""
        while True:
            number = self._ready.pop() if self._ready else self._ask()
            if number is None:
                return
            self._reading.append(number)
            yield self._batches[number]

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
        return self._place[0], self._place[1], number

    def wait_for_more(self) -> bool:
        """Whether there are more to read; waits while other workers may still leave some."""
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
