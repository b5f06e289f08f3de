"""ParameterServerStrategy: the bits of other strategies where it is synchronous, and what happens when things fail."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from support.ranks import Ranks, run_ranks
from support.servers import Servers, alone, on_servers
from support.training import Config, Trained, train, train_mirrored


# --- bits -------------------------------------------------------------------------------------------------------------
def train_precise(strategy: muster.Strategy, config: Config, options: dict[str, Any]) -> Trained:
    """As train, with groups of two learning rates and a schedule."""
    module = config.build()
    parameters = list(module.parameters())
    groups = [{"params": parameters[:2], "lr": 0.03}, {"params": parameters[2:]}]
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(groups, lr=2e-3, weight_decay=0.01, amsgrad=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    model, optimizer, loader = strategy.prepare(module, optimizer, config.loader())
    losses = []
    while strategy.steps < config.steps:
        for batch in loader:
            result = strategy.step(partial(config.loss, model), *batch)
            losses += [float(result.loss), float(result.loss_scale)]
            if result.stepped:
                schedule.step()
            if strategy.steps == config.steps:
                break
    state = optimizer.state_dict()["state"]
    tensors = [*parameters, *(state[p][k] for p in sorted(state) for k in sorted(state[p]))]
    return Trained(torch.cat([t.detach().double().flatten() for t in tensors]).numpy(), np.zeros(0), losses)


PRECISE: list[tuple[Config, dict[str, Any]]] = [
    (Config(optimizer="adam", clip_norm=0.3), {"precision": "fp16"}),
    (Config(optimizer="sgd", accumulate=2), {"precision": "bf16"}),
    (Config(optimizer="adam", dtype=torch.bfloat16, accumulate=2), {}),
    (Config(optimizer="sgd", dtype=torch.float64, clip_norm=0.5), {}),
]
PLAIN = [
    Config(),
    Config(accumulate=3, optimizer="adagrad", checkpointing="reentrant", bucket_bytes=4096),
    Config(optimizer="adamw", clip_norm=0.5, checkpointing="non-reentrant", bucket_bytes=4096),
    Config(accumulate=3, norm=True, clip_norm=0.05),
    Config(model="text", optimizer="adamw", batch_size=37, accumulate=3, checkpointing="reentrant"),
]


def _train_both(addresses: list[list[str]], replicas: int) -> list[str]:
    """Where trainings on servers of a worker of so many replicas differ from those of MultiWorkerMirroredStrategy."""
    devices = ["cpu"] * replicas
    differences = []
    rounds = [(config, {}, train) for config in PLAIN]
    rounds += [(config, options, partial(train_precise, options=options)) for config, options in PRECISE]  # type: ignore[misc]
    for (given, options, run), servers in zip(rounds, addresses, strict=True):
        config = replace(given, steps=50 if replicas == 1 else 12)
        options = {**config.options(), **options}
        with muster.MultiWorkerMirroredStrategy.from_env(devices, **options) as strategy:
            expected = run(strategy, config)
        with on_servers(servers, devices=devices, **options) as strategy:
            actual = run(strategy, config)
        assert np.isfinite(expected.parameters).all()
        if not np.array_equal(actual.parameters, expected.parameters):
            differences.append(f"parameters of {config}")
        if not np.array_equal(actual.buffers, expected.buffers):
            differences.append(f"buffers of {config}")
        if actual.losses != expected.losses:
            differences.append(f"losses of {config}")
    return differences


@pytest.mark.parametrize(
    ("workers", "servers", "replicas"), [(2, 0, 1), (2, 2, 1), (3, 1, 1), (3, 3, 1), (2, 2, 2), (1, 1, 4)]
)
def test_a_synchronous_job_gives_the_bits_of_worker_processes(workers: int, servers: int, replicas: int) -> None:
    rounds = len(PLAIN) + len(PRECISE)
    started = [Servers(servers) for _ in range(rounds)]
    addresses = [group.addresses for group in started]
    for differences in run_ranks(workers, _train_both, addresses, replicas, timeout=400):
        assert differences == []


def test_alone_it_hosts_a_server_and_gives_the_bits_of_one_replica() -> None:
    config = Config(optimizer="adamw", steps=20, norm=True)
    with muster.ParameterServerStrategy(muster.Cluster(0, 1, ""), **config.options()) as strategy:
        assert (strategy.num_replicas, strategy.rank, strategy.is_chief) == (1, 0, True)
        actual = train(strategy, config)
    (expected,) = train_mirrored(1, [config])
    assert np.array_equal(actual.parameters, expected.parameters)
    assert np.array_equal(actual.buffers, expected.buffers)
    assert actual.losses == expected.losses


# --- what the user sees -----------------------------------------------------------------------------------------------
def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def test_optimizer_state_comes_from_the_servers_and_goes_on_in_another_job() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def trained(strategy: muster.Strategy, module: nn.Module, optimizer: Any, first: int, last: int) -> Any:
        model, optimizer = strategy.prepare(module, optimizer)
        for step in range(first, last):
            strategy.step(partial(loss, model), *batch(step))
        return optimizer.state_dict()

    whole, parted = small(), small()
    with muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1) as strategy:
        expected = trained(strategy, whole, torch.optim.AdamW(whole.parameters(), lr=0.01), 0, 8)
    with alone() as strategy:
        halfway = trained(strategy, parted, torch.optim.AdamW(parted.parameters(), lr=0.01), 0, 4)
    resumed = torch.optim.AdamW(parted.parameters(), lr=0.5)
    resumed.load_state_dict(halfway)
    with alone() as strategy:
        actual = trained(strategy, parted, resumed, 4, 8)
        with pytest.raises(muster.InvalidArgument, match="before the first step"):
            resumed.load_state_dict(halfway)
    for p, q in zip(whole.parameters(), parted.parameters(), strict=True):
        assert torch.equal(p, q)
    assert expected["param_groups"] == actual["param_groups"]
    for position, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(value, actual["state"][position][name]), (position, name)


class Sparing(nn.Module):
    """Parameters that are used, have no elements, are not used, and are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(8, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y + self.empty.sum()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_all_parameters_is_as_in_one_process(kind: str) -> None:
    def trained(strategy: muster.Strategy) -> list[Any]:
        """The state in the job, and after it."""
        module = Sparing()
        optimizer = OPTIMIZERS[kind](module.parameters())
        for number, parameter in enumerate(module.parameters()):  # as if all had been trained before
            if kind != "plain sgd" and number % 2 == 0:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with strategy:
            model, optimizer = strategy.prepare(module, optimizer)
            for step in range(3):
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch(step))
            inside = copy.deepcopy(optimizer.state_dict()["state"])
        return [inside, optimizer.state_dict()["state"]]

    found = trained(alone())
    expected = trained(muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for position, values in theirs.items():
            assert ours[position].keys() == values.keys()
            for name, value in values.items():
                assert torch.equal(ours[position][name], value), (position, name)


def test_a_job_on_servers_that_hold_values_goes_on_from_them() -> None:
    servers = Servers(2)

    def values_after(steps: int, module: nn.Module) -> list[list[Tensor]]:
        """The parameters that each step saw, and those that the last one left."""
        seen = []
        with muster.ParameterServerStrategy(muster.Cluster(0, 1, "", 0, servers.addresses), seed=3) as strategy:
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))

            def step(x: Tensor, y: Tensor) -> Tensor:
                seen.append([p.detach().clone() for p in module.parameters()])
                return F.cross_entropy(model(x), y)

            for number in range(steps):
                strategy.step(step, *batch(number))
        return [*seen, [p.detach().clone() for p in module.parameters()]]

    left = values_after(3, small())[-1]
    found = values_after(1, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))[0]
    for before, after in zip(left, found, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    "option", [{"fuse": False}, {"keep_gradients": True}, {"shard_optimizer": True}, {"wire": "bf16"}]
)
def test_options_that_servers_cannot_honour_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(muster.InvalidArgument, match=next(iter(option))):
        alone(**option)


@pytest.mark.parametrize("staleness", [-1, 1.5, "none", True])
def test_a_staleness_that_is_none_is_refused(staleness: Any) -> None:
    with pytest.raises(muster.InvalidArgument, match=f"staleness={staleness!r}"):
        alone(staleness=staleness)


def test_a_second_strategy_of_a_process_at_the_same_servers_is_refused() -> None:
    servers = Servers(1)
    cluster = muster.Cluster(0, 1, "", 0, servers.addresses)
    x, y = batch()

    def loss_of_a_step() -> float:
        with muster.ParameterServerStrategy(cluster, seed=3) as strategy:
            module = small()
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
            with pytest.raises(muster.InvalidArgument, match="has a strategy at the parameter server"):
                muster.ParameterServerStrategy(cluster, seed=3)
            return float(strategy.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y).loss)

    assert loss_of_a_step() > loss_of_a_step()  # once it is closed: it goes on from the servers' values


def _differs(what: str) -> str:
    rank = int(os.environ["RANK"])
    try:
        staleness = 2 * rank if what == "staleness" else 0
        with muster.ParameterServerStrategy.from_env(staleness=staleness, seed=3, timeout=60.0) as strategy:
            strategy.prepare(DataLoader(TensorDataset(torch.zeros(100 - 10 * rank)), batch_size=20))
    except muster.Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "staleness",
            "InvalidArgument: the ranks have different options: rank 0 has staleness=0, rank 1 has staleness=2; ",
        ),
        ("data", "LayoutMismatch: loader 0 of rank 0 has 100 samples in 5 batches, that of rank 1 90 samples in 5 "),
    ],
)
def test_workers_that_differ_are_refused_at_once(what: str, message: str) -> None:
    for outcome in run_ranks(2, _differs, what):
        assert re.match(message, outcome), outcome


def test_what_servers_cannot_step_is_refused() -> None:
    def step(strategy: muster.Strategy, model: Any) -> Any:
        return strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())

    with alone() as strategy, pytest.raises(muster.InvalidArgument, match="AdamW, Adam, SGD or Adagrad"):
        step(strategy, strategy.prepare(small()))
    module = small()
    with alone() as strategy, pytest.raises(muster.InvalidArgument, match="AdamW, Adam, SGD or Adagrad"):
        model, _ = strategy.prepare(module, torch.optim.RMSprop(module.parameters()))
        step(strategy, model)
    module = small()
    with alone() as strategy, pytest.raises(muster.InvalidArgument, match=r"'2\.weight' belongs to another optimizer"):
        model, _, _ = strategy.prepare(
            module, torch.optim.SGD(module[0].parameters(), lr=0.1), torch.optim.SGD(module[2].parameters(), lr=0.1)
        )
        step(strategy, model)


def test_parameters_that_were_written_between_steps_are_an_error_that_names_one() -> None:
    module = small()
    with alone() as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
        with torch.no_grad():
            module[2].bias.zero_()
        with pytest.raises(muster.InvalidArgument, match=r"'2\.bias' was written outside step"):
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Perturbed(nn.Linear):
    """Puts back what it had."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.weight.detach().clone()
        with torch.no_grad():
            self.weight.add_(0.1)
            shifted = F.linear(x, self.weight.detach())
            self.weight.copy_(before)
        return super().forward(x) + shifted


def test_parameters_that_move_to_shared_memory_were_not_written() -> None:
    with alone() as strategy:
        module = small()
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

        def step() -> float:
            x, y = batch()
            return float(strategy.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y).loss)

        losses = [step()]
        for value in model.state_dict().values():  # as torch.multiprocessing does with what it sends
            value.share_memory_()
        losses += [step(), step()]
        assert losses[0] > losses[1] > losses[2]
        with torch.no_grad():
            next(module.parameters()).add_(1)
        with pytest.raises(muster.InvalidArgument, match="was written outside step"):
            step()


@pytest.mark.parametrize("staleness", [0, None])
def test_parameters_that_a_step_writes_are_an_error_of_the_next(staleness: int | None) -> None:
    for module, ids in ((Clamped(4, 2), False), (nn.Embedding(6, 4, max_norm=0.5), True)):
        x = torch.arange(6) if ids else torch.ones(6, 4)
        with alone(staleness=staleness) as strategy:
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
            strategy.step(lambda x, m=model: m(x).square().mean(), x)
            with pytest.raises(muster.InvalidArgument, match=r"'weight' was written in the last step or since"):
                for _ in range(2):
                    strategy.step(lambda x, m=model: m(x).square().mean(), x)


def test_a_hook_that_writes_parameters_is_an_error_of_the_next_step() -> None:
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def write(*_: Any) -> None:
        with torch.no_grad():
            module[0].weight.zero_()

    optimizer.register_step_pre_hook(write)
    with alone() as strategy:
        model, _ = strategy.prepare(module, optimizer)
        with pytest.raises(muster.InvalidArgument, match=r"'0\.weight' was written in the last step or since"):
            for _ in range(3):
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())


def test_parameters_that_a_step_puts_back_are_none() -> None:
    module = Perturbed(4, 2)
    with alone() as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(3):
            assert strategy.step(lambda x: model(x).square().mean(), torch.ones(6, 4)).stepped


def test_parameters_that_are_views_of_one_tensor_train() -> None:
    def trained(*, by_servers: bool) -> Tensor:
        memory = torch.linspace(-1, 1, 10)
        module = nn.Linear(4, 2)
        module.weight, module.bias = nn.Parameter(memory[:8].view(2, 4)), nn.Parameter(memory[8:])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 24).view(6, 4)
        with alone() if by_servers else muster.MirroredStrategy(["cpu"]) as strategy:
            model, _ = strategy.prepare(module, optimizer)
            for _ in range(3):
                strategy.step(lambda x: model(x).square().mean(), x)
        return torch.cat([module.weight.detach().view(-1), module.bias.detach()])

    assert torch.equal(trained(by_servers=True), trained(by_servers=False))


def test_unfreezing_after_the_first_step_is_an_error() -> None:
    module = small()
    module[0].requires_grad_(False)
    with alone() as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
        module[0].requires_grad_(True)
        with pytest.raises(muster.InvalidArgument, match="changed after the first step"):
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())


def test_a_sparse_gradient_is_refused_and_training_can_go_on() -> None:
    module = nn.ModuleDict({"rows": nn.Embedding(10, 4, sparse=True), "head": nn.Linear(4, 2)})
    with alone() as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        before = module["head"].weight.detach().clone()
        ids = torch.tensor([1, 2, 2])
        with pytest.raises(muster.InvalidArgument, match=r"'rows\.weight' has a sparse gradient"):
            strategy.step(lambda ids: model["head"](model["rows"](ids)).sum(), ids)
        assert torch.equal(module["head"].weight, before)
        assert strategy.step(lambda ids: model["head"](model["rows"](ids).detach()).sum(), ids).stepped


def test_unused_parameters_stay_as_they_are() -> None:
    module = nn.ModuleDict({"used": nn.Linear(8, 3), "idle": nn.Linear(8, 3)})
    before = [p.detach().clone() for p in module["idle"].parameters()]
    with alone() as strategy:
        model, optimizer = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5))
        for step in range(3):
            strategy.step(lambda x, y: F.cross_entropy(model["used"](x), y), *batch(step))
        assert sorted(optimizer.state_dict()["state"]) == [0, 1]
    for p, q in zip(before, module["idle"].parameters(), strict=True):
        assert torch.equal(p, q)


def test_it_says_where_parameters_live() -> None:
    with alone(staleness=4) as strategy:
        text = strategy.explain()
    assert "a parameter server in the chief's process" in text
    assert "4 steps ahead of the slowest" in text


# --- failures ---------------------------------------------------------------------------------------------------------
def _fails_once(addresses: list[str]) -> tuple[list[str], np.ndarray]:
    seen = []
    module = small()
    with on_servers(addresses, seed=3, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            if strategy.steps == 2 and strategy.rank == 1 and not seen:
                raise ValueError("no luck")
            return loss

        for number in range(6):
            try:
                strategy.step(step, *batch(number))
            except (ValueError, muster.RemoteError) as error:
                seen.append(f"{type(error).__name__}: {error}")
        assert strategy.steps == 5
    return seen, torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()


def test_a_step_that_raises_is_dropped_everywhere() -> None:
    servers = Servers(2)
    (seen_0, left_0), (seen_1, left_1) = run_ranks(2, _fails_once, servers.addresses)
    assert seen_1[0].startswith("ValueError: no luck")
    assert seen_0[0].startswith("RemoteError") and "ValueError: no luck" in seen_0[0]
    assert len(seen_0) == len(seen_1) == 1
    assert np.array_equal(left_0, left_1)


def test_steps_that_are_not_finite_are_skipped() -> None:
    module = small()
    with alone(max_skipped=3) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        factor = torch.tensor(1.0)

        def step(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y) * factor

        assert not strategy.step(step, *batch(0)).skipped
        left = [p.detach().clone() for p in module.parameters()]
        factor.fill_(float("inf"))
        assert strategy.step(step, *batch(1)).skipped
        for p, q in zip(left, module.parameters(), strict=True):
            assert torch.equal(p, q)
        factor.fill_(1.0)
        assert not strategy.step(step, *batch(2)).skipped
        factor.fill_(float("nan"))
        with pytest.raises(muster.NonFinite, match="3 windows in a row"):
            for number in range(4):
                strategy.step(step, *batch(number))


STEPS_WITH_A_DEATH = 60


def _dies_at(step_of_death: int, addresses: list[str], staleness: int | None) -> tuple[int, np.ndarray] | None:
    module = small()
    with on_servers(addresses, staleness=staleness, seed=3, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01))

        def step(x: Tensor, y: Tensor) -> Tensor:
            if strategy.rank == 1 and strategy.steps == step_of_death:
                os.kill(os.getpid(), signal.SIGKILL)
            return F.cross_entropy(model(x), y)

        for number in range(STEPS_WITH_A_DEATH):
            result = strategy.step(step, *batch(3 * number + strategy.rank))
        assert np.isfinite(float(result.loss))
        # The servers' newest, which the last of the others may have changed.
        strategy.run(lambda: None)
        return strategy.steps, torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()


def test_the_others_go_on_without_a_worker_that_died() -> None:
    servers = Servers(2)
    first, dead, last = Ranks(3, _dies_at, 5, servers.addresses, 0).results()
    assert dead is None
    assert first is not None and last is not None
    assert first[0] == last[0] == STEPS_WITH_A_DEATH
    assert np.array_equal(first[1], last[1])


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def _shares(addresses: list[str], step_of_death: int, accumulate: int) -> list[list[int]] | None:
    """The samples of each step of one epoch."""
    module = nn.Linear(4, 1)
    with on_servers(addresses, seed=3, threads_per_replica=1, accumulate=accumulate) as strategy:
        data = torch.utils.data.DataLoader(Numbers(), batch_size=7, shuffle=True)
        model, _, loader = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-6), data)
        seen = []
        for number, x in enumerate(loader):
            if strategy.rank == 1 and number == step_of_death:
                os.kill(os.getpid(), signal.SIGKILL)
            strategy.step(lambda x: model(x).sum(), x)
            seen.append([int(v) for v in x[:, 0]])
        assert not strategy.run(lambda: None)[0]
        return seen


@pytest.mark.parametrize(("step_of_death", "accumulate"), [(6, 1), (5, 2)])
def test_the_others_compute_what_a_dead_worker_left(step_of_death: int, accumulate: int) -> None:
    servers = Servers(1)
    alive = Ranks(3, _shares, servers.addresses, 99, accumulate).results()
    servers = Servers(1)
    first, dead, last = Ranks(3, _shares, servers.addresses, step_of_death, accumulate).results()
    assert dead is None
    assert first is not None and last is not None
    before = step_of_death // accumulate * accumulate
    done = alive[1][:before]
    samples = [sample for worker in (first, done, last) for part in worker for sample in part]
    assert sorted(samples) == list(range(50))
    assert len(first) > len(alive[0])
    # Up to the step in which it died parts are those of three, then of two.
    assert first[:before] == alive[0][:before]
    assert all(
        abs(len(a) - len(b)) <= 1
        for a, b in zip(first[before + accumulate :], last[before + accumulate :], strict=True)
    )


def _outlives_a_server(addresses: list[str], patient: bool, ready: str) -> tuple[str, float]:
    module = small()
    with on_servers(addresses, seed=3, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        started = time.monotonic()
        try:
            for number in range(10_000):
                if number == 5:
                    Path(f"{ready}-{strategy.rank}").touch()
                    while not Path(f"{ready}-gone").exists():
                        time.sleep(0.01)
                    started = time.monotonic()
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch(number))
                if patient and number == 30:
                    break
        except muster.PeerLost as error:
            return str(error), time.monotonic() - started
        return "fine", time.monotonic() - started


@pytest.mark.parametrize("returns", [False, True])
def test_a_server_that_dies_is_named_and_one_that_returns_with_its_snapshots_is_not_missed(
    returns: bool, tmp_path: Path
) -> None:
    servers = Servers(2, tmp_path / "snapshots" if returns else None)
    ready = str(tmp_path / "ready")
    ranks = Ranks(2, _outlives_a_server, servers.addresses, returns, ready)
    deadline = time.monotonic() + 60
    while not all(Path(f"{ready}-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if returns:
        servers.restart(1)
    else:
        servers.running[1] = None
    Path(f"{ready}-gone").touch()
    for text, seconds in ranks.results():
        if returns:
            assert text == "fine"
        else:
            assert text.startswith(f"parameter server 1 ({servers.addresses[1]}) is gone")
            assert seconds < 10


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_interrupt_ends_the_wait_for_another_worker(replicas: int, tmp_path: Path) -> None:
    servers = Servers(1)
    assert run_ranks(2, _is_interrupted, servers.addresses, replicas, tmp_path) == ["interrupted", "waited"]


def _is_interrupted(addresses: list[str], replicas: int, folder: Path) -> str:
    module = small()
    with on_servers(addresses, devices=["cpu"] * replicas, seed=3, timeout=60.0) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
        started = time.monotonic()
        if strategy.rank == 1:
            while not (folder / "closed").exists() and time.monotonic() - started < 50:
                time.sleep(0.05)
            return "waited"
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
        assert time.monotonic() - started < (2 if replicas == 1 else 10)
    (folder / "closed").touch()
    assert time.monotonic() - started < 40  # close() waited neither for the other worker nor for the timeout
    return "interrupted"


# --- workers that step on their own -----------------------------------------------------------------------------------
def _pass_over(
    addresses: list[str],
    epochs: int,
    loader_workers: int,
    victim: int | None,
    slow: int | None,
    leaves_early: bool,
    staleness: int | None = None,
) -> list[list[list[int]]]:
    """The samples of each step, by epoch."""
    # Daemons, as ranks are, may not have loader workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    module = nn.Linear(4, 1)
    with on_servers(addresses, staleness=staleness, seed=3, threads_per_replica=1) as strategy:
        starts = {"num_workers": loader_workers, "multiprocessing_context": "fork"} if loader_workers else {}
        data = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True, **starts)
        model, _, loader = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-6), data)
        assert len(loader) == 13
        seen: list[list[list[int]]] = []
        for _ in range(epochs):
            seen.append([])
            for x in loader:
                if strategy.rank == victim and strategy.steps == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                is_slow = strategy.rank == slow or victim not in (None, strategy.rank)
                time.sleep(0.1 if is_slow else 0.01)
                strategy.step(lambda x: model(x).sum(), x)
                seen[-1].append([int(v) for v in x[:, 0]])
                if leaves_early and strategy.rank == 0:
                    break
        strategy.barrier() if victim is None else None
        return seen


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_servers_deal_each_batch_of_an_epoch_to_one_worker(loader_workers: int) -> None:
    servers = Servers(2)
    epochs = 1 if loader_workers else 3
    first, second = run_ranks(2, _pass_over, servers.addresses, epochs, loader_workers, None, 1, False)
    orders = []
    for a, b in zip(first, second, strict=True):
        assert sorted(sample for part in [*a, *b] for sample in part) == list(range(50))
        assert len(a) + len(b) == 13
        orders.append([*a, *b])
    if loader_workers == 0:  # which read ahead of their steps, and so take batches that the slow one computes
        assert sum(map(len, first)) > sum(map(len, second)) > 0
        assert sorted(orders[0]) != sorted(orders[1]), "each epoch is shuffled anew"


def test_who_waits_for_others_batches_holds_nobody_back() -> None:
    # The slow worker's readers hold more batches than it may be steps ahead.
    servers = Servers(1)
    first, second = run_ranks(2, _pass_over, servers.addresses, 1, 4, None, 1, False, 1, timeout=100)
    assert sorted(sample for part in [*first[0], *second[0]] for sample in part) == list(range(50))


def test_a_short_last_window_that_is_dropped_is_not_waited_for() -> None:
    module = nn.Linear(4, 1)
    with alone(staleness=None, accumulate=2, drop_incomplete=True, timeout=10.0) as strategy:
        data = torch.utils.data.DataLoader(Numbers(), batch_size=4)
        model, _, loader = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-6), data)
        for _ in range(2):
            for x in loader:
                strategy.step(lambda x: model(x).sum(), x)
        assert strategy.steps == 12


def test_batches_of_a_worker_that_died_are_dealt_again() -> None:
    servers = Servers(1)
    first, second, dead = Ranks(3, _pass_over, servers.addresses, 1, 0, 2, None, False).results()
    assert dead is None
    samples = [sample for worker in (first, second) for part in worker[0] for sample in part]
    assert len(samples) == len(set(samples))
    # One batch, of 4 samples but the last of 2, was in a step of the one that died.
    assert len(samples) in (50 - 4, 50 - 2)


def test_a_pass_that_is_left_early_goes_to_the_others() -> None:
    servers = Servers(1)
    first, second = run_ranks(2, _pass_over, servers.addresses, 1, 0, None, None, True)
    assert len(first[0]) == 1
    assert sorted(sample for part in [*first[0], *second[0]] for sample in part) == list(range(50))


def test_staleness_bounds_how_far_a_worker_runs_ahead() -> None:
    servers = Servers(1)
    fast, slow = run_ranks(2, _runs_ahead, servers.addresses, 2)
    assert slow == 0
    assert 1 <= fast <= 3


def _runs_ahead(addresses: list[str], staleness: int) -> int:
    """How far this worker was ahead of the other at most, by files that both write."""
    module = small()
    folder = Path("/tmp") / f"muster-ahead-{addresses[0].split(':')[1]}"
    folder.mkdir(exist_ok=True)
    ahead = 0
    with on_servers(addresses, staleness=staleness, seed=3, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
        for number in range(12):
            if strategy.rank == 1:
                time.sleep(0.05)
            else:
                ahead = max(ahead, number - len(list(folder.glob("step-*"))))
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch(number))
            if strategy.rank == 1:
                (folder / f"step-{number}").touch()
        strategy.barrier()
        if strategy.rank == 0:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    return ahead


def test_others_go_on_where_a_worker_dies_that_steps_on_its_own() -> None:
    servers = Servers(2)
    first, dead, last = Ranks(3, _dies_at, 5, servers.addresses, None).results()
    assert dead is None
    assert first is not None and last is not None
    assert first[0] == last[0] == STEPS_WITH_A_DEATH


def test_who_waits_for_a_chief_that_left_learns_it_though_the_chief_waits_too() -> None:
    left, error = run_ranks(2, _leaves_early)
    assert left == "left"
    assert error.startswith("rank 0 left")


def _leaves_early() -> str:
    module = small()
    started = time.monotonic()
    try:
        with muster.ParameterServerStrategy.from_env(staleness=None, seed=3, timeout=60.0) as strategy:
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
            strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
            if strategy.rank == 0:
                return "left"
            strategy.barrier()
            return "passed"
    except muster.PeerLost as error:
        return str(error)
    finally:
        assert time.monotonic() - started < 30


def _closes_after_others_have_stepped(writes: bool) -> tuple[list[Any], list[Any]]:
    """What this worker's parameters are after its own steps, and after close(); rank 0 steps first."""
    module = small()
    strategy = muster.ParameterServerStrategy.from_env(staleness=None, seed=3, timeout=60.0)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for rank in range(2):
        if strategy.rank == rank:
            for _ in range(3):
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch())
        strategy.barrier()
    if writes and strategy.rank == 0:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    stepped = [parameter.detach().numpy().copy() for parameter in module.parameters()]
    strategy.close()
    return stepped, [parameter.detach().numpy() for parameter in module.parameters()]


@pytest.mark.parametrize("writes", [False, True])
def test_close_brings_what_others_have_stepped_but_over_nothing_that_was_written(writes: bool) -> None:
    (first, closed), (last, closed_last) = run_ranks(2, _closes_after_others_have_stepped, writes)
    assert all(map(np.array_equal, last, closed_last))
    assert not any(map(np.array_equal, first, last))
    assert all(map(np.array_equal, closed, first if writes else last))


def test_iterable_data_cannot_be_dealt() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    with alone(staleness=1) as strategy, pytest.raises(muster.InvalidArgument, match="by number"):
        strategy.prepare(torch.utils.data.DataLoader(Stream()))


def test_learning_works_with_any_staleness() -> None:
    for staleness in (0, 2, None):
        config = Config(steps=60, optimizer="adamw", dropout=0.0)
        servers = Servers(1)
        for trained in run_ranks(2, _learn, servers.addresses, staleness, config):
            assert np.mean(trained[-10:]) < 0.5 * np.mean(trained[:5])


def _learn(addresses: list[str], staleness: int | None, config: Config) -> list[float]:
    with on_servers(addresses, staleness=staleness, **config.options()) as strategy:
        return train(strategy, config).losses


class Masked(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1)
        self.register_buffer("position", torch.arange(size))
        self.register_buffer("mask", torch.ones(size, size, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ self.mask.to(x.dtype))


def stepped_with_masks(size: int, staleness: int) -> bool:
    """Whether two steps are made, each with the same error else."""
    module = Masked(size)
    told = []
    with alone(staleness=staleness) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(2):
            try:
                strategy.step(lambda x: model(x).square().mean(), torch.ones(2, size))
            except muster.InvalidArgument as error:
                told.append(str(error))
    assert len(set(told)) <= 1 and all("have 65792 elements, 'mask' 65536 of them" in text for text in told)
    return not told


def test_integer_buffers_that_synchronous_workers_cannot_show_are_named() -> None:
    assert stepped_with_masks(255, 0) and not stepped_with_masks(256, 0)
    assert stepped_with_masks(256, 1)
