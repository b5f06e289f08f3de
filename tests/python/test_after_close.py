"""When a strategy is closed its modules and optimizers are the user's: for torch alone, and for another strategy."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import muster
from support.jobs import Launcher, part_of, plain
from support.servers import Servers, alone

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2),
}
STRATEGIES: dict[str, Callable[[], muster.Strategy]] = {
    "mirrored": lambda: muster.MirroredStrategy(["cpu"] * 2),
    "unfused": lambda: muster.MirroredStrategy(["cpu"], fuse=False),
    "servers": alone,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))


X = torch.linspace(-1, 1, 6 * 9).view(6, 9)


def by_hand(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(X).square().mean().backward()
        optimizer.step()


def train(strategy: muster.Strategy, model: Any, steps: int) -> None:
    for _ in range(steps):
        strategy.step(lambda x: model(x).square().mean(), X)


def in_torch(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = net()
    optimizer = KINDS[kind](module.parameters())
    by_hand(module, optimizer, steps)
    return module, optimizer


def assert_as_in_torch(module: nn.Module, optimizer: torch.optim.Optimizer, kind: str, steps: int) -> None:
    expected, reference = in_torch(kind, steps)
    for own, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    state = optimizer.state_dict()["state"]
    for number, values in reference.state_dict()["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(state[number][name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("raw", [False, True])
def test_torch_goes_on_alone(first: str, kind: str, raw: bool) -> None:
    if first == "servers" and kind == "rmsprop":
        pytest.skip("servers do not step it")
    module = net()
    optimizer = KINDS[kind](module.parameters())
    with STRATEGIES[first]() as strategy:
        model, _ = strategy.prepare(module, optimizer)
        train(strategy, model, 3)
    assert_as_in_torch(module, optimizer, kind, 3)
    by_hand(module if raw else model, optimizer, 2)
    assert_as_in_torch(module, optimizer, kind, 5)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_model_and_optimizer_go_to_another_strategy(first: str, second: str, kind: str) -> None:
    module = net()
    optimizer = KINDS[kind](module.parameters())
    for name in (first, second):
        with STRATEGIES[name]() as strategy:
            model, _ = strategy.prepare(module, optimizer)
            train(strategy, model, 2)
            assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert_as_in_torch(module, optimizer, kind, 4)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def again(strategy: muster.Strategy, sharded: bool) -> Any:
    module = net()
    optimizer = KINDS["adamw"](module.parameters())
    model, _ = strategy.prepare(module, optimizer)
    x = part_of(strategy, X)
    for _ in range(2):
        strategy.step(lambda x: model(x).square().mean(), x)
    saved = copy.deepcopy(optimizer.state_dict())
    strategy.close()
    if sharded:
        with pytest.raises(muster.InvalidArgument, match="divided over the workers"):
            optimizer.state_dict()
        with pytest.raises(muster.InvalidArgument, match="divided over the workers"):
            by_hand(module, optimizer, 1)
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
    with muster.MirroredStrategy(["cpu"] * 2) as other:
        model, _ = other.prepare(model.module, optimizer)
        train(other, model, 2)
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("sharded", [False, True])
def test_from_workers_to_one_process(worker_job: Launcher, sharded: bool) -> None:
    expected, _ = in_torch("adamw", 4)
    options: dict[str, Any] = {"shard_optimizer": True} if sharded else {}
    for parameters in worker_job(again, sharded, keep_gradients=False, **options):
        for own, other in zip(parameters, plain(list(expected.parameters())), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def plain_sgd_again(strategy: muster.Strategy) -> Any:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _ = strategy.prepare(module, optimizer)
    x = part_of(strategy, X)
    strategy.step(lambda x: model(x).square().mean(), x)
    strategy.close()
    optimizer.state_dict()
    by_hand(module, optimizer, 1)
    optimizer.zero_grad()
    with muster.MirroredStrategy(["cpu"] * 2) as other:
        model, _ = other.prepare(model.module, optimizer)
        train(other, model, 1)
    return [p.detach() for p in module.parameters()]


def test_an_optimizer_without_state_goes_on_after_it_was_sharded(worker_job: Launcher) -> None:
    module = net()
    by_hand(module, torch.optim.SGD(module.parameters(), lr=0.1), 3)
    for parameters in worker_job(plain_sgd_again, keep_gradients=False, shard_optimizer=True):
        for own, other in zip(parameters, plain(list(module.parameters())), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_new_groups_are_stepped_after_close() -> None:
    module = net()
    optimizer = torch.optim.AdamW(module[0].parameters(), lr=1e-2)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model, _ = strategy.prepare(module, optimizer)
        train(strategy, model, 2)
    optimizer.add_param_group({"params": list(module[2].parameters())})
    before = module[2].weight.detach().clone()
    by_hand(module, optimizer, 1)
    assert not torch.equal(module[2].weight, before)
    assert float(optimizer.state[module[0].weight]["step"]) == 3


# --- parameter servers ------------------------------------------------------------------------------------------------
EDITS: dict[str, Callable[[Any], Any]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "replace": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "pop": lambda optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0], None),
    "set": lambda optimizer: optimizer.state.__setitem__(optimizer.param_groups[0]["params"][0], {}),
    "read": lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]],
    "get": lambda optimizer: optimizer.state.get(optimizer.param_groups[0]["params"][0]),
    "look for": lambda optimizer: optimizer.param_groups[0]["params"][0] in optimizer.state,
    "load": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("edit", EDITS)
def test_state_on_servers_cannot_be_edited(edit: str) -> None:
    module = net()
    with alone() as strategy:
        optimizer: Any = KINDS["adamw"](module.parameters())
        model, _ = strategy.prepare(module, optimizer)
        train(strategy, model, 2)
        state = optimizer.state
        with pytest.raises(muster.InvalidArgument, match="parameter servers hold the"):
            EDITS[edit](optimizer)
            train(strategy, model, 1)
        optimizer.state = state
        assert len(copy.deepcopy(optimizer).state) == len(list(module.parameters()))
        train(strategy, model, 1)
    assert_as_in_torch(module, optimizer, "adamw", 3)


def test_edits_before_the_first_step_reach_the_servers() -> None:
    module = net()
    with alone() as strategy:
        optimizer: Any = KINDS["adamw"](module.parameters())
        by_hand(module, optimizer, 2)
        model, _ = strategy.prepare(module, optimizer)
        optimizer.state.clear()
        train(strategy, model, 1)
        assert {float(values["step"]) for values in optimizer.state_dict()["state"].values()} == {1.0}


def test_state_that_died_with_its_servers_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    module = net()
    optimizer: Any = KINDS["adamw"](module.parameters())
    servers = Servers(1)
    cluster = muster.Cluster(0, 1, "", 0, servers.addresses)
    with muster.ParameterServerStrategy(cluster, timeout=1.0) as strategy:
        model, _ = strategy.prepare(module, optimizer)
        train(strategy, model, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        servers.running.clear()
        caplog.set_level(logging.WARNING, "muster")
    assert any("did not come back" in message for message in caplog.messages)
    for use in (optimizer.state_dict, lambda: by_hand(module, optimizer, 1)):
        with pytest.raises(muster.InvalidArgument, match="were gone"):
            use()
    optimizer.load_state_dict(saved)
    by_hand(module, optimizer, 1)
    assert float(optimizer.state[module[0].weight]["step"]) == 2


def clamp_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def replace_data(module: nn.Module) -> None:
    module[0].weight.data = module[0].weight.data * 0.5  # type: ignore[index, union-attr]


@pytest.mark.parametrize("write", [clamp_data, replace_data])
def test_writes_past_the_version_counter_are_an_error_on_servers(write: Callable[[nn.Module], None]) -> None:
    module = net()
    with alone() as strategy:
        optimizer = KINDS["adamw"](module.parameters())
        model, _ = strategy.prepare(module, optimizer)
        train(strategy, model, 2)
        write(module)
        with pytest.raises(muster.InvalidArgument, match=r"'0\.weight' was written outside step"):
            train(strategy, model, 1)


def test_a_second_optimizer_on_servers_is_refused_as_such() -> None:
    module = net()
    with alone() as strategy:
        one = KINDS["sgd"](module[0].parameters())
        two = KINDS["sgd"](module[2].parameters())
        model, _, _ = strategy.prepare(module, one, two)
        strategy.step(lambda x: model(x).square().mean(), X, optimizers=one)
        with pytest.raises(muster.InvalidArgument, match="step one optimizer"):
            strategy.step(lambda x: model(x).square().mean(), X, optimizers=two)


# --- optimizers that cannot be, or are not, prepared ------------------------------------------------------------------
def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    class Evolving(torch.optim.SGD):
        def step(self, evaluate: Any) -> Any:  # type: ignore[override]
            return evaluate()

    module = net()
    for kind in (torch.optim.LBFGS, Evolving):
        with muster.MirroredStrategy(["cpu"]) as strategy, pytest.raises(muster.InvalidArgument, match="closure"):
            strategy.prepare(module, kind(module.parameters()))


def untrained(caplog: pytest.LogCaptureFixture, each: Callable[[nn.Module], None]) -> list[str]:
    module = net()
    with muster.MirroredStrategy(["cpu"]) as strategy, caplog.at_level(logging.WARNING, "muster"):
        model = strategy.prepare(module)
        for _ in range(4):
            assert strategy.step(lambda x: model(x).square().mean(), X).stepped
            each(module)
    return [message for message in caplog.messages if "no optimizer is prepared" in message]


def test_gradients_that_nobody_uses_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def step(module: nn.Module) -> None:
        torch.optim.SGD(module.parameters(), lr=0.1).step()

    assert untrained(caplog, step) == []
    assert len(untrained(caplog, lambda module: None)) == 1


def reordered(strategy: muster.Strategy, module_first: bool) -> str:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    parameters = list(module.parameters())
    order = [2, 1, 0, 3] if strategy.rank else [0, 1, 2, 3]
    optimizer = torch.optim.AdamW([parameters[number] for number in order])
    if module_first:
        strategy.prepare(module)
    with pytest.raises(muster.LayoutMismatch) as caught:
        strategy.prepare(optimizer)
        strategy.prepare(module)
    return str(caught.value)


@pytest.mark.parametrize("module_first", [True, False])
def test_parameters_in_another_order_are_refused_by_name(worker_job: Launcher, module_first: bool) -> None:
    for message in worker_job(reordered, module_first):
        assert "parameter 0 of AdamW is '0.weight' (3, 3) in group 0 on rank 0, and '1.weight'" in message
