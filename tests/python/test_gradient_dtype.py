"""Gradients of another dtype than their parameter's, as `Tensor.grad_dtype` asks for them, keep their digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from support.jobs import Launcher, part_of

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def wide_gradients(sparse: bool = False) -> nn.Linear | nn.Embedding:
    torch.manual_seed(0)
    module = nn.Embedding(8, 64, sparse=True) if sparse else nn.Linear(64, 3, bias=False)
    module.bfloat16().weight.grad_dtype = torch.float32
    return module


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean() * 1.2345  # type: ignore[no-any-return]


def add_digits(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1 + 2**-12)


def expected(parts: int = 1) -> Tensor:
    gradients = []
    for x in X.chunk(parts):
        module = wide_gradients()
        module.weight.register_post_accumulate_grad_hook(add_digits)
        loss_of(module, x).backward()  # type: ignore[no-untyped-call]
        assert module.weight.grad is not None
        assert module.weight.grad.dtype == torch.float32
        assert not torch.equal(module.weight.grad, module.weight.grad.bfloat16().float())
        gradients.append(module.weight.grad)
    return torch.stack(gradients).mean(0)


def stepped(strategy: muster.Strategy) -> Any:
    """What the step took of the parameter, and the `.grad` that it left."""
    module = wide_gradients()
    weight = module.weight
    weight.register_post_accumulate_grad_hook(add_digits)
    before = weight.detach().float().clone()
    model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    strategy.step(lambda x: loss_of(model, x), part_of(strategy, X))
    return before - optimizer.state_dict()["state"][0]["master"], weight.grad


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("job", ["mirrored-1", "workers-2"], indirect=True)
def test_a_step_takes_all_digits_of_a_wide_gradient(job: Launcher, keep: bool) -> None:
    for taken, gradient in job(stepped, keep_gradients=keep):
        torch.testing.assert_close(torch.as_tensor(taken), expected(job.replicas), rtol=3e-6, atol=3e-7)
        if keep:
            assert torch.as_tensor(gradient).dtype == torch.float32
            torch.testing.assert_close(torch.as_tensor(gradient), expected(job.replicas), rtol=3e-6, atol=3e-7)


class Watched(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.seen = [parameter.grad.clone() for parameter in group["params"]]


def test_an_optimizer_of_users_sees_it_in_its_dtype() -> None:
    module = wide_gradients()
    module.weight.register_post_accumulate_grad_hook(add_digits)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model, optimizer = strategy.prepare(module, Watched(module.parameters(), lr=1.0))
        strategy.step(lambda x: loss_of(model, x), X)
        assert torch.equal(optimizer.seen[0], expected())


@pytest.mark.parametrize("fuse", [True, False])
def test_rows_keep_their_dtype(fuse: bool) -> None:
    module = wide_gradients(sparse=True)
    weight = module.weight
    with muster.MirroredStrategy(["cpu"], fuse=fuse, keep_gradients=True) as strategy:
        kind = torch.optim.SGD if fuse else Watched
        model, _ = strategy.prepare(module, kind(module.parameters(), lr=1.0))
        strategy.step(lambda ids: loss_of(model, ids), torch.arange(4))
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32


def test_a_parameter_without_a_dtype_of_its_gradients_has_them_in_its_own() -> None:
    module = nn.Linear(64, 3, bias=False).bfloat16()
    with muster.MirroredStrategy(["cpu"], keep_gradients=True) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
        strategy.step(lambda x: loss_of(model, x), X)
        assert module.weight.grad is not None
        assert module.weight.grad.dtype == torch.bfloat16
