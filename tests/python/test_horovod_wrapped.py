"""muster.horovod's DistributedOptimizer, and what programs do besides with its parameters and the optimizer in it."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from test_horovod import job, raised
from test_horovod_optimizer import alone, assert_equal, loss_of, net, part, sgd
from torch import nn

import muster.horovod as hvd
from support.jobs import WorkerPool


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, part()).backward()
    optimizer.step()


def assert_equal_on_ranks(model: nn.Module) -> None:
    for p in model.parameters():
        everyones = hvd.allgather(p.detach().view(1, -1))
        assert torch.equal(everyones[0], everyones[1])


def scheduled() -> list[float]:
    model = net()
    inner = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    wrapped = hvd.DistributedOptimizer(inner, model.named_parameters())
    state = hvd.elastic.TorchState(model, wrapped)
    rates = []
    for change in (
        lambda: hvd.broadcast_optimizer_state(wrapped, 0),
        lambda: hvd.broadcast_optimizer_state(inner, 1),
        lambda: wrapped.load_state_dict(wrapped.state_dict()),
        lambda: inner.load_state_dict(inner.state_dict()),
        state.sync,
        lambda: (state.commit(), state.restore()),
    ):
        change()
        assert wrapped.state is inner.state and wrapped.param_groups[0] is inner.param_groups[0]
        step(model, wrapped)
        schedule.step()
        rates.append(wrapped.param_groups[0]["lr"])
    assert_equal_on_ranks(model)
    return rates


def test_a_schedule_of_the_inner_optimizer_counts_after_its_state_was_loaded(two_workers: WorkerPool) -> None:
    rates = [0.1 * 0.5 ** (n + 1) for n in range(6)]
    assert two_workers.call(job, scheduled) == [pytest.approx(rates)] * 2


def by_closure() -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    for make in (sgd, lbfgs):
        models = net(), net()
        optimizers: list[Any] = [make(model.parameters()) for model in models]
        optimizers[1] = hvd.DistributedOptimizer(optimizers[1], models[1].named_parameters())
        for _ in range(3):
            for model, optimizer, rows in zip(models, optimizers, (slice(None), part()), strict=True):

                def loss(model: Any = model, optimizer: Any = optimizer, rows: Any = rows) -> Any:
                    optimizer.zero_grad()
                    found = loss_of(model, rows)
                    found.backward()
                    return found

                assert optimizer.step(loss) > 0
        assert_equal(models[1], models[0])
    # A closure that waits by itself.
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())

    def clipped() -> None:
        optimizer.zero_grad()
        loss_of(model, part()).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    for _ in range(3):
        with optimizer.skip_synchronize():
            optimizer.step(clipped)
    assert_equal(model, alone(sgd, clip=0.1))


def test_gradients_of_a_closure_are_reduced(two_workers: WorkerPool) -> None:
    two_workers.call(job, by_closure)


def replaced() -> list[str]:
    model = net()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, part()).backward()
    model[0].weight.grad = model[0].weight.grad * 0.5
    texts = [raised(optimizer.step)]
    optimizer.zero_grad()
    loss_of(model, part()).backward()
    if hvd.rank() == 1:
        model[2].bias.grad = None
    texts.append(raised(optimizer.synchronize))
    optimizer.zero_grad()
    for _ in range(3):
        optimizer.zero_grad()
        (loss_of(model, part()) * 2).backward()
        optimizer.synchronize()
        for p in model.parameters():
            p.grad = p.grad * 0.5
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_equal(model, alone(sgd))
    return texts


def test_a_gradient_replaced_while_it_is_reduced_is_an_error(two_workers: WorkerPool) -> None:
    first, second = two_workers.call(job, replaced)
    for text in (first[0], second[0], second[1]):
        assert text.startswith("AssertionError: ") and "synchronize()" in text and "skip_synchronize()" in text
    assert "0.weight" in first[0] and "2.bias" in second[1]
    assert first[1] == "nothing"


def unfrozen() -> None:
    for named in (True, False):
        model = net()
        model[0].requires_grad_(False)
        names = model.named_parameters() if named else None
        optimizer: Any = hvd.DistributedOptimizer(sgd(model.parameters()), names)
        model[0].requires_grad_(True)
        for _ in range(3):
            step(model, optimizer)
        assert_equal(model, alone(sgd))
        loss_of(model, part()).backward()
        assert "more often" in raised(loss_of(model, part()).backward)  # both layers' gradients are followed
        optimizer.synchronize()


def added() -> None:
    for names, op in (("model", hvd.Average), ("layer", hvd.Average), ("none", hvd.Average), ("layer", hvd.Adasum)):
        model = net()
        optimizer: Any = sgd(model[2].parameters())
        named = {"model": model.named_parameters(), "layer": model[2].named_parameters(), "none": None}[names]
        wrapped = hvd.DistributedOptimizer(optimizer, named, op=op)
        (optimizer if names == "none" else wrapped).add_param_group({"params": list(model[0].parameters())})
        for _ in range(3):
            step(model, wrapped)
        assert_equal_on_ranks(model)
        if op == hvd.Average:
            assert_equal(model, alone(sgd))


def test_parameters_that_come_after_wrapping_are_reduced(two_workers: WorkerPool) -> None:
    two_workers.call(job, unfrozen)
    two_workers.call(job, added)


def wrapped_again() -> None:
    model = net()
    optimizer: Any = None
    for phase in range(3):
        model[2].requires_grad_(phase != 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model.named_parameters()
        )
        for _ in range(2):
            step(model, optimizer)
        loss_of(model, part()).backward()  # is left under way
    assert_equal_on_ranks(model)
    optimizer.synchronize()
    del optimizer
    gc.collect()
    for _ in range(2):
        loss_of(model, part()).backward()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]


def test_parameters_are_wrapped_again(two_workers: WorkerPool) -> None:
    two_workers.call(job, wrapped_again)


def copied() -> list[str]:
    found = []
    for op in (hvd.Average, hvd.Adasum):
        optimizer = hvd.DistributedOptimizer(sgd(net().parameters()), op=op)
        found += [raised(copy.deepcopy, optimizer), raised(copy.copy, optimizer), raised(pickle.dumps, optimizer)]
    return found


def test_copies_are_refused(two_workers: WorkerPool) -> None:
    for texts in two_workers.call(job, copied):
        assert all(text.startswith("TypeError: ") and "state_dict()" in text for text in texts)
