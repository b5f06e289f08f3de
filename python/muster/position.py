"""What a pass over a loader yielded."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from numbers import Number

from torch.nn.utils.rnn import PackedSequence

from muster.batch import is_column, members

__all__ = ["Position", "Yielded"]


@dataclass
class Yielded:
    """A batch that a pass has yielded."""

    part_rows: list[int] | None
    """The samples in each local replica's part; None where nothing tells."""
    number: int
    """Among those that the loader yielded, as `LoaderProgress` counts."""
    is_last: bool
    """Of its pass, as far as is known."""
    identities: list[_Identity]


class Position:
    """How many batches a pass has yielded, and the rows and the identities of the last ones."""

    _KEPT = 8
    """Batches that are recognised: loops fetch some ahead of their steps."""

    def __init__(self, num_skipped: int = 0) -> None:
        """`num_skipped`: batches that were yielded before, of another pass that this one goes on with."""
        self.num_yielded = num_skipped
        self._recent: deque[Yielded] = deque(maxlen=self._KEPT)
        self._addresses: frozenset[int] = frozenset()
        """Of what is recognised: most values in question are of no batch, and are to cost little."""

    def yielded(self, value: object, part_rows: list[int] | None, number: int, *, is_last: bool) -> None:
        """Notes that `value` is the latest."""
        self.num_yielded += 1
        fields = [] if is_column(value) else [field for _, field in members(value) or ()]
        identities = [_Identity(each) for each in (value, *fields) if not _is_plain(each)]
        self._recent.appendleft(Yielded(part_rows, number, is_last, identities))
        self._addresses = frozenset(each.address for batch in self._recent for each in batch.identities)

    def note_end(self) -> None:
        """The latest is its pass's last."""
        if self._recent:
            self._recent[0].is_last = True

    def find(self, value: object) -> Yielded | None:
        """The latest batch that `value` is, or is a field of, by identity."""
        if id(value) not in self._addresses:
            return None
        return next((batch for batch in self._recent if any(each.is_of(value) for each in batch.identities)), None)


class _Identity:
    """Recognises one object without keeping it alive.

    Builtin containers cannot be referenced weakly: one is recognised by its address and its members, so that another
    one at the same address is not mistaken for it. What can be told in neither way is kept alive; it holds no tensor.
    """

    def __init__(self, value: object) -> None:
        self.address = id(value)
        self._members: list[_Identity] = []
        self._kept: object = None
        self._reference: weakref.ref[object] | None = None
        try:
            self._reference = weakref.ref(_referable(value))
        except TypeError:
            self._members = [_Identity(member) for _, member in members(value) or () if not _is_plain(member)]
            if not self._members:
                self._kept = value

    def is_of(self, value: object) -> bool:
        if id(value) != self.address:
            return False
        if self._reference is not None:
            return self._reference() is _referable(value)
        if self._kept is not None:
            return self._kept is value
        found = [member for _, member in members(value) or () if not _is_plain(member)]
        return len(found) == len(self._members) and all(
            identity.is_of(member) for identity, member in zip(self._members, found, strict=True)
        )


def _referable(value: object) -> object:
    """What tells the object: of a packed sequence, which is a tuple, its tensor."""
    return value.data if isinstance(value, PackedSequence) else value


def _is_plain(value: object) -> bool:
    """Equal values may be one object, so its identity tells nothing."""
    return value is None or isinstance(value, (str, bytes, Number)) or (type(value) is tuple and not value)
