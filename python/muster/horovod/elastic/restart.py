"""A training function that is called again after an operation has failed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from muster.horovod.basics import init, shutdown
from muster.horovod.elastic.state import State
from muster.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["run"]

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A decorator: `func(state, ...)` is called when `state` is the same on all ranks, and again after it raised.

    HorovodInternalError: the state goes back to its last commit, all ranks meet again (shutdown(), init()), reset
    callbacks are called, the state of rank 0 goes to all, and `func` is called again. HostsUpdatedInterrupt: likewise,
    from the state as it is. The same processes must come: where one has died, those that live raise Timeout, after
    HOROVOD_GLOO_TIMEOUT_SECONDS, unless their launcher ends them first, and a launcher that starts all again (torchrun
    --max-restarts) lets them go on from what commit() has kept in MUSTER_COMMITS.
    """

    @functools.wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        skip_sync = False
        state.load_kept()
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                state.save()
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper
