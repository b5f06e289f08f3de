"""What goes wrong on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from muster import _C
from muster.errors import CheckpointError, Error, LayoutMismatch

__all__ = ["together", "told_by_all"]

_T = TypeVar("_T")

_DONE, _FAILED = "=", "!"
"""What texts begin with that ranks tell each other."""


def together(core: _C.StrategyCore, what: str, act: Callable[[], _T]) -> _T:
    """What `act` gives, which every rank of `core` calls in its call of `what`; where it raises on any, all raise.
    Collective where there are several."""
    result: list[_T] = []

    def acted() -> str:
        result.append(act())
        return ""

    told_by_all(core, what, acted)
    return result[0]


def told_by_all(core: _C.StrategyCore, what: str, act: Callable[[], str]) -> list[str]:
    """What `act` gives on every rank, by rank; else as `together`."""
    if core.num_workers == 1:
        return [act()]
    error: BaseException | None = None
    try:
        mine = _DONE + act()
    except BaseException as raised:
        error = raised
        mine = f"{_FAILED}{type(error).__name__}\n{_text_of(error)}"
    try:
        told = core.exchange_texts(mine, f"{what}()")
    except Error:
        if error is None:
            raise
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text.startswith(_FAILED):
            kind, _, words = text.removeprefix(_FAILED).partition("\n")
            shown = LayoutMismatch if kind == LayoutMismatch.__name__ else CheckpointError
            raise shown(f"{what}() failed on rank {rank}: {words}")
    return [text.removeprefix(_DONE) for text in told]


def _text_of(error: BaseException) -> str:
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception:
        text = "(its __str__ raises)"
    return text if isinstance(error, Error) else f"{type(error).__name__}: {text}".removesuffix(": ")
