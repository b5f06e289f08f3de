"""The phase after backward: unscale, norm, clip and AdamW, against torch's own stack, tuned.

fp32 parameters as 30 and as 1,000 tensors, 1 and 2 intra-op threads. Torch: GradScaler.unscale_,
clip_grad_norm_(foreach=True), AdamW(fused=True) through GradScaler.step, GradScaler.update. Muster: what a strategy
does between the reduced sums and the next forward. Columns take turns in one process; a column's ratio is the median
over rounds of torch's time over its own. `streams` is a loop without arithmetic worth the name over the same memory:
the gradient read twice; parameter and both moments read and written in place.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import muster
from muster.benchmarks.record import Out, publish, record
from muster.benchmarks.rounds import Column, quartiles, ratio, take_turns
from muster.benchmarks.tables import after_backward as table

__all__ = ["main"]

SCALE = 65536.0
CLIP = 1.0
BYTES = 4 * (1 + 1 + 2 + 2 + 2)
"""Moved per parameter: the gradient twice; parameter and two moments, read and written."""


def tensors(count: int, parameters: int) -> list[Tensor]:
    return [torch.randn(parameters // count) for _ in range(count)]


def torch_phase(parameters: list[nn.Parameter], gradients: list[Tensor]) -> Column:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    # The gradients stay finite and are not scaled again: the scaler divides by one, with the same passes.
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.zeros(()))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def phase() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    return phase


def muster_phase(parameters: list[nn.Parameter], sums: list[Tensor]) -> Column:
    strategy = muster.MirroredStrategy()
    module = nn.ParameterList(parameters)
    core = strategy._core
    number = core.add_module([list(module.named_parameters())], [[]])
    row = [1e-3, 0.9, 0.999, 1e-8, 1e-2, True, False, False]
    flat = core.make_flat("adam", [(index, 0) for index in core.parameters_of(number)], [row])
    return lambda: flat.step_from_sums(sums, SCALE, CLIP, "adam", [row])


def streams_phase(sums: list[Tensor], states: list[Tensor]) -> Column:
    ones = torch.tensor(1.0)

    def phase() -> None:
        for values in sums:
            torch.sum(values)
            torch.sum(values)
        for state in states:
            state.mul_(ones)

    return phase


def measure(count: int, threads: int, parameters: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each column by round, and ratios."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    gradients = tensors(count, parameters)

    def leaves() -> list[nn.Parameter]:
        return [nn.Parameter(values) for values in tensors(count, parameters)]

    phases = {
        "torch": torch_phase(leaves(), [g.clone() for g in gradients]),
        "muster": muster_phase(leaves(), [g * SCALE for g in gradients]),
        "streams": streams_phase(tensors(count, parameters), [torch.zeros(parameters) for _ in range(3)]),
    }
    times = take_turns(phases, rounds)
    return {
        "tensors": count,
        "threads": threads,
        "ms": {name: quartiles(values) for name, values in times.items()},
        "torch over muster": ratio(times["torch"], times["muster"]),
        "streams over muster": ratio(times["streams"], times["muster"]),
    }


def main(
    parameters: Annotated[int, typer.Option(help="Of the model.", min=1000)] = 25_000_000,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each case.", min=3)] = 12,
    out: Out = None,
) -> None:
    """The phase after backward (unscale, norm, clip, AdamW) against torch's own."""
    result = record(
        "after_backward",
        **{"parameters": parameters, "bytes per parameter": BYTES},
        cases=[measure(count, threads, parameters, rounds) for count in (30, 1000) for threads in (1, 2)],
    )
    publish(result, table(result), out)
