"""muster.Checkpoints: after which steps a loop saves, what is the best, and that all ranks do the same."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import muster
from muster import saving_policy
from muster.checkpoint import reading
from support.jobs import Launcher, WorkerPool, make_job
from support.saving import mirrored
from support.servers import Servers, on_servers


@pytest.fixture(params=["mirrored-2", "workers-2"])
def either(request: pytest.FixtureRequest, two_workers: WorkerPool) -> Launcher:
    return make_job(request.param, two_workers)


class Loop:
    """Steps of two small models, each with an optimizer; all ranks have the same batch."""

    def __init__(self, strategy: muster.Strategy) -> None:
        self.strategy = strategy
        torch.manual_seed(1)
        modules = nn.Linear(4, 1), nn.Linear(4, 1)
        users = [torch.optim.SGD(module.parameters(), lr=0.01) for module in modules]
        self.schedule = torch.optim.lr_scheduler.StepLR(users[0], step_size=3)
        self.models = strategy.prepare(*modules)
        self.optimizers = strategy.prepare(*users)

    def step(self, which: int = 0) -> muster.StepResult:
        batch = torch.ones(4, 4)
        optimizer = self.optimizers[which]
        return self.strategy.step(lambda x: self.models[which](x).square().mean(), batch, optimizers=optimizer)


class Watched(muster.Checkpoints):
    """Notes after which steps it saved."""

    def __init__(self, strategy: muster.Strategy, *args: Any, **options: Any) -> None:
        super().__init__(strategy, *args, **options)
        self.saved: list[int] = []

    def save(self, **values: Any) -> None:
        super().save(**values)
        self.saved.append(self._strategy.steps)


def steps_in(strategy: muster.Strategy, folder: Path) -> list[int]:
    """Of the checkpoints there, the newest last; as the chief says."""
    strategy._saving.writing.finish()
    strategy.barrier()
    manifests = sorted(folder.glob("snapshot-*/manifest.json"))
    return [json.loads(path.read_text())["manifest"]["int64s"]["steps"] for path in manifests]


# --- after a number of steps ------------------------------------------------------------------------------------------
def every_third(strategy: muster.Strategy, folder: Path) -> tuple[list[int], list[int]]:
    loop = Loop(strategy)
    checkpoints = Watched(strategy, folder, every=3, keep=2)
    assert checkpoints.load() is None
    assert not any(checkpoints.after_step(loop.step()) for _ in range(10))
    return checkpoints.saved, steps_in(strategy, folder)


def test_every_nth_step_is_saved_and_the_newest_stay(either: Launcher, tmp_path: Path) -> None:
    for result in either(every_third, tmp_path):
        assert result == ([3, 6, 9], [6, 9])


def windows_of_two(strategy: muster.Strategy, folder: Path) -> list[int]:
    loop = Loop(strategy)
    checkpoints = Watched(strategy, folder, every=1)
    for which in (0, 1, 0, 0, 0, 1, 1, 0):
        checkpoints.after_step(loop.step(which))
    checkpoints.after_step(strategy.flush())
    return checkpoints.saved


def test_a_checkpoint_waits_until_no_window_is_open(either: Launcher, tmp_path: Path) -> None:
    # Windows of the first model close in calls 3, 5 and 9, which flushes both; of the other in 6 and 9.
    for saved in either(windows_of_two, tmp_path, accumulate=2):
        assert saved == [3, 5]


def stopped(strategy: muster.Strategy, folder: Path) -> list[Any]:
    loop = Loop(strategy)
    checkpoints = Watched(strategy, folder, every=2, schedule=loop.schedule)
    told = []
    for number in range(1, 5):
        if number == 4 and strategy.rank == strategy.num_workers - 1:
            strategy.stop()
        result = loop.step()
        loop.schedule.step()
        told.append(checkpoints.after_step(result, number=number, more=[1, "a"]))
    told.append(checkpoints.after_step(None, number=9))  # it has saved after this step already
    first = loop.schedule.state_dict()
    loop.schedule.step()
    values = checkpoints.load()
    return [told, checkpoints.saved, values, loop.schedule.state_dict() == first, strategy.steps]


def test_where_the_job_stops_it_saves_once_and_all_ranks_leave(either: Launcher, tmp_path: Path) -> None:
    for told, saved, values, is_same, steps in either(stopped, tmp_path):
        assert told == [False, False, False, True, True] and saved == [2, 4]
        assert values == {"number": 4, "more": [1, "a"]} and is_same and steps == 4


def stopped_between(strategy: muster.Strategy, folder: Path) -> tuple[bool, list[int]]:
    loop = Loop(strategy)
    checkpoints = Watched(strategy, folder)
    checkpoints.after_step(loop.step())
    strategy.stop()
    return checkpoints.after_step(loop.step()), checkpoints.saved


def test_without_a_period_it_saves_only_where_the_job_stops(either: Launcher, tmp_path: Path) -> None:
    for result in either(stopped_between, tmp_path):
        assert result == (True, [2])


def test_a_job_that_goes_on_saves_after_the_same_steps(tmp_path: Path) -> None:
    for expected in ([3], [6, 9]):
        with mirrored() as strategy:
            loop = Loop(strategy)
            checkpoints = Watched(strategy, tmp_path, every=3)
            checkpoints.load()
            assert not any(checkpoints.after_step(loop.step()) for _ in range(5 if len(expected) == 1 else 7))
            assert checkpoints.saved == expected  # and is as good as killed


def test_without_a_folder_it_says_only_when_the_job_stops() -> None:
    with mirrored() as strategy:
        loop = Loop(strategy)
        checkpoints = muster.Checkpoints(strategy, None, every=1, every_seconds=1e-9, schedule=loop.schedule)
        assert checkpoints.load() is None
        assert not checkpoints.after_step(loop.step(), epoch=1)
        assert not checkpoints.best(0.5)
        strategy.stop()
        assert checkpoints.after_step(loop.step())


# --- after a time -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def clock() -> Iterator[SimpleNamespace]:
    """A clock that tests set."""
    own = SimpleNamespace(now=100.0)
    real = saving_policy.time
    saving_policy.time = SimpleNamespace(monotonic=lambda: own.now)  # type: ignore[assignment]
    try:
        yield own
    finally:
        saving_policy.time = real


def timed(strategy: muster.Strategy, folder: Path, seconds: list[float]) -> tuple[list[int], int]:
    """Steps that take so long at the chief; another rank's clock is far from right."""
    loop = Loop(strategy)
    asked = 0
    number_of_chief = strategy._saving.number_of_chief

    def counted(number: int) -> int:
        nonlocal asked
        asked += 1
        return number_of_chief(number)

    strategy._saving.number_of_chief = counted  # type: ignore[method-assign]
    with clock() as own:
        checkpoints = Watched(strategy, folder, every_seconds=100, keep=1)
        for each in seconds:
            own.now += each if strategy.is_chief else 77.0 / (1 + strategy.steps)
            checkpoints.after_step(loop.step())
    return checkpoints.saved, asked


def test_a_time_is_the_chiefs_and_seldom_asked_for(either: Launcher, tmp_path: Path) -> None:
    for saved, asked in either(timed, tmp_path, [0.5] * 650):
        assert saved == [200, 400, 600]
        assert asked == 0 if either.workers == 0 else asked < 3 * 18


def test_first_steps_that_are_slow_or_fast_do_not_decide(either: Launcher, tmp_path: Path) -> None:
    for saved, _ in either(timed, tmp_path, [0.001] * 3 + [10.0] * 20):
        assert len(saved) == 2 and saved[0] <= 3 + 13  # 10 where it is asked after each step
    for saved, _ in either(timed, tmp_path, [60.0] + [0.5] * 100):
        assert saved == [81]


def test_steps_and_a_time_together(tmp_path: Path) -> None:
    with mirrored() as strategy, clock() as own:
        loop = Loop(strategy)
        checkpoints = Watched(strategy, tmp_path, every=4, every_seconds=10.0)
        for each in (1, 1, 1, 1, 6, 6, 1, 1, 9):
            own.now += each
            checkpoints.after_step(loop.step())
        assert checkpoints.saved == [4, 6, 8]


# --- the best ---------------------------------------------------------------------------------------------------------
def bests(
    strategy: muster.Strategy, folder: Path, mode: Any, metrics: list[Any], keep: int, **values: Any
) -> list[Any]:
    loop = Loop(strategy)
    checkpoints = muster.Checkpoints(strategy, folder, every=1, keep=1, mode=mode, best_keep=keep)
    checkpoints.load()
    found = []
    for metric in metrics:
        checkpoints.after_step(loop.step())
        own = metric if strategy.is_chief else 0.0  # the chief's decides
        found.append(checkpoints.best(own, epoch=strategy.steps, **values))
    kept = steps_in(strategy, folder / "best")
    return [found, kept, strategy.load(folder / "best"), strategy.steps]


def test_the_best_is_kept_and_known_to_the_next_job(either: Launcher, tmp_path: Path) -> None:
    metrics = [math.nan, 0.5, torch.tensor(0.75), 0.25, 0.25, math.nan, math.inf]
    for found, kept, state, steps in either(bests, tmp_path, "min", metrics, 2):
        assert found == [False, True, False, True, False, False, False] and kept == [2, 4] and steps == 4
        assert state == {"best": {"metric": 0.25, "mode": "min"}, "epoch": 4}
    for found, kept, state, _ in either(bests, tmp_path, "min", [0.3, -math.inf, 0.1], 1):
        assert found == [False, True, False] and kept == [9]
        assert state == {"best": {"metric": -math.inf, "mode": "min"}, "epoch": 9}


def best_of_large(strategy: muster.Strategy, folder: Path) -> list[Any]:
    return bests(strategy, folder, "max", [0.75, 0.5, 0.25], 1, seed=2**127 + 1)


def test_the_best_may_hold_integers_of_any_size(either: Launcher, tmp_path: Path) -> None:
    for found, kept, state, _ in either(best_of_large, tmp_path):
        assert found == [True, False, False] and kept == [1]
        assert state == {"best": {"metric": 0.75, "mode": "max"}, "epoch": 1, "seed": 2**127 + 1}


def test_the_greatest_may_be_the_best(tmp_path: Path) -> None:
    with mirrored() as strategy:
        found, kept, state, _ = bests(strategy, tmp_path, "max", [1, 3.0, 2.0, 4], 1)
        assert found == [True, True, False, True] and kept == [4] and state["best"] == {"metric": 4.0, "mode": "max"}
        with pytest.raises(muster.InvalidArgument, match="best by mode='max', and mode='min' was given; give that"):
            muster.Checkpoints(strategy, tmp_path).best(0.0)


def test_what_could_not_be_written_is_not_the_best(tmp_path: Path) -> None:
    with mirrored() as strategy:
        Loop(strategy)
        checkpoints = muster.Checkpoints(strategy, tmp_path)
        (tmp_path / "best").touch()
        with pytest.raises(muster.CheckpointError, match="best"):
            checkpoints.best(0.1)
        (tmp_path / "best").unlink()
        assert checkpoints.best(0.2)
        assert steps_in(strategy, tmp_path / "best") == [0]


def save_bests(folder: Path, *metrics: float) -> list[bool]:
    """What best() said of each in a job of its own, which keeps two."""
    with mirrored() as strategy:
        Loop(strategy)
        checkpoints = muster.Checkpoints(strategy, folder, best_keep=2)
        return [checkpoints.best(metric) for metric in metrics]


def promise(manifest: Path, metric: float) -> None:
    """Has it claim another metric, as whoever knows nothing of its checksum would."""
    text = manifest.read_text()
    assert text.count("0.25") == 1
    manifest.write_text(text.replace("0.25", str(metric)))


def test_what_is_damaged_is_not_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert save_bests(tmp_path, 0.5, 0.25) == [True, True]
    newest = tmp_path / "best" / "snapshot-0000000002"
    promise(newest / "manifest.json", 0.05)
    assert save_bests(tmp_path, 0.6, 0.4, 0.45) == [False, True, False]  # than 0.5
    assert sum(newest.name in line and "passed over" in line for line in caplog.messages) == 1
    shard = next((tmp_path / "best" / "snapshot-0000000003").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert save_bests(tmp_path, 0.45) == [True]


def test_where_none_is_good_the_first_one_is_the_best(tmp_path: Path) -> None:
    assert save_bests(tmp_path, 0.25) == [True]
    promise(tmp_path / "best" / "snapshot-0000000001" / "manifest.json", 0.05)
    assert save_bests(tmp_path, 0.75, 0.8) == [True, False]


def test_the_best_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def read_folder(folder: Path) -> reading.Checkpoint:
        read.append(folder.name)
        return as_it_is(folder)

    as_it_is = reading.read_folder
    assert save_bests(tmp_path, 0.5) == [True]
    monkeypatch.setattr(reading, "read_folder", read_folder)
    assert save_bests(tmp_path, 0.6, 0.7, 0.25, 0.3, 0.1) == [False, False, True, False, True]
    assert read == ["snapshot-0000000001"]  # and none of those that the job itself has written


def wrong_on_one(strategy: muster.Strategy, folder: Path) -> list[str]:
    loop = Loop(strategy)
    checkpoints = muster.Checkpoints(strategy, folder)
    texts = []
    try:
        checkpoints.best("best" if strategy.rank == 1 else 0.5)  # type: ignore[arg-type]
    except muster.Error as error:
        texts.append(f"{type(error).__name__}: {error}")
    loop.step()
    return [*texts, str(checkpoints.best(0.5))]


def test_a_metric_that_is_none_on_one_rank_is_said_on_all(worker_job: Launcher, tmp_path: Path) -> None:
    chief, other = worker_job(wrong_on_one, tmp_path)
    assert chief[0].startswith("CheckpointError: best() failed on rank 1: best() was given 'best'; give it one")
    assert other[0].startswith("InvalidArgument: best() was given 'best'") and chief[1] == other[1] == "True"


# --- parameter servers ------------------------------------------------------------------------------------------------
def with_servers(folder: Path, addresses: list[str]) -> list[Any]:
    with on_servers(addresses, seed=1, threads_per_replica=1, timeout=60.0) as strategy:
        loop = Loop(strategy)
        checkpoints = muster.Checkpoints(strategy, folder, every=2, every_seconds=3600)
        checkpoints.load()
        for _ in range(4):
            checkpoints.after_step(loop.step())
        best = checkpoints.best(0.5)
        strategy.stop()
        return [checkpoints.after_step(loop.step()), best, steps_in(strategy, folder)]


def test_with_parameter_servers_the_chief_saves_alone(two_workers: WorkerPool, tmp_path: Path) -> None:
    servers = Servers(1)
    chief, other = two_workers.call(with_servers, tmp_path, servers.addresses)
    assert chief == [True, True, [2, 4, 5]] and other[:2] == [True, False]
    assert json.loads(next((tmp_path / "best").glob("*/manifest.json")).read_text())["manifest"]["int64s"]["steps"] == 4


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0: it must be an int >= 1, or None"),
        ({"every": 2.5}, "every=2.5"),
        ({"every": True}, "every=True"),
        ({"every_seconds": 0}, "every_seconds=0: it must be a number of seconds above 0"),
        ({"every_seconds": math.nan}, "every_seconds=nan"),
        ({"every_seconds": "10"}, "every_seconds='10'"),
        ({"keep": 0}, "keep=0: it must be an int >= 1, or None, which keeps all"),
        ({"best_keep": -1}, "best_keep=-1"),
        ({"mode": "greatest"}, "mode='greatest': it must be 'min' or 'max'"),
        ({"epoch": 3}, r"epoch= is a int without .* give values to after_step\(result, epoch=...\)"),
        ({"best": nn.Linear(1, 1)}, "best= is what best.. calls its metric in a checkpoint; give it another name"),
    ],
)
def test_nonsense_is_refused_at_once(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with mirrored() as strategy, pytest.raises(muster.InvalidArgument, match=words):
        muster.Checkpoints(strategy, tmp_path, **options)


def test_nonsense_is_refused_in_calls(tmp_path: Path) -> None:
    with mirrored(accumulate=2) as strategy:
        loop = Loop(strategy)
        checkpoints = muster.Checkpoints(strategy, tmp_path, schedule=loop.schedule)
        with pytest.raises(muster.InvalidArgument, match="given a float; give it what"):
            checkpoints.after_step(0.5)  # type: ignore[arg-type]
        with pytest.raises(muster.InvalidArgument, match="schedule= is an object that"):
            checkpoints.save(schedule=1)
        with pytest.raises(muster.InvalidArgument, match="best= is what best"):
            checkpoints.save(best=1)
        for metric in (True, None, torch.ones(2), 1j):
            with pytest.raises(muster.InvalidArgument, match="give it one real number"):
                checkpoints.best(metric)  # type: ignore[arg-type]
        loop.step()
        for call in (checkpoints.save, lambda: checkpoints.best(0.5)):
            with pytest.raises(muster.InvalidArgument, match=r"flush\(\)"):
                call()
        assert not list(tmp_path.iterdir())


def test_a_relative_folder_stays_where_it_was_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with mirrored() as strategy:
        checkpoints = muster.Checkpoints(strategy, "runs")
        monkeypatch.chdir(elsewhere)
        checkpoints.save()
        assert checkpoints.best(1.0)
        assert checkpoints.load() is not None
    assert not [*elsewhere.iterdir()] and (tmp_path / "runs" / "best").is_dir()
