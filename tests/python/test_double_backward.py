"""Collectives inside a step can be differentiated twice, and nothing about them is silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import muster
from muster import Loss
from support.jobs import Launcher, part_of

ROWS = 7
Strategy = muster.Strategy | None


def rows() -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def build(synchronised: bool) -> nn.Sequential:
    torch.manual_seed(4)
    kind = nn.SyncBatchNorm if synchronised else nn.BatchNorm1d
    return nn.Sequential(nn.Linear(4, 5), kind(5), nn.Tanh(), nn.Linear(5, 3)).double()


def gradient_of(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value, x, create_graph=True)[0]


def whole(strategy: Strategy, op: str, value: Tensor, dim: int = 0) -> Tensor:
    """The reduction of rows over all samples."""
    if op == "mean":
        return value.mean(dim) if strategy is None else strategy.reduce(value.mean(dim), "mean")
    if op == "sum":
        return value.sum(dim) if strategy is None else strategy.reduce(value.sum(dim), "sum")
    extremum = value.amin(dim) if op == "min" else value.amax(dim)
    return extremum if strategy is None else strategy.reduce(extremum, op)


def gradient_penalty(strategy: Strategy, model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP's and R1's shape: the squared gradient with respect to the samples."""
    x = x.clone().requires_grad_(True)
    return gradient_of(model(x).sum(), x).square().sum()


def path_length(strategy: Strategy, model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    y = model(x)
    direction = torch.linspace(-1, 1, y.size(1), dtype=y.dtype).expand_as(y)
    return gradient_of((y * direction).sum(), x).square().sum(1).sqrt().sum()


def through(op: str) -> Callable[[Strategy, nn.Module, Tensor], Tensor]:
    def penalty(strategy: Strategy, model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        y = model(x) ** 3
        share = 1.0 if strategy is None else len(x) / ROWS
        value = (whole(strategy, op, y) ** 3).sum() * share
        return gradient_of(value, x).square().sum()

    penalty.__name__ = f"through_{op}"
    return penalty


def through_gather(strategy: Strategy, model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    y = model(x)
    others = y if strategy is None else strategy.gather(y)
    return gradient_of(torch.logsumexp(y @ others.t(), 1).sum(), x).square().sum()


def through_broadcast(strategy: Strategy, model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    y = model(x)
    anchor = y[0] if strategy is None else strategy.broadcast(y[0] * 1.0, 0)
    return gradient_of((y * anchor).sum(1).square().sum(), x).square().sum()


PENALTIES = [gradient_penalty, path_length, *map(through, ("sum", "mean", "min", "max")), through_gather]
PENALTIES.append(through_broadcast)


def left(parameter: nn.Parameter) -> Tensor:
    """Its gradient; zeros where it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def penalise(strategy: muster.Strategy) -> Any:
    found = {}
    for penalty in PENALTIES:
        module = build(True)
        model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
        result = strategy.step(
            lambda x, m=model, f=penalty: Loss(f(strategy, m, x), reduction="sum"),
            part_of(strategy, rows()),
            optimizers=optimizer,
        )
        found[penalty.__name__] = float(result.loss), [left(p) for p in module.parameters()]
    return found


def test_penalties_on_gradients_are_those_of_the_whole_batch(job: Launcher) -> None:
    expected = {}
    for penalty in PENALTIES:
        model = build(False)
        loss = penalty(None, model, rows())
        loss.backward()
        expected[penalty.__name__] = loss.item(), [left(p).numpy() for p in model.parameters()]
    for found in job(penalise, fuse=False):
        for name, (loss, gradients) in found.items():
            assert loss == pytest.approx(expected[name][0], rel=1e-9), name
            for a, b in zip(gradients, expected[name][1], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-10, err_msg=name)


@pytest.fixture
def pair() -> Any:
    with muster.MirroredStrategy(["cpu:0", "cpu:1"], timeout=20.0, fuse=False) as strategy:
        yield strategy


def line(strategy: muster.Strategy, value: float = 2.0) -> nn.Module:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(module.weight, value)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    return model  # type: ignore[no-any-return]


def test_a_replica_without_the_collective_in_its_double_backward_is_an_error(pair: muster.MirroredStrategy) -> None:
    model = line(pair)
    parts = muster.PerReplica([torch.full((1, 1), value, dtype=torch.float64) for value in (1.0, 2.0)])

    def step(x: Tensor) -> Loss:
        y = pair.reduce(model(x).sum() ** 2, "sum") ** 2
        (g,) = torch.autograd.grad(y, model.weight, create_graph=True)
        return Loss((g.detach() * model.weight if x.item() == 1 else g).sum(), reduction="sum")

    with pytest.raises((muster.LayoutMismatch, muster.RemoteError)):
        pair.step(step, parts)
    assert pair.step(lambda x: model(x).mean(), parts).stepped


def test_collectives_that_trade_places_in_backward_are_no_silent_mixture(pair: muster.MirroredStrategy) -> None:
    model = line(pair)
    parts = muster.PerReplica([torch.full((1, 1), value, dtype=torch.float64) for value in (1.0, 2.0)])

    def step(x: Tensor) -> Loss:
        y = model(x).sum()
        a, b = pair.reduce(y * 2, "sum"), pair.reduce(y * 3, "sum")
        return Loss(a if x.item() == 1 else b, reduction="sum")

    with pytest.raises((muster.LayoutMismatch, muster.RemoteError)):
        pair.step(step, parts)
    assert pair.step(lambda x: model(x).mean(), parts).stepped


def test_a_graph_that_outlives_its_step_or_strategy_is_refused_at_once() -> None:
    kept: list[Tensor] = []
    with muster.MirroredStrategy(["cpu:0", "cpu:1"], timeout=20.0, fuse=False) as strategy:
        model = line(strategy)
        x = torch.ones(2, 1, dtype=torch.float64)

        def step(x: Tensor) -> Tensor:
            loss = strategy.reduce(model(x).sum(), "sum") + strategy.gather(model(x)).sum()
            kept.append(loss + strategy.broadcast(model(x).sum(), 0))
            return model(x).mean()

        strategy.step(step, x)
        # Outside of a step torch's own translation of errors is at work.
        with pytest.raises(RuntimeError, match="has ended"):
            kept[0].backward()
        with pytest.raises((muster.InvalidArgument, muster.RemoteError), match="has ended"):
            strategy.step(lambda x: kept[0] * 1.0, x)
        strategy.step(lambda x: model(x).mean(), x)
    with pytest.raises(RuntimeError, match="has ended"):
        kept[1].backward()


# --- what replicas disagree about -------------------------------------------------------------------------------------
def disagree(strategy: muster.Strategy) -> list[str]:
    model = line(strategy)
    parts = [torch.ones(3, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)]
    first, count = strategy.rank, len(strategy.devices)
    mine = muster.PerReplica(parts[first : first + count] if count == 1 else parts)
    errors = []
    wide = torch.ones(100_000, 1, dtype=torch.float64)

    def shapes(x: Tensor) -> Tensor:
        return strategy.reduce(torch.ones(2, 3) if len(x) == 3 else torch.ones(3, 2), "sum")

    def lists(x: Tensor) -> Any:
        return strategy.reduce([torch.ones(6), torch.ones(2, 3) if len(x) == 3 else torch.ones(3, 2)], "sum")

    for fn in (
        lambda x: strategy.reduce(x.flatten(), "sum"),
        lambda x: strategy.reduce(wide[: 30_000 * len(x)].flatten(), "sum"),
        lambda x: strategy.reduce(wide[: 49_000 + len(x)].flatten(), "sum"),
        lambda x: strategy._core.broadcast_in_step([x.flatten()], 0),
        shapes,
        lists,
    ):
        with pytest.raises((muster.LayoutMismatch, muster.RemoteError)) as raised:
            strategy.run(fn, mine)
        errors.append(f"{type(raised.value).__name__}: {raised.value}")
        # It is over with the call.
        total = strategy.run(lambda x: strategy.reduce(wide * len(x), "sum"), mine)
        assert float(total[0].sum()) == 500_000
        assert strategy.step(lambda x: model(x).mean(), mine).stepped
    return errors


def test_replicas_that_reduce_other_shapes_once_go_on(wide_job: Launcher) -> None:
    if wide_job.replicas != 2:
        pytest.skip("two parts")
    for errors in wide_job(disagree, fuse=False):
        assert all("disagree" in error for error in errors), errors
        assert "[2, 3]" in errors[4]
        assert "[3, 2]" in errors[4]


# --- conjugates, negations, complex values ----------------------------------------------------------------------------
def lazy(strategy: muster.Strategy) -> Any:
    z = torch.tensor([[1 + 2j, 3 - 1j]], dtype=torch.complex128)
    given = muster.PerReplica([torch.ones(1, 1)] * len(strategy.devices))

    def values(_: Tensor) -> Any:
        negative = z.conj().imag
        assert negative.is_neg()
        return {
            "gathered": strategy.gather(z.conj()),
            "negative": strategy.gather(negative),
            "sum": strategy.reduce(z.conj(), "sum"),
            "mean": strategy.reduce(z.conj(), "mean"),
            "negative sum": strategy.reduce(negative, "sum"),
            "broadcast": strategy.broadcast(z.conj(), 0),
        }

    inside = strategy.run(values, given)[0]
    outside = {
        "gathered": strategy.gather(z.conj()),
        "negative": strategy.gather(z.conj().imag),
        "mean": strategy.reduce(z.conj(), "mean"),
        "broadcast": strategy.broadcast(z.conj(), 0),
    }
    return {name: value.resolve_conj().resolve_neg().clone() for name, value in inside.items()}, {
        name: value.resolve_conj().resolve_neg().clone() for name, value in outside.items()
    }


def test_conjugates_and_negations_keep_their_values(job: Launcher) -> None:
    conjugate = np.array([[1 - 2j, 3 + 1j]])
    for inside, outside in job(lazy):
        n = job.replicas
        np.testing.assert_array_equal(inside["gathered"], np.repeat(conjugate, n, 0))
        np.testing.assert_array_equal(inside["negative"], np.repeat(conjugate.imag, n, 0))
        np.testing.assert_array_equal(inside["sum"], n * conjugate)
        np.testing.assert_allclose(inside["mean"], conjugate)
        np.testing.assert_array_equal(inside["negative sum"], n * conjugate.imag)
        np.testing.assert_array_equal(inside["broadcast"], conjugate)
        np.testing.assert_array_equal(outside["gathered"][:1], conjugate)
        np.testing.assert_array_equal(outside["negative"][:1], conjugate.imag)
        np.testing.assert_allclose(outside["mean"], conjugate)
        np.testing.assert_array_equal(outside["broadcast"], conjugate)


def test_complex_values_have_no_maximum(pair: muster.MirroredStrategy) -> None:
    z = torch.ones(2, 1, dtype=torch.complex64)
    with pytest.raises(muster.InvalidArgument, match="no maximum"):
        pair.run(lambda z: pair.reduce(z, "max"), z)
    with pytest.raises(muster.InvalidArgument, match="no minimum"):
        pair.reduce(z, "min")
