"""Columns that take turns, so that what changes on the machine meanwhile meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["Column", "by_clock", "quartiles", "ratio", "rotated", "take_turns"]

Column = Callable[[], object]


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """The columns of a round: each round begins with another."""
    first = round_number % len(names)
    return [*names[first:], *names[:first]]


def by_clock(run: Column, repeats: int) -> float:
    """Milliseconds of the host's clock."""
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats * 1e3


def take_turns(
    columns: dict[str, Column], rounds: int, clock: Callable[[Column, int], float] = by_clock, repeats: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each column by round."""
    times: dict[str, list[float]] = {name: [] for name in columns}
    for round_number in range(rounds + 1):
        for name in rotated(list(columns), round_number):
            columns[name]()
            times[name].append(clock(columns[name], repeats))
    return {name: values[1:] for name, values in times.items()}  # the first round touches the memory, warms the clocks


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def ratio(over: list[float], under: list[float]) -> list[float]:
    """Quartiles over rounds."""
    return quartiles([a / b for a, b in zip(over, under, strict=True)])
