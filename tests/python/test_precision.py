"""Mixed precision: autocast in every replica, loss scaling as torch's GradScaler, accumulation in fp32."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import muster
from support.jobs import Launcher, part_of


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 8, generator=generator)
    return x, (x @ torch.randn(8, 4, generator=generator)).argmax(1)


def train(strategy: muster.Strategy, steps: int, cls: Any = torch.optim.AdamW) -> Any:
    module = classifier()
    model, _ = strategy.prepare(module, cls(module.parameters(), lr=1e-2))
    x, y = part_of(strategy, data())
    seen: set[str] = set()
    losses = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        seen.add(str(logits.dtype))
        return F.cross_entropy(logits, y)

    for _ in range(steps):
        result = strategy.step(step, x, y)
        losses.append(result.loss.item())
    (evaluated,) = {str(part.dtype) for part in strategy.run(lambda x: model(x), x)}
    with strategy.autocast():
        outside = str(module(torch.ones(1, 8)).dtype)
    return {
        "parameters": [p.detach() for p in module.parameters()],
        "dtypes": {str(p.dtype) for p in module.parameters()},
        "losses": losses,
        "seen": seen | {evaluated, outside},
        "scale": strategy.loss_scaler().get_scale(),
    }


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_replica_computes_in_the_precision(job: Launcher, precision: str) -> None:
    for result in job(train, 30, precision=precision):
        assert result["seen"] == {"torch.bfloat16" if precision == "bf16" else "torch.float16"}
        assert result["dtypes"] == {"torch.float32"}
        assert result["losses"][-1] < 0.7 * result["losses"][0]
        assert result["scale"] == (65536 if precision == "fp16" else 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_strategies_agree_to_the_bit(worker_job: Launcher, precision: str) -> None:
    with muster.MirroredStrategy(["cpu"] * 2, precision=precision, threads_per_replica=1, seed=3) as strategy:
        mirrored = train(strategy, 10)
    for result in worker_job(train, 10, precision=precision):
        for own, other in zip(result["parameters"], mirrored["parameters"], strict=True):
            assert np.array_equal(own, other.numpy())


@pytest.mark.parametrize("replicas", [1, 2])
def test_loss_curve_of_torchs_own_loop(replicas: int) -> None:
    with muster.MirroredStrategy(["cpu"] * replicas, precision="fp16", threads_per_replica=1) as strategy:
        ours = train(strategy, 40)["losses"]
    module = classifier()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    x, y = data()
    theirs = []
    for _ in range(40):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(module(x), y)
        theirs.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-3)


def overflowing(strategy: muster.Strategy, pattern: list[bool]) -> Any:
    module = nn.Linear(2, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    x = part_of(strategy, torch.ones(4, 2))
    scales, skipped, weights = [], [], []
    for overflow in pattern:
        factor = float("inf") if overflow and strategy.rank == strategy.num_workers - 1 else 1.0
        result = strategy.step(lambda x, factor=factor: (model(x) * factor).mean(), x)
        scales.append(result.loss_scale.item())
        skipped.append(result.skipped.item())
        weights.append(module.weight.detach().clone())
    return scales, skipped, weights, strategy.loss_scaler().state_dict()


SCALE = muster.LossScale(init=1024.0, interval=3)


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.1, 0.7)])
def test_the_scale_follows_gradscaler(job: Launcher, growth: float, backoff: float) -> None:
    generator = torch.Generator().manual_seed(5)
    pattern = (torch.rand(40, generator=generator) < 0.25).tolist()
    reference = torch.amp.GradScaler("cpu", 1024.0, growth, backoff, growth_interval=3)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    expected = []
    scale = muster.LossScale(init=1024.0, growth=growth, backoff=backoff, interval=3)
    for overflow in pattern:
        optimizer.zero_grad()
        reference.scale(parameter.sum() * (float("inf") if overflow else 1.0)).backward()
        reference.step(optimizer)
        reference.update()
        expected.append(reference.get_scale())
    for scales, skipped, weights, state in job(overflowing, pattern, precision="fp16", loss_scale=scale):
        assert scales == expected
        assert skipped == pattern
        assert state == reference.state_dict()
        for before, after, was_skipped in zip(weights, weights[1:], skipped[1:], strict=False):
            assert np.array_equal(before, after) == was_skipped


def test_the_scale_is_restored() -> None:
    with muster.MirroredStrategy(precision="fp16", loss_scale=SCALE) as strategy:
        *_, state = overflowing(strategy, [True, False, False])
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 512
    with muster.MirroredStrategy(precision="fp16", loss_scale=SCALE) as strategy:
        module = nn.Linear(2, 1)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.loss_scaler().load_state_dict(scaler.state_dict())
        assert strategy.step(lambda x: model(x).mean(), torch.ones(2, 2)).loss_scale.item() == 1024


def test_where_losses_are_not_scaled_the_state_is_that_of_a_gradscaler_that_is_not_enabled(tmp_path: Path) -> None:
    def job(**options: Any) -> tuple[muster.Strategy, Any]:
        strategy = muster.MirroredStrategy(**options)
        module = nn.Linear(2, 1)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        return strategy, model

    strategy, model = job(precision="fp16")
    with strategy:
        strategy.step(lambda x: model(x).mean(), torch.ones(2, 2))
        scaled = strategy.loss_scaler().state_dict()
        strategy.save(tmp_path)
        with pytest.raises(muster.InvalidArgument, match="scaled no losses"):
            strategy.loss_scaler().load_state_dict({})
    strategy, model = job()
    with strategy:
        assert strategy.loss_scaler().state_dict() == torch.amp.GradScaler("cpu", enabled=False).state_dict() == {}
        strategy.load(tmp_path)
        strategy.loss_scaler().load_state_dict(scaled)
        assert strategy.step(lambda x: model(x).mean(), torch.ones(2, 2)).loss_scale == 1


def scaled_apart(strategy: muster.Strategy) -> list[str]:
    module = nn.Linear(2, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.ones(2, 2)
    if strategy.is_chief:
        strategy.loss_scaler().load_state_dict({"scale": 512.0, "_growth_tracker": 0})
    before = module.weight.detach().clone()
    with pytest.raises(muster.LayoutMismatch) as raised:
        strategy.step(lambda x: model(x).mean(), x)
    assert torch.equal(module.weight, before)
    strategy.loss_scaler().load_state_dict({"scale": 512.0, "_growth_tracker": 0})
    return [str(raised.value), *(str(strategy.step(lambda x: model(x).mean(), x).loss_scale.item()) for _ in range(2))]


@pytest.mark.parametrize("fuse", [True, False])
def test_a_scale_that_one_rank_loads_alone_is_named(worker_job: Launcher, fuse: bool) -> None:
    for message, *scales in worker_job(scaled_apart, precision="fp16", fuse=fuse):
        assert "rank 0 has loss scale 512 after 0 finite steps, rank 1 has loss scale 65536" in message
        assert scales == ["512.0", "512.0"]


def test_a_loop_inside_autocast_sees_updated_parameters() -> None:
    with torch.autocast("cpu", torch.bfloat16), muster.MirroredStrategy() as strategy:
        module = nn.Linear(2, 1, bias=False)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
        x = torch.ones(1, 2)
        for _ in range(3):
            before = model(x).item()
            assert before == pytest.approx(module.weight.detach().sum().item(), abs=0.05)
            strategy.step(lambda x: model(x).mean(), x)
            assert model(x).item() == pytest.approx(before - 2, abs=0.05)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replica_threads_follow_the_callers_autocast(replicas: int) -> None:
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        module = nn.Linear(2, 2)
        model = strategy.prepare(module)
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                assert [part.dtype for part in strategy.run(lambda x: model(x), torch.ones(4, 2))] == [dtype] * replicas
        assert {part.dtype for part in strategy.run(lambda x: model(x), torch.ones(4, 2))} == {torch.float32}


def accumulated(strategy: muster.Strategy, k: int) -> Any:
    module = classifier()
    model, _ = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    x, y = data()
    for start in range(0, 32, 32 // k):
        batch = part_of(strategy, (x[start : start + 32 // k], y[start : start + 32 // k]))
        result = strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    assert result.stepped
    return [p.grad for p in module.parameters()], result.grad_norm.item() if result.grad_norm is not None else None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_micro_batches_make_the_big_batch(wide_job: Launcher, precision: str) -> None:
    scale = SCALE if precision == "fp16" else None
    options = {"precision": precision, "loss_scale": scale, "keep_gradients": True, "clip_norm": 0.01}
    (big, norm), *_ = wide_job(accumulated, 1, **options)
    (small, small_norm), *_ = wide_job(accumulated, 4, accumulate=4, **options)
    difference = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(small, big, strict=True)))
    limit = 1e-6 if precision == "fp32" else 1e-3
    assert difference < limit * norm
    assert small_norm == pytest.approx(norm, rel=limit)


def test_low_precision_gradients_accumulate_in_fp32() -> None:
    with muster.MirroredStrategy(accumulate=300, keep_gradients=True) as strategy:
        module = nn.Linear(1, 1, bias=False).bfloat16()
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
        for _ in range(300):  # a bf16 sum of ones stops at 256
            strategy.step(lambda x: muster.Loss(model(x).sum(), reduction="sum"), torch.ones(1, 1).bfloat16())
        assert module.weight.grad is not None
        assert module.weight.grad.item() == pytest.approx(300, abs=1)


def test_bad_options_are_refused() -> None:
    with pytest.raises(muster.InvalidArgument, match="precision='fp8'"):
        muster.MirroredStrategy(precision="fp8")
    with pytest.raises(muster.InvalidArgument, match="loss_scale"):
        muster.MirroredStrategy(loss_scale=2.0)
    with pytest.raises(muster.InvalidArgument, match="backoff"):
        muster.MirroredStrategy(loss_scale=muster.LossScale(backoff=2.0))
    for wrong in ({"init": "a"}, {"growth": True}, {"backoff": None}, {"interval": 2.5}):
        ((name, value),) = wrong.items()
        with pytest.raises(muster.InvalidArgument, match=f"{name}={value!r}: it must be "):
            muster.LossScale(**wrong)  # type: ignore[arg-type]
    with muster.MirroredStrategy(precision="fp16") as strategy:
        module = nn.Linear(2, 1)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(muster.InvalidArgument, match=r"strategy\.step"):
            model(torch.ones(1, 2)).sum().backward()


def test_replicas_leave_the_cache_of_casts_alone_that_they_share() -> None:
    # Who clears it holds torch's mutex and may want the GIL, which another replica may have that waits for the mutex.
    with muster.MirroredStrategy(["cpu"] * 2, precision="bf16") as strategy:
        raw = nn.Linear(4, 4, bias=False)
        model, _ = strategy.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        first_left_forward = threading.Event()

        def cast_of(output: Tensor) -> Any:
            transposed = next(node for node, _ in output.grad_fn.next_functions if node is not None)
            return transposed.next_functions[0][0]

        def step(x: Tensor) -> Tensor:
            output = model(x)
            assert output.dtype == torch.bfloat16
            if strategy.replica == 0:
                output.register_hook(lambda gradient: first_left_forward.set())
            else:
                assert first_left_forward.wait(20)
                again = model(x)
                assert cast_of(again) is cast_of(output) and "ToCopy" in cast_of(again).name()
            return output.float().square().mean()

        for _ in range(2):
            first_left_forward.clear()
            before = raw.weight.detach().clone()
            assert strategy.step(step, torch.ones(8, 4)).stepped
            assert not torch.equal(before, raw.weight)
            outputs = strategy.run(model, torch.ones(8, 4))
            for output in outputs:  # of what the step made of the weights
                torch.testing.assert_close(
                    output.float(), torch.ones(4, 4) @ raw.weight.detach().t(), rtol=2e-2, atol=2e-2
                )
        with torch.autocast("cpu", torch.float16):
            assert all(output.dtype == torch.bfloat16 for output in strategy.run(model, torch.ones(8, 4)))
            assert model(torch.ones(8, 4)).dtype == torch.float16


@pytest.mark.parametrize("way", ["precision", "autocast in the step"])
def test_a_replica_that_is_done_leaves_the_others_casts_of_parameters(way: str) -> None:
    """Gradients of the uses of a cast parameter add up in bf16 where they share the cast, and in fp32 where not."""

    def trained(first: int) -> Tensor:
        torch.manual_seed(5)
        module = nn.Linear(16, 16)
        first_is_done, other_has_begun = threading.Event(), threading.Event()
        options: dict[str, Any] = {"precision": "bf16"} if way == "precision" else {}
        with muster.MirroredStrategy(["cpu"] * 2, seed=1, threads_per_replica=1, fuse=False, **options) as strategy:
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))

            def step(x: Tensor) -> Tensor:
                is_first = strategy.replica == first
                with torch.autocast("cpu", torch.bfloat16) if way != "precision" else contextlib.nullcontext():
                    y = model(model(model(x)))
                    if not is_first:
                        other_has_begun.set()
                    assert (other_has_begun if is_first else first_is_done).wait(30)
                    y = model(model(model(y)))
                y = y.float()
                y.register_hook(lambda gradient: first_is_done.set() if is_first else None)
                return y.square().mean()

            strategy.step(step, torch.randn(8, 16))
        return module.weight.detach().clone()

    assert torch.equal(trained(first=0), trained(first=1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_that_enters_autocast_again_leaves_the_others_casts(reentrant: bool) -> None:
    def trained(first: int) -> Tensor:
        torch.manual_seed(5)
        module = nn.Linear(16, 16)
        first_was_computed_again, other_has_begun = threading.Event(), threading.Event()
        with muster.MirroredStrategy(
            ["cpu"] * 2, seed=1, threads_per_replica=1, fuse=False, precision="bf16"
        ) as strategy:
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))

            def step(x: Tensor) -> Tensor:
                is_first = strategy.replica == first
                y = model(model(x))
                if is_first:
                    y.register_hook(lambda gradient: first_was_computed_again.set())
                else:
                    other_has_begun.set()
                assert (other_has_begun if is_first else first_was_computed_again).wait(30)
                return checkpoint(lambda y: model(model(y)), y, use_reentrant=reentrant).float().square().mean()

            strategy.step(step, torch.randn(8, 16))
        return module.weight.detach().clone()

    assert torch.equal(trained(first=0), trained(first=1))


def train_in_own_autocasts(strategy: muster.Strategy) -> Any:
    torch.manual_seed(5)
    module = nn.Linear(16, 16)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))

    def step(x: Tensor) -> Tensor:
        outputs = []
        for part in x.chunk(4, 1):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(model(part))
        return torch.cat(outputs).float().square().mean()

    strategy.step(step, part_of(strategy, torch.randn(8, 64)))
    return module.weight.detach()


def test_strategies_agree_to_the_bit_where_a_step_enters_autocast_several_times(worker_job: Launcher) -> None:
    with muster.MirroredStrategy(["cpu"] * 2, threads_per_replica=1, seed=3) as strategy:
        mirrored = train_in_own_autocasts(strategy).numpy()
    for weight in worker_job(train_in_own_autocasts, keep_gradients=False):
        assert np.array_equal(weight, mirrored)


def train_through_many_casts(strategy: muster.Strategy | None) -> Any:
    """A target of the model's own without gradients and in another dtype, then with gradients: in autocasts of their
    own."""
    torch.manual_seed(5)
    module = nn.Linear(16, 16)
    before = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=10.0)
    x = torch.randn(8, 16)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            target = model(2 * x)
        with torch.autocast("cpu", torch.float16):
            assert model(x).dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x) - target).float().square().mean()

    if strategy is None:
        model = module
        step(x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    else:
        model, _ = strategy.prepare(module, optimizer)
        strategy.step(step, part_of(strategy, x))
    return module.weight.detach() - before


def test_casts_of_one_autocast_serve_no_other(job: Launcher) -> None:
    expected = train_through_many_casts(None).numpy()
    scale = np.abs(expected).max()
    assert scale > 0.1
    for change in job(train_through_many_casts):
        np.testing.assert_allclose(change, expected, rtol=0, atol=2e-2 * scale)
