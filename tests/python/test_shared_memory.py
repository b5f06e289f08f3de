"""Parameters that show the same memory: one parameter in two places stays one, two parameters are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from support.jobs import Launcher


def two_layers() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})


def tied_through_data() -> nn.ModuleDict:
    module = two_layers()
    module["b"].weight.data = module["a"].weight.data
    return module


def a_view_of_another() -> nn.ModuleDict:
    module = two_layers()
    module["b"].bias.data = module["a"].weight.data.view(-1)[8:14]
    return module


def a_buffer_that_shows_a_parameter() -> nn.ModuleDict:
    module = two_layers()
    module["a"].register_buffer("seen", module["a"].weight.detach()[1:])
    return module


def tied() -> nn.ModuleDict:
    module = two_layers()
    module["b"].weight = module["a"].weight
    return module


def of_one_memory() -> nn.ModuleDict:
    """As layers have it whose weights are packed, or come from one file."""
    module = two_layers()
    memory = torch.randn(2 * 36)
    for number, layer in enumerate(module.values()):
        layer.weight.data = memory[36 * number : 36 * (number + 1)].view(6, 6)
    return module


class Shown(nn.Linear):
    """As layers have it that keep a weight beside their parameters: it is no parameter, and no buffer either."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.shown = {"rows": [self.weight.detach()]}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 0.5 * x @ self.shown["rows"][0]


class Viewed(nn.Linear):
    """A view of its weight that gradients go through."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.turned = self.weight.t()[:, 1:]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - F.pad(0.5 * x @ self.turned, (1, 0))


def a_view_of_a_parameter() -> nn.ModuleDict:
    return nn.ModuleDict({"a": Viewed(6), "b": nn.Linear(6, 6)})


def an_attribute_that_shows_a_parameter() -> nn.ModuleDict:
    return nn.ModuleDict({"a": Shown(6), "b": nn.Linear(6, 6)})


REFUSED: dict[str, tuple[Callable[[], nn.ModuleDict], str]] = {
    "tied through data": (tied_through_data, "parameter 'a.weight' and parameter 'b.weight' share memory"),
    "a view of another": (a_view_of_another, "parameter 'a.weight' and parameter 'b.bias' share memory"),
    "a buffer": (a_buffer_that_shows_a_parameter, "parameter 'a.weight' and buffer 'a.seen' share memory"),
}
KEPT = {
    "tied": tied,
    "of one memory": of_one_memory,
    "a plain attribute": an_attribute_that_shows_a_parameter,
    "a view": a_view_of_a_parameter,
}


def preparing(strategy: muster.Strategy, what: str) -> str:
    with pytest.raises(muster.InvalidArgument) as caught:
        strategy.prepare(REFUSED[what][0]())
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_two_parameters_of_one_memory_are_refused(job: Launcher, what: str) -> None:
    for text in job(preparing, what):
        assert REFUSED[what][1] in text


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module["b"](module["a"](x).tanh()).square().mean()  # type: ignore[index, operator]


def training(strategy: muster.Strategy, what: str) -> list[Tensor]:
    torch.manual_seed(1)
    module = KEPT[what]()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(3):
        strategy.step(lambda x: loss_of(model, x), torch.ones(6, 6))
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("what", KEPT)
def test_what_is_one_parameter_or_does_not_overlap_trains_as_in_torch(job: Launcher, what: str) -> None:
    torch.manual_seed(1)
    module = KEPT[what]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(module, torch.ones(6, 6)).backward()
        optimizer.step()
    expected = list(module.parameters())
    for seen in job(training, what):
        assert len(seen) == len(expected)
        for one, other in zip(seen, expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(one), other.detach())


def shown_at_last(strategy: muster.Strategy) -> bool:
    """Whether what shows a parameter still does: in a step, outside of it, after close()."""
    layer = Shown(6)
    model, _ = strategy.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append(torch.equal(model.shown["rows"][0], model.weight))
        return model(x).square().mean()

    for _ in range(3):
        strategy.step(loss, torch.ones(6, 6))
    seen.append(torch.equal(layer.shown["rows"][0], layer.weight))
    strategy.close()
    with torch.no_grad():
        layer.weight.fill_(3)
    seen.append(bool((layer.shown["rows"][0] == 3).all()))
    return all(seen)


def test_what_shows_a_parameter_does_so_to_the_end(job: Launcher) -> None:
    assert all(job(shown_at_last))


def sharing_later(strategy: muster.Strategy, steps: int) -> str:
    module = two_layers()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(steps):
        strategy.step(lambda x: loss_of(model, x), torch.ones(6, 6))
    module["b"].weight.data = module["a"].weight.data
    with pytest.raises(muster.InvalidArgument) as caught:
        strategy.step(lambda x: loss_of(model, x), torch.ones(6, 6))
    module["b"].weight.data = module["a"].weight.data.clone()
    assert strategy.step(lambda x: loss_of(model, x), torch.ones(6, 6)).stepped
    return str(caught.value)


@pytest.mark.parametrize("steps", [0, 2])
def test_memory_that_is_shared_after_prepare_is_refused_in_the_step(job: Launcher, steps: int) -> None:
    for text in job(sharing_later, steps):
        assert "parameter 'a.weight' and parameter 'b.weight' share memory" in text
