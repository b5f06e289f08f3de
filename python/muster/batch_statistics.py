"""Batch normalisation by the statistics of several parts together: one collective in forward, one in backward.

Each part has its mean and its variance from it, and they are joined as by Chan, Golub and LeVeque, "Algorithms for
Computing the Sample Variance" (The American Statistician 37, 1983), which loses no digits where the mean is large.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

__all__ = ["average_factor", "normalise"]


class Peers(Protocol):
    """All whose parts are normalised together, each of which makes the same calls in the same order."""

    def gather(self, row: Tensor) -> Tensor:
        """Everyone's row, in an order that is everyone's: (parts, len(row)). A row is the means of a part's channels,
        their variances, and how many elements each has. May join rows, as statistics of all their elements. No
        gradient."""

    def sum_in_backward(self, values: Tensor) -> Tensor:
        """The sum of everyone's values, within backward of what the peers were made for. No gradient."""

    def reduce(self, values: Tensor) -> Tensor:
        """The sum of everyone's values, through which gradients flow."""


class _Statistics(NamedTuple):
    mean: Tensor  # (channels,)
    variance: Tensor  # (channels,), divided by the number of elements
    elements: Tensor  # 0-dim: of a channel


def normalise(layer: nn.SyncBatchNorm, input: Tensor, peers: Peers) -> Tensor:
    """`input`, (rows, channels, ...), by the mean and the variance of all parts: the same shape and dtype. Computed in
    fp32, or fp64 if that is its dtype. In training moves the layer's running statistics, as of the whole batch."""
    values = input if input.dtype == torch.float64 else input.float()
    weight = None if layer.weight is None else layer.weight.to(values.dtype)
    bias = None if layer.bias is None else layer.bias.to(values.dtype)
    output, *statistics = _Normalise.apply(values, weight, bias, layer.eps, peers)  # type: ignore[no-untyped-call]
    if layer.training and layer.track_running_stats and layer.running_mean is not None:
        _move(layer, _Statistics(*statistics), has_rows=values.numel() > 0)
    return cast(Tensor, output.to(input.dtype))


def average_factor(layer: nn.SyncBatchNorm, *, updates: bool) -> float:
    """By how much running statistics move to those of a batch, which is counted where `updates`."""
    if not (updates and layer.training and layer.num_batches_tracked is not None):
        return 0.0 if layer.momentum is None else layer.momentum
    layer.num_batches_tracked.add_(1)
    return 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum


def _move(layer: nn.SyncBatchNorm, of_batch: _Statistics, *, has_rows: bool) -> None:
    """`has_rows`: this part has some; without it all may have none, of which there are no statistics."""
    factor = average_factor(layer, updates=True)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    with torch.no_grad():
        unbiased = of_batch.variance * (of_batch.elements / (of_batch.elements - 1).clamp(min=1))
        for running, found in ((layer.running_mean, of_batch.mean), (layer.running_var, unbiased)):
            moved = found.to(running.dtype)
            running.lerp_(moved if has_rows else torch.where(of_batch.elements > 0, moved, running), factor)
        if not has_rows and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.sub_((of_batch.elements == 0).long())


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, peers: Peers
    ) -> tuple[Tensor, ...]:
        statistics = _of_all(values, peers)
        output = F.batch_norm(values, statistics.mean, statistics.variance, weight, bias, eps=eps)
        ctx.eps, ctx.peers = eps, peers
        ctx.save_for_backward(values, weight, bias, *statistics)
        ctx.mark_non_differentiable(*statistics)
        return output, *statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        values, weight, bias, *statistics = ctx.saved_tensors
        if torch.is_grad_enabled():  # this backward will be differentiated
            given = zip((values, weight, bias), ctx.needs_input_grad[:3], strict=True)
            inputs = [each for each, needs in given if needs]
            output = _composed(values, weight, bias, ctx.eps, ctx.peers)
            gradients = iter(torch.autograd.grad(output, inputs, gradient, create_graph=True))
            needed = [next(gradients) if needs else None for needs in ctx.needs_input_grad[:3]]
            return *needed, None, None
        found = _backward(ctx, gradient, values, weight, _Statistics(*statistics))
        needed = [own if needs else None for own, needs in zip(found, ctx.needs_input_grad[:3], strict=True)]
        return *needed, None, None


def _backward(
    ctx: Any, gradient: Tensor, values: Tensor, weight: Tensor | None, statistics: _Statistics
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of the values, the weight and the bias."""
    mean, variance, elements = statistics
    inverse = torch.rsqrt(variance + ctx.eps)  # of the standard deviation
    of_weight, of_bias = torch.zeros_like(mean), torch.zeros_like(mean)
    if values.numel() > 0:
        # Beside the statistics CUDA's kernels ask for the inverse, and for a weight, in place of what they could find.
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, values, torch.ones_like(mean) if weight is None else weight, mean, variance, mean, inverse, False,
            ctx.eps, [False, True, True],
        )  # fmt: skip
    if not ctx.needs_input_grad[0]:
        return None, of_weight, of_bias
    mean_of_bias, mean_of_weight = (ctx.peers.sum_in_backward(torch.cat([of_bias, of_weight])) / elements).chunk(2)
    scale = inverse if weight is None else inverse * weight
    # scale * (gradient - its mean - normalised values * the mean of their product with it)
    own = values - _wide(mean, values)
    own.mul_(_wide(-scale * inverse * mean_of_weight, own)).sub_(_wide(scale * mean_of_bias, own))
    return own.addcmul_(gradient, _wide(scale, own)), of_weight, of_bias


def _of_all(values: Tensor, peers: Peers) -> _Statistics:
    if values.numel() > 0:
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    else:
        mean = variance = values.new_zeros(values.size(1))
    rows = peers.gather(torch.cat([mean, variance, mean.new_full((1,), values.numel() / values.size(1))]))
    channels = values.size(1)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    elements = counts.sum()
    mean = (means * counts).sum(0) / elements
    return _Statistics(mean, ((variances + (means - mean).square()) * counts).sum(0) / elements, elements)


def _composed(values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, peers: Peers) -> Tensor:
    """The same of operations that can be differentiated as often as one likes, with two collectives."""
    dimensions = _dimensions(values)
    count = values.new_full((1,), values.numel() / values.size(1))
    total = peers.reduce(torch.cat([values.sum(dimensions), count]))
    everyones = total[-1].detach()
    centred = values - _wide(total[:-1] / everyones, values)
    variance = peers.reduce(centred.square().sum(dimensions)) / everyones
    output = centred * _wide(torch.rsqrt(variance + eps), values)
    if weight is not None:
        output = output * _wide(weight, values)
    return output if bias is None else output + _wide(bias, values)


def _dimensions(values: Tensor) -> list[int]:
    """All but the channels'."""
    return [0, *range(2, values.dim())]


def _wide(of_channels: Tensor, values: Tensor) -> Tensor:
    """A number a channel, as one that meets `values`."""
    return of_channels.view([1, -1, *[1] * (values.dim() - 2)])
