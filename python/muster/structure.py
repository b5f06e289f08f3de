"""Nested values on their way through collectives: a description that travels as text, and tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from muster.errors import InvalidArgument

__all__ = ["decode", "encode"]


def encode(value: object, *, texts: bool = False) -> tuple[str, list[Tensor]]:
    """A value's description (JSON; tuples, lists, dicts, and what each leaf is) and its leaves as tensors.

    Leaves are tensors, numbers, bools and None, and with `texts` sparse tensors and strings, which travel inside the
    description. Raises InvalidArgument naming any other leaf, or a dict key that is neither a string nor an integer.
    """
    leaves: list[Tensor] = []
    return json.dumps(_describe(value, "value", leaves, texts)), leaves


def decode(description: str, leaves: list[Tensor], *, as_numbers: str | None = None) -> Any:
    """The inverse. Numbers come back as numbers: as they were, or after a reduction `as_numbers` ("mean": floats;
    "sum": bools as ints); "none": as tensors."""
    return _build(json.loads(description), iter(leaves), as_numbers)


def _describe(value: object, path: str, leaves: list[Tensor], texts: bool) -> Any:
    if texts and isinstance(value, Tensor) and value.is_sparse:
        # As they are: coalescing would round sums.
        leaves += [value._indices(), value._values()]
        return {"sparse": [list(value.shape), value.is_coalesced()]}
    if isinstance(value, Tensor):
        leaves.append(value)
        return "tensor"
    if value is None:
        return None
    if isinstance(value, bool):
        leaves.append(torch.tensor(int(value)))
        return "bool"
    if isinstance(value, int):
        leaves.append(torch.tensor(value))
        return "int"
    if isinstance(value, float):
        leaves.append(torch.tensor(value, dtype=torch.float64))
        return "float"
    if texts and isinstance(value, str):
        return {"text": value}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(item, f"{path}[{i}]", leaves, texts) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int)):
                raise InvalidArgument(f"{path}: key {key!r} must be a string or an integer")
        return {"dict": [[key, _describe(item, f"{path}[{key!r}]", leaves, texts)] for key, item in value.items()]}
    raise InvalidArgument(
        f"{path}: a {type(value).__name__} cannot travel between replicas; pass tensors and numbers, in tuples, lists "
        "and dicts"
    )


def _build(node: Any, leaves: Any, as_numbers: str | None) -> Any:
    if node is None:
        return None
    if isinstance(node, str):
        leaf = next(leaves)
        if node == "tensor" or as_numbers == "none":
            return leaf
        if as_numbers == "mean":
            return float(leaf)
        if node == "bool":
            return int(leaf) if as_numbers == "sum" else bool(leaf)
        return leaf.item()
    ((kind, content),) = node.items()
    if kind == "text":
        return content
    if kind == "sparse":
        indices, values = next(leaves), next(leaves)
        return torch.sparse_coo_tensor(indices, values, content[0], is_coalesced=content[1], check_invariants=False)
    if kind == "dict":
        return {key: _build(item, leaves, as_numbers) for key, item in content}
    built = [_build(item, leaves, as_numbers) for item in content]
    return built if kind == "list" else tuple(built)
