"""A training function that is called again after an operation has failed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from muster.horovod.basics import init, shutdown
from muster.horovod.elastic.state import State
from muster.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt, InvalidOperation

__all__ = ["run"]

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")

MAX_FAILURES = 3
"""How often errors may come in a row, without a commit of rank 0's in between, until they are raised."""


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A decorator: `func(state, ...)` is called when `state` is the same on all ranks, and again after it raised.

    HorovodInternalError: the state goes back to its last commit, all ranks meet again (shutdown(), init()), reset
    callbacks are called, the state of rank 0 goes to all, and `func` is called again. HostsUpdatedInterrupt: likewise,
    from the state as it is. The same processes must come: where one has died, those that live raise Timeout, after
    HOROVOD_GLOO_TIMEOUT_SECONDS, unless their launcher ends them first, and a launcher that starts all again (torchrun
    --max-restarts) lets them go on from what commit() has kept in MUSTER_COMMITS.

    Each restart is a warning of the logger "muster", with the error. Errors that a restart does not mend are raised:
    that ranks disagree about a tensor, that a name is under way already, and, on all ranks, whatever failed for the
    third time in a row without a commit in between. Ranks meet before they give up, so that none waits for another; the
    state is that of the last commit then.
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
            except InvalidOperation:
                raise
            except HorovodInternalError as error:
                cause: Exception = error
                if state.count_failure() < MAX_FAILURES:
                    _warn("from the last commit", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                cause = interrupt
                _warn("from the state as it is", interrupt)
                state.save()
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            _go_on_or_raise(state, cause)
            del cause  # whose frames keep tensors of the call that failed
            state.on_reset()

    return wrapper


def _go_on_or_raise(state: State, error: Exception) -> None:
    """Collective: raises `error` of this rank where all ranks give up."""
    number, text = state.agree_on_failures(error)
    if number < MAX_FAILURES:
        return
    if isinstance(error, HorovodInternalError):
        raise error
    raise HorovodInternalError(f"rank 0 has failed {MAX_FAILURES} times in a row without a commit: {text}") from error


def _warn(where: str, error: Exception) -> None:
    logging.getLogger("muster").warning(
        "hvd.elastic.run begins again %s, after %s: %s", where, type(error).__name__, error
    )
