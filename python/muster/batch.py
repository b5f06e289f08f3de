"""How a batch is divided into parts.

A batch is a structure (tuples, named tuples, lists, mappings and dataclass instances, nested) of leaves. One rule of
sizes holds everywhere (`part_sizes`): contiguous parts in replica order that differ by at most one, larger first, or
follow the replicas' capacities (``balance="auto"``).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from muster import _C
from muster.errors import InvalidArgument
from muster.per_replica import PerReplica
from muster.tensor_memory import memory_of

__all__ = [
    "agreeing_rows",
    "digest",
    "emptied",
    "fewer_rows",
    "is_column",
    "is_sequence",
    "mapped",
    "members",
    "part_sizes",
    "pinned",
    "place",
    "rebuilt",
    "rows",
    "split",
]

T = TypeVar("T")

# MKL's sums depend on where a tensor starts; DESIGN.md, idea 4.
_ALIGNMENT_BYTES = 64

_WHOLE = (str, bytes, Number, type(None), torch.Size)
_LEAVES = (Tensor, PerReplica, PackedSequence, *_WHOLE)


def part_sizes(n: int, parts: int, capacities: Sequence[float] = ()) -> list[int]:
    """Sizes of `parts` contiguous parts of `n` samples, differing by at most one, larger first (9 over 4: 3,2,2,2).

    With `capacities`, one for each part and summing to 1: `muster::detail::part_sizes` of csrc/include/muster/batch.h.
    """
    if capacities:
        return _C.part_sizes(n, capacities)
    size, larger = divmod(n, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def split(
    args: Sequence[Any], num_parts: int, rows_hint: Sequence[int] | None = None, capacities: Sequence[float] = ()
) -> list[tuple[Any, ...]]:
    """Divides a step's positional arguments into `num_parts` argument tuples, one per local replica.

    At any depth of each argument's structure:

    - a PerReplica gives its parts explicitly; it must hold `num_parts`;
    - tensors of at least one dimension share size(0), the batch's rows, and are narrowed along it, contiguously;
    - a list that holds only strings, bytes and numbers, and a tuple of only strings and bytes (what torch's default
      collate makes of strings), is a column: its length must be the batch's rows, and it is sliced like a tensor;
    - 0-dim tensors, numbers, strings, bytes, None and torch.Size go to all parts.
    - a tuple of three or more numbers beside a list or tuple of as many tensors or structures (what
      ``tuple(zip(*samples))`` gives) is refused: both hold one item per sample, and would not be divided.

    Structures keep their types. A list or tuple of tensors is a structure whose tensors are split one by one, not a
    column of samples. Parts are views where they can be; a part that does not start on 64 bytes is a copy in the same
    memory format, so that its results do not depend on its neighbours. With one part nothing is divided, so that any
    object is accepted and size(0) need not agree.

    `rows_hint` holds the rows of each part when the batch came from a loader that knows them; tensors and columns
    must then have sum(rows_hint) rows and are divided by these sizes. Without it, the sizes are those of `part_sizes`
    with these `capacities`.

    Raises InvalidArgument naming the leaf: of another type, of another number of rows, sparse or nested, a PerReplica
    of another length, or a column where neither a tensor nor the hint tells the rows.
    """
    flat = _split_flat(args, num_parts, rows_hint, capacities) if num_parts > 1 else None
    if flat is not None:
        return flat
    arguments = [(f"argument {position}", value) for position, value in enumerate(args, start=1)]
    if num_parts == 1:
        return [tuple(_only_part(value, path) for path, value in arguments)]
    splitter = _Splitter(num_parts, *_sizes(arguments, num_parts, rows_hint, capacities))
    divided = [splitter.split(value, path) for path, value in arguments]
    return [tuple(parts[i] for parts in divided) for i in range(num_parts)]


def rows(part: object) -> int | None:
    """size(0) of the part's first tensor of at least one dimension, depth first in order; None when it has none.

    Tensors inside objects that are no structure are not seen.
    """
    return next(_all_rows(part), None)


def agreeing_rows(part: object) -> int | None:
    """The size(0) that all of the part's tensors of at least one dimension share; None when they differ or are none."""
    if type(part) is tuple and all(type(leaf) is Tensor and leaf.dim() > 0 for leaf in part):
        found = {leaf.size(0) for leaf in part}  # as below, without walking a structure
    else:
        found = set(_all_rows(part))
    return found.pop() if len(found) == 1 else None


def fewer_rows(part: object, samples: int) -> int | None:
    """The size(0) that all of the part's tensors of at least one dimension share, where that is less than `samples`:
    it was collated of fewer, maybe. None else, and where a tensor has as many along dimension 1 (time first)."""
    num_rows = agreeing_rows(part)
    if num_rows is None or num_rows >= samples:
        return None
    tensors = (leaf for _, leaf in _tensors(part, "") if leaf.dim() > 1 and not leaf.is_nested)
    return None if any(tensor.size(1) == samples for tensor in tensors) else num_rows


def digest(part: object) -> str:
    """Equal for parts whose tensors of at least one dimension are equal; empty where there is none. Reads them all."""
    found = hashlib.blake2b(digest_size=16)
    tensors = list(_tensors(part, ""))
    for path, tensor in tensors:
        shape = () if tensor.is_nested else tuple(tensor.shape)  # which torch does not know of all nested ones
        found.update(f"{path} {shape} {tensor.dtype}".encode())
        if tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type != "meta":
            values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            found.update(memory_of(values))
    return found.hexdigest() if tensors else ""


def is_column(value: object) -> bool:
    """Whether a list or tuple holds one plain value per sample rather than fields; see `split`."""
    if type(value) is list:
        return bool(value) and all(isinstance(item, (str, bytes, Number)) for item in value)
    return type(value) is tuple and bool(value) and all(isinstance(item, (str, bytes)) for item in value)


def emptied(part: T, num_rows: int) -> T:
    """The same structure and dtypes with 0 rows: tensors and columns of `num_rows` rows lose them, the rest stays.

    Shares no memory with `part`'s rows.
    """

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            splittable = leaf.dim() > 0 and leaf.layout == torch.strided and not leaf.is_nested
            return leaf.narrow(0, 0, 0).clone() if splittable and leaf.size(0) == num_rows else leaf
        return leaf[:0] if is_column(leaf) and len(leaf) == num_rows else leaf

    return mapped(empty, part, column_is_leaf=True)  # type: ignore[no-any-return]


def place(part: T, device: torch.device, copy: Callable[[Tensor], Tensor] | None = None) -> T:
    """The part with its tensors on `device` and starting on 64 bytes; the same object when nothing had to change.

    `copy` brings strided tensors from the host to a CUDA device; without it they are copied in the order of the current
    stream, as all others are. Objects that are no structure are moved by their ``to(device)``, if they have one and
    `device` is not the CPU, and else left alone.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.device.type == device.type == "cpu":
                return aligned(leaf)
            if leaf.device.type != "cpu" or device.type != "cuda" or leaf.layout != torch.strided or leaf.is_nested:
                return aligned(leaf.to(device, non_blocking=True))
            return pinned(leaf).to(device, non_blocking=True) if copy is None else copy(leaf)
        if device.type != "cpu" and not isinstance(leaf, _WHOLE) and callable(getattr(leaf, "to", None)):
            return leaf.to(device)
        return leaf

    return mapped(moved, part)  # type: ignore[no-any-return]


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in memory that a copy to a CUDA device need not wait for; itself where it is, or cannot be."""
    can_be = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested
    if not can_be or tensor.is_pinned():
        return tensor
    # Without gaps, which a copy would wait for, and without memory that several elements share: Tensor.pin_memory keeps
    # them, and cannot write to the latter.
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself when it starts on 64 bytes, else a copy that does, in the same memory format."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    if tensor.data_ptr() % _ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


def _split_flat(
    args: Sequence[Any], num_parts: int, rows_hint: Sequence[int] | None, capacities: Sequence[float]
) -> list[tuple[Any, ...]] | None:
    """What `split` gives for tensors and PerReplicas that agree, without walking structures; None for all else."""
    num_rows = None if rows_hint is None else sum(rows_hint)
    for arg in args:
        if type(arg) is PerReplica:
            if len(arg.parts) != num_parts:
                return None
            continue
        if type(arg) is not Tensor or arg.layout != torch.strided or arg.is_nested or arg.dim() == 0:
            return None
        if num_rows is None:
            num_rows = arg.size(0)
        elif arg.size(0) != num_rows:
            return None
    ranges = _ranges(part_sizes(num_rows or 0, num_parts, capacities) if rows_hint is None else rows_hint)
    columns = [arg.parts if type(arg) is PerReplica else _narrowed(arg, ranges) for arg in args]
    return list(zip(*columns, strict=True)) if columns else None


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each of contiguous parts starts, and its size."""
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _narrowed(tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = [tensor.narrow(0, start, size) for start, size in ranges]
    return [part if part.data_ptr() % _ALIGNMENT_BYTES == 0 else aligned(part) for part in parts]


class _Splitter:
    """Divides values into parts of known sizes. `num_rows` is None when nothing tells the batch's rows."""

    def __init__(self, num_parts: int, num_rows: int | None, sizes: Sequence[int]) -> None:
        self._num_parts = num_parts
        self._num_rows = num_rows
        self._ranges = _ranges(sizes)

    def split(self, value: Any, path: str) -> list[Any]:
        if isinstance(value, PerReplica):
            return list(_parts_of(value, path, self._num_parts))
        if isinstance(value, Tensor):
            if value.dim() == 0:
                return [value] * self._num_parts
            return _narrowed(value, self._ranges)
        if isinstance(value, _WHOLE):
            return [value] * self._num_parts
        if is_column(value):
            self._check_column(value, path)
            return [value[start : start + size] for start, size in self._ranges]
        found = members(value)
        if found is None:
            raise InvalidArgument(
                f"{path}: object of type {type(value).__name__} cannot be split; pass PerReplica([...]) with one part "
                f"per local replica ({self._num_parts} here), or make it of tensors"
            )
        _refuse_samples(found, path, self._num_parts)
        divided = [self.split(member, path + step) for step, member in found]
        return [rebuilt(value, [parts[i] for parts in divided]) for i in range(self._num_parts)]

    def _check_column(self, column: Sequence[Any], path: str) -> None:
        if len(column) == self._num_rows:
            return
        kind = type(column).__name__
        known = "there is no tensor to tell" if self._num_rows is None else f"the batch has {self._num_rows}"
        raise InvalidArgument(
            f"{path}: {kind} of {len(column)} plain values cannot be split, as such a {kind} holds one per row and "
            f"{known} rows; pass PerReplica([...]) with one part per local replica ({self._num_parts} here)"
        )


def _refuse_samples(found: Sequence[tuple[str, Any]], path: str, num_parts: int) -> None:
    """Raises InvalidArgument where members of a structure are lists of what one sample has each."""
    lengths = {len(member) for _, member in found if is_sequence(member) and any(map(_is_divided, member))}
    for step, member in found:
        is_numbers = type(member) is tuple and all(isinstance(item, Number) for item in member)
        if is_numbers and len(member) > 2 and len(member) in lengths:
            raise InvalidArgument(
                f"{path}{step}: a tuple of {len(member)} numbers beside as many tensors cannot be split, as both look "
                f"like one for each sample; stack them in the loader's collate_fn, pass PerReplica([...]) with one "
                f"part per local replica ({num_parts} here), or a torch.Size where they are the same for all samples"
            )


def is_sequence(value: object) -> bool:
    """Whether it is a list or tuple of members without names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


def _is_divided(member: object) -> bool:
    return (isinstance(member, Tensor) and member.dim() > 0) or bool(members(member))


def _only_part(value: Any, path: str) -> Any:
    def only(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return _parts_of(leaf, path, 1)[0]
        return aligned(leaf) if isinstance(leaf, Tensor) else leaf

    return mapped(only, value)


def _parts_of(value: PerReplica[Any], path: str, num_parts: int) -> tuple[Any, ...]:
    if len(value) != num_parts:
        raise InvalidArgument(
            f"{path}: a PerReplica of {len(value)} parts, but this worker has {num_parts} local replicas; "
            "pass one part for each"
        )
    return value.parts


def _sizes(
    arguments: Sequence[tuple[str, Any]],
    num_parts: int,
    rows_hint: Sequence[int] | None,
    capacities: Sequence[float],
) -> tuple[int | None, Sequence[int]]:
    """The batch's rows and those of each part. Raises InvalidArgument where tensors disagree."""
    num_rows, source = (None, "") if rows_hint is None else (sum(rows_hint), "the loader's batch")
    for path, tensor in (found for root, value in arguments for found in _tensors(value, root)):
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise InvalidArgument(
                f"{path}: a {kind} tensor cannot be split; pass PerReplica([...]) with one part per local replica "
                f"({num_parts} here)"
            )
        if num_rows is None:
            num_rows, source = tensor.size(0), path
        elif tensor.size(0) != num_rows:
            raise InvalidArgument(
                f"{path}: a tensor of {tensor.size(0)} rows (size(0)) cannot be split beside {source}, which has "
                f"{num_rows}; pass PerReplica([...]) with one part per local replica ({num_parts} here), the same "
                "tensor in each to give all of it to all"
            )
    if rows_hint is not None:
        return num_rows, rows_hint
    return num_rows, part_sizes(num_rows or 0, num_parts, capacities)


def _all_rows(part: object) -> Iterator[int]:
    return (tensor.size(0) for _, tensor in _tensors(part, ""))


def _tensors(node: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of at least one dimension, with their paths, outside any PerReplica, depth first."""
    if isinstance(node, Tensor) and node.dim() > 0:
        yield path, node
    for step, member in members(node) or ():
        yield from _tensors(member, path + step)


def members(node: Any) -> list[tuple[str, Any]] | None:
    """A structure's members, each with its step of a path; None for a leaf."""
    if isinstance(node, _LEAVES):
        return None
    if isinstance(node, Mapping):
        return [(f", key {key!r}", member) for key, member in node.items()]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", member) for name, member in zip(node._fields, node, strict=True)]
    if isinstance(node, (list, tuple)):
        return [(f"[{position}]", member) for position, member in enumerate(node)]
    return None


def rebuilt(node: Any, values: Sequence[Any]) -> Any:
    """A structure like `node` with other values, in the order of `members`. A dict stands in for an immutable mapping
    whose class makes none of a dict."""
    if isinstance(node, Mapping):
        if not isinstance(node, MutableMapping):
            made = dict(zip(node, values, strict=True))
            try:
                return type(node)(made)  # type: ignore[call-arg]
            except TypeError:
                return made
        clone: Any = copy.copy(node)
        for key, value in zip(node, values, strict=True):
            clone[key] = value
        return clone
    if dataclasses.is_dataclass(node):
        instance = copy.copy(node)
        for field, value in zip(dataclasses.fields(node), values, strict=True):
            object.__setattr__(instance, field.name, value)  # reaches the fields of a frozen one too
        return instance
    if isinstance(node, list):
        clone = copy.copy(node)
        clone[:] = values
        return clone
    if hasattr(node, "n_sequence_fields"):  # a struct of C, as torch.return_types are
        return type(node)(values)
    # Without the class's own constructor, which may take anything.
    clone = tuple.__new__(type(node), values)
    if hasattr(node, "__dict__"):
        vars(clone).update(vars(node))
    return clone


def mapped(function: Callable[[Any], Any], node: Any, *, column_is_leaf: bool = False) -> Any:
    """The structure `node` with `function` applied to its leaves; the same object when no leaf changed.

    With `column_is_leaf` a column (`is_column`) is a leaf, too.
    """
    found = None if column_is_leaf and is_column(node) else members(node)
    if found is None:
        return function(node)
    values = [mapped(function, member, column_is_leaf=column_is_leaf) for _, member in found]
    if all(after is before for after, (_, before) in zip(values, found, strict=True)):
        return node
    return rebuilt(node, values)
