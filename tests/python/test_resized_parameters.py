"""Parameters that get another shape between steps: those without optimizer state train in it, others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from muster import Loss
from support.jobs import Launcher, part_of

SIZES = [16, 3, 60_000]


def table(rows: int = 10, sparse: bool = False) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(rows, 4, sparse=sparse)


def resize(module: nn.Embedding, rows: int) -> None:
    old = module.weight.data[:rows]
    module.weight.data = torch.cat([old, torch.ones(rows - len(old), 4)])
    module.num_embeddings = rows


def resized(strategy: muster.Strategy, sparse: bool, before: bool) -> list[Tensor]:
    module = table(sparse=sparse)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    found = []
    for rows in SIZES if before else [10, *SIZES]:
        if rows != 10:
            resize(module, rows)
        for _ in range(2):
            ids = part_of(strategy, torch.arange(rows))
            strategy.step(lambda ids: Loss(model(ids).square().sum() / len(ids), weight=len(ids)), ids)
        found.append(module.weight.detach().clone())
    return found


def resized_in_torch(before: bool) -> list[Tensor]:
    module = table()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    found = []
    for rows in SIZES if before else [10, *SIZES]:
        if rows != 10:
            resize(module, rows)
        for _ in range(2):
            optimizer.zero_grad()
            (module(torch.arange(rows)).square().sum() / rows).backward()
            optimizer.step()
        found.append(module.weight.detach().clone())
    return found


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["trained", "untrained"])
def test_what_has_no_state_trains_in_its_new_shape(job: Launcher, sparse: bool, before: bool) -> None:
    for found in job(resized, sparse, before):
        for own, expected in zip(found, resized_in_torch(before), strict=True):
            torch.testing.assert_close(torch.as_tensor(own), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["common", "sharded"])
@pytest.mark.parametrize("sparse", [False, True])
def test_so_it_does_where_workers_divide_the_steps(worker_job: Launcher, options: dict[str, Any], sparse: bool) -> None:
    for found in worker_job(resized, sparse, False, keep_gradients=False, **options):
        for own, expected in zip(found, resized_in_torch(before=False), strict=True):
            torch.testing.assert_close(torch.as_tensor(own), expected, rtol=1e-5, atol=1e-6)


def drop(optimizer: Any, weight: Tensor) -> None:
    optimizer.state.pop(weight)


def drop_all(optimizer: Any, weight: Tensor) -> None:
    optimizer.state.clear()


def pad(optimizer: Any, weight: Tensor) -> None:
    for name, value in optimizer.state[weight].items():
        if name != "step":
            kept = value[: len(weight)]
            optimizer.state[weight][name] = torch.cat([kept, torch.zeros(len(weight) - len(kept), 4)])


def pad_in_place(optimizer: Any, weight: Tensor) -> None:
    for name, value in optimizer.state[weight].items():
        if name != "step":
            kept = value[: len(weight)]
            value.data = torch.cat([kept, torch.zeros(len(weight) - len(kept), 4)])


def step_of(module: nn.Embedding, optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    def step(rows: int) -> None:
        optimizer.zero_grad()
        module(torch.arange(rows)).square().sum().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("rows", [16, 3])
@pytest.mark.parametrize("mend", [drop, drop_all, pad, pad_in_place])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("by_hand", [False, True])
def test_state_of_another_shape_is_refused_until_it_is_mended(
    rows: int, mend: Callable[[Any, Tensor], None], devices: int, by_hand: bool
) -> None:
    module = table()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    twin, other = copy.deepcopy((module, optimizer))
    theirs = step_of(twin, other)
    with muster.MirroredStrategy([f"cpu:{i}" for i in range(devices)]) as strategy:
        model, _ = strategy.prepare(module, optimizer)

        def step(rows: int) -> Any:
            return strategy.step(lambda ids: Loss(model(ids).square().sum() * devices, weight=1.0), torch.arange(rows))

        def check() -> None:
            for train in (ours, theirs):
                train(rows)
            torch.testing.assert_close(module.weight, twin.weight, rtol=1e-4, atol=1e-6)

        def train_resized(ours: Callable[[int], Any]) -> None:
            resize(module, rows)
            resize(twin, rows)
            before = module.weight.detach().clone()
            with pytest.raises(muster.InvalidArgument, match=rf"shape \[{rows}, 4\].*'exp_avg'.*\[10, 4\]"):
                ours(rows)
            assert torch.equal(module.weight, before)
            mend(optimizer, module.weight)
            mend(other, twin.weight)

        ours: Callable[[int], Any] = step
        step(10)
        theirs(10)
        if not by_hand:
            train_resized(step)
            check()
            check()
    if by_hand:
        ours = step_of(module, optimizer)
        train_resized(ours)
        check()


def divided(strategy: muster.Strategy, rows: int, mend: Callable[[Any, Tensor], None]) -> tuple[str, Tensor]:
    module = table()
    model, optimizer = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))

    def step(rows: int) -> None:
        strategy.step(lambda ids: model(ids).square().mean(), part_of(strategy, torch.arange(rows)))

    step(10)
    resize(module, rows)
    with pytest.raises(muster.InvalidArgument) as error:
        step(rows)
    strategy.barrier()
    mend(optimizer, module.weight)
    step(rows)
    return str(error.value), module.weight.detach().clone()


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["common", "sharded"])
@pytest.mark.parametrize("rows", [60_000, 3])
def test_all_workers_refuse_it_and_go_on(worker_job: Launcher, options: dict[str, Any], rows: int) -> None:
    results = worker_job(divided, rows, drop_all, keep_gradients=False, **options)
    for error, weight in results:
        assert f"[{rows}, 4]" in error
        assert "[10, 4]" in error
        assert (torch.as_tensor(weight) != 1).any(1).all()
        assert torch.equal(torch.as_tensor(weight), torch.as_tensor(results[0][1]))


def test_a_master_copy_of_another_shape_is_refused_until_it_is_dropped() -> None:
    module = nn.Linear(4, 3).bfloat16()
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.randn(8, 4).bfloat16()
        strategy.step(lambda x: model(x).float().square().mean(), x)
        module.weight.data = torch.ones(5, 4).bfloat16()
        module.bias.data = torch.ones(5).bfloat16()
        with pytest.raises(muster.InvalidArgument, match="'master'"):
            strategy.step(lambda x: model(x).float().square().mean(), x)
        assert optimizer.state_dict()["state"][0]["master"].shape == (3, 4)
        optimizer.state.clear()
        strategy.step(lambda x: model(x).float().square().mean(), x)
        assert (module.weight != 1).all()
        assert optimizer.state[module.weight]["master"].shape == (5, 4)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("other", [torch.zeros(1, 2), torch.zeros(3, 4, dtype=torch.float64)])
def test_state_that_is_changed_through_its_data_is_refused(name: str, other: Tensor) -> None:
    module = nn.Linear(4, 3)
    x = torch.randn(8, 4)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model, optimizer = strategy.prepare(module, torch.optim.AdamW(module.parameters()))
        strategy.step(lambda x: model(x).square().mean(), x)
        held = optimizer.state[module.weight][name]
        values = held.clone()
        held.data = other
        with pytest.raises(muster.InvalidArgument, match=f"'{name}'"):
            strategy.step(lambda x: model(x).square().mean(), x)
        held.data = values
        assert strategy.step(lambda x: model(x).square().mean(), x).stepped


@pytest.mark.parametrize("sparse", [False, True])
def test_a_parameter_keeps_its_shape_within_a_window(sparse: bool) -> None:
    module = table(sparse=sparse)
    with muster.MirroredStrategy(["cpu"], accumulate=2) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))

        def step(rows: int) -> Any:
            return strategy.step(lambda ids: model(ids).square().mean(), torch.arange(rows))

        step(10)
        step(10)
        step(10)
        resize(module, 3)
        # Of torch's, where a gradient does not reach its parameter.
        with pytest.raises((muster.InvalidArgument, RuntimeError), match=r"\[3, 4\].*\[10, 4\]"):
            step(3)


def test_a_step_function_may_not_resize_what_it_trains() -> None:
    module = table()
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))

        def step(ids: Tensor) -> Tensor:
            loss = model(ids).square().mean()
            resize(module, 3)
            return loss

        with pytest.raises(muster.InvalidArgument, match=r"\[3, 4\]"):
            strategy.step(step, torch.arange(10))
