"""Ways to train a model on one batch, each a function that makes a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

import muster
from muster.benchmarks.models import Model
from muster.benchmarks.servers import Step

__all__ = ["BareThreads", "Batch", "MakeOptimizer", "on_threads", "ordinary", "parts_of", "with_muster", "without_step"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]


def ordinary(
    model: Model, module: nn.Module, optimizer: MakeOptimizer, batch: Batch, called: nn.Module | None = None
) -> Step:
    """The loop as it is written without Muster; `called` wraps the module."""
    forward = called or module
    stepper = optimizer(module.parameters())
    x, y = batch

    def step() -> None:
        stepper.zero_grad()
        torch.autograd.backward(model.loss(forward(x), y))
        stepper.step()

    return step


def without_step(model: Model, module: nn.Module, batch: Batch) -> Step:
    """Forward and backward alone."""
    x, y = batch

    def step() -> None:
        module.zero_grad()
        torch.autograd.backward(model.loss(module(x), y))

    return step


def with_muster(
    model: Model, module: nn.Module, optimizer: MakeOptimizer, batch: Batch, strategy: muster.Strategy
) -> Step:
    prepared, _ = strategy.prepare(module, optimizer(module.parameters()))
    return lambda: strategy.step(lambda x, y: model.loss(prepared(x), y), *batch)


def on_threads(threads: int, step: Step) -> Step:
    """The step with so many intra-op threads."""

    def run() -> None:
        torch.set_num_threads(threads)
        step()

    return run


def parts_of(batch: Batch, parts: int) -> list[Batch]:
    x, y = batch
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


class BareThreads:
    """Threads that stay, of one intra-op thread each: calling this lets each make its step once."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._started = threading.Barrier(len(steps) + 1)
        self._ended = threading.Barrier(len(steps) + 1)
        for step in steps:
            threading.Thread(target=self._serve, args=(step,), daemon=True).start()

    def _serve(self, step: Step) -> None:
        torch.set_num_threads(1)
        while True:
            self._started.wait()
            step()
            self._ended.wait()

    def __call__(self) -> None:
        self._started.wait()
        self._ended.wait()
