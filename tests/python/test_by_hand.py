"""Backward by hand under MultiWorker means what it means under DistributedDataParallel."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import muster
from support.jobs import Launcher


class Net(nn.Module):
    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)
        self.unused = nn.Linear(3, 3)
        self.of_rank = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, rank: int | None = None) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.checkpointing == "none":
            x = self.middle(self.middle(x))
        else:
            for _ in range(2):
                x = checkpoint(self.middle, x, use_reentrant=self.checkpointing == "reentrant")
        if rank is not None:
            x = self.of_rank[rank](x)
        return self.last(x)


def build(checkpointing: str = "none") -> Net:
    torch.manual_seed(6)
    return Net(checkpointing).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, dtype=torch.float64, generator=generator) for _ in range(4)]


def mine(strategy: muster.Strategy, batch: Tensor) -> Tensor:
    return batch.chunk(strategy.num_workers)[strategy.rank]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def trained(strategy: muster.Strategy, checkpointing: str) -> Any:
    module = build(checkpointing)
    model, optimizer = strategy.prepare(module, torch.optim.Adam(module.parameters(), lr=0.01))
    for batch in batches():
        optimizer.zero_grad()
        model(mine(strategy, batch)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()], gradients(module)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_it_trains_as_on_the_whole_batch(worker_job: Launcher, checkpointing: str) -> None:
    model = build(checkpointing)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    results = worker_job(trained, checkpointing)
    for parameters, grads in results:
        for a, b, g in zip(parameters, model.parameters(), grads, strict=True):
            np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-9, atol=1e-12)
            assert (g is None) == (b.grad is None)
        for a, b in zip(parameters, results[0][0], strict=True):
            assert np.array_equal(a, b)


def accumulating(strategy: muster.Strategy) -> Any:
    module = build()
    model = strategy.prepare(module)
    snapshots = []
    for number, batch in enumerate(batches()):
        with model.no_sync() if number < 2 else contextlib.nullcontext():
            loss = model(mine(strategy, batch)).square().mean()
        loss.backward()
        if number >= 2:
            snapshots.append(gradients(module))
    return snapshots


def test_no_sync_adds_locally_and_the_next_backward_averages_the_sum(worker_job: Launcher) -> None:
    model = build()
    expected = []
    for number, batch in enumerate(batches()):
        model(batch).square().mean().backward()
        if number >= 2:
            expected.append(gradients(model))
    for snapshots in worker_job(accumulating):
        for actual, whole in zip(snapshots, expected, strict=True):
            for a, b in zip(actual, whole, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-12)


def several(strategy: muster.Strategy) -> Any:
    module = build()
    model = strategy.prepare(module)
    x = mine(strategy, batches()[0])
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    first = gradients(module)
    output.mean().backward()
    (model(x).square().mean() + model(2 * x).mean()).backward()  # one backward over two forwards
    return first, gradients(module)


def test_several_backward_calls_add_up(worker_job: Launcher) -> None:
    model = build()
    x = batches()[0]
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    first = gradients(model)
    output.mean().backward()
    (model(x).square().mean() + model(2 * x).mean()).backward()
    for early, late in worker_job(several):
        for actual, whole in ((early, first), (late, gradients(model))):
            for a, b in zip(actual, whole, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-12)


def differing_by_rank(strategy: muster.Strategy) -> Any:
    module = build()
    model = strategy.prepare(module)
    model(mine(strategy, batches()[0]), strategy.rank).square().mean().backward()
    return gradients(module)


def test_parameters_may_be_used_on_one_rank_only(worker_job: Launcher) -> None:
    model = build()
    for rank, part in enumerate(batches()[0].chunk(2)):
        (model(part, rank).square().mean() / 2).backward()
    for actual in worker_job(differing_by_rank):
        for a, p in zip(actual, model.parameters(), strict=True):
            assert (a is None) == (p.grad is None)
            if a is not None and p.grad is not None:
                np.testing.assert_allclose(a, p.grad.numpy(), rtol=1e-9, atol=1e-12)


def mixed_with_step(strategy: muster.Strategy) -> None:
    module = build()
    model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = mine(strategy, batches()[0])
    strategy.step(lambda x: model(x).square().mean(), x)
    with pytest.raises(muster.InvalidArgument, match=r"after strategy\.step"):
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    strategy.step(lambda x: model(x).square().mean(), x)
    with pytest.raises(muster.InvalidArgument, match=r"after strategy\.step"):
        optimizer.step()


def test_the_optimizer_is_stepped_by_hand_after_a_backward_by_hand_only(worker_job: Launcher) -> None:
    worker_job(mixed_with_step)


def by_forward(strategy: muster.Strategy) -> Any:
    module = build()
    model = strategy.prepare(module)
    x = mine(strategy, batches()[0])
    with model.no_sync():
        model.forward(x).mean().backward()
    model.forward(x).square().mean().backward()
    return gradients(module)


def test_forward_that_is_called_by_name_is_averaged_like_any_other(worker_job: Launcher) -> None:
    model = build()
    x = batches()[0]
    (model(x).mean() + model(x).square().mean()).backward()
    for actual in worker_job(by_forward):
        for a, p in zip(actual, model.parameters(), strict=True):
            assert (a is None) == (p.grad is None)
            if a is not None and p.grad is not None:
                np.testing.assert_allclose(a, p.grad.numpy(), rtol=1e-9, atol=1e-12)


def with_accumulate(strategy: muster.Strategy) -> None:
    model = strategy.prepare(build())
    x = mine(strategy, batches()[0])
    with pytest.raises(muster.InvalidArgument, match=r"strategy\.step"):
        model(x).square().mean().backward()


def test_accumulate_with_it_is_an_error_that_names_step(worker_job: Launcher) -> None:
    worker_job(with_accumulate, accumulate=2)


def test_under_mirrored_it_is_an_error_that_says_what_to_write() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = build()
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for forward in (model, model.forward):
            with pytest.raises(muster.InvalidArgument, match=r"strategy\.step\(fn"):
                forward(batches()[0]).square().mean().backward()
        assert strategy.step(lambda x: model(x).square().mean(), batches()[0]).stepped


def structured(strategy: muster.Strategy) -> Any:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.a, self.b = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "rest": [self.b(x), 3, "text"]}

    module = Structured()
    model = strategy.prepare(module)
    outputs = model(mine(strategy, batches()[0]))
    (outputs["a"].square().mean() + outputs["rest"][0].mean()).backward()
    first = gradients(module)
    for p in module.parameters():
        p.grad = None
    model(mine(strategy, batches()[0]))["a"].square().mean().backward()
    return first, gradients(module)


def test_outputs_may_be_structures_of_which_only_some_are_used(worker_job: Launcher) -> None:
    results = worker_job(structured)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        expected = structured(strategy)
    for actual in results:
        for a_list, b_list in zip(actual, expected, strict=True):
            for a, b in zip(a_list, b_list, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-12)


def looked_into(strategy: muster.Strategy) -> Any:
    """Gradients of inputs, on the chief alone; then a backward on all."""
    module = build()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = mine(strategy, batches()[0])
    if strategy.is_chief:
        pixels = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(module(pixels).sum(), pixels)
        (of_inputs,) = torch.autograd.grad(model(pixels).sum(), pixels)
        assert torch.equal(of_inputs, expected)
        model.requires_grad_(False)
        model(pixels).sum().backward()
        assert pixels.grad is not None and torch.equal(pixels.grad, expected)
        model.requires_grad_(True)
        model(x)  # whose backward never comes
    strategy.step(lambda x: 0 * model(x).square().mean(), x)
    model(x).square().mean().backward()
    return gradients(module)


def test_gradients_of_inputs_concern_one_worker_alone(worker_job: Launcher) -> None:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        expected = looked_into(strategy)
    for actual in worker_job(looked_into, timeout=20):
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("replicas", "options"), [(2, {}), (1, {"accumulate": 2}), (1, {"precision": "fp16"}), (2, {"precision": "bf16"})]
)
def test_gradients_of_inputs_come_where_a_backward_by_hand_is_refused(replicas: int, options: dict[str, Any]) -> None:
    with muster.MirroredStrategy(["cpu"] * replicas, **options) as strategy:
        module = build()
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        pixels = batches()[0].requires_grad_()
        (of_inputs,) = torch.autograd.grad(model(pixels).sum(), pixels)
        assert of_inputs.shape == pixels.shape


def penalised(strategy: muster.Strategy) -> Any:
    module = build()
    model = strategy.prepare(module)
    x = mine(strategy, batches()[0]).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum(1).mean().backward()
    return gradients(module)


def test_a_penalty_of_gradients_is_averaged(worker_job: Launcher) -> None:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        expected = penalised(strategy)
    assert any(gradient is not None and gradient.any() for gradient in expected)
    for actual in worker_job(penalised):
        for a, b in zip(actual, expected, strict=True):
            if a is not None and b is not None:
                np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-12)


def test_a_step_by_hand_with_a_closure_follows_one_of_the_strategy() -> None:
    def stepped(by_strategy: bool) -> list[Tensor]:
        module = build()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = batches()[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if by_strategy:
            with muster.MirroredStrategy() as strategy:
                model, _ = strategy.prepare(module, optimizer)
                strategy.step(lambda x: model(x).square().mean(), x)
                optimizer.step(closure)
        else:
            for _ in range(2):
                optimizer.step(closure)
        return list(module.parameters())

    for a, b in zip(stepped(True), stepped(False), strict=True):
        torch.testing.assert_close(a, b)
