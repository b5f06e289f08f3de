"""Nested values in a file: a JSON document, and tensors by names that say where in the document they are."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from muster import _C
from muster.errors import CheckpointError, InvalidArgument

__all__ = ["copied", "decode", "encode", "encode_in_place"]

_T = TypeVar("_T")

_MAX_DEPTH = 200
"""Of values in one another: what C++ reads, too."""

_KEY_BITS = 64
"""Of integers as keys, sign included: what C++ reads, too."""

_MAX_BITS = 10_000
"""Of integers. Python reads 4300 digits, and no more, unless it was told otherwise."""


def encode(value: object) -> tuple[str, dict[str, Tensor]]:
    """The document of a value, and its tensors, on the CPU and not copied where they are there already.

    What JSON has no word for is an object of one member: ``{"tensor": name}``, ``{"tuple": [...]}``,
    ``{"dict": {...}}``, ``{"items": [[key, value], ...]}`` of a dict with integers among its keys, ``{"counter":
    [[key, count], ...]}`` and ``{"float": "nan"}`` (or "inf", "-inf"). Raises InvalidArgument naming the place of
    anything else.
    """
    document, tensors = encode_in_place(value)
    return document, {name: tensor.cpu() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def encode_in_place(value: object) -> tuple[str, dict[str, Tensor | _C.Run]]:
    """As encode(), with tensors on the device where they are, and runs of tensors in their place."""
    tensors: dict[str, Tensor | _C.Run] = {}
    return json.dumps(_described(value, "", tensors), allow_nan=False), tensors


def decode(document: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value. Raises CheckpointError for what encode() does not give."""
    try:
        return _built(json.loads(document), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"this is no document of a checkpoint ({error!r}); load another one") from error


def copied(value: _T) -> _T:
    """The value with copies of its tensors, which may lie in the memory of their file."""
    return cast(_T, tree_map_only(Tensor, Tensor.clone, value))


def _described(value: object, path: str, tensors: dict[str, Tensor | _C.Run], depth: int = 1) -> Any:
    if depth > _MAX_DEPTH:
        raise InvalidArgument(
            f"'{path[:80]}...' lies too deep for a checkpoint, or in itself; save at most {_MAX_DEPTH} values in one "
            "another"
        )
    if isinstance(value, (Tensor, _C.Run)):
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise InvalidArgument(f"'{path}' is a sparse tensor, which a checkpoint does not hold; make it dense")
        # Elsewhere one stands in for a tensor that parameter servers write.
        if isinstance(value, Tensor) and value.is_meta and path.startswith("state/"):
            raise InvalidArgument(f"'{path}' is a tensor on the device meta, which has no values; materialize it")
        name = path
        while name in tensors:  # a key with a slash
            name += "'"
        tensors[name] = value.detach() if isinstance(value, Tensor) else value
        return {"tensor": name}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _check_is_utf8(value, f"'{path}'")
        return value
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise InvalidArgument(f"'{path}' is an integer of {value.bit_length()} bits; save it as text, hex() of it")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, (list, tuple)):
        items = [_described(item, f"{path}/{i}", tensors, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise InvalidArgument(f"'{path}' has the key {key!r}; a checkpoint takes strings and integers as keys")
            if isinstance(key, str):
                _check_is_utf8(key, f"a key of '{path}'")
            elif key.bit_length() >= _KEY_BITS:
                raise InvalidArgument(f"'{path}' has the key {key}; a checkpoint takes integers of 64 bits as keys")
        items = [
            [key, _described(item, f"{path}/{key}" if path else str(key), tensors, depth + 1)]
            for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {"counter": items}
        return {"dict": dict(items)} if all(isinstance(key, str) for key in value) else {"items": items}
    raise InvalidArgument(
        f"'{path}' is a {type(value).__name__}, which a checkpoint does not hold; give objects that have state_dict() "
        "and load_state_dict(), tensors, numbers, strings, or tuples, lists and dicts of them"
    )


def _check_is_utf8(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # of the name of a file, say, as os.fsdecode() gives it
        raise InvalidArgument(f"{what} is {text!r}, which is no UTF-8; save repr() of it") from None


def _built(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_built(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_built(item, tensors) for item in content)
    if kind == "dict":
        return {key: _built(item, tensors) for key, item in content.items()}
    pairs = {key: _built(item, tensors) for key, item in content}
    if kind == "items":
        return pairs
    if kind == "counter":
        return Counter(pairs)
    raise ValueError(f"unknown kind {kind!r}")
