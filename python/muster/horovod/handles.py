"""Operations under way, as the numbers that programs hold."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from muster.horovod.engine import Engine, Pending
from muster.horovod.process_sets import ProcessSet
from muster.horovod.requests import Request
from muster.horovod.runtime import running

__all__ = ["begin", "engine_of", "poll", "synchronize"]

_numbers = itertools.count()
_mutex = threading.Lock()
_handles: dict[int, tuple[Engine, Pending, Callable[[Any], Any]]] = {}  # guarded by _mutex


def engine_of(process_set: ProcessSet) -> Engine:
    """Of a set that this process belongs to. Raises ValueError for others, and for one that is not initialized."""
    number = process_set.process_set_id
    return running().engine(-1 if number is None else number)


def begin(
    engine: Engine,
    request: Request,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    finish: Callable[[Any], Any],
) -> int:
    """The handle of `request`, submitted to `engine`; `finish` makes of its result what synchronize() returns."""
    pending = engine.submit(request, inputs, outputs)
    handle = next(_numbers)
    with _mutex:
        _handles[handle] = (engine, pending, finish)
    return handle


def poll(handle: int) -> bool:
    """Whether the operation of `handle` is done, so that synchronize() returns, or raises, at once."""
    with _mutex:
        found = _handles.get(handle)
    return found is None or found[1].done.is_set()


def synchronize(handle: int) -> Any:
    """Waits for the operation of `handle`, and returns its result: a tensor, a list of them for grouped operations, or
    of an alltoall the rows and how many came from each rank. None for a handle that was synchronized before.

    Raises HorovodInternalError where the operation failed: a peer is gone, or ranks disagree.
    """
    with _mutex:
        found = _handles.get(handle)
    if found is None:
        return None
    engine, pending, finish = found
    try:
        return finish(engine.wait(pending))
    finally:
        if pending.done.is_set():
            with _mutex:
                _handles.pop(handle, None)
