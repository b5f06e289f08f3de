"""Which operations all ranks of a process set have asked for, whatever the order in which each did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.horovod.requests import Request, disagreement

__all__ = ["Negotiation", "Ready"]


@dataclass(frozen=True)
class Ready:
    """An operation whose time has come on all ranks."""

    requests: dict[int, Request]
    """By rank; without ranks that have joined."""
    error: str | None
    """Why it cannot be done, on every rank."""
    last_joined: int = -1
    """Of a join: who came last."""

    @property
    def request(self) -> Request:
        """That of the lowest rank."""
        return self.requests[min(self.requests)]


class Negotiation:
    """The table of what ranks asked for. Every rank has one, and sees the same messages in the same order, so that all
    tables are equal; there is no coordinator. Owned by the engine's thread."""

    def __init__(self, size: int) -> None:
        """For `size` ranks."""
        self._size = size
        self._waiting: dict[str, dict[int, Request]] = {}
        self._joined: dict[int, Request] = {}
        self._last_joined = -1

    def add(self, messages: Sequence[Sequence[Request]]) -> list[Ready]:
        """Takes what each rank asks for besides what it did before, and returns what all have asked for, in one order
        on all ranks."""
        for rank, requests in enumerate(messages):
            for request in requests:
                if request.kind == "join":
                    self._joined[rank] = request
                    self._last_joined = rank
                else:
                    self._waiting.setdefault(request.key, {})[rank] = request
        needed = self._size - len(self._joined)
        ready = []
        for key, requests_by_rank in list(self._waiting.items()):
            if sum(rank not in self._joined for rank in requests_by_rank) == needed:
                del self._waiting[key]
                ready.append(Ready(requests_by_rank, disagreement(requests_by_rank, len(self._joined))))
        if needed == 0:
            ready.append(Ready(self._joined, None, self._last_joined))
            self._joined, self._last_joined = {}, -1
        return ready

    def missing(self, key: str) -> list[int] | None:
        """Ranks that have not asked for the operation `key`; None where this rank's asking for it has not come through,
        since some rank does not answer."""
        have = self._waiting.get(key)
        if have is None:
            return None
        return [rank for rank in range(self._size) if rank not in have and rank not in self._joined]

    def others_of_name(self, name: str, ranks: Sequence[int]) -> dict[int, str]:
        """Kinds of operations of this name that `ranks` have asked for, and others have not. By rank."""
        waiting = list(self._waiting.values())  # while the engine's thread goes on
        return {
            rank: requests[rank].kind
            for requests in waiting
            for rank in ranks
            if rank in requests and requests[rank].name == name
        }
