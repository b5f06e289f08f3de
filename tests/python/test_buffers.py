"""Buffers at a window's end, seeds and threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from support.jobs import Launcher, part_of

ROWS = 11


class Counting(nn.Module):
    """Buffers of several kinds, written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(3, momentum=None).double()
        self.register_buffer("mean_row", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("replaced", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("minus_infinity", torch.full((2,), float("-inf")))
        self.register_buffer("transient", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = x.detach().mean(0)
        with torch.no_grad():
            self.mean_row.copy_(x.mean(0))
            self.largest.fill_(int(x[:, 0].max()))
        return (self.norm(x) * self.weight).square().mean()


def rows() -> Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float64).view(ROWS, 3)


def counted(strategy: muster.Strategy) -> Any:
    module = Counting()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, rows())
    strategy.step(lambda x: model(x), x)
    everywhere = strategy.run(
        lambda x: {name: buffer.clone() for name, buffer in model.named_buffers()},
        muster.PerReplica([torch.ones(1)] * len(strategy.devices)),
    )
    return list(everywhere)


@pytest.mark.parametrize("buffers", ["mean", "chief"])
def test_buffers_are_averaged_by_weight_or_the_chiefs(job: Launcher, buffers: str) -> None:
    parts = [part for part in np.array_split(rows().numpy(), job.replicas) if len(part)]
    weights = np.array([len(part) for part in parts]) / ROWS
    for replicas in job(counted, buffers=buffers):
        for seen in replicas:
            if buffers == "mean":
                np.testing.assert_allclose(seen["mean_row"], rows().numpy().mean(0))
                variances = sum(w * part.var(0, ddof=1) for w, part in zip(weights, parts, strict=True))
                assert seen["largest"] == rows()[-1, 0]
            else:
                np.testing.assert_allclose(seen["mean_row"], parts[0].mean(0))
                variances = parts[0].var(0, ddof=1)
                assert seen["largest"] == parts[0][-1, 0]
            np.testing.assert_allclose(seen["norm.running_var"], variances)
            np.testing.assert_allclose(seen["replaced"], seen["mean_row"])
            assert seen["norm.num_batches_tracked"] == 1
            assert seen["mask"].tolist() == [True, False, True]
            assert np.isneginf(seen["minus_infinity"]).all()


def constant(strategy: muster.Strategy) -> bool:
    module = nn.Linear(4, 1).double()
    values = torch.rand(1000, dtype=torch.float64) * 1e3
    module.register_buffer("constant", values.clone())
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.ones(ROWS, 4, dtype=torch.float64))
    for _ in range(5):
        strategy.step(lambda x: model(x).mean(), x)
    return torch.equal(module.constant, values) if strategy.is_chief else True


class Replacing(nn.Module):
    """A buffer that every forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen * 0.5 + x.detach().mean()
        return (x * self.weight).mean()


def replaced(strategy: muster.Strategy, way: str) -> Any:
    module = Replacing()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, rows())

    def fail(x: Tensor) -> Tensor:
        model(x)
        strategy.barrier()
        raise KeyError("after the forward pass")

    if way == "run":
        strategy.run(lambda x: model(x), x)
    else:
        with pytest.raises(KeyError):
            (strategy.step if way == "a step that raises" else strategy.run)(fail, x)
    ones = muster.PerReplica([torch.ones(1)] * len(strategy.devices))
    return [part.item() for part in strategy.run(lambda _: model.seen.clone(), ones)]


@pytest.mark.parametrize("way", ["a step that raises", "run", "a run that raises"])
def test_a_buffer_that_was_replaced_outside_a_window_is_the_replicas_own(job: Launcher, way: str) -> None:
    seen = [value for of_rank in job(replaced, way) for value in of_rank]
    assert seen == pytest.approx([part.mean() for part in np.array_split(rows().numpy(), job.replicas)])


def test_a_constant_buffer_stays_what_it_is(job: Launcher) -> None:
    assert all(job(constant))


# --- random streams ---------------------------------------------------------------------------------------------------
def masks(strategy: muster.Strategy) -> Any:
    torch.manual_seed(77 + strategy.rank)
    ambient = torch.get_rng_state()
    module = nn.Linear(4, 1)
    ambient = torch.get_rng_state()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = muster.PerReplica([torch.ones(3, 4)] * len(strategy.devices))
    drawn = []

    def step(x: Tensor) -> muster.Loss:
        noise = F.dropout(torch.ones(16)) + torch.rand(16) + torch.randperm(16)
        return muster.Loss(model(x).mean(), output=noise)

    for _ in range(2):
        drawn += [list(strategy.step(step, x).output), list(strategy.run(lambda x: torch.randn(4), x))]
    return drawn, torch.equal(ambient, torch.get_rng_state())


def test_draws_depend_on_seed_replica_and_step_alone(job: Launcher) -> None:
    with muster.MirroredStrategy(["cpu"] * job.replicas, seed=3) as strategy:
        expected, _ = masks(strategy)
    results = job(masks)
    assert all(untouched for _, untouched in results)
    for call, of_call in enumerate(expected):
        together = [draw for drawn, _ in results for draw in drawn[call]]
        for a, b in zip(together, of_call, strict=True):
            assert np.array_equal(a, b.numpy())
    first = [draw.tobytes() for drawn, _ in results for of_call in drawn for draw in of_call]
    assert len(set(first)) == len(first), "replicas and steps draw different numbers"
    other = [draw for drawn, _ in job(masks, seed=4) for of_call in drawn for draw in of_call]
    assert not {draw.tobytes() for draw in other} & set(first)


def seeds(strategy: muster.Strategy) -> int:
    return strategy.seed


def test_without_a_seed_it_is_the_chiefs(worker_job: Launcher) -> None:
    assert len(set(worker_job(seeds, seed=None))) == 1
    torch.manual_seed(123)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        assert strategy.seed == 123


# --- threads ----------------------------------------------------------------------------------------------------------
def threads(strategy: muster.Strategy) -> Any:
    outside = torch.get_num_threads()
    module = nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

    def step(x: Tensor) -> muster.Loss:
        return muster.Loss(model(x).mean(), output=torch.get_num_threads())

    x = part_of(strategy, torch.ones(ROWS, 4))
    inside = list(strategy.step(step, x).output)
    return inside, outside == torch.get_num_threads(), strategy._core.threads_per_replica


@pytest.mark.parametrize("wanted", [1, 3])
def test_every_replica_has_its_own_number_of_threads(job: Launcher, wanted: int) -> None:
    for inside, restored, known in job(threads, threads_per_replica=wanted):
        assert inside == [wanted] * job.local_replicas
        assert restored and known == wanted


def test_threads_that_run_no_replica_keep_theirs() -> None:
    found: list[int] = []
    wanted = torch.get_num_threads() + 1

    def look() -> None:
        found.append(torch.get_num_threads())

    def train() -> None:
        with muster.MirroredStrategy(["cpu"] * 2, threads_per_replica=wanted) as strategy:
            threads(strategy)
        look()

    for work in (look, train, look):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [found[0]] * 3


def test_all_strategies_share_the_cores_alike(worker_job: Launcher) -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        expected = strategy._core.threads_per_replica
    assert {known for _, _, known in worker_job(threads, threads_per_replica=None)} == {expected}


class Scaled(nn.Module):
    """By a buffer that programs replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(4, 1)
        self.register_buffer("scale", torch.tensor([2]))
        self.register_buffer("alias", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.read((x * self.scale).to(self.read.weight.dtype))
        return result


@pytest.mark.parametrize(
    "scale", [torch.tensor([2.5]), torch.tensor([2.5], dtype=torch.float64), torch.tensor(3), torch.ones(1, 4)]
)
def test_a_buffer_is_replaced_by_one_of_another_kind(scale: Tensor) -> None:
    def train(step: Any, module: nn.Module) -> list[Tensor]:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        for number in range(3):
            if number == 1:
                module.scale = module.alias = scale.clone()
            step(x)
        return [parameter.detach().clone() for parameter in module.parameters()]

    def by_torch(x: Tensor) -> None:
        optimizer.zero_grad()
        module(x).float().square().mean().backward()
        optimizer.step()

    module = Scaled()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.double() if scale.dtype == torch.float64 else None
    expected = train(by_torch, module)
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        own = Scaled()
        own.double() if scale.dtype == torch.float64 else None
        model, _ = strategy.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
        found = train(lambda x: strategy.step(lambda x: model(x).float().square().mean(), x), own)
        torch.testing.assert_close(found, expected)
        everywhere = strategy.run(lambda x: (model.scale.clone(), model.scale is model.alias), torch.zeros(2, 4))
        for value, is_shared in everywhere:
            assert is_shared
            assert torch.equal(value, scale) and value.dtype == scale.dtype


class Counts(nn.Module):
    """Makes a buffer anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        result: Tensor = self.read(x)
        return result


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_buffer_that_inference_mode_made_is_one_as_any_other(replicas: int) -> None:
    module = Counts()
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(2):
            with torch.inference_mode():
                model(torch.ones(2, 4))
                strategy.run(lambda x: model(x), torch.ones(4, 4))
            strategy.step(lambda x: model(x).mean(), torch.ones(4, 4))
        assert not module.count.is_inference()
        assert float(module.count) == 6


def test_a_buffer_that_is_given_other_data_is_so_everywhere() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = nn.BatchNorm1d(3)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.randn(8, 3)
        strategy.step(lambda x: model(x).square().mean(), x)
        assert module.running_mean is not None
        module.running_mean.data = torch.full((3,), 5.0)
        for mean in strategy.run(lambda _: model.running_mean.clone(), x):
            assert mean.tolist() == [5.0] * 3
        module.running_mean.data.copy_(torch.full((3,), 6.0))  # which leaves its version and its memory alone
        for mean in strategy.run(lambda _: model.running_mean.clone(), x):
            assert mean.tolist() == [6.0] * 3
        module.running_mean.numpy()[1] = 7
        for mean in strategy.run(lambda _: model.running_mean.clone(), x):
            assert mean.tolist() == [6.0, 7.0, 6.0]


class KeepsItsPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("last", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return self.layer(x).square().mean()


def test_a_buffer_of_another_size_on_each_replica_is_named() -> None:
    with muster.MirroredStrategy(["cpu", "cpu"], threads_per_replica=1) as strategy:
        module = KeepsItsPart()
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert strategy.step(model, torch.ones(8, 4)).stepped
        text = r"'last' \(\[[34], 4\], at prepare\(\) \[0, 4\]\); give them one size"
        # Of a device's replicas one may hear from the other.
        with pytest.raises((muster.LayoutMismatch, muster.CommError), match=text):
            strategy.step(model, torch.ones(7, 4))
