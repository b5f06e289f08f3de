"""What a backward that nobody called through a strategy does to parameters, and when it is over."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import unserializable_hook

from muster import _C

__all__ = ["BackwardWatch"]


class BackwardWatch:
    """Calls back at the end of each backward that reached parameters through a synchronised forward.

    A hook on the forward's outputs runs in the outermost graph task, so that its callback comes when all of backward is
    done, reentrant checkpoints included. Hooks on parameters, in C++, say whether gradients arrived at all
    (torch.autograd.grad leaves none), and stand in where they arrive by another way than outputs: in a gradient
    penalty, or where a loss was kept elsewhere.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ended: Callable[[], None],
        is_joining: Callable[[], bool] | None = None,
    ) -> None:
        """Of `parameters`; those that are frozen count from when they are not. `ended` is called in autograd's thread,
        where what it raises ends that backward; it holds nobody who holds this. `is_joining`: whether each forward has
        one end at most."""
        self._ended = ended
        self._is_joining = is_joining or (lambda: False)
        self._is_expected = False  # the last forward was synchronised
        self._queued_in: int | None = None  # the graph task at whose end gradients are looked at
        self._is_nested = False  # that task may be a reentrant checkpoint's
        self.memory: _C.GradientMemory | None = None
        """Where gradients come in a backward that began at outputs; None: where torch puts them."""
        this = weakref.ref(self)
        self._arrivals: _C.GradientArrivals | None = _C.GradientArrivals(
            parameters, lambda: None if (watch := this()) is None else watch._on_parameter()
        )

    @property
    def is_queued(self) -> bool:
        """Whether a backward that reached outputs or parameters is not over."""
        return self._queued_in is not None

    def watch(self, output: Any, owner: object = None) -> None:
        """After a synchronised forward, which returned `output`. `owner` lives as long as the graph of that."""
        if self._arrivals is not None:
            self._arrivals.renew()
        self._expect(True)
        self._queued_in = None
        self._close_memory()
        self._take_arrivals()
        # Saving an output does not warn of it.
        hook = unserializable_hook(functools.partial(self._on_output, owner))  # type: ignore[no-untyped-call]
        for tensor in _tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def rest(self) -> None:
        """After a forward that is not synchronised, and before a backward that is somebody else's."""
        self._expect(False)

    def end(self) -> None:
        """Nothing is watched any more."""
        self._arrivals = None
        self._close_memory()
        self.memory = None

    def _on_output(self, owner: object, gradient: Tensor) -> None:
        task = _current_graph_task_id()
        if self._queued_in == task or (self._is_joining() and not self._is_expected):
            return
        self._take_arrivals()
        self._queue(task, is_nested=False)
        if self.memory is not None:
            self.memory.open()

    def _on_parameter(self) -> None:
        task, is_nested = _current_graph_task_id(), _may_be_nested()
        # A backward that raised has left its number.
        if self._queued_in is None or (self._queued_in != task and not is_nested):
            self._queue(task, is_nested)

    def _queue(self, task: int, is_nested: bool) -> None:
        self._queued_in, self._is_nested = task, is_nested
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_task)

    def _end_of_task(self) -> None:
        self._queued_in = None
        self._close_memory()
        if not self._take_arrivals():
            self._expect(self._is_expected)
            return
        # A backward that no output tells of may end several times: after each reentrant checkpoint.
        self._expect(self._is_nested and not self._is_joining())
        self._ended()

    def _expect(self, is_expected: bool) -> None:
        self._is_expected = is_expected
        if self._arrivals is not None:
            self._arrivals.announce(is_expected)

    def _close_memory(self) -> None:
        if self.memory is not None:
            _C.GradientMemory.close()

    def _take_arrivals(self) -> bool:
        return self._arrivals is not None and self._arrivals.take()


def _may_be_nested() -> bool:
    """Whether this thread runs a backward within another one. Of a device's thread nobody knows."""
    frame: FrameType | None = inspect.currentframe()
    backwards = 0
    while frame is not None:
        backwards += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back
    return backwards != 1


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in tuples, lists, dicts, what torch's pytree knows, dataclasses, and attributes of other objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors_in(getattr(leaf, field.name, None))
        elif not isinstance(leaf, (nn.Module, type, str, int, float)) and hasattr(leaf, "__dict__"):
            yield from (held for held in tree_leaves(vars(leaf)) if isinstance(held, Tensor))
