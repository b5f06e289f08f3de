"""In what two checkpoints differ, to the last bit."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.describing import dtype_of, value_text
from muster.checkpoint.reading import Checkpoint, with_numbers
from muster.saved_optimizer import has_numbers

__all__ = ["compare"]


@dataclass(frozen=True)
class Comparison:
    """Of two checkpoints."""

    differences: list[str]
    """A line each."""
    equal_tensors: int
    equal_values: int


def compare(first: Checkpoint, second: Checkpoint) -> Comparison:
    """By the places that tensors and values have. Versions, times and numbers of checkpoints do not count, and where
    one has numbers for an optimizer's parameters, the names of the other do not either."""
    documents = [_document(checkpoint) for checkpoint in (first, second)]
    if first.is_of_strategy and second.is_of_strategy:
        _number_alike(*documents)
    ours, theirs = (dict(_leaves_of(document, ())) for document in documents)
    differences, tensors, values = [], 0, 0
    for place, value in ours.items():
        if place not in theirs:
            differences.append(f"{_path(place)}: only in the first, {_words(value)}")
        elif (difference := _difference(value, theirs[place])) is not None:
            differences.append(f"{_path(place)}: {difference}")
        elif isinstance(value, Tensor):
            tensors += 1
        else:
            values += 1
    for place, value in theirs.items():
        if place not in ours:
            differences.append(f"{_path(place)}: only in the second, {_words(value)}")
    return Comparison(differences, tensors, values)


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.is_of_strategy:
        return {name: part for name, part in checkpoint.parts().items() if part is not None and part != {}}
    if checkpoint.is_known:
        return {"content": checkpoint.document()}
    return {"metadata": checkpoint.metadata, "tensors": checkpoint.tensors}


def _number_alike(first: dict[str, Any], second: dict[str, Any]) -> None:
    optimizers = [list(document.get("optimizers", ())) for document in (first, second)]
    for number, pair in enumerate(zip(*optimizers, strict=False)):
        if any(map(has_numbers, pair)) and not all(map(has_numbers, pair)):
            for document, listed, optimizer in zip((first, second), optimizers, pair, strict=True):
                packed = with_numbers(optimizer)
                listed[number] = {
                    "name": optimizer["name"], "groups": packed["param_groups"], "state": packed["state"],
                }  # fmt: skip
                document["optimizers"] = listed


_Place = tuple[tuple[type, Any], ...]
"""The keys on the way to a value, with their types: 1, "1" and True are three."""


def _path(place: _Place) -> str:
    return "/".join(str(key) for _, key in place)


def _leaves_of(value: Any, place: _Place) -> Iterator[tuple[_Place, Any]]:
    items: list[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)) and any(isinstance(each, (Tensor, Mapping, list, tuple)) for each in value):
        items = list(enumerate(value))
    if not items:
        yield place, value
        return
    for key, each in items:
        yield from _leaves_of(each, (*place, (type(key), key)))


def _words(value: Any) -> str:
    return f"{dtype_of(value)} {list(value.shape)}" if isinstance(value, Tensor) else value_text(value)


def _difference(first: Any, second: Any) -> str | None:
    """None where there is none."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        are_tensors = isinstance(first, Tensor) or isinstance(second, Tensor)
        return f"{_words(first)} and {_words(second)}" if are_tensors or not _same(first, second) else None
    if first.dtype != second.dtype or first.shape != second.shape:
        return f"{_words(first)} and {_words(second)}"
    differ = (_bytes(first) != _bytes(second)).any(dim=1)
    number = int(differ.sum())
    if number == 0:
        return None
    ours, theirs = (tensor.flatten()[differ].to(torch.complex128) for tensor in (first, second))
    distance = (ours - theirs).abs().max()
    return f"{number:,} of {first.numel():,} elements differ, by at most {float(distance):.6g}"


def _bytes(tensor: Tensor) -> Tensor:
    """A row for each element."""
    return tensor.contiguous().flatten().view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _same(first: Any, second: Any) -> bool:
    """To the last bit, so that a number that is none is the same as itself."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
