"""Flat optimizers against torch.optim's: the same steps, the same state_dict, the same object for the user."""

from __future__ import annotations

import copy
import io
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import muster
from support.jobs import WorkerPool, make_job, part_of

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
    "adamw-amsgrad": (torch.optim.AdamW, {"lr": 3e-3, "amsgrad": True, "weight_decay": 0.1}),
    "adamw-maximize": (torch.optim.AdamW, {"lr": 3e-3, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    "adam": (torch.optim.Adam, {"lr": 3e-3}),
    "adam-decay": (torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    "sgd-nesterov": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "adagrad-decay": (
        torch.optim.Adagrad,
        {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.02, "initial_accumulator_value": 0.1},
    ),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 33), nn.Linear(33, 1)).to(dtype)


def make(name: str, module: nn.Module, **changes: Any) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[name]
    return cls(module.parameters(), **{**options, **changes})


def recorded_gradients(module: nn.Module, steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(p.shape, generator=generator) / 10).to(p.dtype) for p in module.parameters()]
        for _ in range(steps)
    ]


def along(model: nn.Module, gradients: list[Tensor]) -> Tensor:
    """A loss whose gradients are the given ones."""
    return sum((p * g).sum() for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[return-value]


@pytest.fixture
def strategy() -> Iterator[muster.MirroredStrategy]:
    with muster.MirroredStrategy() as strategy:
        yield strategy


def train(strategy: muster.Strategy, model: Any, gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        strategy.step(lambda x, step=step: along(model, step), torch.ones(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hundred_steps_are_torchs(strategy: muster.MirroredStrategy, name: str, dtype: torch.dtype) -> None:
    ours, theirs = net(dtype), net(dtype)
    gradients = recorded_gradients(ours, 100)
    reference = make(name, theirs, foreach=False)
    for step in gradients:
        for parameter, gradient in zip(theirs.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
    optimizer = make(name, ours)
    model, _ = strategy.prepare(ours, optimizer)
    train(strategy, model, gradients)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-14}
    if name == "adamw-maximize":  # torch's own paths differ by more
        tolerance["rtol"] *= 5
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, **tolerance)
        assert own.grad is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_object_stays_and_becomes_flat(strategy: muster.MirroredStrategy, name: str) -> None:
    module = net()
    optimizer = make(name, module)
    _, same = strategy.prepare(module, optimizer)
    assert same is optimizer
    assert isinstance(optimizer, OPTIMIZERS[name][0])
    assert type(optimizer) is getattr(muster.optim, OPTIMIZERS[name][0].__name__)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_goes_both_ways(strategy: muster.MirroredStrategy, name: str) -> None:
    ours, theirs = net(), net()
    gradients = recorded_gradients(ours, 20)
    optimizer = make(name, ours)
    model, _ = strategy.prepare(ours, optimizer)
    train(strategy, model, gradients[:10])

    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    # Each tensor has storage of its own: nothing but the state is written.
    numbers = sum(p.numel() for p in ours.parameters()) * (3 if "amsgrad" in str(OPTIMIZERS[name]) else 2)
    assert buffer.tell() < 4 * numbers + 20_000

    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    reference = make(name, theirs, foreach=False)
    theirs.load_state_dict(ours.state_dict())
    reference.load_state_dict(saved)
    for step in gradients[10:15]:
        for parameter, gradient in zip(theirs.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
    train(strategy, model, gradients[10:15])
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)

    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    for step in gradients[15:]:
        for parameter, gradient in zip(theirs.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
    train(strategy, model, gradients[15:])
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    for key, values in reference.state_dict()["state"].items():
        for name_, value in values.items():
            if value is not None:
                torch.testing.assert_close(optimizer.state_dict()["state"][key][name_], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_a_gradscaler_unscales_and_skips(cls: Any, fused: bool | None, closes: bool) -> None:
    ours, theirs = net(), net()
    x = torch.ones(4, 1, 8, 8)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(module(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    reference = cls(theirs.parameters(), lr=0.01, fused=fused)
    theirs(x).square().mean().backward()
    reference.step()
    with muster.MirroredStrategy() as strategy:
        model, optimizer = strategy.prepare(ours, cls(ours.parameters(), lr=0.01, fused=fused))
        strategy.step(lambda x: model(x).square().mean(), x)
        if closes:
            strategy.close()
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for factor in (1.0, float("inf"), 1.0):
            step(model, optimizer, scalers[0], factor)
            step(theirs, reference, scalers[1], factor)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


def test_state_from_before_prepare_is_kept(strategy: muster.MirroredStrategy) -> None:
    ours, theirs = net(), net()
    gradients = recorded_gradients(ours, 10)
    optimizer, reference = make("adamw-amsgrad", ours), make("adamw-amsgrad", theirs)
    for module, stepping, count in ((ours, optimizer, 5), (theirs, reference, 10)):
        for step in gradients[:count]:
            for parameter, gradient in zip(module.parameters(), step, strict=True):
                parameter.grad = gradient.clone()
            stepping.step()
    model, _ = strategy.prepare(ours, optimizer)
    train(strategy, model, gradients[5:])
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.filterwarnings("error")
def test_schedulers_made_before_and_after(strategy: muster.MirroredStrategy, before: bool) -> None:
    module = net()
    optimizer = make("sgd", module, lr=1.0)
    scheduler: Any = None
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, _ = strategy.prepare(module, optimizer)
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    bias = module[4].bias
    for rate in (1.0, 0.5, 0.25):
        start = bias.item()
        strategy.step(lambda x: model[4].bias.sum(), torch.ones(1))
        assert start - bias.item() == pytest.approx(rate, abs=1e-6)
        scheduler.step()
    for group in optimizer.param_groups:
        group["lr"] = 2.0
    start = bias.item()
    strategy.step(lambda x: model[4].bias.sum(), torch.ones(1))
    assert start - bias.item() == pytest.approx(2, abs=1e-5)


def test_a_backward_by_hand_steps_from_grad_with_the_same_bits() -> None:
    x = torch.linspace(-1, 1, 4 * 64).view(4, 1, 8, 8)
    parameters = []
    for by_hand in (False, True):
        with muster.MirroredStrategy(threads_per_replica=torch.get_num_threads()) as strategy:
            module = net()
            optimizer = make("adamw", module)
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
            model, _ = strategy.prepare(module, optimizer)

            def loss(x: Tensor, model: Any = model) -> Tensor:
                return model(x).square().mean()  # type: ignore[no-any-return]

            strategy.step(loss, x)
            with pytest.raises(muster.InvalidArgument, match="applied the gradients"):
                optimizer.step()
            for _ in range(4):
                if by_hand:
                    optimizer.zero_grad()
                    loss(x).backward()
                    optimizer.step()
                else:
                    strategy.step(loss, x)
                scheduler.step()
            strategy.step(loss, x)
            parameters.append([p.detach().clone() for p in module.parameters()])
    for own, other in zip(*parameters, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_add_param_group_keeps_the_state(
    strategy: muster.MirroredStrategy, kind: type[torch.optim.AdamW | torch.optim.Adagrad]
) -> None:
    ours, theirs = net(), net()
    gradients = recorded_gradients(ours, 12)
    optimizer, reference = kind(ours[0].parameters(), lr=1e-2), kind(theirs[0].parameters(), lr=1e-2)
    model, _ = strategy.prepare(ours, optimizer)
    for half in range(2):
        if half == 1:
            for module, growing in ((ours, optimizer), (theirs, reference)):
                rest = itertools.chain(module[3].parameters(), module[4].parameters())
                growing.add_param_group({"params": list(rest), "lr": 1e-3, "weight_decay": 0.0})
        for step in gradients[6 * half : 6 * half + 6]:
            for parameter, gradient in zip(theirs.parameters(), step, strict=True):
                parameter.grad = gradient.clone()
            reference.step()
        train(strategy, model, gradients[6 * half : 6 * half + 6])
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert [float(optimizer.state[p]["step"]) for p in ours.parameters()] == [12, 12, 6, 6, 6, 6]


def test_unused_parameters_are_untouched(strategy: muster.MirroredStrategy) -> None:
    module = net()
    model, optimizer = strategy.prepare(module, make("adamw", module, weight_decay=0.5))
    before = copy.deepcopy(module.state_dict())
    strategy.step(lambda x: model[4](x).mean(), torch.ones(2, 33))
    assert torch.equal(module[0].weight, before["0.weight"])
    assert not torch.equal(module[4].weight, before["4.weight"])
    assert module[0].weight not in optimizer.state
    assert float(optimizer.state[module[4].weight]["step"]) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_a_master_copy(strategy: muster.MirroredStrategy, dtype: torch.dtype) -> None:
    low, full = net(dtype), net(dtype).float()
    gradients = [[g.to(dtype) for g in step] for step in recorded_gradients(full, 50)]
    optimizer = make("adamw", low, lr=1e-4)
    model, _ = strategy.prepare(low, optimizer)
    train(strategy, model, gradients)
    with muster.MirroredStrategy() as second:
        reference, _ = second.prepare(full, make("adamw", full, lr=1e-4))
        train(second, reference, [[g.float() for g in step] for step in gradients])
    for own, other in zip(low.parameters(), full.parameters(), strict=True):
        assert own.dtype == dtype
        assert torch.equal(own, other.to(dtype))
        assert torch.equal(optimizer.state[own]["master"], other)
    # What user code writes between steps counts, and the state survives a round trip to the last bit.
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for number, parameter in enumerate(low.parameters()):
        for key, value in saved["state"][number].items():
            assert torch.equal(optimizer.state[parameter][key], value)
    with torch.no_grad():
        for parameter in low.parameters():
            parameter.zero_()
    train(strategy, model, gradients[:1])
    assert max(parameter.abs().max().item() for parameter in low.parameters()) < 1e-3


def clamp(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.clamp_(-0.01, 0.01)


def replace_all(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(parameters) / 2, parameters)


def swap_and_back(parameters: list[nn.Parameter]) -> None:
    """As for an evaluation with averaged weights."""
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter, other in zip(parameters, kept, strict=True):
        parameter.data.fill_(1.0)
        parameter.data.copy_(other)


@pytest.mark.parametrize("write", [clamp, replace_all, swap_and_back])
def test_what_is_written_past_the_version_counter_counts(
    strategy: muster.MirroredStrategy, write: Callable[[list[nn.Parameter]], None]
) -> None:
    """Of a parameter of low precision, whose master copy it is not."""
    low, full = net(torch.bfloat16), net(torch.bfloat16).float()
    gradients = [[g.bfloat16() for g in step] for step in recorded_gradients(full, 6)]
    optimizer = make("adamw", low, lr=1e-2)
    model, _ = strategy.prepare(low, optimizer)
    train(strategy, model, gradients[:3])
    before = [parameter.detach().clone() for parameter in low.parameters()]
    with muster.MirroredStrategy() as second:
        reference, _ = second.prepare(full, make("adamw", full, lr=1e-2))
        train(second, reference, [[g.float() for g in step] for step in gradients[:3]])
        write(list(low.parameters()))
        saved = copy.deepcopy(optimizer.state_dict()["state"])
        for number, (own, old, other) in enumerate(zip(low.parameters(), before, full.parameters(), strict=True)):
            other.data.copy_(torch.where(own == old, other, own.float()))
            assert torch.equal(saved[number]["master"], other)
        train(strategy, model, gradients[3:])
        train(second, reference, [[g.float() for g in step] for step in gradients[3:]])
    for own, other in zip(low.parameters(), full.parameters(), strict=True):
        assert torch.equal(own, other.to(own.dtype))


def test_clipping_and_kept_gradients(strategy: muster.MirroredStrategy) -> None:
    ours, theirs = net(), net()
    gradients = recorded_gradients(ours, 5)
    reference = make("adamw", theirs)
    with muster.MirroredStrategy(clip_norm=1.0, keep_gradients=True) as clipping:
        model, _ = clipping.prepare(ours, make("adamw", ours))
        for step in gradients:
            for parameter, gradient in zip(theirs.parameters(), step, strict=True):
                parameter.grad = gradient.clone()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            reference.step()
            result = clipping.step(lambda x, step=step: along(model, step), torch.ones(1))
            assert result.grad_norm is not None
            assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
            for parameter, gradient in zip(ours.parameters(), step, strict=True):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradient)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replaces", [False, True])
def test_pre_hooks_edit_the_mean_before_norm_and_clip(replaces: bool) -> None:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if replaces:
                parameter.grad = parameter.grad * 3
            else:
                parameter.grad.mul_(3)

    ours, theirs = net(), net()
    (gradients,) = recorded_gradients(ours, 1)
    reference = make("sgd", theirs)
    for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
        parameter.grad = 3 * gradient
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    reference.step()
    with muster.MirroredStrategy(clip_norm=0.5, keep_gradients=True) as strategy:
        optimizer = make("sgd", ours)
        optimizer.register_step_pre_hook(hook)
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        model, _ = strategy.prepare(ours, optimizer)
        result = strategy.step(lambda x: along(model, gradients), torch.ones(1))
    assert called == [1]
    assert result.grad_norm is not None
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for own, other, gradient in zip(ours.parameters(), theirs.parameters(), gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
        assert own.grad is not None
        assert torch.equal(own.grad, 3 * gradient)


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adagrad", "adamw"])
def test_sparse_rows(strategy: muster.MirroredStrategy, name: str) -> None:
    def embedding(sparse: bool) -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(50, 7, sparse=sparse)

    ours, theirs = embedding(True), embedding(name == "sgd" or name == "adagrad")
    changes: dict[str, Any] = {"weight_decay": 0.0} if name == "adamw" else {}
    reference: torch.optim.Optimizer = make(name, theirs, **changes)
    if name == "adamw":
        theirs = embedding(True)
        reference = torch.optim.SparseAdam(theirs.parameters(), lr=3e-3)
    model, _ = strategy.prepare(ours, make(name, ours, **changes))
    for step in range(8):
        ids = torch.tensor([step, 3, 3, 11])
        reference.zero_grad()
        (theirs(ids) * torch.arange(7.0)).sum().backward()
        reference.step()
        strategy.step(lambda ids: muster.Loss((model(ids) * torch.arange(7.0)).sum(), reduction="sum"), ids)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)


def sharded(strategy: muster.Strategy, name: str, shards: bool) -> Any:
    module = net()
    optimizer = make(name, module)
    model, _ = strategy.prepare(module, optimizer)
    x = part_of(strategy, torch.linspace(-1, 1, 6 * 64).view(6, 1, 8, 8))
    for _ in range(6):
        strategy.step(lambda x: model(x).square().mean(), x)
    held = sum(
        value.numel() for state in optimizer.state.values() for key, value in state.items() if key.startswith("exp_avg")
    )
    whole = copy.deepcopy(optimizer.state_dict())
    numbers = sum(p.numel() for p in module.parameters())
    if shards:
        assert held < 2 * numbers / strategy.num_workers + 2 * 4096
    optimizer.load_state_dict(whole)
    strategy.step(lambda x: model(x).square().mean(), x)
    return [p.detach().clone() for p in module.parameters()], whole["state"]


@pytest.mark.parametrize("workers", ["workers-2", "workers-2x2"])
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
def test_sharding_the_state_changes_no_bit(two_workers: WorkerPool, name: str, workers: str) -> None:
    job = make_job(workers, two_workers)
    (parameters, state), *others = job(sharded, name, True, shard_optimizer=True, clip_norm=0.1)
    ((reference, whole), *_) = job(sharded, name, False, clip_norm=0.1)
    for own, other in zip(parameters, reference, strict=True):
        assert np.array_equal(own, other)
    for number in whole:
        for key, value in whole[number].items():
            assert np.array_equal(state[number][key], value), key
    for others_parameters, _ in others:
        assert all(np.array_equal(a, b) for a, b in zip(parameters, others_parameters, strict=True))


@pytest.mark.parametrize("fuse", [True, False])
def test_momentum_that_comes_later_begins_with_the_gradient(fuse: bool) -> None:
    def momenta(strategy: muster.Strategy | None) -> list[Tensor]:
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model: Any = module if strategy is None else strategy.prepare(module, optimizer)[0]
        x = torch.linspace(-1, 1, 6 * 64).view(6, 1, 8, 8)
        for step in range(5):
            if step == 2:
                optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
            if strategy is not None:
                strategy.step(lambda x: model(x).square().mean(), x)
                continue
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [values["momentum_buffer"].clone() for values in optimizer.state_dict()["state"].values()]

    with muster.MirroredStrategy(["cpu"], fuse=fuse) as strategy:
        torch.testing.assert_close(momenta(strategy), momenta(None))


@pytest.mark.parametrize("fuse", [True, False, None])
def test_step_hooks_are_called_once(fuse: bool | None) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch wraps the step of its class
    module = nn.Linear(2, 2)
    optimizer = muster.optim.SGD(module.parameters(), lr=0.1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    if fuse is None:
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    else:
        with muster.MirroredStrategy(["cpu"], fuse=fuse, keep_gradients=fuse) as strategy:
            model, _ = strategy.prepare(module, optimizer)
            strategy.step(lambda x: model(x).sum(), torch.ones(4, 2))
    assert called == ["before", "after"]


def kept_gradients(strategy: muster.Strategy, sparse: bool) -> list[Any]:
    torch.manual_seed(0)
    words = nn.Embedding(50, 7, sparse=sparse)
    images = net()
    both = nn.ModuleList([words, images])
    model, _ = strategy.prepare(both, torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9))
    ids = part_of(strategy, torch.arange(9) % 5)
    x = part_of(strategy, torch.linspace(-1, 1, 9 * 64).view(9, 1, 8, 8))
    strategy.step(lambda ids, x: model[0](ids).square().mean() + model[1](x).square().mean(), ids, x)
    return [parameter.grad for parameter in both.parameters()]


@pytest.mark.parametrize(("sparse", "shards"), [(True, False), (False, True)])
def test_kept_gradients_are_means_whole(worker_job: Callable[..., Any], sparse: bool, shards: bool) -> None:
    (reference, *_) = worker_job(kept_gradients, sparse, fuse=False)
    for kept in worker_job(kept_gradients, sparse, keep_gradients=True, shard_optimizer=shards):
        for own, other in zip(kept, reference, strict=True):
            assert np.array_equal(own, other)


def test_without_a_flat_version(strategy: muster.MirroredStrategy) -> None:
    class Mine(torch.optim.AdamW):
        pass

    module = net()
    optimizer = Mine(module.parameters())
    model, _ = strategy.prepare(module, optimizer)
    strategy.step(lambda x: model(x).mean(), torch.ones(2, 1, 8, 8))
    assert type(optimizer) is Mine
    assert module[0].weight.grad is not None
    with muster.MirroredStrategy(shard_optimizer=True) as sharding, pytest.raises(muster.InvalidArgument, match="flat"):
        other = net()
        sharding.prepare(other, Mine(other.parameters()))
    with muster.MirroredStrategy(fuse=False) as plain:
        third = net()
        unfused = make("adamw", third)
        plain.prepare(third, unfused)
        assert type(unfused) is torch.optim.AdamW


def halved(optimizer: torch.optim.Optimizer) -> None:
    """Replaces step() of the object by one that halves gradients first, as wrapping libraries do."""
    step = optimizer.step

    def halve_and_step(*args: Any, **options: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return step(*args, **options)

    optimizer.step = halve_and_step  # type: ignore[method-assign]


def test_a_step_that_was_replaced_is_called(strategy: muster.MirroredStrategy) -> None:
    module, alone = nn.Linear(5, 1), nn.Linear(5, 1)
    alone.load_state_dict(module.state_dict())
    x = torch.linspace(-1, 1, 20).view(4, 5)
    expected = torch.optim.SGD(alone.parameters(), lr=0.5)
    halved(expected)
    alone(x).square().mean().backward()
    expected.step()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    halved(optimizer)
    model, _ = strategy.prepare(module, optimizer)
    strategy.step(lambda x: model(x).square().mean(), x)
    for found, parameter in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, parameter)


def test_a_step_that_is_replaced_after_prepare_is_refused(strategy: muster.MirroredStrategy) -> None:
    module = nn.Linear(5, 1)
    model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.5))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces it by one that only notes the call
    x = torch.ones(4, 5)
    assert strategy.step(lambda x: model(x).square().mean(), x).stepped
    halved(optimizer)
    with pytest.raises(muster.InvalidArgument, match=r"replace it before prepare\(\), or pass fuse=False"):
        strategy.step(lambda x: model(x).square().mean(), x)


class Halving(muster.optim.SGD):
    """Has a step() of its own, as a class that is derived from torch's may."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


class Named(muster.optim.SGD):
    """Has none."""


def test_a_step_of_a_class_derived_from_a_flat_one_is_called(strategy: muster.MirroredStrategy) -> None:
    x = torch.linspace(-1, 1, 20).view(4, 5)
    moved = []
    for cls in (Halving, Named):
        torch.manual_seed(0)
        module = nn.Linear(5, 1)
        before = module.weight.detach().clone()
        model, optimizer = strategy.prepare(module, cls(module.parameters(), lr=0.5))
        strategy.step(lambda x, model=model: model(x).square().mean(), x, optimizers=optimizer)
        moved.append(module.weight.detach() - before)
        assert (module.weight.grad is None) == (cls is Named), "a class without a step() of its own stays flat"
    torch.testing.assert_close(moved[0] * 2, moved[1])
    with muster.MirroredStrategy(shard_optimizer=True) as sharding, pytest.raises(muster.InvalidArgument, match="flat"):
        other = nn.Linear(5, 1)
        sharding.prepare(other, Halving(other.parameters(), lr=0.5))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("cls", [torch.optim.AdamW, muster.optim.AdamW, torch.optim.SGD])
def test_a_parameter_that_is_listed_twice_is_refused(cls: Any) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(4, 3)
    theirs = copy.deepcopy(ours)
    optimizer, reference = (cls([m.weight, m.bias, m.weight], lr=0.1, foreach=False) for m in (ours, theirs))
    again = f"parameter 2 of {cls.__name__} .* is its parameter 0 again"
    with muster.MirroredStrategy(["cpu"]) as strategy, pytest.raises(muster.InvalidArgument, match=again):
        strategy.prepare(ours, optimizer)
    with muster.MirroredStrategy(["cpu"], fuse=False) as strategy:
        model, _ = strategy.prepare(ours, optimizer)
        for _ in range(3):
            strategy.step(lambda x: model(x).square().mean(), torch.ones(2, 4))
            reference.zero_grad()
            theirs(torch.ones(2, 4)).square().mean().backward()
            reference.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_a_parameter_that_is_listed_again_later_is_refused(strategy: muster.MirroredStrategy) -> None:
    module = nn.Linear(4, 3)
    model, optimizer = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
    before = copy.deepcopy(module.state_dict())
    optimizer.param_groups[0]["params"].append(module.bias)
    with pytest.raises(muster.InvalidArgument, match=r"parameter 2 of AdamW .* is its parameter 1 again"):
        strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
    strategy.close()
    module(torch.ones(2, 4)).sum().backward()
    with pytest.raises(muster.InvalidArgument, match=r"parameter 2 of AdamW .* is its parameter 1 again"):
        optimizer.step()
    with pytest.raises(muster.InvalidArgument, match=r"parameter 2 of AdamW .* is its parameter 1 again"):
        copy.deepcopy(optimizer).step()
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    assert not any(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def unpickled(objects: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


COPIED = ["adamw", "adamw-amsgrad", "sgd-momentum", "sgd", "adagrad"]


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_steps_as_the_original_does(
    strategy: muster.MirroredStrategy, name: str, dtype: torch.dtype, copied: Callable[[Any], Any]
) -> None:
    ours = net(dtype)
    gradients = recorded_gradients(ours, 6)
    options = {"fused": True} if name == "adamw" else {}
    model, optimizer = strategy.prepare(ours, make(name, ours, **options))
    train(strategy, model, gradients[:3])
    module, twin = copied((ours, optimizer))
    module, twin = copied((module, twin))  # a copy of a copy that has not stepped
    strategy.close()
    for step in gradients[3:]:
        for parameters, stepped in ((ours.parameters(), optimizer), (module.parameters(), twin)):
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            stepped.step()
    assert all(map(torch.equal, ours.parameters(), module.parameters()))
    saved, others = optimizer.state_dict()["state"], twin.state_dict()["state"]
    assert saved.keys() == others.keys()
    for number, values in saved.items():
        assert values.keys() == others[number].keys()
        assert all(torch.equal(value, others[number][key]) for key, value in values.items() if value is not None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda objects: objects])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", COPIED)
def test_without_fuse_torch_steps_what_was_flat(
    strategy: muster.MirroredStrategy, name: str, dtype: torch.dtype, copied: Callable[[Any], Any]
) -> None:
    ours = net(dtype)
    gradients = recorded_gradients(ours, 5)
    model, optimizer = strategy.prepare(ours, make(name, ours, foreach=False))
    train(strategy, model, gradients[:3])
    strategy.close()
    theirs = copy.deepcopy(ours)
    reference = make(name, theirs, foreach=False)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours, optimizer = copied((ours, optimizer))
    with muster.MirroredStrategy(["cpu"], fuse=False) as second:
        model, _ = second.prepare(ours, optimizer)
        train(second, model, gradients[3:])
    for step in gradients[3:]:
        for parameter, gradient in zip(theirs.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert not any("master" in values for values in optimizer.state.values())


def wrap(_: Any, packed: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": packed, "version": 2}


def unwrap(_: Any, packed: dict[str, Any]) -> Any:
    return packed["optimizer"]


def test_hooks_of_state_dicts_may_make_another_structure(strategy: muster.MirroredStrategy) -> None:
    module = net(torch.bfloat16)
    gradients = recorded_gradients(module, 3)
    model, optimizer = strategy.prepare(module, make("adamw", module))
    train(strategy, model, gradients)
    plain = copy.deepcopy(optimizer.state_dict())
    optimizer.register_state_dict_post_hook(wrap)
    optimizer.register_load_state_dict_pre_hook(unwrap)
    packed = copy.deepcopy(optimizer.state_dict())
    assert packed.keys() == {"optimizer", "version"}
    optimizer.load_state_dict(packed)
    other = net(torch.bfloat16)
    other.load_state_dict(module.state_dict())
    alone = muster.optim.AdamW(other.parameters())
    alone.register_load_state_dict_pre_hook(unwrap)
    alone.load_state_dict(packed)
    for found in (packed["optimizer"], optimizer.state_dict()["optimizer"], alone.state_dict()):
        for number, values in plain["state"].items():
            for name, value in values.items():
                assert found["state"][number][name].dtype == value.dtype == torch.float32
                assert torch.equal(found["state"][number][name], value)
    train(strategy, model, gradients)


def test_checkpoints_refuse_another_structure_by_name(strategy: muster.MirroredStrategy, tmp_path: Path) -> None:
    module = net()
    _, optimizer = strategy.prepare(module, make("adamw", module))
    hook = optimizer.register_state_dict_post_hook(wrap)
    with pytest.raises(muster.InvalidArgument, match="AdamW has another structure than torch's"):
        strategy.save(tmp_path)
    hook.remove()
    strategy.save(tmp_path)


def test_a_pre_hook_of_loading_may_drop_parameters(strategy: muster.MirroredStrategy) -> None:
    """As where a model is trained on without its old head."""
    whole = net(torch.bfloat16)
    model, optimizer = strategy.prepare(whole, make("adamw", whole))
    train(strategy, model, recorded_gradients(whole, 2))
    saved = optimizer.state_dict()

    def without_head(_: Any, packed: dict[str, Any]) -> dict[str, Any]:
        (group,) = packed["param_groups"]
        kept = {number: values for number, values in packed["state"].items() if number < 4}
        return {"state": kept, "param_groups": [{**group, "params": group["params"][:4]}]}

    body = net(torch.bfloat16)[:4]
    alone = muster.optim.AdamW(body.parameters())
    alone.register_load_state_dict_pre_hook(without_head)
    alone.load_state_dict(saved)
    for number, values in alone.state_dict()["state"].items():
        assert torch.equal(values["exp_avg"], saved["state"][number]["exp_avg"])


def hooked(strategy: muster.Strategy, fuse: bool) -> list[Tensor]:
    module = net(torch.bfloat16)
    optimizer = make("adamw", module)
    optimizer.register_state_dict_post_hook(wrap)
    optimizer.register_load_state_dict_pre_hook(unwrap)
    for parameter in module.parameters():
        exact = torch.full(parameter.shape, 0.1) * (1 + strategy.rank)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": exact, "exp_avg_sq": exact.clone()}
        optimizer.state[parameter] |= {"seen": torch.tensor(2**40 + 1)}
    strategy.prepare(module, optimizer)
    state = optimizer.state_dict()["optimizer"]["state"]
    assert all(values["seen"].item() == 2**40 + 1 for values in state.values())
    return [values["exp_avg"].float() for values in state.values()]


@pytest.mark.parametrize("fuse", [True, False])
def test_workers_take_over_state_through_hooks(two_workers: WorkerPool, fuse: bool) -> None:
    chiefs, others = make_job("workers-2", two_workers)(hooked, fuse, fuse=fuse)
    for own, other in zip(chiefs, others, strict=True):
        np.testing.assert_allclose(own, 0.1, rtol=1e-7)
        np.testing.assert_allclose(other, 0.1, rtol=1e-7 if fuse else 0.01)


def test_alone_they_are_torchs() -> None:
    ours, theirs = net(), net()
    flat, plain = muster.optim.AdamW(ours.parameters(), lr=1e-3), torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    for step in recorded_gradients(ours, 3):
        for module, optimizer in ((ours, flat), (theirs, plain)):
            for parameter, gradient in zip(module.parameters(), step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_patch_of_torchs_optimizer_is_called_before_anything_compiles() -> None:
    program = """
import functools, sys
import torch, muster
plain, calls = torch.optim.Optimizer.zero_grad, []
@functools.wraps(plain)
def patched(self, *args, **options):
    calls.append(self)
    return plain(self, *args, **options)
torch.optim.Optimizer.zero_grad = patched
optimizer = muster.optim.SGD(torch.nn.Linear(2, 2).parameters())
assert "torch._dynamo" not in sys.modules
optimizer.zero_grad()
assert calls == [optimizer]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW"])
def test_training_without_torch_compile_does_not_import_it(name: str) -> None:
    program = f"""
import copy, sys
import torch, muster
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = muster.optim.{name}(model[0].parameters())
optimizer.add_param_group({{"params": model[1].parameters()}})
with muster.MirroredStrategy(["cpu"]) as strategy:
    model, optimizer = strategy.prepare(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
