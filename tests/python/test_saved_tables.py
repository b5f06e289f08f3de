"""Rows that parameter servers alone hold, in checkpoints: saved, and loaded with and without servers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from muster import _C, checkpoint
from muster.checkpoint import reading
from support.ranks import run_ranks
from support.servers import Servers, alone, on_servers

ROWS, DIM = 500, 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "row-wise": partial(torch.optim.Adagrad, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0, amsgrad=True),
}


class Clicks(nn.Module):
    """One table beside a dense part."""

    def __init__(self, *, on_servers: bool, row_wise: bool = False, seed: int | None = 5) -> None:
        super().__init__()
        self.ids = muster.ShardedEmbedding(
            ROWS, DIM, mode="sum", seed=seed, scale=0.1, on_servers=on_servers, row_wise_adagrad=row_wise
        )
        generator = torch.Generator().manual_seed(0)
        self.read = nn.Linear(DIM, 1)
        with torch.no_grad():
            self.read.weight.copy_(torch.randn(1, DIM, generator=generator))
            self.read.bias.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.read(self.ids(ids)).squeeze(1)
        return result


def mirrored() -> muster.Strategy:
    return muster.MirroredStrategy(["cpu"], seed=3, threads_per_replica=1)


class Job:
    """The model and its optimizer, prepared."""

    def __init__(
        self, strategy: muster.Strategy, optimizer: str, *, on_servers: bool = False, seed: int | None = 5
    ) -> None:
        self.strategy = strategy
        self.module = Clicks(on_servers=on_servers, row_wise=optimizer == "row-wise", seed=seed)
        made = OPTIMIZERS[optimizer](self.module.parameters())
        self.model, self.optimizer = strategy.prepare(self.module, made)

    def train(self, steps: range) -> Job:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, 30, (12, 2), generator=generator) * 13 % ROWS
            clicks = torch.randint(0, 2, (12,), generator=generator).float()
            mine = [part.chunk(self.strategy.num_workers)[self.strategy.rank] for part in (ids, clicks)]
            self.strategy.step(lambda x, y: F.binary_cross_entropy_with_logits(self.model(x), y), *mine)
        return self

    def values(self) -> dict[str, Tensor]:
        """Copies of parameters and state."""
        values = dict(self.module.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            values |= {f"{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        return {name: value.detach().clone() for name, value in values.items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_goes_on_in_another_job_and_as_a_dense_weight(optimizer: str, tmp_path: Path) -> None:
    with mirrored() as strategy:
        expected = Job(strategy, optimizer).train(range(6)).values()
    with alone() as strategy:
        Job(strategy, optimizer, on_servers=True).train(range(3))
        strategy.save(tmp_path)
    (table,) = reading.read(tmp_path).parts()["tables"]
    assert 0 < len(table["rows"]) <= 30, "rows that were never used are left out"
    for shape, stays in ((alone, True), (alone, False), (mirrored, False)):
        with shape() as strategy:
            job = Job(strategy, optimizer, on_servers=stays)
            assert strategy.load(tmp_path) == {}
            assert strategy.steps == 3
            assert_same(job.train(range(3, 6)).values(), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_dense_weight_goes_on_as_a_table(optimizer: str, tmp_path: Path) -> None:
    with mirrored() as strategy:
        job = Job(strategy, optimizer).train(range(3))
        strategy.save(tmp_path)
        expected = job.train(range(3, 6)).values()
    with alone() as strategy:
        job = Job(strategy, optimizer, on_servers=True)
        strategy.load(tmp_path)
        assert_same(job.train(range(3, 6)).values(), expected)


def test_rows_that_were_loaded_and_not_stepped_yet_are_saved_again(tmp_path: Path) -> None:
    with alone() as strategy:
        Job(strategy, "adamw", on_servers=True).train(range(3))
        strategy.save(tmp_path)
    with alone() as strategy:
        Job(strategy, "adamw", on_servers=True)
        strategy.load(tmp_path)
        strategy.save(tmp_path)
    first, second = ((reading.read(tmp_path / number).parts()["tables"])[0] for number in ("1", "2"))
    assert first["state"].keys() == second["state"].keys() == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    for name in ("rows", "values", "step"):
        assert torch.equal(first[name], second[name])
    for name, values in first["state"].items():
        assert torch.equal(values, second["state"][name])


def test_a_table_that_nobody_has_used_is_saved_without_rows(tmp_path: Path) -> None:
    with alone() as strategy:
        Job(strategy, "adagrad", on_servers=True)
        strategy.save(tmp_path)
    (table,) = reading.read(tmp_path).parts()["tables"]
    assert len(table["rows"]) == 0 and table["seed"] == "5"
    with mirrored() as strategy:
        job = Job(strategy, "adagrad")
        strategy.load(tmp_path)
        assert torch.equal(job.module.ids.weight, Clicks(on_servers=False).ids.weight)


def test_rows_that_were_never_used_are_those_of_the_seed_that_was_saved(tmp_path: Path) -> None:
    with alone() as strategy:
        job = Job(strategy, "sgd", on_servers=True, seed=None).train(range(2))
        expected = job.values()
        strategy.save(tmp_path)
    for stays in (True, False):
        with alone() as strategy:
            job = Job(strategy, "sgd", on_servers=stays, seed=None)
            strategy.load(tmp_path)
            strategy.step(lambda x, job=job: job.model(x).sum() * 0, torch.tensor([[0]]))
            assert_same(job.values(), expected)
            assert not stays or job.module.ids.seed == int(reading.read(tmp_path).parts()["tables"][0]["seed"])


def _save(servers: list[str], folder: str) -> dict[str, Any]:
    with on_servers(servers, seed=3, threads_per_replica=1, timeout=60.0) as strategy:
        job = Job(strategy, "adamw", on_servers=True).train(range(3))
        strategy.save(folder)
        strategy.barrier()
        return {name: value.numpy() for name, value in job.train(range(3, 6)).values().items()}


def _go_on(servers: list[str], folder: str) -> dict[str, Any]:
    with on_servers(servers, seed=3, threads_per_replica=1, timeout=60.0) as strategy:
        job = Job(strategy, "adamw", on_servers=True, seed=None)  # which each worker draws for itself
        strategy.load(folder)
        return {name: value.numpy() for name, value in job.train(range(3, 6)).values().items()}


def test_another_number_of_servers_goes_on(tmp_path: Path) -> None:
    first, second = Servers(2), Servers(3)
    expected = run_ranks(2, _save, first.addresses, str(tmp_path))
    for values in run_ranks(2, _go_on, second.addresses, str(tmp_path)):
        assert values.keys() == expected[0].keys()
        for name, value in values.items():
            assert (value == expected[0][name]).all(), name


def test_a_table_that_no_memory_holds(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self, rows: int = 10**12) -> None:
            super().__init__()
            self.table = muster.ShardedEmbedding(rows, 4, mode="sum", seed=1, on_servers=True)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum(1) * self.scale

    ids = torch.randint(0, 10**12, (16, 2), generator=torch.Generator().manual_seed(2))
    found = []
    for steps in (2, 0):
        with alone() as strategy:
            module = Wide()
            model, _ = strategy.prepare(module, muster.optim.Adagrad(module.parameters(), lr=0.3))
            strategy.load(tmp_path)
            for _ in range(steps):
                strategy.step(lambda x, model=model: model(x).square().mean(), ids)
            strategy.step(lambda x, model=model: model(x).sum() * 0, ids)
            with torch.no_grad():
                found.append(module(ids))
            if steps:
                strategy.save(tmp_path)
    assert torch.equal(*found)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 100_000
    with pytest.raises(muster.InvalidArgument, match=r"'table.weight' is a table of 1,000,000,000,000 rows"):
        checkpoint.model_state(tmp_path)
    with alone() as strategy, pytest.raises(muster.LayoutMismatch, match=r"'table.weight' of module 0 has shape"):
        module = Wide(rows=7)
        strategy.prepare(module, muster.optim.Adagrad(module.parameters(), lr=0.3))
        strategy.load(tmp_path)


def test_tools_show_tables_and_make_them_dense(tmp_path: Path) -> None:
    with alone() as strategy:
        job = Job(strategy, "adamw", on_servers=True).train(range(3))
        strategy.save(tmp_path)
        expected, optimizer = copy.deepcopy(job.module.state_dict()), copy.deepcopy(job.optimizer.state_dict())
    assert_same(checkpoint.model_state(tmp_path), expected)
    saved = checkpoint.optimizer_state(tmp_path)
    for number, values in optimizer["state"].items():
        assert_same(dict(saved["state"][number]), dict(values))


def _forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors, metadata = _C._checkpoint.read_snapshot(next(folder.glob("snapshot-*")))
    document = json.loads(str(metadata["content"]))
    (table,) = document["dict"]["tables"]
    change(table["dict"])
    writer = _C.SnapshotWriter(folder, None)
    writer.write_copy(tensors, {**metadata, "content": json.dumps(document)})
    writer.wait()


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("rows", lambda table: table.update(num_rows=10)),
        ("values", lambda table: table.update(dim=DIM + 1)),
        ("values", lambda table: table.update(values=table["rows"])),
        ("state", lambda table: table["state"]["dict"].update(exp_avg={"tensor": "modules/0/read.weight"})),
        ("places", lambda table: table.update(places=[[3, "ids.weight"]])),
        ("places", lambda table: table.update(places=[])),
        ("optimizer", lambda table: table.update(optimizer=1)),
        ("seed", lambda table: table.update(seed="-1")),
        ("init", lambda table: table.update(init="zeros")),
        ("rows", lambda table: table.pop("rows")),
    ],
)
def test_a_forged_table_is_refused_by_its_place(
    place: str, change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    with alone() as strategy:
        Job(strategy, "adamw", on_servers=True).train(range(2))
        strategy.save(tmp_path)
    _forged(tmp_path, change)
    with alone() as strategy, pytest.raises(muster.CheckpointError, match=f"'tables/0/{place}"):
        Job(strategy, "adamw", on_servers=True)
        strategy.load(tmp_path)
