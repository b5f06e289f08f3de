"""Statistics over all replicas, and every reduction inside a step: gradients are those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from muster import Loss
from muster.batch_statistics import normalise
from support.jobs import Launcher, part_of


def build(synchronised: bool, momentum: float | None = 0.2, affine: bool = True) -> nn.Sequential:
    torch.manual_seed(4)
    kind = nn.SyncBatchNorm if synchronised else nn.BatchNorm1d
    layers = [nn.Linear(5, 6), kind(6, momentum=momentum, affine=affine), nn.Tanh(), nn.Linear(6, 3), kind(3)]
    return nn.Sequential(*layers).double()


def batches(rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    return [
        (
            torch.randn(rows, 5, generator=generator, dtype=torch.float64) + 100,
            torch.randint(0, 3, (rows,), generator=generator),
        )
        for _ in range(3)
    ]


def train(strategy: muster.Strategy, rows: int, momentum: float | None, affine: bool) -> Any:
    module = build(True, momentum, affine)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    gradients = []
    for x, y in batches(rows):
        x, y = part_of(strategy, (x, y))
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
        gradients.append([p.grad.clone() for p in module.parameters()])
    model.eval()
    evaluated = strategy.run(lambda x: model(x), part_of(strategy, batches(rows)[0][0]))
    return gradients, [p.detach() for p in module.parameters()], list(module.buffers()), strategy.gather(evaluated)


def alone(rows: int, momentum: float | None, affine: bool) -> Any:
    model = build(False, momentum, affine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for x, y in batches(rows):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients.append([p.grad.numpy().copy() for p in model.parameters()])
        optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(batches(rows)[0][0]).numpy()
    return gradients, [p.detach().numpy() for p in model.parameters()], [b.numpy() for b in model.buffers()], evaluated


@pytest.mark.parametrize(("rows", "momentum", "affine"), [(11, 0.2, True), (2, 0.2, True), (7, None, False)])
def test_training_equals_the_whole_batch_on_one_process(
    job: Launcher, rows: int, momentum: float | None, affine: bool
) -> None:
    if job.replicas == 1:
        pytest.skip("one replica is one process")
    expected = alone(rows, momentum, affine)
    for result in job(train, rows, momentum, affine):
        for actual_step, expected_step in zip(result[0], expected[0], strict=True):
            for a, b in zip(actual_step, expected_step, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
        for kind in (1, 2):
            for a, b in zip(result[kind], expected[kind], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(result[3], expected[3], rtol=1e-6, atol=1e-8)


def images(strategy: muster.Strategy) -> Any:
    module = _images(True)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, _pictures())
    result = strategy.step(lambda x: model(x).square().mean(), x)
    return [p.grad for p in module.parameters()], float(result.loss)


def _images(synchronised: bool) -> nn.Sequential:
    torch.manual_seed(4)
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.GELU(), nn.Conv2d(3, 2, 1))
    return (nn.SyncBatchNorm.convert_sync_batchnorm(module) if synchronised else module).double()


def _pictures() -> Tensor:
    return torch.randn(5, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_works_on_images_and_after_torchs_conversion(wide_job: Launcher) -> None:
    model = _images(False)
    loss = model(_pictures()).square().mean()
    loss.backward()
    for gradients, value in wide_job(images):
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for a, p in zip(gradients, model.parameters(), strict=True):
            np.testing.assert_allclose(a, p.grad.numpy(), rtol=1e-8, atol=1e-10)


def test_in_training_it_needs_its_peers() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.prepare(build(True))
        with pytest.raises(muster.InvalidArgument, match=r"strategy\.step"):
            model(torch.ones(3, 5, dtype=torch.float64))
        model.eval()
        assert model(torch.ones(3, 5, dtype=torch.float64)).shape == (3, 3)


class Counting:
    """A strategy's core, and the names of its collectives inside a step, in order."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        if name in ("gather_in_step", "reduce_in_step"):
            return lambda *args: (self.calls.append(name), found(*args))[1]
        if name == "sum_in_backward":
            return lambda value: self._counted(found(value))
        return found

    def _counted(self, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda value: (self.calls.append("in backward"), call(value))[1]


def collectives_of_a_layer(strategy: muster.Strategy) -> list[str]:
    module = nn.Sequential(nn.Linear(5, 6), nn.SyncBatchNorm(6))
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    collectives: Any = strategy._collectives
    collectives._core = counting = Counting(collectives._core)
    strategy.step(lambda x: model(x).square().mean(), part_of(strategy, torch.ones(6, 5)))
    collectives._core = counting._core
    return counting.calls


def test_a_layer_waits_for_its_peers_once_forward_and_once_backward(wide_job: Launcher) -> None:
    for calls in wide_job(collectives_of_a_layer):
        local_replicas = calls.count("in backward")
        assert local_replicas >= 1
        assert sorted(calls) == ["gather_in_step"] * local_replicas + ["in backward"] * local_replicas


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_low_precision_is_normalised_in_fp32(memory_format: torch.memory_format) -> None:
    torch.manual_seed(4)
    x = torch.randn(6, 3, 4, 5).bfloat16().contiguous(memory_format=memory_format) + 3
    weight = torch.randn(6, 3, 4, 5)
    ours, whole = nn.SyncBatchNorm(3), nn.BatchNorm2d(3)
    own, theirs = x.clone().requires_grad_(), x.float().requires_grad_()

    class Alone:
        def gather(self, row: Tensor) -> Tensor:
            return row[None]

        def sum_in_backward(self, values: Tensor) -> Tensor:
            return values

        reduce = sum_in_backward

    found = normalise(ours, own, Alone())
    assert found.dtype == torch.bfloat16
    expected = whole(theirs)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(found, expected.bfloat16())
    torch.testing.assert_close(own.grad.float(), theirs.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours.weight.grad, whole.weight.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours.running_var, whole.running_var)


def empty_parts(strategy: muster.Strategy) -> Any:
    """Of the positive rows alone; the replicas but the first have none."""
    module = build(True)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.arange(30.0, dtype=torch.float64).view(6, 5)

    def some(x: Tensor) -> Tensor:
        return model(x if strategy.replica == 0 else x[:0]).square().sum()

    strategy.step(lambda x: Loss(some(x), reduction="sum"), part_of(strategy, x))
    return strategy.num_replicas, [p.grad.clone() for p in module.parameters()], list(module.buffers())


def test_a_part_may_have_no_rows(wide_job: Launcher) -> None:
    for replicas, gradients, buffers in wide_job(empty_parts):
        model = build(False)
        rows = torch.tensor_split(torch.arange(30.0, dtype=torch.float64).view(6, 5), replicas)[0]
        model(rows).square().sum().backward()
        for found, parameter in zip(gradients, model.parameters(), strict=True):
            np.testing.assert_allclose(found, parameter.grad.numpy(), rtol=1e-9, atol=1e-12)
        for found, buffer in zip(buffers, model.buffers(), strict=True):
            np.testing.assert_allclose(found, buffer.numpy(), rtol=1e-9)


def all_parts_empty(strategy: muster.Strategy) -> list[Tensor]:
    """Changes of running statistics by a step whose replicas all found nothing in their parts."""
    module = build(True)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.arange(30.0, dtype=torch.float64).view(6, 5))
    strategy.step(lambda x: model(x).square().sum(), x)
    before = [buffer.clone() for buffer in module.buffers()]
    strategy.step(lambda x: Loss(model(x[:0]).square().sum(), reduction="sum"), x)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    return [b - a for b, a in zip(before, module.buffers(), strict=True)]


def test_parts_without_any_row_leave_running_statistics_alone(wide_job: Launcher) -> None:
    for changes in wide_job(all_parts_empty):
        for change in changes:
            np.testing.assert_array_equal(change, 0)


def kept(strategy: muster.Strategy) -> str:
    """What backward through a layer of an earlier step says."""
    module = nn.Sequential(nn.Linear(5, 6), nn.SyncBatchNorm(6, affine=False))
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.randn(6, 5))
    outputs: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        outputs[strategy.replica] = model(x)
        return outputs[strategy.replica].square().mean()

    strategy.step(lambda x: keep(x).detach() + model(x).mean(), x)
    with pytest.raises(muster.InvalidArgument) as caught:
        strategy.step(lambda x: outputs[strategy.replica].sum() + model(x).mean(), x)
    return str(caught.value)


def test_a_graph_of_an_earlier_step_is_refused(wide_job: Launcher) -> None:
    for text in wide_job(kept):
        assert "detach() what is kept" in text


# --- reductions inside the step ---------------------------------------------------------------------------------------
def model_of() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def centred(strategy: muster.Strategy | None, x: Tensor) -> Tensor:
    """Distances from the mean over all samples: a mean loss of every sample depends on all parts."""
    mean = x.mean(0) if strategy is None else strategy.reduce(x.mean(0), "mean")
    return (x - mean).square().sum(1).mean()


def weighed(strategy: muster.Strategy | None, x: Tensor) -> Tensor:
    mean = (x[:, 0] ** 3).sum() / (len(x) * 2)
    if strategy is not None:
        mean = strategy.reduce((x[:, 0] ** 3).sum() / (len(x) * 2), "mean", weight=2.0 * len(x))
    return (x * mean).square().mean()


def summed(strategy: muster.Strategy | None, x: Tensor) -> Tensor:
    total = {"t": (x.sum(0), x.square().sum())}
    if strategy is not None:
        total = strategy.reduce(total, "sum")
    return (x * total["t"][0]).mean() / total["t"][1]


def spread(strategy: muster.Strategy | None, x: Tensor) -> Tensor:
    low, high = x.min(0).values, x.max(0).values
    if strategy is not None:
        low, high = strategy.reduce(low, "min"), strategy.reduce(high, "max")
    return ((x - low) / (high - low + 1)).square().mean()


def contrastive(strategy: muster.Strategy | None, x: Tensor) -> Tensor:
    others = x if strategy is None else strategy.gather(x)
    return torch.logsumexp(x @ others.t(), 1).mean()


def against_first(strategy: muster.Strategy | None, x: Tensor) -> Tensor:
    anchor = x[0] if strategy is None else strategy.broadcast(x[0] * 1.0, 0)
    return (x * anchor).sum(1).square().mean()


LOSSES = [centred, weighed, summed, spread, contrastive, against_first]


def reduce_in_steps(strategy: muster.Strategy, rows: int) -> Any:
    results = {}
    for fn in LOSSES:
        module = model_of()
        model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
        x = part_of(strategy, batches(rows)[0][0] - 100)
        result = strategy.step(lambda x, m=model, f=fn: f(strategy, m(x)), x, optimizers=optimizer)
        results[fn.__name__] = float(result.loss), [p.grad.clone() for p in module.parameters()]
    return results


@pytest.mark.parametrize("rows", [11, 2])
def test_gradients_through_collectives_are_those_of_the_whole_batch(job: Launcher, rows: int) -> None:
    expected = {}
    for fn in LOSSES:
        model = model_of()
        loss = fn(None, model(batches(rows)[0][0] - 100))
        loss.backward()
        expected[fn.__name__] = loss.item(), [p.grad.numpy() for p in model.parameters()]
    for results in job(reduce_in_steps, rows):
        for name, (loss, gradients) in results.items():
            assert loss == pytest.approx(expected[name][0], rel=1e-9), name
            for a, b in zip(gradients, expected[name][1], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11, err_msg=name)


def weightless(strategy: muster.Strategy, normalises: bool) -> Any:
    """Gradients of a step whose last replica's loss weighs nothing, while others' depend on its outputs."""
    module = build(True) if normalises else model_of()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    x = part_of(strategy, batches(12)[0][0] - 100)

    def step(x: Tensor) -> Loss:
        weight = 0 if strategy.replica == strategy.num_replicas - 1 else len(x)
        outputs = model(x)
        return Loss(outputs.square().sum(1).mean() if normalises else centred(strategy, outputs), weight=weight)

    result = strategy.step(step, x)
    return float(result.loss), [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("normalises", [True, False])
def test_a_part_without_weight_gets_the_gradients_of_others_losses(wide_job: Launcher, normalises: bool) -> None:
    model = build(False) if normalises else model_of()
    outputs = model(batches(12)[0][0] - 100)
    rest = outputs[: 12 - 12 // wide_job.replicas]  # but the last replica's
    loss = (rest if normalises else rest - outputs.mean(0)).square().sum(1).mean()
    loss.backward()
    for found, gradients in wide_job(weightless, normalises):
        assert found == pytest.approx(loss.item(), rel=1e-9)
        for a, b in zip(gradients, model.parameters(), strict=True):
            np.testing.assert_allclose(a, b.grad.numpy(), rtol=1e-8, atol=1e-11)


def checkpointed_statistics(strategy: muster.Strategy) -> Any:
    from torch.utils.checkpoint import checkpoint

    module = build(True)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = part_of(strategy, batches(6)[0])

    def step(x: Tensor, y: Tensor) -> Loss:
        return Loss(F.cross_entropy(checkpoint(model, x, use_reentrant=False), y), weight=len(x))

    strategy.step(step, x, y)
    return [p.grad for p in module.parameters()]


def test_it_works_inside_activation_checkpointing(wide_job: Launcher) -> None:
    model = build(False)
    x, y = batches(6)[0]
    F.cross_entropy(model(x), y).backward()
    for gradients in wide_job(checkpointed_statistics):
        for a, p in zip(gradients, model.parameters(), strict=True):
            np.testing.assert_allclose(a, p.grad.numpy(), rtol=1e-6, atol=1e-8)
