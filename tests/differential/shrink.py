"""A smaller program that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable

from differential.program import Program


def shrunk(program: Program, fails: Callable[[Program], bool], attempts: int = 150) -> Program:
    """Takes one thing after another away, as long as the program still fails; `fails` is asked at most `attempts`
    times. The result is no larger than the program, and with attempts enough nothing can be taken away from it."""
    found = True
    while found:
        found = False
        for smaller in program.smaller():
            if attempts == 0:
                return program
            if smaller == program or not smaller.optimizers:
                continue
            attempts -= 1
            if fails(smaller):
                program, found = smaller, True
                break
    return program
