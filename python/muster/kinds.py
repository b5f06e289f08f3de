"""Of what kind a value is that a user gave, or that a file has: a bool is no number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard

from muster.errors import InvalidArgument

__all__ = ["BOOL", "Requirement", "check_kinds", "is_count", "is_int", "is_real", "or_none"]

Requirement = tuple[Callable[[Any], bool], str]
"""Whether a value is right, and what it must be, in words."""


def check_kinds(given: Mapping[str, Any], requirements: Mapping[str, Requirement]) -> None:
    """Raises InvalidArgument for a value, by its name in `requirements`, that is not what it must be."""
    for name, value in given.items():
        is_right, requirement = requirements[name]
        if not is_right(value):
            raise InvalidArgument(f"{name}={value!r}: it must be {requirement}")


def is_int(value: object) -> bool:
    """Whether it is an integer of any library."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether it is a real number of any library."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether it is an int of Python, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Tells whether a value is None, or right."""
    return lambda value: value is None or is_right(value)


BOOL: Requirement = (lambda value: isinstance(value, bool), "True or False")
