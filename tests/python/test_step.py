"""Strategy.step: weights, windows, results, skipped windows, sets of optimizers."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import muster
from muster import Loss, PerReplica
from support.jobs import Launcher, part_of
from support.messages import messages_of_muster

ROWS = 11
"""Uneven over 2, 3 and 4 replicas."""


def model_of(seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch_of(rows: int = ROWS, seed: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator, dtype=dtype), torch.randint(0, 3, (rows,), generator=generator)


def state_of(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def by_hand(rows: int = ROWS) -> list[np.ndarray]:
    """The whole batch's mean gradient on one process."""
    model = model_of()
    x, y = batch_of(rows)
    F.cross_entropy(model(x), y).backward()
    return [parameter.grad.numpy() for parameter in model.parameters()]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


def prepared(strategy: muster.Strategy, lr: float = 0.1, **kwargs: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    module = model_of(**kwargs)
    model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=lr))
    return module, model, optimizer


# --- weights ----------------------------------------------------------------------------------------------------------
def mean_step(strategy: muster.Strategy, rows: int) -> Any:
    module, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of(rows))
    result = strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert result.stepped and result.step == 1 and strategy.steps == 1 and not result.skipped
    return gradients_of(module), float(result.loss), float(result.weight), float(result.grad_norm)


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_uneven_and_empty_parts_count_every_sample_once(job: Launcher, rows: int) -> None:
    expected = by_hand(rows)
    loss = F.cross_entropy(model_of()(batch_of(rows)[0]), batch_of(rows)[1]).item()
    norm = np.sqrt(sum(np.square(g).sum() for g in expected))
    for gradients, mean, weight, grad_norm in job(mean_step, rows):
        assert_close(gradients, expected)
        assert mean == pytest.approx(loss, rel=1e-12)
        assert weight == rows
        assert grad_norm == pytest.approx(norm, rel=1e-12)


def token_step(strategy: muster.Strategy) -> Any:
    module, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())

    def step(x: Tensor, y: Tensor) -> Loss:
        y = torch.where(y == 2, -100, y)
        count = (y != -100).sum()
        losses = F.cross_entropy(model(x), y, ignore_index=-100)
        hits = (model(x).argmax(1) == y).sum() / count.clamp(min=1)
        return Loss(losses, weight=count, metrics={"accuracy": hits, "one": 1.0}, output=len(x))

    result = strategy.step(step, x, y)
    assert list(result.output) == [len(part) for part in x]
    return gradients_of(module), float(result.weight), float(result.metrics["accuracy"]), float(result.metrics["one"])


def test_a_weight_replaces_the_count_of_samples(job: Launcher) -> None:
    model = model_of()
    x, y = batch_of()
    y = torch.where(y == 2, -100, y)
    F.cross_entropy(model(x), y, ignore_index=-100).backward()
    accuracy = ((model(x).argmax(1) == y).sum() / (y != -100).sum()).item()
    for gradients, weight, measured, one in job(token_step):
        assert_close(gradients, [p.grad.numpy() for p in model.parameters()])
        assert weight == (y != -100).sum()
        assert measured == pytest.approx(accuracy, rel=1e-6)
        assert one == 1.0


def nan_of_weight_zero(strategy: muster.Strategy, as_tensor: bool) -> Any:
    module, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())

    def step(x: Tensor, y: Tensor) -> Loss:
        loss = F.cross_entropy(model(x), y)
        if strategy.replica == 0:
            return Loss(loss * float("nan"), weight=torch.tensor(0) if as_tensor else 0, metrics={"m": float("nan")})
        return Loss(loss, weight=len(x), metrics={"m": 2.0})

    result = strategy.step(step, x, y)
    assert not result.skipped
    return gradients_of(module), float(result.loss), float(result.metrics["m"])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_part_of_weight_zero_is_empty_and_its_nan_poisons_nothing(wide_job: Launcher, as_tensor: bool) -> None:
    model = model_of()
    x, y = batch_of()
    first = -(-ROWS // wide_job.replicas)
    loss = F.cross_entropy(model(x[first:]), y[first:])
    loss.backward()
    for gradients, mean, metric in wide_job(nan_of_weight_zero, as_tensor):
        assert_close(gradients, [p.grad.numpy() for p in model.parameters()])
        assert mean == pytest.approx(loss.item(), rel=1e-12)
        assert metric == 2.0


def weightless_window(strategy: muster.Strategy) -> Any:
    module, model, optimizer = prepared(strategy)
    before = state_of(module)
    x, y = part_of(strategy, batch_of())
    result = strategy.step(lambda x, y: Loss(F.cross_entropy(model(x), y), weight=0), x, y)
    assert not result.stepped and strategy.steps == 0
    assert not optimizer.state
    after = state_of(module)
    result = strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert result.stepped
    return [(a == b).all() for a, b in zip(before, after, strict=True)], gradients_of(module)


def test_a_window_without_weight_changes_nothing(job: Launcher) -> None:
    for same, gradients in job(weightless_window):
        assert all(same)
        assert_close(gradients, by_hand())


def refused_weights(strategy: muster.Strategy) -> None:
    _, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises((muster.InvalidArgument, muster.RemoteError), match="weight"):
            strategy.step(lambda x, y, w=weight: Loss(F.cross_entropy(model(x), y), weight=w), x, y)
    assert strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y).stepped


def test_weights_are_finite_and_not_negative(job: Launcher) -> None:
    job(refused_weights)


def numbers_of_python(strategy: muster.Strategy) -> list[float]:
    _, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())
    metrics = {"tokens": 123456789.0, "share": 0.1, "half": np.float32(0.5), "many": 2**53 + 1}
    result = strategy.step(lambda x, y: Loss(F.cross_entropy(model(x), y), weight=1003.1, metrics=metrics), x, y)
    return [float(result.weight), *(float(result.metrics[name]) for name in metrics)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_python_have_all_their_digits(dtype: torch.dtype) -> None:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            found = numbers_of_python(strategy)
        finally:
            torch.set_default_dtype(default)
    assert found == pytest.approx([1003.1, 123456789.0, 0.1, 0.5, 2**53], rel=1e-15)


def sum_step(strategy: muster.Strategy) -> Any:
    module, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())
    result = strategy.step(
        lambda x, y: Loss(F.cross_entropy(model(x), y, reduction="sum"), reduction="sum", metrics={"rows": len(x)}),
        x,
        y,
    )
    return gradients_of(module), float(result.loss), float(result.metrics["rows"])


def test_a_sum_adds_and_never_divides(job: Launcher) -> None:
    model = model_of()
    x, y = batch_of()
    loss = F.cross_entropy(model(x), y, reduction="sum")
    loss.backward()
    for gradients, total, rows in job(sum_step):
        assert_close(gradients, [p.grad.numpy() for p in model.parameters()])
        assert total == pytest.approx(loss.item(), rel=1e-12)
        sizes = [len(part) for part in np.array_split(np.arange(ROWS), job.replicas)]
        assert rows == pytest.approx(sum(n * n for n in sizes) / ROWS)


def mixed_reductions(strategy: muster.Strategy) -> None:
    _, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())

    def step(x: Tensor, y: Tensor) -> Loss:
        return Loss(F.cross_entropy(model(x), y), reduction="sum" if strategy.replica == 0 else "mean")

    with pytest.raises(muster.InvalidArgument, match="reduction"):
        strategy.step(step, x, y)
    assert strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y).stepped


def test_one_window_has_one_reduction(wide_job: Launcher) -> None:
    wide_job(mixed_reductions)


# --- windows ----------------------------------------------------------------------------------------------------------
def accumulated(strategy: muster.Strategy, sizes: list[int]) -> Any:
    module, model, _ = prepared(strategy)
    x, y = batch_of()
    results = []
    for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
        px, py = part_of(strategy, (xs, ys))
        results.append(
            strategy.step(
                lambda x, y: Loss(F.cross_entropy(model(x), y), metrics={"rows": float(len(x))}, output=len(x)), px, py
            )
        )
    assert [r.stepped for r in results] == [False] * (len(sizes) - 1) + [True]
    assert [r.grad_norm is None for r in results] == [True] * (len(sizes) - 1) + [False]
    assert [r.step for r in results] == [0] * (len(sizes) - 1) + [1]
    return gradients_of(module), [float(r.loss) for r in results], [float(r.weight) for r in results]


def test_micro_batches_add_up_to_the_whole_batch(job: Launcher) -> None:
    model = model_of()
    x, y = batch_of()
    losses = F.cross_entropy(model(x), y, reduction="none")
    for gradients, mean, weight in job(accumulated, [4, 5, 2], accumulate=3):
        assert_close(gradients, by_hand())
        assert mean[-1] == pytest.approx(losses.mean().item(), rel=1e-12)
        assert weight[-1] == ROWS
        if job.workers == 0:  # an open window shows this worker's share
            assert mean[:2] == pytest.approx([losses[:4].mean().item(), losses[:9].mean().item()])
            assert weight[:2] == [4, 9]


def counted_windows(strategy: muster.Strategy, rows: int, batch: int) -> Any:
    _, model, _ = prepared(strategy, lr=0.0)
    loader = strategy.prepare(DataLoader(TensorDataset(*batch_of(rows)), batch_size=batch))
    seen = []
    for _ in range(2):
        for x, y in loader:
            result = strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            seen.append((result.stepped, float(result.weight) if result.stepped else 0.0))
    return seen, strategy.flush() is None


def test_a_loaders_end_closes_a_short_window(job: Launcher) -> None:
    expected = [(False, 0), (True, 8), (True, 3)]
    for seen, nothing_left in job(counted_windows, 11, 4, accumulate=2):
        assert seen == expected * 2
        assert nothing_left


def test_drop_incomplete_drops_a_short_window(job: Launcher) -> None:
    expected = [(False, 0), (True, 8), (False, 0)]
    for seen, nothing_left in job(counted_windows, 11, 4, accumulate=2, drop_incomplete=True):
        assert seen == expected * 2
        assert nothing_left


def flushed(strategy: muster.Strategy) -> Any:
    module, model, _ = prepared(strategy)
    assert strategy.flush() is None
    x, y = part_of(strategy, batch_of())
    result = strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert not result.stepped and strategy.steps == 0
    closed = strategy.flush()
    assert closed is not None and closed.stepped and strategy.steps == 1
    assert list(closed.output) == [None] * len(strategy.devices)
    assert strategy.flush() is None
    return gradients_of(module), float(closed.weight)


def test_flush_closes_an_open_window(job: Launcher) -> None:
    for gradients, weight in job(flushed, accumulate=3):
        assert_close(gradients, by_hand())
        assert weight == ROWS


def flush_drops(strategy: muster.Strategy) -> None:
    module, model, _ = prepared(strategy)
    before = state_of(module)
    x, y = part_of(strategy, batch_of())
    strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert strategy.flush() is None and strategy.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(module), strict=True))


def test_flush_drops_the_window_with_drop_incomplete(job: Launcher) -> None:
    job(flush_drops, accumulate=3, drop_incomplete=True)


# --- clipping ---------------------------------------------------------------------------------------------------------
def clipped(strategy: muster.Strategy) -> Any:
    module, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())
    result = strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    return gradients_of(module), float(result.grad_norm), state_of(module)


@pytest.mark.parametrize("limit", [0.01, 100.0])
def test_clipping_equals_torchs_on_the_whole_batch(job: Launcher, limit: float) -> None:
    model = model_of()
    x, y = batch_of()
    F.cross_entropy(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
    expected = [p.grad.numpy().copy() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    unclipped = by_hand()
    for gradients, reported, parameters in job(clipped, clip_norm=limit):
        assert reported == pytest.approx(norm, rel=1e-12)
        assert_close(gradients, unclipped)
        assert_close(parameters, [p.detach().numpy() for p in model.parameters()])
    for gradients, reported, parameters in job(clipped, clip_norm=limit, fuse=False):
        assert reported == pytest.approx(norm, rel=1e-12)
        assert_close(gradients, expected)
        assert_close(parameters, [p.detach().numpy() for p in model.parameters()])


# --- skipped windows --------------------------------------------------------------------------------------------------
def skipping(strategy: muster.Strategy) -> Any:
    module = model_of()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = strategy.prepare(module, optimizer)
    x, y = part_of(strategy, batch_of())
    poison = True

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        return loss * float("inf") if poison and strategy.replica == strategy.num_replicas - 1 else loss

    before = state_of(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = strategy.step(step, x, y)
        scheduler.step()
    assert result.stepped and bool(result.skipped) and strategy.steps == 1
    assert not np.isfinite(float(result.grad_norm))
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(module), strict=True))
    assert not optimizer.state
    poison = False
    assert not strategy.step(step, x, y).skipped
    kept = {key: value.clone() for key, value in optimizer.state[next(module.parameters())].items()}
    poison = True
    assert strategy.step(step, x, y).skipped
    now = optimizer.state[next(module.parameters())]
    assert all(torch.equal(now[key], value) for key, value in kept.items())
    with pytest.raises(muster.NonFinite) as caught:
        for _ in range(2):
            strategy.step(step, x, y)
    poison = False
    assert not strategy.step(step, x, y).skipped
    return str(caught.value)


def test_a_window_that_is_not_finite_is_skipped_and_named_after_max_skipped(job: Launcher) -> None:
    for message in job(skipping, max_skipped=3):
        assert "3 windows in a row" in message
        assert "parameter '0.weight'" in message
        assert f"replica {job.replicas - 1}" in message
        assert "step 5" in message


def scheduled(strategy: muster.Strategy) -> float:
    module = model_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model, optimizer = strategy.prepare(module, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, y = part_of(strategy, batch_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            if strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y).stepped:
                scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


def test_a_scheduler_is_stepped_when_stepped_and_never_warns(job: Launcher) -> None:
    assert job(scheduled, accumulate=2) == [0.25] * max(job.workers, 1)


# --- samples that are left out ----------------------------------------------------------------------------------------
def damaged_left_out(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return torch.utils.data.default_collate([sample for sample in samples if int(sample[1]) != 1] or samples)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_that_counts_for_samples_that_were_left_out_is_told_of(
    weighted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        _, model, _ = prepared(strategy)
        data = TensorDataset(batch_of(16)[0], torch.arange(16) % 2)
        loader = strategy.prepare(DataLoader(data, batch_size=8, collate_fn=damaged_left_out))

        def step(x: Tensor, y: Tensor) -> Loss:
            return Loss(F.cross_entropy(model(x), y), weight=len(y) if weighted else None)

        weights = [float(strategy.step(step, x, y).weight) for x, y in loader]
    texts = [record.message for record in caplog.records if "was collated into" in record.message]
    assert weights == ([4.0, 4.0] if weighted else [8.0, 8.0])
    assert len(texts) == (0 if weighted else 1) and all(
        "a part of 4 samples was collated into 2 rows" in t for t in texts
    )


def test_a_loss_of_weight_0_that_is_not_finite_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

        def step(x: Tensor, mask: Tensor) -> Loss:
            return Loss((model(x).square().sum(1) * mask).sum() / mask.sum(), weight=float(mask.sum()))

        for _ in range(2):
            result = strategy.step(step, torch.randn(8, 4), torch.tensor([1.0] * 4 + [0.0] * 4))
            assert result.skipped and torch.isfinite(result.loss)
    assert len([record for record in caplog.records if "a part of weight 0 has a loss" in record.message]) == 1


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("weight", [1e-310, 1e-60, 1e-44, 1e40, 1e300, 1e308])
def test_weights_that_fp32_cannot_take_skip_windows_until_their_unit_is_known(weight: float, fuse: bool) -> None:
    module = nn.Linear(4, 3)
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    with muster.MirroredStrategy(["cpu"] * 2, fuse=fuse, clip_norm=10.0, max_skipped=9) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(3):
            result = strategy.step(lambda x: Loss(model(x).square().mean(), weight=weight), x)
            if not result.skipped:
                optimizer.zero_grad()
                twin(x).square().mean().backward()
                optimizer.step()
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)
    assert bool(result.skipped) == (weight in (1e-310, 1e308))  # whose unit, and sum, are no numbers


def test_samples_that_a_zipped_loader_leaves_out_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def loader(samples: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(samples, 1)), batch_size=6)

    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _, few, many = strategy.prepare(
            net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=0.1), loader(7), loader(20)
        )
        for (x,), (z,) in zip(few, many, strict=False):
            strategy.step(lambda x, z: model(x).mean() + model(z).mean(), x, z)
    (told,) = [record.getMessage() for record in caplog.records if "left out" in record.message]
    assert "3 samples of other loaders" in told


def test_batches_that_have_time_first_are_none_of_these(caplog: pytest.LogCaptureFixture) -> None:
    def time_first(samples: list[tuple[Tensor]]) -> Tensor:
        return torch.stack([x for (x,) in samples], dim=1)

    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = nn.Linear(3, 1)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        data = TensorDataset(torch.ones(16, 2, 3))
        for x in strategy.prepare(DataLoader(data, batch_size=8, collate_fn=time_first)):
            assert float(strategy.step(lambda x: model(x).mean(), x).weight) == 8
    assert not [record for record in caplog.records if "was collated into" in record.message]


# --- sets of optimizers -----------------------------------------------------------------------------------------------
def adversarial(strategy: muster.Strategy) -> Any:
    torch.manual_seed(4)
    generator, critic = nn.Linear(3, 5).double(), nn.Linear(5, 1).double()
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    g, c, of_generator, of_critic = strategy.prepare(generator, critic, of_generator, of_critic)
    real = torch.randn(7, 5, dtype=torch.float64)
    noise = torch.randn(7, 3, dtype=torch.float64)
    (real_parts, noise_parts) = part_of(strategy, (real, noise))
    norms = []
    for _ in range(5):
        result = strategy.step(lambda r, z: c(g(z)).mean() - c(r).mean(), real_parts, noise_parts, optimizers=of_critic)
        norms.append(float(result.grad_norm))
        result = strategy.step(lambda z: -c(g(z)).mean(), noise_parts, optimizers=[of_generator])
        norms.append(float(result.grad_norm))
    with pytest.raises(muster.InvalidArgument, match="two different sets"):
        strategy.step(lambda z: -c(g(z)).mean(), noise_parts)
    assert strategy.step(lambda z: -c(g(z)).mean(), noise_parts, optimizers=of_generator).stepped
    return [*state_of(generator), *state_of(critic)], norms


def in_two_phases(strategy: muster.Strategy) -> list[Tensor]:
    """A head first, then all layers with another optimizer, and the head again."""
    module = model_of()
    head = torch.optim.SGD(module[2].parameters(), lr=0.1, momentum=0.9)
    model, head = strategy.prepare(module, head)
    x, y = part_of(strategy, batch_of())

    def step(**options: Any) -> None:
        assert strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, **options).stepped

    step()
    step()
    everything = strategy.prepare(torch.optim.AdamW(module.parameters(), lr=0.01))
    with pytest.raises(muster.InvalidArgument, match="belongs to two optimizers that would step together"):
        step()
    for optimizer in (everything, everything, head, everything):
        step(optimizers=optimizer)
    return state_of(module)


def test_optimizers_over_some_of_the_same_parameters_step_in_turns(job: Launcher) -> None:
    module = model_of()
    head = torch.optim.SGD(module[2].parameters(), lr=0.1, momentum=0.9)
    everything = torch.optim.AdamW(module.parameters(), lr=0.01)
    x, y = batch_of()
    for optimizer in (head, head, everything, everything, head, everything):
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    for parameters in job(in_two_phases):
        assert_close(parameters, [parameter.detach().numpy() for parameter in module.parameters()], 1e-9)


def in_two_open_windows(strategy: muster.Strategy) -> None:
    module = model_of()
    head = torch.optim.SGD(module[2].parameters(), lr=0.1)
    everything = torch.optim.SGD(module.parameters(), lr=0.1)
    model, head, everything = strategy.prepare(module, head, everything)
    x, y = part_of(strategy, batch_of())

    def step(optimizer: torch.optim.Optimizer) -> bool:
        return strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, optimizers=optimizer).stepped

    assert not step(head)
    with pytest.raises(muster.InvalidArgument, match=r"'2\.weight' is in another set of optimizers= too, whose window"):
        step(everything)
    assert step(head) and not step(everything) and step(everything)


def test_such_optimizers_have_no_windows_open_at_once(job: Launcher) -> None:
    job(in_two_open_windows, accumulate=2)


def adversarial_by_hand() -> tuple[list[np.ndarray], list[float]]:
    torch.manual_seed(4)
    g, c = nn.Linear(3, 5).double(), nn.Linear(5, 1).double()
    of_generator = torch.optim.SGD(g.parameters(), lr=0.1, momentum=0.9)
    of_critic = torch.optim.Adam(c.parameters(), lr=0.01)
    r, z = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    norms = []

    def update(optimizer: torch.optim.Optimizer, module: nn.Module, loss: Tensor) -> None:
        for parameter in [*g.parameters(), *c.parameters()]:
            parameter.grad = None
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item())
        optimizer.step()

    for _ in range(5):
        update(of_critic, c, c(g(z)).mean() - c(r).mean())
        update(of_generator, g, -c(g(z)).mean())
    update(of_generator, g, -c(g(z)).mean())
    return [p.detach().numpy() for p in [*g.parameters(), *c.parameters()]], norms[:-1]


def test_two_optimizers_take_turns(job: Launcher) -> None:
    expected, expected_norms = adversarial_by_hand()
    for parameters, norms in job(adversarial):
        assert_close(parameters, expected)
        assert norms == pytest.approx(expected_norms, rel=1e-12)


def partly_optimized(strategy: muster.Strategy) -> Any:
    module = model_of()
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
    model, optimizer = strategy.prepare(module, optimizer)
    x, y = part_of(strategy, batch_of())
    leaves: list[list[Any]] = [[] for _ in strategy.devices]

    def step(x: Tensor, y: Tensor) -> Tensor:
        leaves[strategy.replica - strategy.first_replica] = list(model[0].parameters())
        return F.cross_entropy(model(x), y)

    for _ in range(2):
        strategy.step(step, x, y)
    return [leaf.grad is None for of_replica in leaves for leaf in of_replica], state_of(module)


def test_gradients_of_parameters_in_no_optimizer_are_dropped(job: Launcher) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    x, y = batch_of()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for dropped, parameters in job(partly_optimized):
        assert all(dropped)
        assert_close(parameters, [p.detach().numpy() for p in model.parameters()])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("ahead", [1, 3])
def test_batches_that_were_fetched_ahead_close_windows_where_they_are_the_last(replicas: int, ahead: int) -> None:
    module = nn.Linear(3, 1)
    data = TensorDataset(torch.linspace(-1, 1, 90).view(30, 3))
    with muster.MirroredStrategy(["cpu"] * replicas, accumulate=2) as strategy:
        model, _, loader = strategy.prepare(
            module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(data, batch_size=6)
        )
        for _ in range(2):
            stepped = []
            batches = iter(loader)
            fetched = [next(batches) for _ in range(ahead)]
            while fetched:
                fetched += [batch] if (batch := next(batches, None)) is not None else []
                (x,) = fetched.pop(0)
                stepped.append(strategy.step(lambda x: model(x).square().mean(), x).stepped)
            assert stepped == [False, True, False, True, True]


def looped(strategy: muster.Strategy, case: str) -> list[bool]:
    module = nn.Linear(3, 1)
    numbers = torch.linspace(-1, 1, 96).view(32, 3)
    model, _, training, other = strategy.prepare(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        DataLoader(TensorDataset(numbers), batch_size=4),
        DataLoader(TensorDataset(numbers), batch_size=16),
    )

    def is_stepped(x: Any) -> bool:
        return strategy.step(lambda x: model(x).square().mean(), x).stepped

    own = part_of(strategy, numbers[:8])
    if case == "another loop was left at its last batch":
        for number, _ in enumerate(other):
            if number == 1:
                break
        return [is_stepped(own) for _ in training]
    if case == "another loop stands at its last batch":
        kept = iter(other)
        next(kept), next(kept)
        return [is_stepped(x) for (x,) in training]
    if case == "another loop has stood at its last batch for long":
        kept = iter(other)
        next(kept), next(kept)
        next(iter(training))
        return [is_stepped(own) for _ in training]
    if case == "each batch is stepped four times":
        return [is_stepped(x) for (x,) in other for _ in range(4)]
    if case == "each batch makes four steps of others":
        return [is_stepped(own) for _ in other for _ in range(4)]
    if case == "each batch makes a step of others too":
        return [stepped for _ in range(2) for (x,) in other for stepped in (is_stepped(x), is_stepped(own))]
    assert case == "another loop is run in each step"
    stepped = []
    for _ in training:
        for (x,) in other:
            strategy.run(lambda x: model(x).mean(), x)
        stepped.append(is_stepped(own))
    return stepped


@pytest.mark.parametrize(
    "case",
    [
        "another loop was left at its last batch",
        "another loop stands at its last batch",
        "another loop has stood at its last batch for long",
        "each batch is stepped four times",
        "each batch makes four steps of others",
        "each batch makes a step of others too",
        "another loop is run in each step",
    ],
)
def test_only_the_last_step_of_a_loop_closes_a_window_early(job: Launcher, case: str) -> None:
    for stepped in job(looped, case, accumulate=4):
        assert stepped == 2 * [False, False, False, True]


def retried(strategy: muster.Strategy) -> list[list[bool]]:
    module = nn.Linear(3, 1)
    data = TensorDataset(torch.linspace(-1, 1, 48).view(16, 3))
    model, _, loader = strategy.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(data, batch_size=4)
    )

    def fails(x: Tensor) -> Tensor:
        raise LookupError("once")

    epochs = []
    for failing in (2, 3, None):
        stepped = []
        for number, (x,) in enumerate(loader):
            if number == failing:
                with pytest.raises((LookupError, muster.RemoteError)):
                    strategy.step(fails, x)
                strategy.flush()
            stepped.append(strategy.step(lambda x: model(x).square().mean(), x).stepped)
        epochs.append(stepped)
    return epochs


def test_a_step_that_raised_does_not_count_where_loops_end(job: Launcher) -> None:
    for epochs in job(retried, accumulate=3):
        assert [stepped[-1] for stepped in epochs] == [True, True, True]


@pytest.mark.parametrize("drops", [False, True])
def test_the_end_of_a_loop_with_several_steps_a_batch_closes_or_drops(job: Launcher, drops: bool) -> None:
    for stepped in job(looped, "each batch is stepped four times", accumulate=3, drop_incomplete=drops):
        assert stepped == [False, False, True] * 2 + [False, not drops]


def falling_short(strategy: muster.Strategy) -> tuple[list[bool], int]:
    module = nn.Linear(3, 1)
    data = TensorDataset(torch.linspace(-1, 1, 18).view(6, 3))
    model, _, loader = strategy.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(data, batch_size=4)
    )
    stepped = []
    with messages_of_muster() as messages:
        for _ in range(2):
            for number, (x,) in enumerate(loader):
                for _ in range(4 - 2 * number):
                    stepped.append(strategy.step(lambda x: model(x).square().mean(), x).stepped)
    return stepped, sum("call flush() behind the loop" in text for text in messages)


def test_a_last_batch_that_goes_into_fewer_steps_than_others_is_told_once(job: Launcher) -> None:
    for stepped, warned in job(falling_short, accumulate=4):
        assert stepped == [False, False, False, True, False, False, False, True, False, False, False, True]
        assert warned == 1


def overlapping(strategy: muster.Strategy) -> None:
    module = model_of()
    first = torch.optim.SGD(module.parameters(), lr=0.1)
    second = torch.optim.SGD(module[2].parameters(), lr=0.1)
    model, first, second = strategy.prepare(module, first, second)
    x, y = part_of(strategy, batch_of())
    with pytest.raises(muster.InvalidArgument, match=r"'2\.weight'.*two optimizers"):
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, optimizers=first).stepped
    with pytest.raises(muster.InvalidArgument, match="was not prepared"):
        other = torch.optim.SGD(module.parameters(), lr=0.1)
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, optimizers=other)
    with pytest.raises(muster.InvalidArgument, match="names none"):
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, optimizers=[])


def test_one_parameter_is_not_stepped_by_two_optimizers_at_once(worker_job: Launcher) -> None:
    worker_job(overlapping)


def test_a_window_is_stepped_by_the_optimizers_that_opened_it() -> None:
    module = model_of()
    x, y = batch_of()
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1, accumulate=2) as strategy:
        rates = (0.1, 0.03)
        model, one, other = strategy.prepare(module, *(torch.optim.SGD(module.parameters(), lr=rate) for rate in rates))

        def step(*optimizers: torch.optim.Optimizer) -> bool:
            return strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, optimizers=list(optimizers)).stepped

        assert not step(one)
        with pytest.raises(muster.InvalidArgument, match="other optimizers= of the same parameters opened a window"):
            step(other)
        assert step(one) and not step(other) and step(other)


def test_optimizers_of_the_same_parameters_step_in_turn() -> None:
    module, expected = model_of(), model_of()
    rates = [0.1, 0.03]
    x, y = batch_of()
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        optimizers = [torch.optim.SGD(module.parameters(), lr=rate) for rate in rates]
        model, *optimizers = strategy.prepare(module, *optimizers)
        for step in range(4):
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, optimizers=optimizers[step % 2])
    plain = [torch.optim.SGD(expected.parameters(), lr=rate) for rate in rates]
    for step in range(4):
        expected.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        plain[step % 2].step()
    assert_close([p.detach().numpy() for p in module.parameters()], [p.detach().numpy() for p in expected.parameters()])


def growing(strategy: muster.Strategy, grow: str) -> Any:
    module = model_of()
    if grow == "group":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1, momentum=0.9)
    else:
        module[0].requires_grad_(False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = strategy.prepare(module, optimizer)
    x, y = part_of(strategy, batch_of())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    for _ in range(2):
        strategy.step(step, x, y)
    if grow == "group":
        optimizer.add_param_group({"params": list(module[0].parameters()), "lr": 0.05})
    else:
        model[0].requires_grad_(True)
    for _ in range(2):
        strategy.step(step, x, y)
    if grow == "freeze":
        model[2].requires_grad_(False)
        strategy.step(step, x, y)
    return state_of(module)


@pytest.mark.parametrize("grow", ["group", "unfreeze", "freeze"])
def test_the_parameters_of_a_set_may_change_between_steps(job: Launcher, grow: str) -> None:
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        expected = [p.numpy() for p in growing(strategy, grow)]
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    x, y = batch_of()
    for step in range(5 if grow == "freeze" else 4):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05 if grow == "group" else 0.1})
        if step == 4:
            model[2].requires_grad_(False)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_close(expected, [p.detach().numpy() for p in model.parameters()])
    for parameters in job(growing, grow):
        assert_close(parameters, expected)


# --- arguments --------------------------------------------------------------------------------------------------------
def without_arguments(strategy: muster.Strategy) -> Any:
    module, model, _ = prepared(strategy)
    x, y = batch_of()

    def step() -> Loss:
        return Loss(F.cross_entropy(model(x), y), weight=len(x))

    if strategy.num_replicas > 1:
        with pytest.raises((muster.InvalidArgument, muster.RemoteError), match="weight="):
            strategy.step(lambda: F.cross_entropy(model(x), y))
    strategy.step(step)
    return gradients_of(module)


def test_a_step_may_have_no_arguments(job: Launcher) -> None:
    for gradients in job(without_arguments):
        assert_close(gradients, by_hand())


def shared_arguments(strategy: muster.Strategy) -> Any:
    _, model, _ = prepared(strategy)
    x, y = batch_of(8)
    seen = []

    def step(batch: dict[str, Any], scale: float, label: str, mask: Tensor, own: int) -> Tensor:
        seen.append((len(batch["x"]), scale, label, mask.shape, own))
        return F.cross_entropy(model(batch["x"]), batch["y"]) * scale

    locals_ = len(strategy.devices)
    own = PerReplica(range(locals_))
    mask = PerReplica([torch.ones(3, 3)] * locals_)
    weightless = {"x": x, "y": y}
    if locals_ == 1:
        with pytest.raises((muster.InvalidArgument, muster.RemoteError), match="weight="):
            strategy.step(step, weightless, 1.0, "label", mask, own) if strategy.num_replicas > 1 else _refuse()
        mask = PerReplica([torch.ones(8, 8)])
    seen.clear()
    strategy.step(lambda *a: Loss(step(*a), weight=len(a[0]["x"])), weightless, 1.0, "label", mask, own)
    return sorted(seen, key=lambda row: row[-1])


def _refuse() -> None:
    raise muster.InvalidArgument("weight=")


def test_tensors_are_split_and_the_rest_goes_to_all(job: Launcher) -> None:
    for seen in job(shared_arguments):
        rows = [len(part) for part in np.array_split(np.arange(8), job.local_replicas)]
        shape = torch.Size([8, 8] if job.local_replicas == 1 else [3, 3])
        assert seen == [(n, 1.0, "label", shape, i) for i, n in enumerate(rows)]


def test_a_batch_that_cannot_be_split_is_refused_naming_the_leaf() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        _, model, _ = prepared(strategy)
        x, y = batch_of(8)
        called = []

        def step(*args: Any) -> Tensor:
            called.append(args)
            return model(x).sum()

        with pytest.raises(muster.InvalidArgument, match="argument 2, key 'y'"):
            strategy.step(step, x, {"y": y[:5]})
        with pytest.raises(muster.InvalidArgument, match=r"argument 2.*type object"):
            strategy.step(step, x, object())
        with pytest.raises(muster.InvalidArgument, match="argument 2"):
            strategy.step(step, x, PerReplica([1, 2, 3]))
        assert not called
        assert strategy.step(lambda x: model(x).sum(), x).stepped


def empty_parts(strategy: muster.Strategy) -> Any:
    _, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of(2))
    called = []

    def step(x: Tensor, y: Tensor) -> Loss:
        called.append(strategy.replica)
        return Loss(F.cross_entropy(model(x), y), output=strategy.replica)

    result = strategy.step(step, x, y)
    ran = strategy.run(lambda x, y: len(x), x, y)
    return sorted(called), list(result.output), list(ran)


def test_the_function_is_not_called_for_an_empty_part(wide_job: Launcher) -> None:
    results = wide_job(empty_parts)
    assert sorted(replica for called, _, _ in results for replica in called) == [0, 1]
    assert [output for _, outputs, _ in results for output in outputs] == [0, 1] + [None] * (wide_job.replicas - 2)
    assert [n for _, _, ran in results for n in ran] == [1, 1] + [None] * (wide_job.replicas - 2)


# --- two models, what is returned -------------------------------------------------------------------------------------
def two_models(strategy: muster.Strategy) -> Any:
    first, second = model_of(1), model_of(2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    a, b, *_ = strategy.prepare(first, second, *optimizers)
    x, y = part_of(strategy, batch_of())
    for _ in range(3):
        strategy.step(lambda x, y: F.cross_entropy(a(x) + b(x), y), x, y)
    return [*state_of(first), *state_of(second)]


def test_two_models_are_trained_together(job: Launcher) -> None:
    a, b = model_of(1), model_of(2)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    x, y = batch_of()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(a(x) + b(x), y).backward()
        optimizer.step()
    for parameters in job(two_models):
        assert_close(parameters, [p.detach().numpy() for p in [*a.parameters(), *b.parameters()]])


def sharing_models(strategy: muster.Strategy) -> Any:
    encoder = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    torch.manual_seed(1)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter)
    whole = nn.Sequential(encoder, nn.Linear(4, 3).double())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    e, w, _ = strategy.prepare(encoder, whole, optimizer)
    x, y = part_of(strategy, batch_of(12))
    for _ in range(3):
        strategy.step(lambda x, y: F.cross_entropy(w(x), y) + e(2 * x).square().mean(), x, y)
    return [*state_of(whole), encoder[1].running_mean]


def test_a_module_and_a_part_of_it_may_both_be_prepared(worker_job: Launcher) -> None:
    with muster.MirroredStrategy(["cpu"] * 2, seed=3, threads_per_replica=1) as strategy:
        mirrored = [value.numpy().copy() for value in sharing_models(strategy)]
    for parameters in worker_job(sharing_models):
        for a, b in zip(parameters, mirrored, strict=True):
            assert np.array_equal(a, b)


def test_only_a_loss_may_be_returned(job: Launcher) -> None:
    job(returning)


def returning(strategy: muster.Strategy) -> None:
    _, model, _ = prepared(strategy)
    x, y = part_of(strategy, batch_of())
    failures = (muster.InvalidArgument, muster.RemoteError)
    for returned in (None, 1.0, (1, 2), {"loss": 3}, Loss(1.0)):  # type: ignore[arg-type]
        with pytest.raises(failures, match="return the loss as a 0-dim tensor"):
            strategy.step(lambda x, y, r=returned: r, x, y)
    with pytest.raises(failures, match="0-dim"):
        strategy.step(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
    with pytest.raises(failures, match="does not depend on any parameter"):
        strategy.step(lambda x, y: F.cross_entropy(model(x), y).detach(), x, y)
    with pytest.raises(failures, match="metric 'm'"):
        strategy.step(lambda x, y: Loss(F.cross_entropy(model(x), y), metrics={"m": torch.ones(2)}), x, y)
    for weight in (torch.ones(3), "2", 1 + 2j):
        with pytest.raises(failures, match="the weight of a Loss is a real number or a 0-dim tensor"):
            strategy.step(lambda x, y, w=weight: Loss(F.cross_entropy(model(x), y), weight=w), x, y)
    with pytest.raises(failures, match=r"metrics=\[1\]: it must be a dict"):
        strategy.step(lambda x, y: Loss(F.cross_entropy(model(x), y), metrics=[1]), x, y)  # type: ignore[arg-type]
    with pytest.raises(failures, match=r"metrics=\{1: 2\.0\}: it must be a dict"):
        strategy.step(lambda x, y: Loss(F.cross_entropy(model(x), y), metrics={1: 2.0}), x, y)  # type: ignore[dict-item]
    assert strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y).stepped


def misused(strategy: muster.Strategy) -> Any:
    module, model, optimizer = prepared(strategy)
    x, y = part_of(strategy, batch_of())
    failures = (muster.InvalidArgument, muster.RemoteError)

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def retaining(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        return loss

    for fn in (backward, retaining, lambda x, y: backward(x, y).detach()):
        with pytest.raises(failures, match=r"backward\(\) was called inside.*return the loss"):
            strategy.step(fn, x, y)
    for nested in (strategy.step, strategy.run):
        with pytest.raises(failures, match="cannot be called inside a step"):
            strategy.step(lambda x, y, n=nested: n(backward, x, y), x, y)
    strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    with pytest.raises(muster.InvalidArgument, match=r"after strategy\.step"):
        optimizer.step()
    return gradients_of(module)


def test_backward_inside_a_step_is_refused_and_the_strategy_stays_usable(job: Launcher) -> None:
    for gradients in job(misused):
        assert_close(gradients, by_hand())


def test_the_raw_module_in_another_replicas_step_is_refused() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module, model, _ = prepared(strategy)
        x, y = batch_of()
        with pytest.raises(muster.InvalidArgument, match="prepare\\(\\) returned"):
            strategy.step(lambda x, y: F.cross_entropy(module(x), y), x, y)
        assert strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y).stepped


def stepping_on(strategy: muster.Strategy, divide: bool) -> list[str]:
    _, model, _ = prepared(strategy)
    x, y = batch_of(8)
    if divide:
        x, y = part_of(strategy, (x, y))
    with messages_of_muster() as messages:
        for _ in range(2):
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    return [message for message in messages if "same samples" in message]


def test_workers_that_all_step_on_the_same_samples_are_told_once(worker_job: Launcher) -> None:
    chiefs, others = worker_job(stepping_on, False)
    assert len(chiefs) == 1 and "prepare() the loader" in chiefs[0] and not others
    assert worker_job(stepping_on, True) == [[], []]


def test_replicas_of_one_process_divide_what_they_are_given() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        assert stepping_on(strategy, False) == []


# --- modules that were never prepared ---------------------------------------------------------------------------------
class Custom(torch.autograd.Function):
    """A node that Python wrote is in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("kind", ["plain", "custom", "in a second set", "after prepare"])
def test_parameters_of_modules_that_were_never_prepared_are_told_of_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    stranger = nn.Linear(4, 3)
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        first, first_optimizer = strategy.prepare(layers[0], torch.optim.SGD(layers[0].parameters(), lr=0.1))
        second, second_optimizer = strategy.prepare(layers[1], torch.optim.SGD(layers[1].parameters(), lr=0.1))

        def texts() -> list[str]:
            return [record.message for record in caplog.records if "in no prepared module" in record.message]

        x = torch.ones(8, 4)
        if kind in ("in a second set", "after prepare"):
            strategy.step(lambda x: first(x).sum(), x, optimizers=[first_optimizer])
            assert texts() == []
        if kind == "after prepare":
            strategy.prepare(layers[2], torch.optim.SGD(layers[2].parameters(), lr=0.1))
            strategy.step(lambda x: stranger(first(x)).sum(), x, optimizers=[first_optimizer])
        else:
            for _ in range(2):
                strategy.step(
                    lambda x: stranger(Custom.apply(second(x)) if kind == "custom" else second(x)).sum(),
                    x,
                    optimizers=[second_optimizer],
                )
        (text,) = texts()
        assert "(2, of shapes (3, 4), (3,))" in text and "prepare()" in text
        strategy.step(lambda x: stranger(first(x) + second(x)).sum(), x, optimizers=[first_optimizer, second_optimizer])
        assert len(texts()) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_no_module_in_training_is_not_told_of(replicas: int, caplog: pytest.LogCaptureFixture) -> None:
    net, frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4).requires_grad_(False)
    strangers = [nn.Linear(4, 4)] if replicas == 1 else []
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        model, part, _ = strategy.prepare(net, net[0], torch.optim.SGD(net.parameters(), lr=0.1))

        def step(x: Tensor) -> Tensor:
            x = x.requires_grad_()
            fast = {name: value - 0.1 * value.square() for name, value in model.named_parameters()}
            once = torch.ones(4, requires_grad=True)
            y = torch.func.functional_call(model, fast, (x,)) + model(frozen(x)) + part(x) * once
            for stranger in strangers:
                y = y + stranger(x)  # one replica's gradients are whole
            return checkpoint(model, y, use_reentrant=False).sum()

        strategy.step(step, torch.ones(8, 4))
    assert not [record.message for record in caplog.records if "in no prepared module" in record.message]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["forgotten", "prepared", "partly", "frozen", "no gradient", "none is prepared"])
def test_a_module_whose_optimizer_was_not_prepared_is_told_of_once(
    kind: str, replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    body, head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    of_body = torch.optim.SGD(body.parameters(), lr=0.1)
    of_head = torch.optim.SGD((head[1] if kind == "partly" else head).parameters(), lr=0.1)
    if kind == "frozen":
        head.requires_grad_(False)
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        first, last = strategy.prepare(body, head)
        if kind != "none is prepared":
            strategy.prepare(of_body)
        if kind in ("prepared", "partly"):
            strategy.prepare(of_head)

        def step(x: Tensor) -> Tensor:
            with torch.no_grad() if kind == "no gradient" else contextlib.nullcontext():
                factor = last(x).sum()
            return (first(x) * factor).sum()

        for _ in range(2):
            strategy.step(step, torch.ones(8, 4), **({"optimizers": of_body} if kind == "prepared" else {}))
    texts = [record.message for record in caplog.records if "no prepared optimizer" in record.message]
    assert len(texts) == (kind == "forgotten")
    assert all("Sequential" in text and "prepare() its optimizer" in text for text in texts)


# --- two loaders at once ----------------------------------------------------------------------------------------------
def zipped(strategy: muster.Strategy) -> Any:
    """Terms over batches of two sizes, each divided by the samples of its whole batch; and the weight of a mean."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    seven, four = torch.randn(14, 3), torch.randn(8, 3)
    first = strategy.prepare(DataLoader(TensorDataset(four), batch_size=4))
    second = strategy.prepare(DataLoader(TensorDataset(seven), batch_size=7))
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    alone = copy.deepcopy(module)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)

    def sums(x: Tensor, y: Tensor) -> Loss:
        return Loss(model(x).square().sum() / 7 + model(y).abs().sum() / 4, reduction="sum")

    for number, ((x,), (y,)) in enumerate(zip(second, first, strict=True)):
        strategy.step(sums, x, y)
        optimizer.zero_grad()
        x, y = seven[7 * number :][:7], four[4 * number :][:4]
        (alone(x).square().mean() + alone(y).abs().mean()).backward()
        optimizer.step()
    trained = [[p.detach().clone() for p in each.parameters()] for each in (module, alone)]
    weights = [
        float(strategy.step(lambda x, y: model(x).mean() + model(y).mean(), x, y).weight)
        for (x,), (y,) in zip(second, first, strict=True)
    ]
    return *trained, weights


def test_sums_over_two_loaders_batches_add_up_and_means_count_those_of_the_first(wide_job: Launcher) -> None:
    for found, expected, weights in wide_job(zipped):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        assert weights == [4.0, 4.0]


# --- parameters that come to an optimizer -----------------------------------------------------------------------------
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_frozen_parameters_of_a_module_that_was_prepared_later_stay(kind: Any, replicas: int) -> None:
    module, head = nn.Linear(40, 30), nn.Linear(40, 30).requires_grad_(False)
    before = state_of(head)
    optimizer = kind(module.parameters(), lr=0.1)
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        model, _ = strategy.prepare(module, optimizer)
        strategy.step(lambda x: model(x).square().mean(), torch.randn(8, 40))
        strategy.prepare(head)
        optimizer.add_param_group({"params": list(head.parameters())})
        for _ in range(3):
            strategy.step(lambda x: model(x).square().mean(), torch.randn(8, 40))
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), before, strict=True))


@pytest.mark.parametrize("is_prepared_later", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_parameters_that_come_within_a_window_train_from_the_next_one_on(
    replicas: int, is_prepared_later: bool
) -> None:
    module, head = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    with muster.MirroredStrategy(["cpu"] * replicas, accumulate=2) as strategy:
        model, _ = strategy.prepare(module, optimizer)
        if not is_prepared_later:
            strategy.prepare(head)
        strategy.step(lambda x: model(x).square().mean(), x)
        prepared_head = strategy.prepare(head)
        optimizer.add_param_group({"params": list(head.parameters())})
        before = state_of(head)
        assert strategy.step(lambda x: (model(x) + prepared_head(x)).square().mean(), x).stepped
        assert all(torch.equal(a, b) for a, b in zip(head.parameters(), before, strict=True))
        twin = copy.deepcopy(head)
        ((module(x).detach() + twin(x)).square().mean()).backward()
        for _ in range(2):
            strategy.step(lambda x: (model(x) + prepared_head(x)).square().mean(), x)
    for mine, its in zip(head.parameters(), twin.parameters(), strict=True):
        assert its.grad is not None
        torch.testing.assert_close(mine, its - 0.1 * its.grad)


def test_flush_closes_a_window_in_which_a_layer_was_unfrozen() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1).requires_grad_(False))
    x = torch.randn(8, 4)
    with muster.MirroredStrategy(["cpu"] * 2, accumulate=2) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x: model(x).square().mean(), x)
        module[1].requires_grad_(True)
        with pytest.raises(muster.InvalidArgument, match="was unfrozen within a window"):
            strategy.step(lambda x: model(x).square().mean(), x)
        flushed = strategy.flush()
        assert flushed is not None and flushed.stepped
        before = state_of(module[1])
        for _ in range(2):
            strategy.step(lambda x: model(x).square().mean(), x)
        assert not torch.equal(module[1].weight, before[0])


def test_a_window_that_hyperparameters_refuse_does_not_count() -> None:
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _ = strategy.prepare(module, optimizer)

        def step(x: Tensor) -> Tensor:
            optimizer.param_groups[0]["lr"] = object()
            return model(x).square().mean()  # type: ignore[no-any-return]

        with pytest.raises(muster.InvalidArgument, match="'lr' of group 0"):
            strategy.step(step, torch.ones(4, 4))
        assert strategy.steps == 0
        optimizer.param_groups[0]["lr"] = 0.1
        assert strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 4)).step == 1
