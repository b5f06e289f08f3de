"""ShardedEmbedding whose rows are on parameter servers: the bits of other strategies, and what users meet."""

from __future__ import annotations

import copy
import gc
import io
import os
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from support.ranks import run_ranks
from support.servers import Servers, alone, on_servers

ROWS, DIM = 1000, 24


class Clicks(nn.Module):
    """Two tables, of ids and of bags, beside a dense part."""

    def __init__(self, on_servers: bool = False, row_wise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(2 * DIM, 1)
        options: dict[str, Any] = {"scale": 0.1, "on_servers": on_servers, "row_wise_adagrad": row_wise}
        self.ids = muster.ShardedEmbedding(ROWS, DIM, seed=5, **options)
        self.bags = muster.ShardedEmbedding(
            ROWS + 3, DIM, mode="mean", init="uniform", seed=6, placement="range", **options
        )

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.read(torch.cat([self.ids(ids), self.bags(bags)], 1)).squeeze(1)


def loss(model: Any, ids: Tensor, bags: Tensor, clicks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(ids, bags), clicks)


def impressions(step: int, count: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Ids that repeat within a batch and from batch to batch."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 40, (count,), generator=generator) * 23 % ROWS
    bags = torch.randint(0, 60, (count, 3), generator=generator) * 7
    return ids, bags, torch.randint(0, 2, (count,), generator=generator).float()


def part_of(strategy: muster.Strategy, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(column.chunk(strategy.num_workers)[strategy.rank] for column in batch)


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "row-wise adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0),
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("adagrad", {"clip_norm": 0.01}),
    ("row-wise adagrad", {"clip_norm": 0.01, "accumulate": 2}),
    ("adam", {"accumulate": 2, "clip_norm": 0.02}),
    ("adamw", {"precision": "fp16"}),
]


def train(strategy: muster.Strategy, optimizer: str, on_servers: bool = False) -> list[np.ndarray[Any, Any]]:
    """Losses, then all parameters, then all states, after 12 steps of which some use one table alone."""
    module = Clicks(on_servers, row_wise=optimizer.startswith("row-wise"))
    groups = [{"params": [*module.read.parameters(), module.ids.weight]}, {"params": [module.bags.weight], "lr": 0.03}]
    model, trained = strategy.prepare(module, OPTIMIZERS[optimizer](groups))
    losses: list[float] = []
    for step in range(12):
        ids, bags, clicks = part_of(strategy, impressions(step))
        if step == 4 or (step == 5 and strategy.rank > 0):  # one table is used by nobody, then by one worker
            result = strategy.step(lambda x: model.ids(x).square().sum(), ids)
        else:
            result = strategy.step(partial(loss, model), ids, bags, clicks)
        losses += [float(result.loss), float(result.grad_norm or 0)]
    values = [np.array(losses), *(tensor.numpy().copy() for tensor in module.state_dict().values())]
    for _position, states in sorted(trained.state_dict()["state"].items()):
        values += [torch.as_tensor(states[name]).numpy().copy() for name in sorted(states)]
    return values


def _train_both(addresses: list[list[str]], replicas: int) -> list[str]:
    devices = ["cpu"] * replicas
    differences = []
    for (optimizer, options), servers in zip(OPTIONS, addresses, strict=True):
        options = {"seed": 3, "threads_per_replica": 1, "timeout": 60.0, **options}
        with muster.MultiWorkerMirroredStrategy.from_env(devices, **options) as strategy:
            expected = train(strategy, optimizer)
        with on_servers(servers, devices=devices, **options) as strategy:
            actual = train(strategy, optimizer)
        assert len(expected) == len(actual)
        for number, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
            assert np.isfinite(theirs).all()
            if not np.array_equal(theirs, ours):
                differences.append(f"value {number} with {optimizer}")
    return differences


@pytest.mark.parametrize(("workers", "servers", "replicas"), [(2, 0, 1), (2, 3, 1), (3, 1, 1), (2, 2, 2)])
def test_a_synchronous_job_gives_the_bits_of_worker_processes(workers: int, servers: int, replicas: int) -> None:
    started = [Servers(servers) for _ in OPTIONS]
    for differences in run_ranks(workers, _train_both, [group.addresses for group in started], replicas):
        assert differences == []


def test_row_wise_state_goes_to_servers_and_into_checkpoints() -> None:
    def local(steps: range, state: Any = None, weights: Any = None) -> tuple[Clicks, Any]:
        module = Clicks(row_wise=True)
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
        if state is not None:
            module.load_state_dict(weights)
            optimizer.load_state_dict(state)
        with muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1) as strategy:
            model, optimizer = strategy.prepare(module, optimizer)
            for number in steps:
                step(strategy, model, number)
        return module, optimizer.state_dict()

    whole, expected = local(range(6))
    half, state = local(range(3))
    weights = copy.deepcopy(half.state_dict())
    assert state["state"][2]["sum"].shape == (ROWS, 1)
    went_on, resumed = local(range(3, 6), state, weights)
    module = Clicks(row_wise=True)
    module.load_state_dict(weights)
    optimizer = muster.optim.Adagrad(module.parameters(), lr=0.1)
    optimizer.load_state_dict(state)
    with alone() as strategy:
        model, optimizer = strategy.prepare(module, optimizer)
        for number in range(3, 6):
            step(strategy, model, number)
        on_server = optimizer.state_dict()
    for other, its_state in ((went_on, resumed), (module, on_server)):
        for theirs, ours in zip(whole.parameters(), other.parameters(), strict=True):
            assert torch.equal(theirs, ours)
        for position, values in expected["state"].items():
            assert torch.equal(its_state["state"][position]["sum"], values["sum"])


def _place_differently(servers: list[str], late: int) -> tuple[str, float]:
    with on_servers(servers, timeout=60.0) as strategy:
        rank = strategy.rank
        module = muster.ShardedEmbedding(10, 2, seed=1, placement="range" if rank == 1 else "modulo")
        model, _ = strategy.prepare(module, muster.optim.Adagrad(module.parameters()))
        began = time.monotonic()
        if rank == late:
            time.sleep(1)
        with pytest.raises((muster.LayoutMismatch, muster.PeerLost)) as raised:
            strategy.step(lambda ids: model(ids).sum(), torch.tensor([rank]))
        return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("late", [0, 1])
def test_workers_place_rows_alike(late: int) -> None:
    started = Servers(2)
    results = run_ranks(2, _place_differently, started.addresses, late)
    assert "placement" in results[late][0]
    assert "left" in results[1 - late][0]
    assert all(seconds < 20 for _, seconds in results)


def step(strategy: muster.Strategy, model: Any, number: int = 0) -> muster.StepResult:
    return strategy.step(partial(loss, model), *impressions(number))


def prepared(strategy: muster.Strategy, module: nn.Module) -> Any:
    return strategy.prepare(module, torch.optim.Adagrad(module.parameters(), lr=0.1))[0]


def test_weights_take_no_memory_until_the_strategy_is_closed() -> None:
    module, local = Clicks(), Clicks()
    with muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1) as strategy:
        expected = step(strategy, prepared(strategy, local), 0)
    with torch.no_grad():
        evaluated = local(*impressions(1)[:2])
    with alone() as strategy:
        model = prepared(strategy, module)
        assert torch.equal(step(strategy, model, 0).loss, expected.loss)
        assert module.ids.weight.untyped_storage().nbytes() == 4
        assert module.ids.weight.shape == (ROWS, DIM)
        assert module.ids.weight.isnan().all()
        with torch.no_grad():
            assert torch.equal(module(*impressions(1)[:2]), evaluated)
        for name, value in module.state_dict().items():
            assert torch.equal(value, local.state_dict()[name])
        copied = copy.deepcopy(module)
        stored = io.BytesIO()
        torch.save(module.ids, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
    for other in (copied.ids.weight, loaded.weight):
        assert torch.equal(other, local.ids.weight)
    for theirs, ours in zip(local.parameters(), module.parameters(), strict=True):
        assert torch.equal(theirs, ours)


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _memory_of_a_large_table() -> tuple[int, int]:
    module = muster.ShardedEmbedding(400_000, 64, seed=1, on_servers=True)
    before = resident()
    optimizer = torch.optim.Adagrad(module.parameters())
    with alone() as strategy:
        model, optimizer = strategy.prepare(module, optimizer)
        prepared = resident()
        strategy.step(lambda ids: model(ids).sum(), torch.arange(4))
        return prepared - before, resident() - before


def test_an_optimizer_s_memory_is_given_back_once_servers_hold_its_state() -> None:
    megabyte = 10**6
    ((with_state, without),) = run_ranks(1, _memory_of_a_large_table)
    assert with_state > 90 * megabyte
    assert without < 50 * megabyte


@pytest.mark.parametrize("row_wise", [False, True])
def test_rows_that_are_on_servers_from_the_beginning(row_wise: bool) -> None:
    module, local = Clicks(on_servers=True, row_wise=row_wise), Clicks(row_wise=row_wise)
    for stub in (module, copy.deepcopy(module)):
        assert stub.ids.weight.untyped_storage().nbytes() == 4
        with pytest.raises(muster.InvalidArgument, match="not connected"):
            stub(*impressions(0)[:2])
    with muster.MirroredStrategy(["cpu"]) as strategy, pytest.raises(muster.InvalidArgument, match="on_servers"):
        strategy.prepare(Clicks(on_servers=True))
    with muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1) as strategy:
        model = prepared(strategy, local)
        for number in range(3):
            step(strategy, model, number)
    with alone() as strategy:
        model = prepared(strategy, module)
        for number in range(3):
            step(strategy, model, number)
        kept = module.state_dict()
    for name, value in local.state_dict().items():
        assert torch.equal(kept[name], value)
    assert module.ids.weight.untyped_storage().nbytes() == 4


def test_a_table_that_no_memory_holds() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = muster.ShardedEmbedding(10**12, 16, mode="sum", seed=1, scale=0.1, on_servers=True)
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum(1) + self.bias

    module = Wide()
    ids = torch.randint(0, 10**12, (64, 4), generator=torch.Generator().manual_seed(2))
    clicks = torch.arange(64).remainder(2).float()
    with alone() as strategy:
        model, _ = strategy.prepare(module, muster.optim.Adagrad(module.parameters(), lr=0.3))
        assert module.table.weight.shape == (10**12, 16)
        losses = [
            float(strategy.step(lambda x, y: F.binary_cross_entropy_with_logits(model(x), y), ids, clicks).loss)
            for _ in range(20)
        ]
    assert losses[-1] < 0.1 < losses[0]


def test_weights_and_state_that_were_there_before_go_to_the_servers() -> None:
    def train_on(strategy: muster.Strategy, module: nn.Module, state: Any, numbers: range) -> Any:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        if state is not None:
            optimizer.load_state_dict(state)
        model, trained = strategy.prepare(module, optimizer)
        for number in numbers:
            step(strategy, model, number)
        return trained.state_dict()

    whole, parted = Clicks(), Clicks()
    for module in (whole, parted):
        with torch.no_grad():
            module.ids.weight[17:90] += 1
    with muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1) as strategy:
        expected = train_on(strategy, whole, None, range(8))
    with alone() as strategy:
        halfway = train_on(strategy, parted, None, range(4))
    with alone() as strategy:
        actual = train_on(strategy, parted, halfway, range(4, 8))
    for p, q in zip(whole.parameters(), parted.parameters(), strict=True):
        assert torch.equal(p, q)
    for position, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(value, actual["state"][position][name]), (position, name)


def test_workers_that_draw_seeds_of_their_own_start_from_the_chiefs() -> None:
    servers = Servers(1)
    first, second = run_ranks(2, _draw_a_seed, servers.addresses)
    assert np.array_equal(first, second)


def _draw_a_seed(addresses: list[str]) -> Any:
    torch.seed()
    module = nn.Sequential(muster.ShardedEmbedding(50, 4, mode="sum", on_servers=True), nn.Linear(4, 1))
    with on_servers(addresses, seed=3) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x: model(x).mean(), torch.arange(6).view(2, 3))
        return module.state_dict()["0.weight"].numpy()


def _learn_alone(addresses: list[str], staleness: int | None) -> list[float]:
    module = Clicks()
    with on_servers(addresses, staleness=staleness, seed=3, threads_per_replica=1) as strategy:
        model = prepared(strategy, module)
        losses = [float(step(strategy, model).loss) for _ in range(40)]
        strategy.barrier()
        return losses


@pytest.mark.parametrize("staleness", [2, None])
def test_learning_works_with_any_staleness(staleness: int | None) -> None:
    servers = Servers(2)
    for losses in run_ranks(2, _learn_alone, servers.addresses, staleness):
        assert losses[-1] < 0.3 < losses[0]


def test_a_step_of_more_rows_than_the_log_has_room_for_is_made(tmp_path: Path) -> None:
    servers = Servers(1, tmp_path)
    module = muster.ShardedEmbedding(100_000, 64, mode="sum", seed=1, on_servers=True)
    with on_servers(servers.addresses, log_bytes=4 << 20, timeout=10.0, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(module, torch.optim.Adagrad(module.parameters(), lr=0.1))
        for rows in (100, 100, 100, 100, 20_000, 100):
            ids = torch.arange(rows).view(-1, 1)
            assert strategy.step(lambda ids: model(ids).square().mean(), ids).stepped


def test_what_servers_cannot_do_is_refused() -> None:
    plain = nn.Sequential(nn.EmbeddingBag(50, 4, mode="sum", sparse=True), nn.Linear(4, 1))
    with alone() as strategy, pytest.raises(muster.InvalidArgument, match="ShardedEmbedding alone"):
        model, _ = strategy.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        strategy.step(lambda x: model(x).mean(), torch.arange(6).view(2, 3))
    for options in ({"momentum": 0.9}, {"weight_decay": 0.1}):
        module = Clicks()
        with alone() as strategy, pytest.raises(muster.InvalidArgument, match="move every row"):
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1, **options))
            step(strategy, model)
    module = Clicks()
    with alone() as strategy:
        model = prepared(strategy, module)
        step(strategy, model)
        with pytest.raises(muster.InvalidArgument, match="first values follow from"):
            module.ids.reset_parameters()
        with pytest.raises(muster.InvalidArgument, match="rows of 'weight' are on parameter servers"):
            module.ids.load_state_dict(module.ids.state_dict())
        module.ids.weight.data = torch.zeros(ROWS, DIM)
        with pytest.raises(muster.InvalidArgument, match=r"'ids\.weight' was written outside step"):
            step(strategy, model)


EDITS: list[tuple[type[torch.optim.Optimizer], str, Any, str]] = [
    (torch.optim.SGD, "weight_decay", 0.1, "move every row"),
    (torch.optim.SGD, "momentum", 0.9, "move every row"),
    (torch.optim.Adagrad, "weight_decay", 0.1, "move every row"),
    (torch.optim.Adam, "amsgrad", True, "cannot change"),
]


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize(("kind", "option", "value", "text"), EDITS)
@pytest.mark.parametrize("by_hook", [False, True])
def test_hyperparameters_that_rows_cannot_follow_are_refused_and_training_goes_on(
    staleness: int | None, kind: type[torch.optim.Optimizer], option: str, value: Any, text: str, by_hook: bool
) -> None:
    def trained(*, edits: bool) -> list[Tensor]:
        module = Clicks()
        optimizer = kind(module.parameters(), lr=0.1)  # type: ignore[call-arg]
        (group,) = optimizer.param_groups
        before = group[option]
        with alone(staleness=staleness) as strategy:
            model, _ = strategy.prepare(module, optimizer)
            for number in range(4):
                if number == 2 and edits:
                    hook = (
                        optimizer.register_step_pre_hook(lambda *_: group.update({option: value})) if by_hook else None
                    )
                    group[option] = before if by_hook else value
                    with pytest.raises(muster.InvalidArgument, match=text):
                        strategy.step(partial(loss, model), *impressions(number))
                    group[option] = before
                    if hook is not None:
                        hook.remove()
                strategy.step(partial(loss, model), *impressions(number))
        return [parameter.detach().clone() for parameter in module.parameters()]

    for one, other in zip(trained(edits=True), trained(edits=False), strict=True):
        assert torch.equal(one, other)


def test_state_that_servers_cannot_begin_with_is_refused() -> None:
    module = Clicks(on_servers=True)
    optimizer = muster.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.5)
    assert module.ids.weight.shape == (ROWS, DIM)
    with alone() as strategy, pytest.raises(muster.InvalidArgument, match=r"initial_accumulator_value=0\.5"):
        step(strategy, strategy.prepare(module, optimizer)[0])


def test_it_is_refused_for_a_table_that_is_an_optimizers_only_parameter() -> None:
    table = muster.ShardedEmbedding(ROWS, DIM, seed=5, on_servers=True)
    optimizer = muster.optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=0.5)
    with alone() as strategy, pytest.raises(muster.InvalidArgument, match=r"initial_accumulator_value=0\.5"):
        model, _ = strategy.prepare(table, optimizer)
        strategy.step(lambda ids: model(ids).square().mean(), torch.arange(8))


def test_dense_state_of_rows_goes_with_the_first_step() -> None:
    """Which torch's Adagrad makes when it is built, as large as the table."""
    module = Clicks(on_servers=True)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    made = weakref.ref(optimizer.state[module.ids.weight]["sum"])
    with alone() as strategy:
        model, optimizer = strategy.prepare(module, optimizer)
        step(strategy, model)
        gc.collect()
        assert made() is None
        names = [name for name, _ in module.named_parameters()]
        state = optimizer.state_dict()["state"][names.index("ids.weight")]
        assert state["sum"].shape == (ROWS, DIM)
        assert (state["sum"] != 0).any()


def test_rows_are_fp32() -> None:
    module = Clicks().double()
    with alone() as strategy, pytest.raises(muster.InvalidArgument, match=r"'ids\.weight' has dtype Double"):
        model = prepared(strategy, module)
        strategy.step(lambda ids, bags, _: model(ids, bags).mean(), *impressions(0))


def test_a_bad_id_drops_the_window_and_training_goes_on() -> None:
    module = Clicks()
    with alone() as strategy:
        model = prepared(strategy, module)
        step(strategy, model)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        ids, bags, clicks = impressions(1)
        with pytest.raises(muster.InvalidArgument, match=f"id {ROWS} is not in"):
            strategy.step(partial(loss, model), ids.where(ids != ids[0], ROWS), bags, clicks)
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])
        step(strategy, model, 1)
        assert not torch.equal(module.state_dict()["ids.weight"], before["ids.weight"])
