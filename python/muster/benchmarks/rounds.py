"""Columns that take turns, so that what changes on the machine meanwhile meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

__all__ = ["Column", "by_clock", "fixed", "interleave", "lasting", "quartiles", "ratio", "take_turns"]

T = TypeVar("T")
Column = Callable[[], object]
More = Callable[[int], bool]
"""Whether there is another round after so many."""


def fixed(rounds: int) -> More:
    return lambda done: done < rounds


def lasting(seconds: float, least: int) -> More:
    """So many seconds from the first question on, and at least so many rounds."""
    ends: list[float] = []

    def more(done: int) -> bool:
        ends[:] = ends or [time.perf_counter() + seconds]
        return done < least or time.perf_counter() < ends[0]

    return more


def interleave(turns: Mapping[str, Callable[[], T]], more: More) -> dict[str, list[T]]:
    """What each column's turns gave, by round. Each round begins with another column; one before the first, which
    touches the memory and warms the clocks, does not count."""
    names = list(turns)
    found: dict[str, list[T]] = {name: [] for name in names}
    number = 0
    while number == 0 or more(number - 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(turns[name]())
        number += 1
    return {name: values[1:] for name, values in found.items()}


def by_clock(run: Column, repeats: int) -> float:
    """Milliseconds of the host's clock."""
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats * 1e3


def take_turns(
    columns: Mapping[str, Column], rounds: int, clock: Callable[[Column, int], float] = by_clock, repeats: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each column by round; a turn is one untimed run and the timed ones."""

    def turn(run: Column) -> float:
        run()
        return clock(run, repeats)

    return interleave({name: partial(turn, run) for name, run in columns.items()}, fixed(rounds))


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def ratio(over: list[float], under: list[float]) -> list[float]:
    """Quartiles over rounds."""
    return quartiles([a / b for a, b in zip(over, under, strict=True)])
