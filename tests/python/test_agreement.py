"""What ranks must have alike before they step: a difference is an error that names it, and changes nothing."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from support.jobs import Launcher, WorkerPool, make_job, part_of

Edit = Callable[[muster.Strategy, nn.Module, torch.optim.Optimizer], None]


def lower_rate(strategy: muster.Strategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if strategy.rank == 1:
        optimizer.param_groups[1]["lr"] = 0.125


def load_model_on_the_chief(strategy: muster.Strategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if strategy.is_chief:
        module.load_state_dict({name: torch.full_like(value, 7.0) for name, value in module.state_dict().items()})


def replace_on_one(strategy: muster.Strategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if strategy.rank == 1:
        parameter = next(module.parameters())
        parameter.data = parameter.data * 2


def draw_on_each(strategy: muster.Strategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(strategy.rank)
    with torch.no_grad():
        parameter = next(module.parameters())
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def load_state_on(rank: int) -> Edit:
    def load(strategy: muster.Strategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if strategy.rank == rank:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    return load


def load_other_state(strategy: muster.Strategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer.state_dict()
    saved["state"] = {
        number: {name: value + (strategy.rank if name == "exp_avg" else 0) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    optimizer.load_state_dict(saved)


load_state_on_the_chief = load_state_on(0)
load_state_on_another = load_state_on(1)

DIFFERENT: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "learning rate": (lower_rate, ("rank 0 has lr 0.25 in group 1", "rank 1 has lr 0.125 in group 1")),
    "model loaded on the chief": (load_model_on_the_chief, ("parameter '0.weight'", "by rank 0")),
    "parameter replaced": (replace_on_one, ("parameter '0.weight'", "by rank 1")),
    "noise": (draw_on_each, ("parameter '0.weight'", "by rank 0, rank 1")),
    "state loaded on the chief": (load_state_on_the_chief, ("parameter '0.weight'", "loaded")),
    "state loaded on another": (load_state_on_another, ("parameter '0.weight'", "loaded")),
    "other state": (load_other_state, ("optimizer's state of parameter '0.weight'",)),
}


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 3))
    return module, torch.optim.AdamW([{"params": module[0].parameters()}, {"params": module[1].parameters()}], lr=0.25)


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Tensor]]:
    return {
        number: {name: value.clone() for name, value in values.items()}
        for number, values in optimizer.state_dict()["state"].items()
    }


def with_a_difference(strategy: muster.Strategy, what: str, steps: int) -> tuple[str, bool, bool]:
    """The error of a step, whether it changed anything, and whether training goes on once ranks agree."""
    edit, _ = DIFFERENT[what]
    module, optimizer = build()
    model, optimizer = strategy.prepare(module, optimizer)
    x = torch.randn(4, 8) + strategy.rank

    def step() -> muster.StepResult:
        return strategy.step(lambda x: model(x).square().mean(), x)

    for _ in range(steps):
        step()
    good = {name: value.clone() for name, value in module.state_dict().items()}
    good_state = optimizer.state_dict()
    good_state = {**good_state, "state": state_of(optimizer)}
    edit(strategy, module, optimizer)
    before = [value.clone() for value in module.state_dict().values()]
    state_before = state_of(optimizer)
    texts = []
    for _ in range(2):  # and again, as long as they differ
        with pytest.raises(muster.LayoutMismatch) as caught:
            step()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    is_unchanged = all(torch.equal(old, value) for old, value in zip(before, module.state_dict().values(), strict=True))
    for number, values in state_of(optimizer).items():
        is_unchanged &= all(torch.equal(state_before[number][name], value) for name, value in values.items())
    module.load_state_dict(good)
    optimizer.load_state_dict(good_state)
    goes_on = step().stepped and step().stepped
    weights = strategy.gather(next(module.parameters()).detach()[None])
    return texts[0], is_unchanged, goes_on and torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_between_ranks_is_named_and_changes_nothing(worker_job: Launcher, what: str) -> None:
    for text, is_unchanged, goes_on in worker_job(with_a_difference, what, 2, keep_gradients=False):
        for part in DIFFERENT[what][1]:
            assert part in text
        assert is_unchanged
        assert goes_on


@pytest.mark.parametrize("what", ["model loaded on the chief", "parameter replaced", "noise"])
def test_a_difference_before_the_first_step_is_named(worker_job: Launcher, what: str) -> None:
    for text, is_unchanged, _ in worker_job(with_a_difference, what, 0, keep_gradients=False):
        assert "parameter '0.weight'" in text
        assert is_unchanged


@pytest.mark.parametrize("what", ["learning rate", "noise", "other state"])
def test_workers_of_several_replicas_find_differences(two_workers: WorkerPool, what: str) -> None:
    for text, is_unchanged, goes_on in make_job("workers-2x2", two_workers)(with_a_difference, what, 2):
        assert DIFFERENT[what][1][0] in text
        assert is_unchanged
        assert goes_on


def stepped_by_hooks(strategy: muster.Strategy, which: str) -> str:
    """Of parameters that hooks step in backward, each rank by its own gradients."""
    module, _ = build()
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in module[0].parameters()}
    calls: Counter[Tensor] = Counter()

    def step(parameter: Tensor) -> None:
        calls[parameter] += 1
        if which == "in a first micro-batch" and calls[parameter] != 1:
            return
        if which == "through data":
            parameter.data.sub_(0.1 * parameter.grad)
        else:
            own[parameter].step()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    trained = module[1].parameters() if which in ("of no optimizer", "through data") else module.parameters()
    model, _ = strategy.prepare(module, torch.optim.SGD(trained, lr=0.1))
    x = part_of(strategy, (torch.arange(32.0).view(4, 8) / 32,))[0]
    try:
        for _ in range(4):
            strategy.step(lambda x: model(x).square().mean(), x)
    except muster.LayoutMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("which", ["of no optimizer", "through data", "trained, too", "in a first micro-batch"])
def test_parameters_that_steps_write_on_each_rank_are_compared(two_workers: WorkerPool, which: str) -> None:
    # Else one rank steps a parameter for all, so that they are alike again.
    options = {"accumulate": 2, "fuse": False} if which == "in a first micro-batch" else {}
    for message in make_job("workers-2", two_workers)(stepped_by_hooks, which, **options):
        assert "parameter '0.weight'" in message and "rank 0, rank 1" in message


def written_within_a_window(strategy: muster.Strategy) -> str:
    """By one rank, between the two micro-batches of a window."""
    module, optimizer = build()
    model, _ = strategy.prepare(module, optimizer)
    x = torch.ones(4, 8)
    for _ in range(3):
        strategy.step(lambda x: model(x).square().mean(), x)
    if strategy.rank == 1:
        with torch.no_grad():
            module[0].weight.mul_(10)
    with pytest.raises(muster.LayoutMismatch) as caught:
        strategy.step(lambda x: model(x).square().mean(), x)
    return str(caught.value)


@pytest.mark.parametrize("fuse", [True, False])
def test_writes_between_micro_batches_are_compared(two_workers: WorkerPool, fuse: bool) -> None:
    for message in make_job("workers-2", two_workers)(written_within_a_window, accumulate=2, fuse=fuse):
        assert "parameter '0.weight'" in message


def with_an_unfused_optimizer(strategy: muster.Strategy) -> str:
    module = nn.Linear(8, 3)
    model, _ = strategy.prepare(module, torch.optim.RMSprop(module.parameters()))
    x = torch.randn(4, 8)
    strategy.step(lambda x: model(x).square().mean(), x)
    if strategy.rank == 1:
        with torch.no_grad():
            module.bias.add_(1)
    with pytest.raises(muster.LayoutMismatch) as caught:
        strategy.step(lambda x: model(x).square().mean(), x)
    return str(caught.value)


def test_writes_are_compared_for_every_optimizer(worker_job: Launcher) -> None:
    for text in worker_job(with_an_unfused_optimizer):
        assert "parameter 'bias'" in text
        assert "by rank 1" in text


def unequal(kind: str) -> tuple[Callable[[nn.Module], torch.optim.Optimizer], str, Any, str]:
    """An optimizer that steps from `.grad`, one of its hyperparameters, another value of it, and what ranks say."""
    return {
        "number": (lambda m: torch.optim.RMSprop(m.parameters(), lr=0.25), "lr", 0.125, "lr 0.25 in group 0"),
        "pair": (lambda m: torch.optim.Adamax(m.parameters()), "betas", (0.5, 0.75), "betas (0.9, 0.999) in group 0"),
        "tensor": (
            lambda m: torch.optim.NAdam(m.parameters(), lr=torch.tensor(0.25)),
            "lr",
            torch.tensor(0.125),
            "lr 0.25 in group 0",
        ),
    }[kind]


def with_unequal_hyperparameters(strategy: muster.Strategy, kind: str) -> Any:
    make, name, value, _ = unequal(kind)
    module, _ = build()
    other = nn.Linear(8, 3)
    optimizer = make(module)
    model, second, *_ = strategy.prepare(module, other, optimizer, torch.optim.Rprop(other.parameters()))
    x = torch.randn(4, 8) + strategy.rank

    def step() -> muster.StepResult:
        return strategy.step(lambda x: model(x).square().mean() + second(x).square().mean(), x)

    step()
    before, group = [p.detach().clone() for p in module.parameters()], optimizer.param_groups[0]
    good = group[name]
    if strategy.rank == 1:
        group[name] = value
    with pytest.raises(muster.LayoutMismatch) as caught:
        step()
    is_unchanged = all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))
    group[name] = good
    return str(caught.value), is_unchanged, step().stepped


@pytest.mark.parametrize("kind", ["number", "pair", "tensor"])
def test_hyperparameters_are_compared_for_every_optimizer(worker_job: Launcher, kind: str) -> None:
    for text, is_unchanged, goes_on in worker_job(with_unequal_hyperparameters, kind, keep_gradients=False):
        assert f"rank 0 has {unequal(kind)[3]} of optimizer 0, rank 1 has " in text
        assert is_unchanged
        assert goes_on


def with_equal_edits(strategy: muster.Strategy) -> list[Any]:
    """Edits that leave ranks equal: the same on all, or on one and taken back."""
    module, optimizer = build()
    model, optimizer = strategy.prepare(module, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = part_of(strategy, torch.randn(8, 8, generator=torch.Generator().manual_seed(5)))
    for turn in range(4):
        strategy.step(lambda x: model(x).square().mean(), x)
        scheduler.step()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.5, 0.5)
            if strategy.is_chief:
                kept = [parameter.clone() for parameter in module.parameters()]
                for parameter in module.parameters():
                    parameter.zero_()
                for parameter, value in zip(module.parameters(), kept, strict=True):
                    parameter.copy_(value)
        if turn == 2:
            saved = optimizer.state_dict()
            saved["state"] = state_of(optimizer)
            optimizer.load_state_dict(saved)
            module[0].weight.data = module[0].weight.data * 0.5
    return [parameter.detach() for parameter in module.parameters()]


def test_edits_that_leave_ranks_equal_are_allowed_and_strategies_agree(
    worker_job: Launcher, two_workers: WorkerPool
) -> None:
    expected = make_job("mirrored-2", two_workers)(with_equal_edits)[0]
    for seen in worker_job(with_equal_edits):
        assert all((one == other).all() for one, other in zip(seen, expected, strict=True))


def with_other_options() -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(muster.InvalidArgument) as caught:
        muster.MultiWorkerMirroredStrategy.from_env(accumulate=1 + rank, clip_norm=2.0 if rank else None)
    return str(caught.value)


def test_the_options_that_differ_are_named(two_workers: WorkerPool) -> None:
    for text in two_workers.call(with_other_options):
        assert text == (
            "the ranks have different options: rank 0 has accumulate=1 clip_norm=unset, rank 1 has accumulate=2 "
            "clip_norm=2; pass the same everywhere"
        )


def leaving_after_an_error() -> str:
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=30.0) as strategy:
        if strategy.rank == 1:
            return ""  # as an error in the block would end it
        with pytest.raises(muster.PeerLost) as caught:
            strategy.barrier()
        return str(caught.value)


def test_a_worker_that_left_may_have_had_an_error(two_workers: WorkerPool) -> None:
    text, _ = two_workers.call(leaving_after_an_error)
    assert "rank 1 left while rank 0 waited for it in barrier" in text
    assert "or after an error, which its log then shows" in text
