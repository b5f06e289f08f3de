"""What a parameter costs backward: Muster's hooks against none, and against DistributedDataParallel with one rank.

Many equal parameters of a few elements are stacked and summed, so that their gradients come one after another and
backward does little else. Two nodes of the graph take the time, one before the first of those gradients and one after
the last; what a strategy does around backward is outside.

The time is that of the processor on the thread that runs backward: hooks do not wait, and what else the machine does
counts less. "no hooks" is the step of a strategy that has prepared the anchor alone.

"hook" holds back the one bucket until the clock has stopped: the anchor, one more parameter, gets its gradient after
that. What remains is the hook and torch's call of it. In "hook and packing" the last gradient also lets the bucket be
packed. DDP copies each gradient into its bucket from its hook, and starts the all-reduce of full ones. Columns take
turns in one process with one thread; a cost is the median over rounds of the difference to no hooks, per parameter.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster
from muster.benchmarks.record import Out, need_gloo, publish, record
from muster.benchmarks.rounds import fixed, interleave, quartiles
from muster.benchmarks.tables import hooks as table
from muster.free_ports import free_ports

__all__ = ["main"]

ELEMENTS = 4
BASE = "no hooks"


@dataclass
class Stopwatch:
    """When backward passed the two nodes."""

    times: list[float] = field(default_factory=list)

    def node(self, tensor: Tensor) -> Tensor:
        """Its values, with a node that notes the time in backward."""
        noted: Tensor = _Note.apply(tensor, self.times)  # type: ignore[no-untyped-call]
        return noted

    def read(self) -> float:
        """Milliseconds between the two, forgotten with it."""
        began, ended = self.times
        self.times.clear()
        return 1e3 * (ended - began)


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, times: list[float]) -> Tensor:
        ctx.times = times
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.times.append(time.thread_time())
        return gradients[0], None


class ManyParameters(nn.Module):
    """A sum of many leaves, parameters or not, and an anchor. Autograd runs what forward made last first, and gradients
    of leaves as soon as they are there: the anchor's node is the last but one, and the anchor's gradient comes last."""

    def __init__(self, count: int, *, are_parameters: bool = True, has_anchor: bool = False) -> None:
        super().__init__()
        self.stopwatch = Stopwatch()
        self.leaves = [nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(count)]
        self.many = nn.ParameterList(self.leaves if are_parameters else [])
        anchor = torch.zeros(ELEMENTS, requires_grad=True)
        self.anchor = nn.Parameter(anchor) if has_anchor else anchor
        self.factors = torch.ones(count + 1, ELEMENTS)

    def forward(self) -> Tensor:
        last = self.stopwatch.node(self.anchor)
        stacked = self.stopwatch.node(torch.stack([*self.leaves, last]))
        # Their product's gradient is dense, so that autograd hands its rows over and copies none.
        return (stacked * self.factors).sum()

    def clear(self) -> None:
        for leaf in (*self.leaves, self.anchor):
            leaf.grad = None


Turn = Callable[[], float]


def with_ddp(module: ManyParameters, **options: Any) -> Turn:
    model = DistributedDataParallel(module, **options)

    def turn() -> float:
        module.clear()
        torch.autograd.backward(model())
        return module.stopwatch.read()

    return turn


def with_muster(module: ManyParameters, strategy: muster.Strategy) -> Turn:
    prepared, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-3))
    weight = torch.ones(())
    nodes = [leaf.view_as(leaf).grad_fn for leaf in module.leaves]  # live on, as hooked ones do

    def turn() -> float:
        assert nodes
        module.clear()
        strategy.step(lambda: muster.Loss(prepared(), weight=weight))
        return module.stopwatch.read()

    return turn


def measure(parameters: int, rounds: int) -> dict[str, Any]:
    """Nanoseconds per parameter: backward as such, and what each column adds."""
    (port,) = free_ports(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    everything = 64 * (parameters + 1)  # a slot begins on 64 bytes; up to 1 MiB it is one bucket

    with contextlib.ExitStack() as stack:

        def hooked(*, are_parameters: bool = True, has_anchor: bool = False) -> Turn:
            strategy = stack.enter_context(muster.MirroredStrategy(threads_per_replica=1, bucket_bytes=everything))
            return with_muster(
                ManyParameters(parameters, are_parameters=are_parameters, has_anchor=has_anchor), strategy
            )

        turns = {
            BASE: hooked(are_parameters=False, has_anchor=True),
            "hook": hooked(has_anchor=True),
            "hook and packing": hooked(),
            "DDP": with_ddp(ManyParameters(parameters)),
            "DDP tuned": with_ddp(ManyParameters(parameters), gradient_as_bucket_view=True, static_graph=True),
        }
        for turn in turns.values():
            turn()  # learns the gradients' order
        times = interleave(turns, fixed(rounds))
    dist.destroy_process_group()
    base = times.pop(BASE)
    per_parameter = 1e6 / parameters
    added = {
        name: [(own - other) * per_parameter for own, other in zip(values, base, strict=True)]
        for name, values in times.items()
    }
    return {
        "ns": quartiles([value * per_parameter for value in base]),
        "added ns": {name: quartiles(values) for name, values in added.items()},
    }


def main(
    parameters: Annotated[int, typer.Option(help="Of a few elements each.", min=100, max=16_000)] = 2_000,
    rounds: Annotated[int, typer.Option(help="Timed rounds.", min=3)] = 150,
    out: Out = None,
) -> None:
    """What a parameter costs backward: Muster's hooks against none, and against DDP with one rank."""
    need_gloo()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    result = record("hooks", parameters=parameters, **measure(parameters, rounds))
    publish(result, table(result), out)
