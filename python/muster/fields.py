"""What the loop gets of a batch: the parts of the local replicas, by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muster.batch import is_column, rebuilt, rows
from muster.per_replica import PerReplica

__all__ = ["yielded"]


def yielded(parts: list[Any], part_rows: Sequence[int]) -> Any:
    """What the loop gets of the placed parts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if _are_mappings_of_fields(parts):
        return rebuilt(first, [PerReplica(part[key] for part in parts) for key in first])
    if _are_sequences_of_fields(parts, part_rows):
        fields = [PerReplica(values) for values in zip(*parts, strict=True)]
        return rebuilt(first, fields) if hasattr(first, "_fields") else tuple(fields)
    return PerReplica(parts)


def _are_mappings_of_fields(parts: list[Any]) -> bool:
    return all(isinstance(part, Mapping) and part.keys() == parts[0].keys() for part in parts)


def _are_sequences_of_fields(parts: list[Any], part_rows: Sequence[int]) -> bool:
    """Whether the parts are tuples or lists of the same fields, and not columns or lists of one item per sample. Tuples
    of samples count as fields: a step puts them together again."""
    if not all(isinstance(part, (list, tuple)) and len(part) == len(parts[0]) > 0 for part in parts):
        return False
    if any(is_column(part) for part in parts):
        return False
    if isinstance(parts[0], tuple):
        return True
    filled = [(part, count) for part, count in zip(parts, part_rows, strict=False) if count > 0]
    return not filled or not all(len(part) == count and rows(part) != count for part, count in filled)
