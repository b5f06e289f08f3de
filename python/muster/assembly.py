"""What parts that were read become for the loop."""

from __future__ import annotations

from typing import Any

from muster.batch import emptied, place
from muster.copies import CopyStreams
from muster.errors import InvalidArgument
from muster.fields import yielded
from muster.loader_host import LoaderHost
from muster.loader_pass import ReadAhead
from muster.reader import LocalParts, Parts

__all__ = ["Assembly"]

_END = object()


class Assembly:
    """Puts parts of a loader's batches on their devices, and models empty ones. Owned by the thread that iterates."""

    def __init__(self, host: LoaderHost, local_parts: LocalParts, *, is_sharded: bool) -> None:
        self._host = host
        self._num_local = local_parts.num_local
        self._is_sharded = is_sharded
        self._empty: Any = _END
        self._copies = CopyStreams()

    def assembled(self, parts: Parts | None) -> ReadAhead:
        """The batch of these parts on their devices; of empty ones for None. Raises InvalidArgument where none came
        that they could be modelled on, since the first ones could not be read."""
        if parts is None and self._empty is _END:
            raise self._refusal("this")
        values, counts = ([self._empty] * self._num_local, [0] * self._num_local) if parts is None else parts
        if self._is_sharded and self._empty is _END:
            self._empty = emptied(values[0], -1 if counts[0] is None else counts[0])
        devices = self._host.devices
        arrivals = self._copies.begin(devices)
        placed = [
            place(value, device, None if arrival is None else arrival.copy)
            for value, device, arrival in zip(values, devices, arrivals, strict=True)
        ]
        known = [count for count in counts if count is not None]
        return ReadAhead(
            yielded(placed, known),
            known if len(known) == len(counts) else None,
            arrivals=[arrival for arrival in arrivals if arrival is not None],
        )

    def refusal(self, needs_empty: bool) -> InvalidArgument | None:
        """Collective. An error for every worker if one needs an empty part and never had a batch to model it on."""
        missing = needs_empty and self._empty is _END
        if not self._host.any_has_more(missing):
            return None
        return self._refusal("this" if missing else "another")

    @staticmethod
    def _refusal(whose: str) -> InvalidArgument:
        return InvalidArgument(
            f"{whose} worker's loader (sharded=True) has never had a batch to model its empty parts on while others "
            "have data; give every worker at least one batch in its first epoch"
        )
