"""Hooks of modules that several replicas call."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

__all__ = ["HOOK_TABLES", "followed_hook"]

_FORWARD_AND_BACKWARD = frozenset({"_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"})
HOOK_TABLES = _FORWARD_AND_BACKWARD | {
    "_load_state_dict_post_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
}  # fmt: skip
"""A module's attributes that hold its hooks."""

_CONTAINERS = (dict, list, set, deque)
_warned: set[tuple[str, str]] = set()


def followed_hook(table: str, hook: Any, memo: dict[int, Any]) -> Any:
    """What another replica has for a hook of replica 0's, of one of HOOK_TABLES: the hook itself, or where it is bound
    to a part of replica 0's module, or a function that was defined over one, that of the replica's part. Warns, once,
    of one that replicas share with what it writes to. `memo` is deepcopy's: it knows what stands for each part."""
    own = _own_hook(hook, memo)
    if table in _FORWARD_AND_BACKWARD and (own is hook or isinstance(own, FunctionType)):
        _warn_of_shared(hook)
    return own


def _own_hook(hook: Any, memo: dict[int, Any]) -> Any:
    if isinstance(hook, MethodType) and id(hook.__self__) in memo:
        return MethodType(hook.__func__, memo[id(hook.__self__)])
    if isinstance(hook, functools.partial):
        values = [hook.func, *hook.args, *hook.keywords.values()]
        if any(id(value) in memo or isinstance(value, MethodType) for value in values):
            arguments = [_own_hook(memo.get(id(value), value), memo) for value in hook.args]
            keywords = {name: _own_hook(memo.get(id(value), value), memo) for name, value in hook.keywords.items()}
            return functools.partial(_own_hook(hook.func, memo), *arguments, **keywords)
    return _own_function(hook, memo, frozenset()) if isinstance(hook, FunctionType) else hook


def _warn_of_shared(hook: Any) -> None:
    """Warns, once, where it can write to containers that are no replica's own: another replica's call replaces what one
    has written."""
    names = sorted({name for name, value in _reached(hook) if isinstance(value, _CONTAINERS)})
    what = _described(hook)
    if not names or what in _warned:
        return
    _warned.add(what)
    logging.getLogger("muster").warning(
        "the hook %s (%s) is called by several replicas at once, and they share what it holds: %s. What one writes "
        "there, others replace. Keep it in the module that the hook is given (module.x = ...), and read it there, or "
        "return it from forward",
        *what, ", ".join(names),
    )  # fmt: skip


def _own_function(function: FunctionType, memo: dict[int, Any], outer: frozenset[int]) -> FunctionType:
    """Of one that a decorator has wrapped, too: what it closes over is a function. `outer`: those that hold it."""
    cells = function.__closure__ or ()
    own = tuple(_own_cell(cell, memo, outer | {id(function)}) for cell in cells)
    if all(mine is cell for mine, cell in zip(own, cells, strict=True)):
        return function
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, own)
    copy.__kwdefaults__ = function.__kwdefaults__
    return cast(FunctionType, functools.update_wrapper(copy, function))


def _own_cell(cell: CellType, memo: dict[int, Any], outer: frozenset[int]) -> CellType:
    content = _content_of(cell)
    if id(content) in memo:
        return CellType(memo[id(content)])
    if isinstance(content, FunctionType) and id(content) not in outer:
        own = _own_function(content, memo, outer)
        return cell if own is content else CellType(own)
    return cell


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    return zip(function.__code__.co_freevars, map(_content_of, function.__closure__ or ()), strict=True)


def _is_known(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "muster")


def _reached(hook: Any, outer: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """What a hook can write to besides its arguments, by name, as far as it can be seen. `outer`: functions that hold
    it."""
    if isinstance(hook, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(hook.args))
        yield from hook.keywords.items()
        yield from _reached(hook.func)
    elif isinstance(hook, FunctionType):
        for _, value in _closed_over(hook):  # what a decorator has wrapped
            if isinstance(value, FunctionType) and id(value) not in outer:
                yield from _reached(value, outer | {id(hook)})
        if _is_known(hook.__globals__.get("__name__")):
            return
        yield from _closed_over(hook)
        names = _global_names(hook.__code__)
        yield from ((name, hook.__globals__[name]) for name in names if name in hook.__globals__)
    elif isinstance(hook, MethodType) or not isinstance(hook, type):
        owner = hook.__self__ if isinstance(hook, MethodType) else hook
        if _is_known(type(owner).__module__):
            return
        known = vars(nn.Module()) if isinstance(owner, nn.Module) else {}
        attributes = getattr(owner, "__dict__", {}).items()
        yield from ((f"{type(owner).__name__}.{name}", value) for name, value in attributes if name not in known)


def _global_names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_global_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _described(hook: Any) -> tuple[str, str]:
    """Its name, and where it is."""
    function = hook
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return type(function).__qualname__, f"an object of {type(function).__module__}"
    return function.__qualname__, f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
