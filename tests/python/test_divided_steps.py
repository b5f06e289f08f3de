"""Steps that replicas divide: each steps what it owns, and nobody can tell."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import muster
from support.jobs import Launcher, WorkerPool, make_job, part_of

Job = Callable[..., list[Any]]


@pytest.fixture(params=["mirrored-2", "workers-2", "workers-2x2"])
def jobs(request: pytest.FixtureRequest, two_workers: WorkerPool) -> tuple[Launcher, Job]:
    """Replicas that divide their steps, and as many that do not."""
    job = make_job(request.param, two_workers)
    return job, functools.partial(make_job(f"mirrored-{job.replicas}", two_workers), shard_optimizer=True)


def dividing(job: Job, *args: Any, **options: Any) -> list[Any]:
    """What each process of the job returns, with the sums at their owners alone and with those at all."""
    return [*job(*args, keep_gradients=False, **options), *job(*args, keep_gradients=True, **options)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 97), nn.ReLU(), nn.Linear(97, 96))


def train(strategy: muster.Strategy, model: Any, steps: int) -> None:
    x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))
    for _ in range(steps):
        strategy.step(lambda x: model(x).square().mean(), x)


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert np.array_equal(own, other)


def eventful(strategy: muster.Strategy, event: str) -> Any:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, _ = strategy.prepare(module, optimizer)
    train(strategy, model, 3)
    weight = module[0].weight
    if event == "new memory":
        weight.data = weight.data.clone()
    elif event == "edited in place":
        with torch.no_grad():
            weight.mul_(0.5)
    elif event == "new memory in the step":
        x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))
        inside = strategy.num_replicas == strategy.num_workers  # else other replicas have the memory, too

        def step(x: Tensor) -> Tensor:
            if inside:
                weight.data = weight.data * 0.5
            return model(x).square().mean()

        if not inside:
            weight.data = weight.data * 0.5
        strategy.step(step, x)
    elif event == "state loaded":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif event == "state reset":
        for state in optimizer.state.values():
            state["exp_avg"].zero_()  # what is the same for all may be written by each
        strategy.barrier()
    elif event == "group added":
        extra = nn.Linear(96, 5)
        with torch.no_grad():
            extra.weight.fill_(0.1)
            extra.bias.fill_(0.1)
        added = strategy.prepare(extra)
        optimizer.add_param_group({"params": list(extra.parameters()), "lr": 1e-3})
        ones = part_of(strategy, torch.ones(10, 96))
        strategy.step(lambda x: added(model(x)).square().mean(), ones)
        return values(module) + values(extra)
    elif event == "frozen":
        weight.requires_grad_(False)
        train(strategy, model, 2)
        weight.requires_grad_(True)
    train(strategy, model, 3)
    return values(module)


EVENTS = [
    "none",
    "new memory",
    "edited in place",
    "new memory in the step",
    "state loaded",
    "state reset",
    "group added",
    "frozen",
]


@pytest.mark.parametrize("event", EVENTS)
def test_what_users_do_between_steps(jobs: tuple[Launcher, Job], event: str) -> None:
    job, whole = jobs
    (reference,) = whole(eventful, event)
    for ours in dividing(job, eventful, event):
        assert_equal(ours, reference)


OPTIONS: list[dict[str, Any]] = [{"clip_norm": 0.01}, {"precision": "bf16"}, {"precision": "fp16"}, {"accumulate": 3}]


@pytest.mark.parametrize("options", OPTIONS)
def test_options(jobs: tuple[Launcher, Job], options: dict[str, Any]) -> None:
    job, whole = jobs
    (reference,) = whole(eventful, "none", **options)
    for ours in dividing(job, eventful, "none", **options):
        assert_equal(ours, reference)


def saved(strategy: muster.Strategy) -> Any:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, _ = strategy.prepare(module, optimizer)
    train(strategy, model, 2)
    file = io.BytesIO()
    torch.save(module[0].bias, file)
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in module.parameters()]
    copied = copy.deepcopy(module)
    return file.tell(), states, values(copied), values(module), module[0].weight.untyped_storage().nbytes()


def test_a_parameter_is_saved_alone_and_state_is_whole(worker_job: Launcher) -> None:
    results = worker_job(saved, keep_gradients=False)
    for size, states, copied, own, storage in results:
        assert size < 97 * 4 + 2000
        assert storage == 96 * 97 * 4
        assert_equal(copied, own)
        for state, other in zip(states, results[0][1], strict=True):
            assert {"step", "exp_avg", "exp_avg_sq"} <= set(state)
            assert np.count_nonzero(state["exp_avg_sq"]) > 0.5 * state["exp_avg_sq"].size
            assert all(np.array_equal(state[name], other[name]) for name in state)


def by_hand_after(strategy: muster.Strategy) -> Any:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, _ = strategy.prepare(module, optimizer)
    train(strategy, model, 3)
    (x,) = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    train(strategy, model, 2)
    return values(module), [optimizer.state[p]["exp_avg_sq"] for p in module.parameters()]


def test_backward_by_hand_between_divided_steps(worker_job: Launcher) -> None:
    (reference, whole), *_ = worker_job(by_hand_after, fuse=False)
    for parameters, state in worker_job(by_hand_after, keep_gradients=False):
        for own, expected in zip([*parameters, *state], [*reference, *whole], strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)


def mixed(strategy: muster.Strategy, dtype: torch.dtype) -> Any:
    """Dense and sparse gradients of one table, rows alone of another, and a parameter that nobody uses."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"both": nn.Embedding(600, 16, sparse=True), "rows": nn.Embedding(600, 16, sparse=True)})
    module["unused"] = nn.Linear(3, 3)
    module.to(dtype)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    model, _ = strategy.prepare(module, optimizer)
    ids = part_of(strategy, torch.arange(12) * 7 % 600)
    norms = []
    for number in range(5):

        def step(ids: Tensor, number: int = number) -> Tensor:
            loss = model["rows"](ids).square().sum() + model["both"](ids + 1).square().sum()
            return loss + model["both"].weight.square().sum() if number % 2 == 0 else loss

        norms.append(strategy.step(step, ids).grad_norm)
    return values(module), norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_rows_of_what_others_own(jobs: tuple[Launcher, Job], dtype: torch.dtype) -> None:
    job, whole = jobs
    ((reference, norms),) = whole(mixed, dtype)
    for parameters, own_norms in dividing(job, mixed, dtype):
        assert_equal(parameters, reference)
        assert_equal(own_norms, norms)


def fires_again(strategy: muster.Strategy) -> Any:
    """In the last steps a parameter gets a second gradient after its bucket was packed, before it can leave."""
    torch.manual_seed(0)
    early, late = nn.Linear(96, 96), nn.Linear(96, 96)
    module = nn.ModuleList([early, late])
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-2))
    x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))
    for number in range(6):

        def step(x: Tensor, number: int = number) -> Tensor:
            first, second = model
            if number < 3:  # the order that is learned: first's gradient comes first
                return first(second(x)).square().mean()
            hidden = first(x)
            for _ in range(2 if number > 3 else 1):
                hidden = checkpoint(second, hidden, use_reentrant=True)
            return hidden.square().mean()

        strategy.step(step, x)
    return values(module)


def test_a_gradient_in_two_parts(jobs: tuple[Launcher, Job]) -> None:
    job, whole = jobs
    (reference,) = whole(fires_again, bucket_bytes=1024)
    for ours in dividing(job, fires_again, bucket_bytes=1024):
        assert_equal(ours, reference)


def large(strategy: muster.Strategy) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(96, 800), nn.ReLU(), nn.Linear(800, 96))
    model, _ = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    train(strategy, model, 4)
    return values(module)


def test_a_model_that_is_worth_several_threads(jobs: tuple[Launcher, Job]) -> None:
    job, whole = jobs
    (reference,) = whole(large)
    for ours in dividing(job, large):
        assert_equal(ours, reference)


def low(strategy: muster.Strategy) -> Any:
    module = net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, _ = strategy.prepare(module, optimizer)
    x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96).to(torch.bfloat16))
    for number in range(5):
        strategy.step(lambda x: model(x).square().mean(), x)
        if number == 2:
            with torch.no_grad():
                module[0].weight.mul_(0.5)
    return values(module.float())


def test_masters_of_low_precision_parameters(jobs: tuple[Launcher, Job]) -> None:
    job, whole = jobs
    (reference,) = whole(low)
    for ours in dividing(job, low):
        assert_equal(ours, reference)


def huge(strategy: muster.Strategy) -> Any:
    module = nn.Linear(20, 20, bias=False).double()
    with torch.no_grad():
        module.weight.fill_(1.0)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-200))
    x = part_of(strategy, torch.full((4, 20), 1e200, dtype=torch.float64))
    first = strategy.step(lambda x: model(x).mean(), x)
    second = strategy.step(lambda x: model(x * float("inf")).mean(), x)
    return first.skipped, second.skipped, values(module)


def test_a_norm_that_overflows_is_not_an_overflow(jobs: tuple[Launcher, Job]) -> None:
    job, _ = jobs
    results = dividing(job, huge)
    for first, second, parameters in results:
        assert not first
        assert second
        assert not np.array_equal(parameters[0], np.ones((20, 20)))
        assert_equal(parameters, results[0][2])
