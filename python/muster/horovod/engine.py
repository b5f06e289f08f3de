"""The thread of a process set that matches operations by name over ranks, and does them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muster.errors import InvalidArgument
from muster.horovod.exceptions import HorovodInternalError, InvalidOperation
from muster.horovod.execution import Executor, Operation
from muster.horovod.negotiation import Negotiation, Ready
from muster.horovod.requests import Codec, Request
from muster.horovod.transport import Transport

__all__ = ["Engine", "Pending", "Stalls"]

LONGEST_PAUSE = 0.005
"""Seconds between two rounds in which nothing new was asked for, at most."""
GRACE = 2.0
"""Seconds that operations under way have to end at shutdown."""


@dataclass(frozen=True)
class Stalls:
    """What is done about an operation that other ranks do not ask for, in seconds of waiting."""

    warn_after: float
    """Infinity: never."""
    fail_after: float


@dataclass
class Pending:
    """An operation of this rank under way."""

    request: Request
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor | None]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: HorovodInternalError | None = None

    def finish(self, result: Any, error: HorovodInternalError | None = None) -> None:
        """Wakes who waits for it, and lets go of the tensors."""
        self.result, self.error = result, error
        self.inputs = self.outputs = ()
        self.done.set()


class Engine:
    """Takes operations in any order, and does them in one order on all ranks of a process set.

    Ranks that have something under way meet in rounds, in which each says what it asks for besides; what all have asked
    for is done at once. A rank with nothing under way takes part in no round and costs nothing. Thread-safe.
    """

    def __init__(self, transport: Transport, members: Sequence[int], rank: int, stalls: Stalls) -> None:
        """For the ranks `members` of the job, of which this is `rank`, which `transport` connects."""
        self.members = list(members)
        """The job's ranks, by rank in the process set."""
        self.rank = self.members.index(rank)
        """Of this process, in the process set."""
        self.stalls = stalls
        """When to warn and to fail."""
        self.on_ready: Callable[[Request], Any] | None = None
        """What becomes of requests that are not collective operations: called on the engine's thread, on every rank."""
        self._negotiation = Negotiation(len(self.members))
        self._condition = threading.Condition()
        self._queue: list[Pending] = []  # guarded by _condition, as what follows
        self._pending: dict[str, Pending] = {}
        self._numbers: dict[str, itertools.count[int]] = {}
        self._is_ending = False
        self._error: HorovodInternalError | None = None
        self._abort: Callable[[str], None] | None = transport.abort
        # Who leaves drops the transport, by which peers know: the thread alone keeps it.
        self._thread = threading.Thread(target=self._serve, args=(transport,), name="muster.horovod", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Ranks of the process set."""
        return len(self.members)

    def name(self, kind: str, name: str | None) -> str:
        """`name`, or the next one for operations of this `kind` that have none: the same on all ranks that ask for them
        in the same order since the start, or since all had joined."""
        if name is not None:
            return name
        with self._condition:
            return f".noname.{next(self._numbers.setdefault(kind, itertools.count()))}"

    def submit(self, request: Request, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> Pending:
        """Begins `request` over `inputs`, with results in `outputs` where they are given. Raises HorovodInternalError
        after the job has failed or ended, and its InvalidOperation for a name that is under way already."""
        for tensor in inputs:
            if tensor.is_cuda:  # what is queued there comes first
                torch.cuda.current_stream(tensor.device).synchronize()
        pending = Pending(request, inputs, outputs)
        with self._condition:
            if self._error is not None:
                raise HorovodInternalError(str(self._error))
            if request.key in self._pending:
                raise InvalidOperation(
                    f"{request.kind} '{request.name}': a tensor of that name is under way already; give each tensor a "
                    "name of its own, or synchronize() its handle first"
                )
            self._pending[request.key] = pending
            self._queue.append(pending)
            self._condition.notify_all()
        return pending

    def wait(self, pending: Pending) -> Any:
        """Blocks until `pending` is done, and returns its result. Warns where it waits for long; raises
        HorovodInternalError where it failed."""
        begun = time.monotonic()
        warn_at = begun + self.stalls.warn_after
        while not pending.done.wait(1.0):
            now = time.monotonic()
            if now >= warn_at:
                warn_at = now + self.stalls.warn_after
                logging.getLogger("muster").warning(self._told_of_wait(pending.request, now - begun))
            if now - begun >= self.stalls.fail_after:
                waited = self._told_of_wait(pending.request, now - begun)
                self._end_waits(f"{waited} (rank {self.members[self.rank]}, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)")
        if pending.error is not None:
            raise pending.error
        return pending.result

    def close(self, reason: str) -> None:
        """Ends the thread; what is under way fails with `reason`. Peers that ask for something later fail, too."""
        with self._condition:
            self._is_ending = True
            is_idle = not self._pending
            self._condition.notify_all()
        self._thread.join(GRACE if is_idle else 0.1)
        if self._thread.is_alive():
            self._end_waits(reason)
            self._thread.join(GRACE)
        self._abort = None
        self._fail(HorovodInternalError(reason))

    def _end_waits(self, reason: str) -> None:
        with self._condition:
            self._error = self._error or HorovodInternalError(reason)
        abort = self._abort
        if abort is not None:
            abort(reason)

    def _serve(self, transport: Transport) -> None:
        torch.set_grad_enabled(False)  # of this thread
        codec = Codec()
        executor = Executor(transport, self.rank, self.size)
        pause = 0.0
        try:
            while (new := self._next(pause)) is not None:
                messages = transport.exchange(codec.encode([pending.request for pending in new]))
                ready = self._negotiation.add(codec.decode(messages))
                self._finish(ready, executor)
                pause = 0.0 if ready or new else min(pause + LONGEST_PAUSE / 16, LONGEST_PAUSE)
                del new  # whose results would live until the next operation
        except Exception as error:
            self._fail(_as_internal(error))
            transport.abort(f"rank {self.members[self.rank]} failed: {type(error).__name__}: {error}")

    def _next(self, pause: float) -> list[Pending] | None:
        """What was submitted since the last round, once there is reason for another; None at the end."""
        with self._condition:
            if not self._queue and not self._is_ending:
                self._condition.wait(None if not self._pending else pause)
            while not self._queue and not self._pending and not self._is_ending:
                self._condition.wait()
            if self._is_ending:
                return None
            if self._error is not None:  # a group whose abort() ends what is under way alone would go on
                raise self._error
            taken, self._queue = self._queue, []
            return taken

    def _finish(self, ready: Sequence[Ready], executor: Executor) -> None:
        operations: list[tuple[Operation, Pending | None]] = []
        for item in ready:
            request = item.request
            pending = self._pending.get(request.key if request.kind != "join" else item.requests[self.rank].key)
            if item.error is not None:
                self._conclude(pending, None, InvalidOperation(f"{request.kind} '{request.name}': {item.error}"))
            elif request.kind == "join":
                with self._condition:  # what ranks did while others had joined made their numbers differ
                    self._numbers.clear()
                self._conclude(pending, self.members[item.last_joined])
            elif request.kind in ("barrier", "add_process_set", "remove_process_set"):
                result = self.on_ready(request) if self.on_ready is not None and request.kind != "barrier" else None
                self._conclude(pending, result)
            else:
                nothing = [None] * len(request.shapes)
                given = (pending.inputs, pending.outputs) if pending is not None else (nothing, nothing)
                operations.append((Operation(item, *given), pending))
        executor.run([operation for operation, _ in operations])
        for operation, pending in operations:
            self._conclude(pending, operation.result)

    def _conclude(self, pending: Pending | None, result: Any, error: HorovodInternalError | None = None) -> None:
        if pending is None:
            return  # of peers, while this rank has joined
        with self._condition:
            self._pending.pop(pending.request.key, None)
        pending.finish(result, error)

    def _fail(self, error: HorovodInternalError) -> None:
        with self._condition:
            self._error = self._error or error
            failed = list(self._pending.values())
            self._pending.clear()
            self._queue.clear()
        for pending in failed:
            pending.finish(
                None, HorovodInternalError(f"{pending.request.kind} '{pending.request.name}': {self._error}")
            )

    def _told_of_wait(self, request: Request, seconds: float) -> str:
        """In words: for whom `request` has waited."""
        missing = self._negotiation.missing(request.key)
        if missing is None:
            late = "some rank has not answered yet, nor asked for anything"
        else:
            names = [self.members[rank] for rank in missing]
            late = f"not all ranks have asked for it (as far as rank {self.members[self.rank]} knows, {names} have not)"
            for rank, kind in self._negotiation.others_of_name(request.name, missing).items():
                late += (
                    f"; rank {self.members[rank]} has asked for {kind} '{request.name}': ask for one operation of a "
                    "name on every rank"
                )
        return f"{request.kind} '{request.name}' has waited {seconds:.0f} s: {late}"


def _as_internal(error: Exception) -> HorovodInternalError:
    text = str(error).partition("\n")[0].replace("raise `timeout`", "raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    hint = "" if isinstance(error, InvalidArgument) else "; look at what the other ranks printed"
    internal = HorovodInternalError(f"communication with the other ranks failed: {type(error).__name__}: {text}{hint}")
    internal.__cause__ = error.with_traceback(None)  # whose frames would keep the transport
    return internal
