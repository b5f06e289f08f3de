"""A worker that is started again, and joins the ParameterServerStrategy job that goes on without it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from support.ranks import Ranks
from support.servers import Servers, on_servers

EPOCHS = 3
SAMPLES = 50
STEPS = 50
RATE = 2.0**-10
"""Of updates that are whole multiples of it, so that their sums are exact."""


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def zeros() -> nn.Linear:
    module = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


def is_first_life(folder: Path) -> bool:
    """True once for each rank."""
    try:
        (folder / f"life-{os.environ['RANK']}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Run:
    """What a worker saw."""

    joined: bool
    samples: list[list[int]]
    """By epoch: of the steps that it made."""
    left: list[float]
    """The parameters, once all workers were through."""


def training(strategy: muster.Strategy, rate: float = RATE) -> tuple[nn.Linear, Any, Any]:
    """The module, as it is and prepared, and its loader."""
    module = zeros()
    data = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True)
    model, _, loader = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=rate), data)
    return module, model, loader


def _passes(addresses: list[str], staleness: int | None, folder: Path) -> Run:
    """Rank 1 dies in the second epoch, with a batch, and is started again while the other goes on."""
    first_life = is_first_life(folder)
    with on_servers(addresses, staleness=staleness, threads_per_replica=1) as strategy:
        module, model, loader = training(strategy)
        seen: list[list[int]] = []
        for epoch in range(EPOCHS):
            seen.append([])
            for x in loader:
                if strategy.rank == 1 and first_life and epoch == 1 and len(seen[1]) > 0:
                    die()
                if strategy.rank == 0 and epoch == 1 and len(seen[1]) >= 8:
                    # What is left of the pass is for both.
                    wait_for((folder / "joined").exists)
                strategy.step(lambda x: model(x).sum(), x)
                if strategy.rank == 1 and not first_life:
                    (folder / "joined").touch()
                seen[-1] += [int(v) for v in x[:, 0]]
        (folder / f"through-{strategy.rank}").touch()
        wait_for(lambda: all((folder / f"through-{rank}").exists() for rank in range(2)))
        strategy.run(lambda: None)
        return Run(strategy.joins, seen, module.weight.flatten().tolist())


@pytest.mark.parametrize("staleness", [None, 4])
def test_a_worker_that_is_started_again_takes_part_in_the_pass_under_way(staleness: int | None, tmp_path: Path) -> None:
    servers = Servers(2)
    ranks = Ranks(2, _passes, servers.addresses, staleness, tmp_path)
    ranks.restart(1)
    stayed, joiner = ranks.results()
    assert (stayed.joined, joiner.joined) == (False, True)
    assert joiner.samples[0] == []
    assert len(joiner.samples[1]) > 0
    assert sorted(stayed.samples[2] + joiner.samples[2]) == list(range(SAMPLES))
    # Each batch of each pass was applied once, that with which the worker died included.
    assert stayed.left == joiner.left == [-RATE * EPOCHS * sum(range(SAMPLES))] * 4


def _begin_anew(addresses: list[str], folder: Path) -> Run:
    """All die after some steps, whose sums they leave behind."""
    first_life = is_first_life(folder)
    with on_servers(addresses, staleness=None, threads_per_replica=1) as strategy:
        module, model, loader = training(strategy)
        seen: list[list[int]] = []
        for _ in range(EPOCHS):
            seen.append([])
            for x in loader:
                if first_life and len(seen[0]) >= 8:
                    (folder / f"sum-{strategy.rank}").write_text(str(sum(seen[0])))
                    wait_for(lambda: all((folder / f"sum-{rank}").exists() for rank in range(2)))
                    die()
                strategy.step(lambda x: model(x).sum(), x)
                seen[-1] += [int(v) for v in x[:, 0]]
        assert strategy.reduce(1, "sum") == 2
        strategy.run(lambda: None)
        return Run(strategy.joins, seen, module.weight.flatten().tolist())


def test_workers_that_are_all_started_again_begin_anew_from_the_servers_values(tmp_path: Path) -> None:
    servers = Servers(1)
    ranks = Ranks(2, _begin_anew, servers.addresses, tmp_path)
    ranks.restart(0, 1)
    first, second = ranks.results()
    assert not first.joined and not second.joined
    for a, b in zip(first.samples, second.samples, strict=True):
        assert sorted(a + b) == list(range(SAMPLES))
    before = sum(int((tmp_path / f"sum-{rank}").read_text()) for rank in range(2))
    assert first.left == second.left == [-RATE * (before + EPOCHS * sum(range(SAMPLES)))] * 4


def _is_replaced(addresses: list[str], options: dict[str, Any], folder: Path) -> str:
    """Rank 1 waits until another is in its place, and goes on; the newcomer has other options."""
    first_life = is_first_life(folder)
    module = zeros()
    try:
        with on_servers(addresses, staleness=None, **({} if first_life else options)) as strategy:
            model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=RATE))
            strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
            (folder / f"stepped-{strategy.rank}-{first_life}").touch()
            if first_life:
                wait_for((folder / "over").exists)
                strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
            if strategy.joins:
                with pytest.raises(muster.CommError, match="joined a running job"):
                    strategy.reduce(1, "sum")
    except muster.Error as error:
        (folder / f"error-{os.environ['RANK']}-{first_life}").write_text(f"{type(error).__name__}: {error}")
    return "through"


def test_the_one_that_was_replaced_is_told(tmp_path: Path) -> None:
    servers = Servers(2)
    ranks = Ranks(2, _is_replaced, servers.addresses, {}, tmp_path)
    wait_for(lambda: all((tmp_path / f"stepped-{rank}-True").exists() for rank in range(2)))
    replaced = ranks.processes[1]
    ranks.replace(1)
    wait_for((tmp_path / "stepped-1-False").exists)
    (tmp_path / "over").touch()
    assert ranks.results() == ["through", "through"]
    replaced.join(20)
    assert [path.name for path in tmp_path.glob("error-*")] == ["error-1-True"]
    text = (tmp_path / "error-1-True").read_text()
    assert text.startswith("CommError: worker 1") and "was replaced by another" in text


def test_a_joiner_with_other_options_is_refused(tmp_path: Path) -> None:
    servers = Servers(1)
    ranks = Ranks(2, _is_replaced, servers.addresses, {"clip_norm": 7.0}, tmp_path)
    wait_for(lambda: all((tmp_path / f"stepped-{rank}-True").exists() for rank in range(2)))
    ranks.replace(1)
    wait_for((tmp_path / "error-1-False").exists)
    (tmp_path / "over").touch()
    assert ranks.results() == ["through", "through"]
    text = (tmp_path / "error-1-False").read_text()
    assert text.startswith("InvalidArgument: the ranks have different options: the running job has clip_norm=unset, ")
    assert "this worker has clip_norm=7" in text


def _runs_ahead(addresses: list[str], staleness: int, folder: Path) -> int:
    """How far the joiner was ahead of the slow one at most."""
    first_life = is_first_life(folder)
    module = zeros()
    with on_servers(addresses, staleness=staleness, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=RATE))

        def step() -> None:
            strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))

        slow_steps = folder / "slow"
        slow_steps.mkdir(exist_ok=True)
        if strategy.rank == 0:
            for number in range(20):
                time.sleep(0.05)
                step()
                (slow_steps / str(number)).touch()
                if number == 4:
                    wait_for((folder / "joined").exists)
            return 0
        ahead = 0
        for number in range(15):
            begun = len(list(slow_steps.iterdir()))
            step()
            if number == 0:
                at_join = begun
                (folder / "joined").touch() if not first_life else None
            if first_life and number == 3:
                die()
            ahead = max(ahead, number - (begun - at_join))
        return ahead


def test_a_joiner_comes_in_beside_the_slowest_and_stays_within_the_bound(tmp_path: Path) -> None:
    servers = Servers(1)
    ranks = Ranks(2, _runs_ahead, servers.addresses, 2, tmp_path)
    ranks.restart(1)
    _, ahead = ranks.results()
    # A step of the slow one may count before its file is there.
    assert 1 <= ahead <= 4


def _looks_up_rows(addresses: list[str], folder: Path) -> list[float]:
    """Rows that were trained, and one that nobody touched, whose seed each process draws for itself."""
    first_life = is_first_life(folder)
    torch.manual_seed(1000 + os.getpid())
    rows = muster.ShardedEmbedding(50, 4)
    with on_servers(addresses, staleness=None, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(rows, torch.optim.SGD(rows.parameters(), lr=0.5))
        if first_life:
            strategy.step(lambda ids: model(ids).sum(), torch.tensor([1, 2]))
        if first_life and strategy.rank == 1:
            die()
        if not first_life:
            strategy.step(lambda ids: model(ids).sum(), torch.tensor([2, 3]))
            assert strategy.joins
        (folder / f"stepped-{strategy.rank}-{first_life}").touch()
        wait_for((folder / "stepped-1-False").exists)
        return [float(v) for v in model(torch.tensor([1, 2, 3, 40])).detach().flatten()]


def test_a_joiner_sees_the_rows_of_an_embedding_as_all_do(tmp_path: Path) -> None:
    servers = Servers(2)
    ranks = Ranks(2, _looks_up_rows, servers.addresses, tmp_path)
    ranks.restart(1)
    stayed, joiner = ranks.results()
    assert stayed == joiner
    assert len(set(stayed)) == 16


# --- synchronous jobs -------------------------------------------------------------------------------------------------
def _shares(addresses: list[str], victim: int, accumulate: int, replicas: int, folder: Path) -> Run:
    """One dies in the second epoch, and is started again, with a learning rate that must not count."""
    first_life = is_first_life(folder)
    devices = ["cpu"] * replicas
    with on_servers(addresses, devices=devices, threads_per_replica=1, accumulate=accumulate) as strategy:
        module, model, loader = training(strategy, RATE if first_life else 64.0)
        seen: list[list[int]] = []
        for epoch in range(EPOCHS):
            seen.append([])
            for number, x in enumerate(loader):
                if strategy.rank == victim and first_life and epoch == 1 and number == 3:
                    die()
                time.sleep(0.05)
                strategy.step(lambda x: muster.Loss(model(x).sum(), reduction="sum"), x)
                parts = x if isinstance(x, muster.PerReplica) else [x]
                seen[-1] += [int(v) for part in parts for v in part[:, 0]]
        return Run(strategy.joins, seen, module.weight.flatten().tolist())


@pytest.mark.parametrize(("victim", "accumulate", "replicas"), [(1, 1, 1), (0, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_a_worker_that_is_started_again_has_its_share_of_a_synchronous_pass(
    victim: int, accumulate: int, replicas: int, tmp_path: Path
) -> None:
    servers = Servers(2)
    ranks = Ranks(3, _shares, servers.addresses, victim, accumulate, replicas, tmp_path)
    ranks.restart(victim)
    runs = ranks.results()
    joiner = runs[victim]
    assert [run.joined for run in runs] == [rank == victim for rank in range(3)]
    assert joiner.samples[0] == []
    assert len(joiner.samples[1]) > 0
    assert sorted(sample for run in runs for sample in run.samples[2]) == list(range(SAMPLES))
    for run in runs:
        assert run.left == [-RATE * EPOCHS * sum(range(SAMPLES))] * 4


def _normalises(addresses: list[str], options: dict[str, Any], victim: int, folder: Path) -> list[Any]:
    """By step: its number, the statistics, the loss scale and the parameters after it."""
    first_life = is_first_life(folder)
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    norm = module[0]
    assert isinstance(norm, nn.BatchNorm1d)
    with on_servers(addresses, threads_per_replica=1, **options) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        seen: list[Any] = []
        while strategy.steps < STEPS:
            if strategy.rank == victim and first_life and strategy.steps == 5:
                die()
            time.sleep(0.05)
            generator = torch.Generator().manual_seed(strategy.steps)
            x = 10 + torch.randn(8, 2, generator=generator)
            result = strategy.step(lambda x: model(x).square().mean(), x)
            assert norm.running_mean is not None and norm.num_batches_tracked is not None
            numbers = [*norm.running_mean.tolist(), float(norm.num_batches_tracked), float(result.loss_scale)]
            seen.append((result.step, numbers, [p.tolist() for p in module.parameters()]))
        return seen


@pytest.mark.parametrize(
    ("buffers", "victim", "replicas"),
    [("mean", 0, 1), ("mean", 1, 1), ("chief", 0, 1), ("chief", 1, 1), ("mean", 1, 2), ("chief", 0, 2)],
)
def test_a_joiner_takes_over_statistics_scale_and_steps(
    buffers: str, victim: int, replicas: int, tmp_path: Path
) -> None:
    servers = Servers(1)
    options = {"buffers": buffers, "precision": "fp16", "loss_scale": muster.LossScale(init=16.0, interval=3)}
    options["devices"] = ["cpu"] * replicas
    ranks = Ranks(2, _normalises, servers.addresses, options, victim, tmp_path)
    ranks.restart(victim)
    runs = ranks.results()
    stayed, joiner = runs[1 - victim], runs[victim]
    assert [step for step, _, _ in stayed] == list(range(1, STEPS + 1))
    means = [numbers[0] for _, numbers, _ in stayed]
    # They tend to the data's mean, from which nothing fresh draws them away.
    assert all(later > earlier - 0.2 for earlier, later in pairwise(means))
    assert means[-1] > 7
    assert len(joiner) > 3
    assert joiner == stayed[-len(joiner) :]


# --- a C++ worker among Python ones -----------------------------------------------------------------------------------
def test_a_cpp_worker_joins_python_ones_in_the_middle_of_a_pass(programs: Path, tmp_path: Path) -> None:
    servers = Servers(2)
    victim = 1
    ranks = Ranks(3, _shares, servers.addresses, victim, 1, 1, tmp_path)
    variables = ranks.variables(victim)
    ranks.processes[victim].join(60)
    done = subprocess.run(
        [str(programs / "joining"), str(EPOCHS)],
        env={**variables, "MUSTER_SERVERS": ",".join(servers.addresses)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *epochs, left = [line.partition(":")[2].split() for line in done.stdout.splitlines()]
    joiner = [[int(sample) for sample in samples] for samples in epochs]
    stayed = [run for rank, run in enumerate(ranks.results()) if rank != victim]
    assert joiner[0] == []
    assert len(joiner[1]) > 0
    assert sorted(joiner[2] + stayed[0].samples[2] + stayed[1].samples[2]) == list(range(SAMPLES))
    # Each sample of each pass was applied once, those of the batch with which the worker died included.
    expected = [-RATE * EPOCHS * sum(range(SAMPLES))] * 4
    assert stayed[0].left == stayed[1].left == expected
    assert [float.fromhex(value) for value in left] == expected
