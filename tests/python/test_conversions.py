"""What a program changes of parameters between steps: memory order, dtype, the groups that they are in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from support.jobs import Launcher, part_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(3, 4, 3)
        self.square = nn.Linear(4, 4)
        self.read = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.read(self.square(self.image(x.to(self.read.weight.dtype)).mean((2, 3))).tanh())
        return result


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 3, 6, 6, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(count)
    ]


def to_channels_last(net: Net, _: torch.optim.Optimizer) -> None:
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def turn(net: Net, _: torch.optim.Optimizer) -> None:
    net.square.weight.data = net.square.weight.data.t().contiguous().t()


def open_gaps(net: Net, _: torch.optim.Optimizer) -> None:
    wide = torch.zeros(4, 8)
    wide[:, ::2] = net.square.weight.data
    net.square.weight.data = wide[:, ::2]


def to_double(net: Net, _: torch.optim.Optimizer) -> None:
    net.double()


def split_group(_: Net, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    parameters = group["params"]
    group["params"] = parameters[:-1]
    optimizer.add_param_group({"params": parameters[-1:], "lr": 0.0})


def swap_between_groups(_: Net, optimizer: torch.optim.Optimizer) -> None:
    one, other = (group["params"] for group in optimizer.param_groups)
    one[0], other[0] = other[0], one[0]


def reverse_group(_: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


CHANGES = [to_channels_last, turn, open_gaps, to_double, split_group, swap_between_groups, reverse_group]


def halves(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups of as many parameters each."""
    parameters = list(net.parameters())
    middle = len(parameters) // 2
    return [{"params": parameters[:middle]}, {"params": parameters[middle:], "lr": 0.02}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(halves(net), lr=0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(halves(net), lr=0.05),
}


def trained_by_torch(change: Callable[[Net, Any], None], kind: str, at: int) -> tuple[list[Tensor], dict[str, Any]]:
    net = Net()
    optimizer = OPTIMIZERS[kind](net)
    for number, (x, y) in enumerate(batches(7)):
        if number == at:
            change(net, optimizer)
        optimizer.zero_grad()
        F.mse_loss(net(x), y.to(net.read.weight.dtype)).backward()
        optimizer.step()
    return list(net.parameters()), optimizer.state_dict()["state"]


def trained(
    strategy: muster.Strategy, change: Callable[[Net, Any], None], kind: str, at: int
) -> tuple[list[Tensor], dict[str, Any]]:
    net = Net()
    model, optimizer = strategy.prepare(net, OPTIMIZERS[kind](net))
    for number, (x, y) in enumerate(batches(7)):
        if number == at:
            change(model.module, optimizer)
        strategy.step(
            lambda x, y: F.mse_loss(model(x), y.to(model.read.weight.dtype)), part_of(strategy, x), part_of(strategy, y)
        )
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [parameter.detach().clone() for parameter in model.parameters()], state


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_change_between_steps_acts_as_in_torch(
    job: Launcher, change: Callable[[Net, Any], None], kind: str, at: int
) -> None:
    if change is to_double and kind == "adamw":
        pytest.skip("torch's AdamW does not go on with state of another dtype")
    expected, expected_state = trained_by_torch(change, kind, at)
    for parameters, state in job(trained, change, kind, at):
        for own, other in zip(parameters, expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(own), other.detach(), rtol=1e-4, atol=1e-5)
        for position, values in expected_state.items():
            for name, value in values.items():
                given = torch.as_tensor(state[position][name])
                torch.testing.assert_close(given, value, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("change", [to_channels_last, to_double])
def test_a_checkpoint_after_a_change_goes_on(change: Callable[[Net, Any], None], tmp_path: Path) -> None:
    def job() -> tuple[muster.Strategy, Any, torch.optim.Optimizer]:
        strategy = muster.MirroredStrategy(["cpu"] * 2)
        net = Net()
        return strategy, *strategy.prepare(net, OPTIMIZERS["adamw"](net))

    def step(strategy: muster.Strategy, model: Any, x: Tensor, y: Tensor) -> None:
        strategy.step(lambda x, y: F.mse_loss(model(x), y.to(model.read.weight.dtype)), x, y)

    strategy, model, optimizer = job()
    with strategy:
        for number, batch in enumerate(batches(5)):
            if number == 2:
                change(model.module, optimizer)
            step(strategy, model, *batch)
        strategy.save(tmp_path)
        for batch in batches(3):
            step(strategy, model, *batch)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
    strategy, model, optimizer = job()
    with strategy:
        change(model.module, optimizer)
        strategy.load(tmp_path)
        for batch in batches(3):
            step(strategy, model, *batch)
        assert all(map(torch.equal, model.parameters(), expected))
