"""What a step function returns, and what a step gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from muster.errors import InvalidArgument
from muster.per_replica import PerReplica
from muster.texts import lists_fields

__all__ = ["Loss", "Record", "StepResult", "as_record", "parameters_of"]


@dataclass(frozen=True)
class Loss:
    """The result of a step function.

    `value` is a 0-dim floating tensor to differentiate. With ``reduction="mean"`` it is a mean over `weight` samples
    (tokens, ...), and gradients are averaged by weight over all replicas and micro-batches; the weight is never read on
    the host by the step, and defaults to the part's samples: those that a prepared loader has read for it, whatever
    they were collated to, else size(0) of its first tensor. With ``reduction="sum"`` gradients
    are added and never divided. `metrics` are numbers or 0-dim tensors, averaged by weight; `output` may be anything
    and comes back in `StepResult.output`.
    """

    value: Tensor
    weight: Tensor | float | None = field(default=None, kw_only=True)
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict, kw_only=True)
    output: Any = field(default=None, kw_only=True)
    reduction: Literal["mean", "sum"] = field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise InvalidArgument(f"reduction={self.reduction!r}: it must be 'mean' or 'sum'")
        if not (isinstance(self.metrics, Mapping) and all(isinstance(name, str) for name in self.metrics)):
            raise InvalidArgument(f"metrics={self.metrics!r}: it must be a dict of numbers or 0-dim tensors by name")


@lists_fields
@dataclass(frozen=True)
class StepResult:
    """What one step did. Tensors are 0-dim; reading one is the only thing that waits for a device."""

    stepped: bool
    """Whether this call closed a window whose mean gradient went to the optimizer (see also `skipped`)."""
    step: int
    """Windows closed so far."""
    loss: Tensor
    """Mean loss (the sum, with ``reduction="sum"``) of the window so far: of all workers once closed, else of this
    one."""
    metrics: dict[str, Tensor]
    """`Loss.metrics` by name: their means over the window so far, by weight."""
    weight: Tensor
    """Sum of the weights of the window so far."""
    grad_norm: Tensor | None
    """Norm of the mean gradient before clipping; None while the window is open."""
    skipped: Tensor
    """Whether the update was skipped because a gradient was not finite (bool)."""
    loss_scale: Tensor
    """What losses are multiplied by after this step's update; 1 where they are not scaled."""
    output: PerReplica[Any]
    """`Loss.output` of each local replica; None for an empty part."""


Record = tuple[Tensor, Tensor | None, dict[str, Tensor], bool]
"""What the core takes of a Loss: value, weight, metrics, and whether it is a sum."""


def as_record(returned: object) -> tuple[Record, Any]:
    """Checks what a step function returned: the core's part of it, and the output."""
    loss = Loss(returned) if isinstance(returned, Tensor) else returned
    if not isinstance(loss, Loss) or not isinstance(loss.value, Tensor):
        what = f"Loss({type(loss.value).__name__})" if isinstance(loss, Loss) else type(returned).__name__
        raise InvalidArgument(
            f"the step function returned {what}; return the loss as a 0-dim tensor, or muster.Loss(loss, weight=..., "
            "metrics={...}, output=...)"
        )
    weight = None if loss.weight is None else _scalar("weight", loss.weight)
    if isinstance(loss.weight, Tensor) and loss.weight.requires_grad:
        raise InvalidArgument(
            "the weight of a Loss requires a gradient, which a mean over all parts' weights would need and no part can "
            "give; detach() it, or reduce() the sums of losses and of weights in the step and return their quotient"
        )
    metrics = {name: _scalar(f"metric {name!r}", value) for name, value in loss.metrics.items()}
    return (loss.value, weight, metrics, loss.reduction == "sum"), loss.output


def parameters_of(loss: Tensor) -> list[nn.Parameter]:
    """Those that a backward of `loss` brings gradients to."""
    found = []
    seen = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += (before for before, _ in node.next_functions)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, nn.Parameter):
            found.append(leaf)
    return found


def _scalar(what: str, value: Tensor | float) -> Tensor:
    if isinstance(value, (Tensor, Real)) or hasattr(value, "__array__"):
        # Torch's default dtype has fewer digits than a number of Python's.
        scalar = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None).detach()
        if scalar.dim() == 0 and not scalar.is_complex():
            return scalar
        found = f"a tensor of shape {tuple(scalar.shape)} and dtype {scalar.dtype}"
    else:
        found = f"a {type(value).__name__}"
    raise InvalidArgument(f"the {what} of a Loss is a real number or a 0-dim tensor, not {found}; reduce it first")
