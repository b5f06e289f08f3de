"""Nested values on their way through collectives: a description that travels as text, and tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from muster.errors import InvalidArgument

__all__ = ["decode", "encode"]


def encode(
    value: object, *, texts: bool = False, keeps_shared: bool = False, numbers_in_text: bool = False
) -> tuple[str, list[Tensor]]:
    """A value's description (JSON; tuples, lists, dicts, and what each leaf is) and its leaves as tensors.

    Leaves are tensors, numbers, bools and None, and with `texts` sparse tensors and strings, which travel inside the
    description, as numbers and bools do with `numbers_in_text`. With `keeps_shared` a tensor that is there twice is one
    leaf, and one tensor when it comes back. Raises InvalidArgument naming any other leaf, or a dict key that is neither
    a string nor an integer.
    """
    described = _Description(texts=texts, keeps_shared=keeps_shared, numbers_in_text=numbers_in_text)
    return json.dumps(described.of(value, "value")), described.leaves


def decode(description: str, leaves: list[Tensor], *, as_numbers: str | None = None) -> Any:
    """The inverse. Numbers come back as numbers: as they were, or after a reduction `as_numbers` ("mean": floats;
    "sum": bools as ints); "none": as tensors."""
    return _build(json.loads(description), leaves, iter(range(len(leaves))), as_numbers)


class _Description:
    """Of a value: its leaves are put in order."""

    def __init__(self, *, texts: bool, keeps_shared: bool, numbers_in_text: bool) -> None:
        self.leaves: list[Tensor] = []
        self._texts = texts
        self._plain: tuple[type, ...] = (*[str] * texts, *[bool, int, float] * numbers_in_text)
        self._number_of: dict[int, int] | None = {} if keeps_shared else None  # by id of a tensor

    def of(self, value: object, path: str) -> Any:
        """What describes `value`, which is at `path`."""
        if self._texts and isinstance(value, Tensor) and value.is_sparse:
            # As they are: coalescing would round sums.
            self.leaves += [value._indices(), value._values()]
            return {"sparse": [list(value.shape), value.is_coalesced()]}
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if value is None:
            return None
        if isinstance(value, self._plain):
            return {"plain": value}
        if isinstance(value, bool):
            self.leaves.append(torch.tensor(int(value)))
            return "bool"
        if isinstance(value, int):
            self.leaves.append(torch.tensor(value))
            return "int"
        if isinstance(value, float):
            self.leaves.append(torch.tensor(value, dtype=torch.float64))
            return "float"
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.of(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, (str, int)):
                    raise InvalidArgument(f"{path}: key {key!r} must be a string or an integer")
            return {"dict": [[key, self.of(item, f"{path}[{key!r}]")] for key, item in value.items()]}
        raise InvalidArgument(
            f"{path}: a {type(value).__name__} cannot travel between replicas; pass tensors and numbers, in tuples, "
            "lists and dicts"
        )

    def _of_tensor(self, tensor: Tensor) -> Any:
        if self._number_of is not None:
            number = self._number_of.setdefault(id(tensor), len(self.leaves))
            if number < len(self.leaves):
                return {"leaf": number}
        self.leaves.append(tensor)
        return "tensor"


def _build(node: Any, leaves: Sequence[Tensor], order: Iterator[int], as_numbers: str | None) -> Any:
    if node is None:
        return None
    if isinstance(node, str):
        leaf = leaves[next(order)]
        if node == "tensor" or as_numbers == "none":
            return leaf
        if as_numbers == "mean":
            return float(leaf)
        if node == "bool":
            return int(leaf) if as_numbers == "sum" else bool(leaf)
        return leaf.item()
    ((kind, content),) = node.items()
    if kind == "plain":
        return content
    if kind == "leaf":
        return leaves[content]
    if kind == "sparse":
        indices, values = leaves[next(order)], leaves[next(order)]
        return torch.sparse_coo_tensor(indices, values, content[0], is_coalesced=content[1], check_invariants=False)
    if kind == "dict":
        return {key: _build(item, leaves, order, as_numbers) for key, item in content}
    built = [_build(item, leaves, order, as_numbers) for item in content]
    return built if kind == "list" else tuple(built)
