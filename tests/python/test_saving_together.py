"""save() and load() of several workers: what goes wrong on one rank is raised on all, within seconds, and the job goes
on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import muster
from support.ranks import run_ranks
from support.saving import DATA, Job, build, same, saved_twice
from support.servers import Servers, on_servers

SECONDS = 10.0
"""That a rank may wait; the timeout of the job is longer."""


def worker() -> muster.Strategy:
    return muster.MultiWorkerMirroredStrategy.from_env(threads_per_replica=1, timeout=120.0, seed=1)


def chiefs_errors(folder: str) -> list[str]:
    texts = []
    with muster.MultiWorkerMirroredStrategy.from_env(threads_per_replica=1, timeout=60.0) as strategy:
        Job(strategy)
        file = Path(folder) / "file"
        file.touch()
        for call in (strategy.save, strategy.load):
            try:
                call(file)
            except muster.CheckpointError as error:
                texts.append(str(error))
        strategy.save(folder)  # and the job goes on
        assert strategy.load(folder) == {}
    return texts


def test_what_fails_at_the_chief_is_raised_on_every_rank(tmp_path: Path) -> None:
    chiefs, others = run_ranks(2, chiefs_errors, str(tmp_path))
    assert len(chiefs) == 2 and all("file" in text for text in chiefs)
    assert others == [f"{what}() failed on rank 0: {text}" for what, text in zip(("save", "load"), chiefs, strict=True)]


class Fails:
    """An object that raises on one rank."""

    def __init__(self, strategy: muster.Strategy, rank: int, error: type[BaseException], *, saves: bool) -> None:
        self._is_here = strategy.rank == rank
        self._error = error
        self._saves = saves

    def state_dict(self) -> dict[str, int]:
        if self._is_here and self._saves:
            raise self._error("on purpose")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._is_here:
            raise self._error("on purpose")


def said(act: Callable[[], Any]) -> str:
    begin = time.monotonic()
    try:
        act()
    except BaseException as error:
        assert time.monotonic() - begin < SECONDS
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors_of_users(folder: Path, rank: int, error: type[BaseException]) -> list[str]:
    with worker() as strategy:
        job = Job(strategy).train(1)
        texts = [said(lambda: strategy.save(folder, f=Fails(strategy, rank, error, saves=True)))]
        job.train(2)
        texts.append(said(lambda: strategy.load(folder)))
        strategy.save(folder, f=(object := Fails(strategy, rank, error, saves=False)))
        job.train(3)
        before = job.values()
        texts.append(said(lambda: strategy.load(folder, f=object)))
        if strategy.rank == rank:
            assert same(job.values(), before)
        assert strategy.load(folder) == {}
        assert strategy.steps == 2
        job.train(4)
    return texts


@pytest.mark.parametrize(("rank", "error"), [(0, OSError), (1, ValueError), (1, KeyboardInterrupt)])
def test_an_exception_of_user_code_on_one_rank_is_raised_on_all(
    rank: int, error: type[BaseException], tmp_path: Path
) -> None:
    ranks = run_ranks(2, errors_of_users, tmp_path, rank, error)
    name = error.__name__
    assert ranks[rank] == [f"{name}: on purpose", "nothing", f"{name}: on purpose"]
    assert ranks[1 - rank] == [
        f"CheckpointError: save() failed on rank {rank}: {name}: on purpose",
        "nothing",
        f"CheckpointError: load() failed on rank {rank}: {name}: on purpose",
    ]


def errors_of_values(folder: Path) -> list[str]:
    with worker() as strategy:
        job = Job(strategy).train(1)
        texts = [
            said(lambda: strategy.save(folder, value=[object()] if strategy.is_chief else [])),
            said(lambda: strategy.save(folder, keep=0 if strategy.rank == 1 else 2)),
            said(lambda: strategy.save(folder, key={"\ud800": torch.zeros(1)})),
        ]
        job.train(2)
        strategy.save(folder)
    return texts


def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path: Path) -> None:
    chief, other = run_ranks(2, errors_of_values, tmp_path)
    assert "is a object, which a checkpoint does not hold" in chief[0] and "failed on rank 0" in other[0]
    assert "failed on rank 1: keep=0" in chief[1] and other[1].startswith("InvalidArgument: keep=0")
    assert chief[2].startswith("InvalidArgument: a key of 'state/key/value' is '\\ud800', which is no UTF-8")
    assert "on rank 0" in other[2]


def errors_of_layouts(folder: Path, what: str) -> tuple[str, bool, int]:
    with worker() as strategy:
        differs = strategy.rank == 1
        module = nn.Sequential(build(), nn.Identity())
        user = torch.optim.AdamW(module.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(user, 1)
        own = DataLoader(DATA, batch_size=8, generator=torch.Generator() if what == "loader" and differs else None)
        model, _ = strategy.prepare(module, user)
        strategy.prepare_loader(own, sharded=True)
        if what == "buffer" and differs:  # which prepare() has not seen
            model.module.register_buffer("more", torch.zeros(1))
        state = {"average" if what == "name" and differs else "schedule": schedule}
        before = [value.clone() for value in model.state_dict().values()]
        text = said(lambda: strategy.load(folder, **state))
        return text, same([*model.state_dict().values()], before), strategy.steps


def saved_by_one(folder: Path) -> None:
    with muster.MirroredStrategy(["cpu:0"], threads_per_replica=1) as strategy:
        module = nn.Sequential(build(), nn.Identity())
        user = torch.optim.AdamW(module.parameters(), lr=0.01)
        model, _ = strategy.prepare(module, user)
        strategy.prepare_loader(DataLoader(DATA, batch_size=8), sharded=True)
        strategy.step(lambda x, y: nn.functional.cross_entropy(model(x), y), *DATA[:8])
        strategy.save(folder, schedule=torch.optim.lr_scheduler.StepLR(user, 1))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("buffer", "lacks 'more' of module 0"),
        ("loader", "loader 0 has 1 generators of its own"),
        ("name", "no state of an object average=; it has schedule"),
    ],
)
def test_a_rank_whose_objects_are_others_is_a_mismatch_on_every_rank(what: str, words: str, tmp_path: Path) -> None:
    saved_by_one(tmp_path)
    chief, other = run_ranks(2, errors_of_layouts, tmp_path, what)
    for text, is_untouched, steps in (chief, other):
        assert text.startswith("LayoutMismatch: ") and words in text and is_untouched and steps == 0, (text, steps)
    assert "load() failed on rank 1" in chief[0] and str(tmp_path) in other[0]


def loaded_from_folders_of_their_own(folder: Path) -> tuple[dict[str, Any] | None, int]:
    with worker() as strategy:
        job = Job(strategy)
        own = folder / str(strategy.rank)
        if strategy.rank == 1:
            saved_twice(own)
        found = strategy.load(own, schedule=job.schedule)
        job.train(1)
        return found, strategy.steps


def test_a_checkpoint_that_another_host_than_the_chiefs_has_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, loaded_from_folders_of_their_own, tmp_path) == [({}, 2), ({}, 2)]


def errors_on_servers(folder: Path, addresses: list[str]) -> list[str]:
    with on_servers(addresses, seed=1, threads_per_replica=1, timeout=120.0) as strategy:
        job = Job(strategy).train(2)
        texts = [said(lambda: strategy.save(folder, f=Fails(strategy, 0, ValueError, saves=True)))]
        job.train(4)
        texts.append(said(lambda: strategy.save(folder)))
        job.train(6)
    return texts


def test_with_parameter_servers_the_chief_alone_hears_of_it(tmp_path: Path) -> None:
    servers = Servers(1)
    chief, other = run_ranks(2, errors_on_servers, tmp_path, servers.addresses)
    assert chief == ["ValueError: on purpose", "nothing"] and other == ["nothing", "nothing"]
