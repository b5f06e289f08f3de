"""Checkpoints that were damaged or forged: an older one is used, or what is wrong is said by name, and nothing of them
is loaded; whatever they say, no more memory is taken than they could fill."""

from __future__ import annotations

import random
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import muster
from muster import _C
from support.damage import DAMAGES, FORGERIES, Damage, flip
from support.saving import NAMES, Job, loaded, mirrored, same, saved_twice

MEMORY = 192 << 20
"""Of which threads and Python need a part."""


@contextmanager
def little_memory() -> Iterator[None]:
    """The process can take this much more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def folders(folder: Path) -> tuple[list[Path], list[list[Tensor]]]:
    """Two folders of two checkpoints each, in one file and in many, and the values of each checkpoint."""
    values = saved_twice(folder / "one")
    for name in sorted(NAMES.values()):
        tensors, metadata = _C._checkpoint.read_snapshot(folder / "one" / name)
        assert _C._checkpoint.write_snapshot(folder / "many", tensors, metadata, shard_bytes=1000).name == name
    return [folder / "one", folder / "many"], values


class Damaged:
    """A strategy that loads one damaged folder after another."""

    def __init__(self, folder: Path, strategy: muster.Strategy) -> None:
        self._goods, (self._older, self._newer) = folders(folder)
        self._folder = folder / "bad"
        self._strategy = strategy
        self.job = Job(strategy)

    def load(self, damages: list[Damage], seed: int) -> str | None:
        """What load() said of the newest checkpoint; None where it was loaded."""
        dice = random.Random(seed)
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(dice.choice(self._goods), self._folder)
        damage = dice.choice(damages)
        damage(self._folder / NAMES["newest"], dice)
        self._strategy.load(self._goods[0], schedule=self.job.schedule)
        with torch.no_grad():
            for parameter in self.job.model.parameters():
                parameter.fill_(0.25)
        before, steps = self.job.values(), self._strategy.steps
        said: str | None = None
        try:
            with little_memory():
                self._strategy.load(self._folder, schedule=self.job.schedule)
        except (muster.CheckpointError, muster.LayoutMismatch) as error:
            said = str(error)
        except Exception as error:
            notes = "".join(getattr(error, "__notes__", ()))
            if "was loaded" not in notes:  # else it is torch's own, of load_state_dict
                error.add_note(f"seed {seed}, {damage}")
                raise
            said = notes
        if said is not None:
            assert same(self.job.values(), before) and self._strategy.steps == steps, (seed, damage, said)
            assert str(self._folder) in said, (seed, damage, said)
            return said
        if same(self.job.values(), self._older):
            assert self._strategy.steps == 1, (seed, damage)
            return "passed over"
        return None


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Damaged]:
    with mirrored(seed=5) as strategy:
        yield Damaged(tmp_path, strategy)


def check_damages(damaged: Damaged, number: int, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(number):
        caplog.clear()
        assert damaged.load(DAMAGES, seed) == "passed over", seed
        assert re.search(f"'[^']*{NAMES['newest']}' is passed over: .*{NAMES['newest']}", caplog.text), seed


def check_forgeries(damaged: Damaged, number: int) -> None:
    results = []
    for seed in range(number):
        results.append(damaged.load(FORGERIES, seed))
        if results[-1] is None:  # other values of the same form: steps with them raise at most
            try:
                damaged.job.train(damaged.job.strategy.steps + 1)
            except Exception as error:
                print(seed, repr(error))
    assert len({*results} - {None, "passed over"}) > number // 20 and results.count("passed over") > number // 4


def test_the_checkpoint_before_a_damaged_one_is_loaded(damaged: Damaged, caplog: pytest.LogCaptureFixture) -> None:
    check_damages(damaged, 80, caplog)


@pytest.mark.long
def test_a_thousand_damages(damaged: Damaged, caplog: pytest.LogCaptureFixture) -> None:
    check_damages(damaged, 1000, caplog)


def test_a_forged_checkpoint_is_refused_or_passed_over_whole(damaged: Damaged) -> None:
    check_forgeries(damaged, 80)


@pytest.mark.long
def test_a_thousand_forgeries(damaged: Damaged) -> None:
    check_forgeries(damaged, 1000)


def test_where_all_are_damaged_nothing_is_loaded(tmp_path: Path) -> None:
    saved_twice(tmp_path)
    for name in NAMES.values():
        flip(tmp_path / name, random.Random(1))
    with pytest.raises(muster.CheckpointError, match="no snapshot in"):
        loaded(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    muster._C._checkpoint.write_snapshot(tmp_path, {}, {})
    with pytest.raises(muster.CheckpointError, match="no checkpoints of a strategy"):
        loaded(tmp_path)
