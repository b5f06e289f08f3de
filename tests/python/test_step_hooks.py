"""Hooks before and after an optimizer's step see and change what they do in torch, and no peer writes meanwhile."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import muster
from support.jobs import Launcher, part_of, plain

OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"keep_gradients": False},
    "kept": {"keep_gradients": True},
    "sharded": {"keep_gradients": False, "shard_optimizer": True},
    "unfused": {"fuse": False},
}


class Broken(Exception):
    pass


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4))


def batch(strategy: muster.Strategy) -> Tensor:
    return part_of(strategy, torch.linspace(-1, 1, 8 * 256).view(8, 256))  # type: ignore[no-any-return]


def prepared(strategy: muster.Strategy, kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any, Any]:
    module = net()
    optimizer = kind(module.parameters(), **{"lr": 0.05, **options})
    model, _ = strategy.prepare(module, optimizer)
    return module, model, optimizer


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def decaying(strategy: muster.Strategy, steps: int) -> Any:
    module, model, optimizer = prepared(strategy)

    def hook(*_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.999)

    optimizer.register_step_pre_hook(hook)
    x = batch(strategy)
    for _ in range(steps):
        strategy.step(lambda x: model(x).square().mean(), x)
    return values(module)


@pytest.mark.parametrize("options", OPTIONS)
def test_pre_hooks_may_write_parameters(worker_job: Launcher, options: str) -> None:
    one, two = worker_job(decaying, 30, **OPTIONS[options])
    with muster.MirroredStrategy(["cpu"] * worker_job.replicas, seed=3, threads_per_replica=1) as strategy:
        expected = plain(decaying(strategy, 30))
    for a, b, c in zip(one, two, expected, strict=True):
        assert np.array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-7)


def regularised(strategy: muster.Strategy, on: str) -> Any:
    """A hook that reads parameters and writes gradients, where the norm is clipped."""
    module, model, optimizer = prepared(strategy)

    def hook(*_: Any) -> None:
        if strategy.rank == 1:  # the others would be ahead
            for _ in range(50):
                module[0].weight.sum()
        for parameter in module.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.5)  # type: ignore[union-attr]

    def look(*_: Any) -> None:
        assert all(parameter.grad is not None for parameter in module.parameters())

    optimizer.register_step_pre_hook(hook if on == "all" else look)
    if on == "one" and strategy.rank > 0:
        optimizer._optimizer_step_pre_hooks.popitem()
    x = batch(strategy)
    norms = [float(strategy.step(lambda x: model(x).square().mean(), x).grad_norm) for _ in range(5)]
    return norms, values(module), [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("on", ["all", "one"])
def test_all_ranks_clip_what_hooks_left_by_one_factor(worker_job: Launcher, on: str) -> None:
    (norms, one, _), (others, two, _) = worker_job(regularised, on, clip_norm=0.1)
    assert norms == others
    with muster.MirroredStrategy(
        ["cpu"] * worker_job.replicas, seed=3, threads_per_replica=1, clip_norm=0.1, keep_gradients=True
    ) as strategy:
        expected, parameters, _ = plain(regularised(strategy, on))
    assert norms == pytest.approx(expected, rel=1e-9)
    for a, b, c in zip(one, two, parameters, strict=True):
        assert np.array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-8)


def raising(strategy: muster.Strategy, when: str, rank: int) -> Any:
    module, model, optimizer = prepared(strategy, torch.optim.AdamW)
    x = batch(strategy)
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and strategy.rank == rank:
            raise Broken("of the hook's own")

    if strategy.rank == rank:  # nobody else has one
        (optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook)(hook)

    def step() -> Any:
        return strategy.step(lambda x: model(x).square().mean(), x)

    step()
    before, count = values(module), strategy.steps
    error = ""
    try:
        step()
    except Broken as raised:
        error = str(raised)
    except muster.RemoteError as raised:
        error = f"{raised.rank} {raised}"
    unchanged = all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))
    counted = strategy.steps - count
    for _ in range(3):
        step()
    return error, unchanged, counted, values(module)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pre_hook_that_raises_leaves_all_ranks_as_they_were(worker_job: Launcher, options: str, rank: int) -> None:
    results = worker_job(raising, "before", rank, **OPTIONS[options])
    for number, (error, unchanged, counted, _) in enumerate(results):
        assert unchanged
        assert counted == 0
        if number == rank:
            assert error == "of the hook's own"
        else:
            assert error.startswith(f"{rank} ")
            assert "Broken: of the hook's own" in error
    for a, b in zip(results[0][3], results[1][3], strict=True):
        assert np.array_equal(a, b)


def second_raises(strategy: muster.Strategy) -> Any:
    module = net()
    optimizers = [torch.optim.SGD(layer.parameters(), 0.05) for layer in module]
    model, *_ = strategy.prepare(module, *optimizers)

    def hook(*_: Any) -> None:
        if strategy.rank == 1 and strategy.steps == 2:
            raise Broken("of the second")

    optimizers[1].register_step_pre_hook(hook)
    x = batch(strategy)
    strategy.step(lambda x: model(x).square().mean(), x)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    error = ""
    try:
        strategy.step(lambda x: model(x).square().mean(), x)
    except (Broken, muster.RemoteError) as raised:
        error = str(raised)
    changed = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    counted = strategy.steps
    strategy.step(lambda x: model(x).square().mean(), x)
    return error, changed, counted, values(module)


def test_a_later_optimizers_pre_hook_that_raises_undoes_no_earlier_step(worker_job: Launcher) -> None:
    results = worker_job(second_raises, **OPTIONS["unfused"])
    (theirs, *of_first), (own, *of_second) = results
    assert own == "of the second"
    assert "optimizers before that one have stepped on all ranks" in theirs
    for changed, counted, _ in (of_first, of_second):
        assert changed == [True, False, False]
        assert counted == 2
    for a, b in zip(of_first[2], of_second[2], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_post_hook_that_raises_is_that_ranks_alone(worker_job: Launcher, options: str) -> None:
    results = worker_job(raising, "after", 1, **OPTIONS[options])
    assert [error for error, *_ in results] == ["", "of the hook's own"]
    assert all(counted == 1 and not unchanged for _, unchanged, counted, _ in results)
    for a, b in zip(results[0][3], results[1][3], strict=True):
        assert np.array_equal(a, b)


def test_one_process_raises_and_goes_on() -> None:
    for options in OPTIONS.values():
        with muster.MirroredStrategy(["cpu"] * 2, **options) as strategy:
            error, unchanged, counted, _ = raising(strategy, "before", 0)
            assert (error, unchanged, counted) == ("of the hook's own", True, 0)


def spoiling(strategy: muster.Strategy, how: str) -> Any:
    """On one rank a hook, or where there is none the step function, leaves what the optimizer cannot step."""
    module, model, optimizer = prepared(strategy, torch.optim.AdamW)
    x = batch(strategy)

    def step() -> Any:
        return strategy.step(lambda x: model(x).square().mean(), x)

    def spoil(*_: Any) -> None:
        if strategy.rank == 1:
            optimizer.param_groups[0]["lr"] = "high"

    def spoiled(x: Tensor) -> Tensor:
        spoil()
        return model(x).square().mean()  # type: ignore[no-any-return]

    step()
    before, error = values(module), ""
    handle = optimizer.register_step_pre_hook(spoil) if how == "hook" else None
    started = time.monotonic()
    try:
        strategy.step(spoiled if handle is None else lambda x: model(x).square().mean(), x)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - started
    optimizer.param_groups[0]["lr"] = 0.05
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))
    goes_on = False
    if handle is not None:
        handle.remove()
        goes_on = step().stepped
    return error, seconds, is_unchanged, goes_on


@pytest.mark.parametrize("options", ["fused", "kept", "sharded"])
def test_what_a_hook_spoils_is_an_error_of_the_hook(worker_job: Launcher, options: str) -> None:
    (remote, *chiefs), (own, *others) = worker_job(spoiling, "hook", timeout=20.0, **OPTIONS[options])
    assert own.startswith("InvalidArgument: option 'lr' of group 0 of AdamW is 'high'")
    assert remote.startswith("RemoteError: ") and "InvalidArgument: option 'lr' of group 0" in remote
    for seconds, is_unchanged, goes_on in (chiefs, others):
        assert seconds < 10 and is_unchanged and goes_on


@pytest.mark.parametrize("options", ["fused", "sharded"])
def test_peers_learn_at_once_that_a_rank_cannot_step(worker_job: Launcher, options: str) -> None:
    (peers, *chiefs), (own, *others) = worker_job(spoiling, "function", timeout=20.0, **OPTIONS[options])
    assert own.startswith("InvalidArgument: option 'lr' of group 0 of AdamW is 'high'")
    assert peers.startswith("CommError: ")
    assert "rank 1 failed before its part of the optimizer's step: InvalidArgument: option 'lr' of group 0" in peers
    assert chiefs[0] < 10 and others[0] < 10


def projecting(strategy: muster.Strategy) -> Any:
    """Post-hooks of the first optimizer while the second one's parameters are stepped."""
    modules = [net(0), net(1)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in modules]
    *models, _, _ = strategy.prepare(*modules, *optimizers)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    parameter.clamp_(-0.05, 0.05)

    optimizers[0].register_step_post_hook(clamp)
    x = batch(strategy)
    for _ in range(20):
        strategy.step(lambda x: models[0](x).square().mean() + models[1](x).square().mean(), x)
    return [value for module in modules for value in values(module)]


@pytest.mark.parametrize("options", OPTIONS)
def test_post_hooks_run_when_all_optimizers_have_stepped(worker_job: Launcher, options: str) -> None:
    one, two = worker_job(projecting, **OPTIONS[options])
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a, b)
        if options != "unfused":  # there each optimizer's step is torch's, hooks and all
            assert np.abs(a).max() <= np.float32(0.05)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_post_hook_that_raises_keeps_no_other_optimizers_from_being_called(options: str) -> None:
    with muster.MirroredStrategy(["cpu"], **OPTIONS[options]) as strategy:
        module = net()
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in module]
        model, *_ = strategy.prepare(module, *optimizers)
        called = []

        def hook(optimizer: Any, *_: Any) -> None:
            called.append(optimizers.index(optimizer))
            raise Broken(f"of optimizer {called[-1]}")

        for optimizer in optimizers:
            optimizer.register_step_post_hook(hook)
        with pytest.raises(Broken, match="of optimizer 0"):
            strategy.step(lambda x: model(x).square().mean(), batch(strategy))
        assert called == [0, 1]


def test_global_hooks_are_called_too() -> None:
    called: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: called.append(optimizer))
    try:
        for options in OPTIONS.values():
            with muster.MirroredStrategy(["cpu"], **options) as strategy:
                _, model, optimizer = prepared(strategy)
                strategy.step(lambda x, model=model: model(x).square().mean(), batch(strategy))
                assert called.pop() is optimizer
                assert called == []
    finally:
        handle.remove()


@pytest.mark.parametrize(("options", "warns"), [("fused", True), ("kept", False), ("unfused", False)])
def test_hooks_that_see_no_gradients_are_a_warning(caplog: pytest.LogCaptureFixture, options: str, warns: bool) -> None:
    seen: list[bool] = []
    with muster.MirroredStrategy(["cpu"], **OPTIONS[options]) as strategy:
        module, model, optimizer = prepared(strategy)
        optimizer.register_step_pre_hook(lambda *_: seen.append(module[0].weight.grad is not None))
        with caplog.at_level(logging.WARNING, "muster"):
            for _ in range(3):
                strategy.step(lambda x: model(x).square().mean(), batch(strategy))
    assert seen == [not warns] * 3
    assert sum("keep_gradients=True" in message for message in caplog.messages) == int(warns)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("has_hooks", [False, True])
def test_hooks_of_a_step_are_those_that_its_function_leaves(options: str, replicas: int, has_hooks: bool) -> None:
    called: list[str] = []
    with muster.MirroredStrategy(["cpu"] * replicas, **OPTIONS[options]) as strategy:
        _, model, optimizer = prepared(strategy)

        def register(name: str) -> list[Any]:
            return [
                optimizer.register_step_pre_hook(lambda *_: called.append(f"before, {name}")),
                optimizer.register_step_post_hook(lambda *_: called.append(f"after, {name}")),
            ]

        handles = register("of the beginning") if has_hooks else []

        def step(x: Tensor) -> Tensor:
            if strategy.replica == strategy.num_replicas - 1:
                while handles:
                    handles.pop().remove()
                register("of the function")
            return model(x).square().mean()  # type: ignore[no-any-return]

        strategy.step(step, batch(strategy))
        assert called == ["before, of the function", "after, of the function"]


def registering(strategy: muster.Strategy) -> Any:
    """One rank's function registers a hook that raises."""
    module, model, optimizer = prepared(strategy)
    x = batch(strategy)

    def hook(*_: Any) -> None:
        handle.remove()
        raise Broken("of the hook's own")

    strategy.step(lambda x: model(x).square().mean(), x)
    before, error = values(module), ""

    def step(x: Tensor) -> Tensor:
        nonlocal handle
        if strategy.rank == 1:
            handle = optimizer.register_step_pre_hook(hook)
        return model(x).square().mean()  # type: ignore[no-any-return]

    handle: Any = None
    try:
        strategy.step(step, x)
    except (Broken, muster.RemoteError) as raised:
        error = type(raised).__name__
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))
    return error, is_unchanged, strategy.step(lambda x: model(x).square().mean(), x).stepped


@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_agree_on_hooks_that_the_function_registered(worker_job: Launcher, options: str) -> None:
    results = worker_job(registering, **OPTIONS[options])
    assert [tuple(result) for result in results] == [("RemoteError", True, True), ("Broken", True, True)]


def test_a_hook_that_leaves_a_gradient_that_is_not_finite_skips_the_window() -> None:
    with muster.MirroredStrategy(["cpu"] * 2, keep_gradients=True, max_skipped=2) as strategy:
        module, model, optimizer = prepared(strategy)
        before = values(module)
        optimizer.register_step_pre_hook(lambda *_: module[1].weight.grad.fill_(float("nan")))
        x = batch(strategy)
        result = strategy.step(lambda x: model(x).square().mean(), x)
        assert result.stepped and result.skipped
        with pytest.raises(muster.NonFinite, match="2 windows in a row"):
            strategy.step(lambda x: model(x).square().mean(), x)
        assert all(torch.equal(a, b) for a, b in zip(values(module), before, strict=True))


def test_a_hook_that_gives_a_gradient_to_an_unused_parameter_is_refused() -> None:
    with muster.MirroredStrategy(["cpu"] * 2, keep_gradients=True) as strategy:
        module, model, optimizer = prepared(strategy)

        def hook(*_: Any) -> None:
            module[1].weight.grad = torch.ones_like(module[1].weight)

        handle = optimizer.register_step_pre_hook(hook)
        x = batch(strategy)
        with pytest.raises(muster.InvalidArgument, match=r"a hook gave a gradient to '1\.weight', which has none"):
            strategy.step(lambda x: model[0](x).square().mean(), x)
        handle.remove()
        assert strategy.step(lambda x: model[0](x).square().mean(), x).stepped and strategy.steps == 1


@pytest.mark.parametrize("edits", [False, True])
def test_a_hook_changes_what_it_edits_alone_in_low_precision(edits: bool) -> None:
    def trained(hooked: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(16, 4).bfloat16()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        with muster.MirroredStrategy(["cpu"] * 2, keep_gradients=True) as strategy:
            model, _ = strategy.prepare(module, optimizer)
            if hooked:
                optimizer.register_step_pre_hook(lambda *_: module.weight.grad[0].zero_() if edits else None)
            for seed in range(5):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
                strategy.step(lambda x: model(x).float().square().mean(), x)
            return [optimizer.state[p]["momentum_buffer"].clone() for p in module.parameters()]

    (weight, bias), (plain_weight, plain_bias) = trained(True), trained(False)
    if edits:
        assert not weight[0].any() and plain_weight[0].any()
    else:
        assert torch.equal(weight, plain_weight) and torch.equal(bias, plain_bias)
