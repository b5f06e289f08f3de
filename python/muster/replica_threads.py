"""The threads of a process's replicas."""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from muster import _C

__all__ = ["ReplicaThreads", "warn_of_one_lock"]

_MOST_DEVICES = 2
"""That a process keeps busy from Python."""


def warn_of_one_lock(devices: Sequence[torch.device]) -> None:
    """Logs where replicas of so many GPUs take turns at Python's global interpreter lock."""
    count = len({device for device in devices if device.type == "cuda"})
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    if count <= _MOST_DEVICES or not has_lock:
        return
    logging.getLogger("muster").warning(
        f"{count} GPUs in one process: Python runs their forward and backward passes under one lock, so that the "
        f"host's time for them adds up. A process for each GPU has none of that: muster run --workers {count}, with "
        "MultiWorkerMirroredStrategy.from_env()"
    )


class ReplicaThreads:
    """One thread for each of several local replicas; a single replica runs on the thread that calls."""

    def __init__(self, core: _C.StrategyCore) -> None:
        self._core = core
        self._in_function = [False] * core.local_replicas
        self._was_interrupted = False
        self.threads = _start_threads(core) if core.local_replicas > 1 else []

    def on_replicas(self, call: Callable[[int], Any]) -> Callable[[int], Any]:
        """`call` with the caller's context variables, and a note on what it raises."""
        contexts = [contextvars.copy_context() for _ in range(self._core.local_replicas)]

        def run(local: int) -> Any:
            self._in_function[local] = True
            try:
                return contexts[local].run(call, local)
            except BaseException as error:
                replica = self._core.first_replica + local
                error.add_note(f"[raised in replica {replica} of {self._core.num_replicas}, rank {self._core.rank}]")
                raise
            finally:
                self._in_function[local] = False

        return run

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the replicas that are in user code. Called by the thread that waits for them."""
        self._was_interrupted = True
        self._raise_in_replicas(KeyboardInterrupt)

    def take_back_interrupt(self) -> None:
        """Before a call: a replica that had finished when an interrupt came must not get it in the next step."""
        if self._was_interrupted and not self._core.busy:
            self._was_interrupted = False
            self._raise_in_replicas(None)

    def _raise_in_replicas(self, error: type[BaseException] | None) -> None:
        for thread, in_function in zip(self.threads, self._in_function, strict=True):
            if thread.ident is not None and (in_function or error is None):
                _C.interrupt_thread(thread.ident, error)

    def join(self) -> None:
        """After the core was closed: waits until the threads have ended."""
        for thread in self.threads:
            thread.join()
        if self._was_interrupted:
            self._was_interrupted = False
            self._raise_in_replicas(None)  # one that ended before it had heard of it
        self.threads = []

    def end(self, process: int) -> None:
        """When the strategy that `process` made is gone, or the interpreter exits."""
        # A forked DataLoader worker inherits what runs at exit, but not the threads.
        if os.getpid() != process:
            return
        # The garbage collector may call this anywhere, in one of the replicas too: nothing is waited for there.
        if threading.current_thread() in self.threads or (self._core.busy and not _is_exiting):
            self._core.leave()
            _left_behind.extend(self.threads)
            return
        self._core.close()
        for thread in self.threads:
            thread.join()


def _start_threads(core: _C.StrategyCore) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=core.serve, args=(local,), name=f"muster-replica-{local}", daemon=True)
        for local in range(core.local_replicas)
    ]
    for thread in threads:
        thread.start()
    return threads


_left_behind: list[threading.Thread] = []
_is_exiting = False


@atexit.register
def _wait_for_replicas() -> None:
    # A thread that works while the interpreter and its libraries are taken down would crash.
    global _is_exiting
    _is_exiting = True
    for thread in _left_behind:
        thread.join()
