"""What a replica's module takes over of the attributes that user code changed in replica 0's."""

from __future__ import annotations

import copy
import io
import queue
import socket
import subprocess
import threading
from collections.abc import MutableMapping, MutableSequence, MutableSet, Sequence
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import _inject_new_class, _inject_property, is_parametrized

from muster.errors import InvalidArgument
from muster.hooks import HOOK_TABLES, followed_hook

__all__ = [
    "FOLLOWED_OTHERWISE",
    "SHARED_TYPES",
    "attribute_at",
    "compiled_alike",
    "follow",
    "parametrized_apart",
    "share_within",
    "view_of",
]

FOLLOWED_OTHERWISE = frozenset({"_parameters", "_modules", "_buffers", "training"})
SHARED_TYPES: list[type] = [
    type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
    threading.Thread, queue.Queue, io.IOBase, socket.socket, subprocess.Popen, GeneratorType,
]  # fmt: skip
"""Types of objects that drive modules, or cannot be copied, and are one for all replicas: neither looked into nor
copied."""


def follow(
    first: nn.Module,
    other: nn.Module,
    path: Sequence[Any],
    changed: Sequence[Any] | None,
    gone: Sequence[Any] | None,
    container: Any,
    memo: dict[int, Any],
) -> None:
    """A change that `_C.ModuleState` found in replica 0's module, in the module of another replica.

    `memo` is deepcopy's: it knows what stands for each part of replica 0's modules. What cannot be copied is shared.
    """
    source, target = attribute_at(first.__dict__, path), attribute_at(other.__dict__, path)
    if source is not container or target is source:
        # Replaced, which was taken over as a whole; or on purpose one object, which was set in all replicas.
        return
    if not path:
        for name in changed or ():
            if name not in FOLLOWED_OTHERWISE:
                target[name] = _own_attribute(first, other, name, target.get(name), memo)
    elif type(target) is not type(source):
        other.__dict__[path[0]] = _own(first.__dict__[path[0]], None, memo)
        return
    elif isinstance(source, MutableMapping) and changed is not None:
        is_hooks = path[0] in HOOK_TABLES
        for key in changed:
            value = source[key]
            target[key] = followed_hook(path[0], value, memo) if is_hooks else _own(value, target.get(key), memo)
    elif isinstance(source, MutableMapping):
        target.clear()
        target.update(_own(dict(source), None, memo))
    elif isinstance(source, MutableSequence):
        target[:] = _own(list(source), None, memo)
    elif isinstance(source, MutableSet):
        target.clear()
        target.update(_own(set(source), None, memo))
    else:  # a tensor in a tuple was written
        other.__dict__[path[0]] = _own(first.__dict__[path[0]], None, memo)
    for key in gone or ():
        if path or key not in FOLLOWED_OTHERWISE:
            target.pop(key, None)
    if path and isinstance(source, MutableMapping):
        _take_order(target, source)


def _take_order(target: MutableMapping[Any, Any], source: MutableMapping[Any, Any]) -> None:
    """That of hooks, of which one may come before earlier ones."""
    if list(target) != list(source) and target.keys() == source.keys():
        items = {key: target[key] for key in source}
        target.clear()
        target.update(items)


def attribute_at(attributes: Any, path: Sequence[Any]) -> Any:
    """What a `path` of `_C.ModuleState` leads to in a module's `attributes`; None where it leads nowhere."""
    for step in path:
        attributes = _enter(attributes, step)
    return attributes


def _enter(container: Any, step: Any) -> Any:
    try:
        return container.__dict__ if step is ... else container[step]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _own_attribute(first: nn.Module, other: nn.Module, name: str, current: Any, memo: dict[int, Any]) -> Any:
    value = first.__dict__[name]
    if current is value:
        return value
    if name == "_compiled_call_impl":
        return _compiled(first, other, value)
    return _own(value, current, memo)


def _own(value: Any, current: Any, memo: dict[Any, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple(SHARED_TYPES)):
        return value
    if isinstance(value, Tensor) and value._base is not None and id(value._base) in memo:
        return view_of(value, memo)
    share_within(value, memo)
    tables = (memo, memo.setdefault("torch", {}))  # the latter as UntypedStorage.__deepcopy__ has it
    known = [len(table) for table in tables]
    try:
        own = copy.deepcopy(value, memo)
    except Exception:
        for table, size in zip(tables, known, strict=True):
            for key in list(table)[size:]:  # of what is half copied
                del table[key]
        memo[id(value)] = value
        return value
    if isinstance(own, Tensor) and isinstance(current, Tensor) and own.device != current.device:
        return own.to(current.device)
    return own


def view_of(value: Tensor, memo: dict[int, Any]) -> Tensor:
    """What `value`, a view, is of the tensor that stands for its base in deepcopy's `memo`."""
    base, own = cast(Tensor, value._base), cast(Tensor, memo[id(value._base)])
    offset = own.storage_offset() + value.storage_offset() - base.storage_offset()
    with torch.set_grad_enabled(value.requires_grad):
        return own.as_strided(value.size(), value.stride(), offset)


def share_within(value: Any, memo: dict[int, Any]) -> None:
    """Lets deepcopy, whose `memo` it is, keep what `value` refers to and is one for all replicas."""
    shared, seen, rest = tuple(SHARED_TYPES), set[int](), [value]
    while rest:
        item = rest.pop()
        if id(item) in seen or id(item) in memo or isinstance(item, (Tensor, type, ModuleType, FunctionType)):
            continue
        seen.add(id(item))
        if isinstance(item, shared):
            memo[id(item)] = item
        elif isinstance(item, dict):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            rest += item
        elif isinstance(item, MethodType):
            rest.append(item.__self__)
        elif isinstance(attributes := getattr(item, "__dict__", None), dict):
            rest += attributes.values()


def compiled_alike(first: nn.Module, other: nn.Module) -> None:
    """Compiles the submodules of `other` as those of `first` were by Module.compile, which copies leave out."""
    for one, copied in zip(first.modules(), other.modules(), strict=True):
        value = one.__dict__.get("_compiled_call_impl")
        if value is not None:
            copied.__dict__["_compiled_call_impl"] = _compiled(one, copied, value)


def parametrized_apart(first: nn.Module, other: nn.Module) -> None:
    """Gives the parametrized submodules of `other`, a copy of `first`, classes of their own. Copies share torch's
    class, which names one module for all of them: `parametrize.cached` would give each the tensors of another."""
    for one, copied in zip(first.modules(), other.modules(), strict=True):
        if is_parametrized(copied) and type(copied) is type(one):
            copied.__class__ = type(copied).__bases__[0]
            _inject_new_class(copied)
            for name in cast(Any, copied).parametrizations:
                _inject_property(copied, name)


# Module.compile binds what it makes to the module.
def _compiled(first: nn.Module, other: nn.Module, value: Any) -> Any:
    config = getattr(value, "get_compiler_config", None)
    if not isinstance(config, FunctionType):
        return None
    cells = dict(zip(config.__code__.co_freevars, config.__closure__ or (), strict=True))
    if "self" not in cells:
        raise InvalidArgument(
            f"{type(first).__name__}.compile() of replica 0's module cannot be repeated for the other replicas; call "
            "compile() on the module that prepare() returned"
        )
    return cells["self"].cell_contents(other._call_impl)
