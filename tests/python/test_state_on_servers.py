"""What programs do to an optimizer whose state parameter servers hold."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from support.servers import alone

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def mirrored() -> muster.Strategy:
    return muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1)


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    groups = [{"params": list(module[0].parameters())}, {"params": list(module[2].parameters()), "lr": 0.05}]
    return module, torch.optim.Adam(groups, lr=0.01)


def train(strategy: muster.Strategy, steps: int = 3) -> tuple[Any, torch.optim.Optimizer]:
    module, optimizer = build()
    model, _ = strategy.prepare(module, optimizer)
    for _ in range(steps):
        strategy.step(lambda x: model(x).square().mean(), X)
    return model, optimizer


def swap_groups(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.reverse()


def reverse_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


def remove_parameter(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]["params"][1]


def moments(state: dict[Any, Any]) -> dict[Any, Tensor]:
    return {key: values["exp_avg"].clone() for key, values in state.items()}


def assert_same(ours: dict[Any, Tensor], theirs: dict[Any, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=0)


@pytest.mark.parametrize("change", [swap_groups, reverse_group, remove_parameter])
def test_state_stays_with_its_parameter_where_groups_change_after_the_last_step(
    change: Callable[[torch.optim.Optimizer], None], tmp_path: Path
) -> None:
    shown = []
    for name, strategy in (("mirrored", mirrored()), ("servers", alone())):
        with strategy:
            model, optimizer = train(strategy)
            change(optimizer)
            of_dict = {}
            if change is not remove_parameter:  # torch's state_dict() does not know where to put its state
                of_dict = moments(optimizer.state_dict()["state"])
                strategy.save(tmp_path / name)
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        left = {names[parameter]: values["exp_avg"].clone() for parameter, values in optimizer.state.items()}
        shown.append((of_dict, dict(sorted(left.items()))))
    for ours, theirs in zip(*shown, strict=True):
        assert_same(ours, theirs)
    if change is remove_parameter:
        return
    ends = []
    for name in ("mirrored", "servers"):
        with mirrored() as strategy:
            module, optimizer = build()
            change(optimizer)
            model, _ = strategy.prepare(module, optimizer)
            strategy.load(tmp_path / name)
            strategy.step(lambda x, model=model: model(x).square().mean(), X)
            ends.append(dict(module.state_dict()))
    assert_same(*ends)


def saved_and_loaded(optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(optimizer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, saved_and_loaded])
def test_a_copy_of_the_optimizer_has_the_state(duplicate: Callable[[Any], Any]) -> None:
    with alone() as strategy:
        _, optimizer = train(strategy)
        expected = moments(optimizer.state_dict()["state"])
        assert_same(moments(duplicate(optimizer).state_dict()["state"]), expected)


@pytest.mark.parametrize(
    "look", [len, bool, list, dict, lambda state: state.items(), lambda state: list(state.values())]
)
def test_state_that_is_not_here_is_never_taken_for_none(look: Callable[[Any], Any]) -> None:
    with alone() as strategy:
        _, optimizer = train(strategy)
        with pytest.raises(muster.InvalidArgument, match="parameter servers hold"):
            look(optimizer.state)
    assert look(optimizer.state)
