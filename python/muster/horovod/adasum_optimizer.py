"""What DistributedOptimizer adds for Adasum: ranks step by themselves, and what their steps changed is combined."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster.horovod.compression import Compressor
from muster.horovod.gradients import add_names
from muster.horovod.handles import synchronize
from muster.horovod.operations import Adasum, allreduce_async

__all__ = ["AdasumDeltas"]


class AdasumDeltas(Optimizer):
    """Parts of an optimizer's class. Every rank's parameters are equal after step(), where they were before."""

    def begin(self, parameters: dict[Tensor, str], compression: type[Compressor], passes: int) -> None:
        """For `parameters` with their names, whose changes travel as `compression` makes them; `passes` backward passes
        make up a step."""
        self._names = parameters
        self._compression = compression
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes make up a step: it steps by what they have added up, however many `passes`."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Without effect: ranks wait for one another in step()."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raises AssertionError: what is combined is known after a rank's step."""
        raise AssertionError("skip_synchronize() cannot be with op=Adasum; clip gradients before step(), without it")

    def step(self, closure: Any = None) -> Any:
        """As of the optimizer, on this rank; then adds to what parameters were before the Adasum of all ranks' changes.
        Collective."""
        add_names(self._names, self)
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        loss = super().step(closure)
        with torch.no_grad():
            under_way = []
            for parameter, start in zip(trained, before, strict=True):
                sent, ctx = self._compression.compress(parameter - start)
                under_way.append((allreduce_async(sent, name=self._names[parameter], op=Adasum), ctx))
            for parameter, start, (handle, ctx) in zip(trained, before, under_way, strict=True):
                parameter.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        return loss

    # torch wraps a step() without this mark when a state is loaded: hooks, which are the base's, would run twice.
    step.hooked = True  # type: ignore[attr-defined]
