"""What goes wrong while a checkpoint is written or read in one process: it is said, once, and training goes on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import muster
from muster.loader import Loader
from muster.writing import Writing
from support.ranks import run_ranks
from support.saving import NAMES, Job, mirrored, same, small_files


@pytest.mark.parametrize("how", ["save", "load", "close"])
def test_what_went_wrong_with_the_last_checkpoint_is_said_at_the_next_call_once(how: str, tmp_path: Path) -> None:
    strategy = mirrored()
    Job(strategy)
    big = {"big": torch.zeros(10_000)}
    strategy.save(tmp_path, number=1)
    strategy.load(tmp_path)
    with small_files():
        strategy.save(tmp_path, number=2, **big)
        with pytest.raises(muster.CheckpointError, match=r"shard-00000"):
            {"save": lambda: strategy.save(tmp_path), "load": lambda: strategy.load(tmp_path), "close": strategy.close}[
                how
            ]()
    if how != "close":
        found = strategy.load(tmp_path)
        assert found is not None and found["number"] == 1
        (tmp_path / f".partial-{NAMES['newest']}").mkdir()  # as a disk that was full may leave it
        strategy.save(tmp_path, number=3, **big)
    strategy.close()
    with mirrored() as strategy:
        Job(strategy)
        found = strategy.load(tmp_path)
        assert found is not None and found["number"] == (1 if how == "close" else 3)
    assert not [*tmp_path.glob(".partial-snapshot-*")]


def test_close_ends_all_and_raises_what_went_wrong_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Loader[object]) -> None:
        raise RuntimeError("a worker of the loader")

    strategy = mirrored()
    Job(strategy)
    with small_files(), monkeypatch.context() as patch:
        strategy.save(tmp_path, big=torch.zeros(10_000))
        patch.setattr(Loader, "end_workers", fail)
        with pytest.raises(RuntimeError, match="a worker of the loader"):
            strategy.close()
    strategy.close()
    with mirrored() as other:
        other.save(tmp_path)


def test_one_job_writes_to_a_folder_and_another_once_it_is_closed(tmp_path: Path) -> None:
    with mirrored() as first:
        first.save(tmp_path)
        first.save(tmp_path, keep=1)
        with mirrored() as second, pytest.raises(muster.CheckpointError, match="another process uses the folder"):
            second.save(tmp_path)
        first.save(tmp_path / "other")
        first.load(tmp_path)
    with mirrored() as third:
        third.save(tmp_path)


@pytest.mark.parametrize("what", ["folder", "content"])
def test_a_folder_that_is_removed_while_the_job_trains_is_missed_once_and_made_again(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with mirrored() as strategy:
        job = Job(strategy)
        strategy.save(folder, number=1)
        strategy.load(folder)
        shutil.rmtree(folder)
        if what == "content":
            folder.mkdir()
        job.train(1)
        strategy.save(folder, number=2)
        with pytest.raises(muster.CheckpointError, match="is gone, or what was in it"):
            strategy.save(folder, number=3)
        job.train(2)
        strategy.save(folder, number=4)
        assert strategy.load(folder) == {"number": 4} and strategy.steps == 2
        with mirrored() as second, pytest.raises(muster.CheckpointError, match="another process uses the folder"):
            second.save(folder)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Which everybody may enter and write to."""
    folder = Path("/tmp") / f"muster-test-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def write_as_nobody(folder: Path) -> None:
    if os.getuid() == 0:  # who may write everywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    with mirrored() as strategy:
        Job(strategy)
        strategy.save(folder, number=1)
        strategy.load(folder)
        for mode in (0o500, 0o000):
            folder.chmod(mode)
            strategy.save(folder)
            with pytest.raises(muster.CheckpointError, match=f"{folder}.*Permission denied"):
                strategy.save(folder)
            if mode == 0:
                with pytest.raises(muster.CheckpointError, match=f"{folder}.*Permission denied"):
                    strategy.load(folder)
            folder.chmod(0o700)
        assert strategy.load(folder) == {"number": 1}
        strategy.save(folder, number=2)
        assert strategy.load(folder) == {"number": 2}
        folder.chmod(0o000)
    with mirrored() as strategy:
        Job(strategy)
        with pytest.raises(muster.CheckpointError, match=f"{folder}.*Permission denied"):
            strategy.save(folder)
        folder.chmod(0o700)


def test_a_folder_without_permissions_is_named_and_used_once_it_has_them(open_folder: Path) -> None:
    run_ranks(1, write_as_nobody, open_folder / "checkpoints")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with mirrored() as strategy:
        Job(strategy)
        assert strategy.load(tmp_path / "nowhere") is None
        file = tmp_path / "file"
        for call, folder in ((strategy.load, file), (strategy.save, file), (strategy.save, file / "below")):
            with pytest.raises(muster.CheckpointError, match=f"'{folder}.*directory"):
                call(folder)


def test_ctrl_c_ends_the_wait_for_a_checkpoint_and_not_its_writing(tmp_path: Path) -> None:
    with mirrored() as strategy:
        job = Job(strategy)
        big = {"big": torch.zeros(50_000_000)}
        interrupted = False
        while not interrupted:
            strategy.save(tmp_path, number=1, **big)
            sent = threading.Timer(0.02, os.kill, [os.getpid(), signal.SIGINT])
            sent.start()
            try:
                strategy.save(tmp_path, number=2)
                time.sleep(1)  # it was written too soon
            except KeyboardInterrupt:
                interrupted = not strategy._saving.writing._writer.is_done  # type: ignore[union-attr]
        job.train(1)
        found = strategy.load(tmp_path)
        assert found is not None and found["number"] == 1
        job.train(1)
        strategy.save(tmp_path, number=3)
    with mirrored() as strategy:
        Job(strategy)
        assert strategy.load(tmp_path) == {"number": 3}


def test_a_thread_saves_while_the_one_that_steps_waits_for_it(tmp_path: Path) -> None:
    with mirrored() as strategy:
        job = Job(strategy).train(3)

        def in_thread(act: Callable[[], object]) -> None:
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()

        in_thread(lambda: strategy.save(tmp_path, schedule=job.schedule))
        expected = job.values()
        job.train(5)
        in_thread(lambda: strategy.load(tmp_path, schedule=job.schedule))
        assert strategy.steps == 3 and same(job.values(), expected)


def test_a_thread_cannot_save_while_another_steps(tmp_path: Path) -> None:
    with mirrored() as strategy:
        job = Job(strategy)
        inside, go_on = threading.Event(), threading.Event()

        def loss(x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(20)
            return job.model(x).sum()

        thread = threading.Thread(target=strategy.step, args=(loss, torch.rand(4, 8)))
        thread.start()
        assert inside.wait(20)
        try:
            for call in (strategy.save, strategy.load):
                with pytest.raises(muster.InvalidArgument, match="another thread is in step"):
                    call(tmp_path)
        finally:
            go_on.set()
            thread.join()
        strategy.save(tmp_path)


def test_a_fork_of_the_process_neither_waits_nor_writes(tmp_path: Path) -> None:
    def child() -> None:
        strategy._saving.writing.end()
        strategy._saving.writing = Writing()
        gc.collect()

    def misuse() -> None:
        for call in (strategy.save, strategy.load):
            with pytest.raises(muster.InvalidArgument, match="in a fork of the strategy's process"):
                call(tmp_path)

    with mirrored() as strategy:
        Job(strategy)
        strategy.save(tmp_path, big=torch.zeros(20_000_000))
        for act in (misuse, child):
            process = multiprocessing.get_context("fork").Process(target=act)
            process.start()
            process.join(20)
            assert process.exitcode == 0
        assert set(strategy.load(tmp_path) or {}) == {"big"}


def test_what_a_killed_job_has_forked_does_not_keep_its_folder(tmp_path: Path) -> None:
    """Workers of a DataLoader, say, which live some seconds longer."""
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()

    def job() -> None:
        with mirrored() as strategy:
            Job(strategy)
            strategy.save(tmp_path)
            strategy.load(tmp_path)
            if os.fork() == 0:
                ours.send(os.getpid())
                time.sleep(60)
                os._exit(0)
            time.sleep(60)

    process = context.Process(target=job)
    process.start()
    ours.close()
    child = 0
    try:
        assert theirs.poll(60), "the job has not saved and loaded"
        child = theirs.recv()
        process.kill()
        process.join()
        os.kill(child, 0)
        with mirrored() as strategy:
            Job(strategy)
            assert strategy.load(tmp_path) == {}
            strategy.save(tmp_path)
    finally:
        process.kill()
        if child:
            os.kill(child, signal.SIGKILL)


# --- what explain() says ----------------------------------------------------------------------------------------------
def checkpoints_line(strategy: muster.Strategy) -> str:
    lines = [line for line in strategy.explain().splitlines() if line.startswith("checkpoints: ")]
    assert len(lines) <= 1
    return lines[0] if lines else ""


def finished(strategy: muster.Strategy) -> str:
    """What it says once nothing is being written."""
    while "being written" in (line := checkpoints_line(strategy)):
        time.sleep(0.002)
    return line


def test_explain_tells_of_the_last_checkpoint_and_of_what_went_wrong(tmp_path: Path) -> None:
    with mirrored() as strategy:
        assert checkpoints_line(strategy) == ""
        strategy.save(tmp_path, big=torch.zeros(10_000))
        folder = tmp_path / NAMES["older"]
        assert re.fullmatch(
            rf"checkpoints: the last one, '{folder}' \([\d.]+ kB\), was written at \d{{4}}-\d\d-\d\d .*",
            finished(strategy),
        )
        with small_files():
            strategy.save(tmp_path, big=torch.zeros(10_000))
            line = finished(strategy)
            assert line.startswith("checkpoints: the last one could not be written: ") and "shard-00000" in line
            assert f"; the one before, '{folder}' (" in line
            with pytest.raises(muster.CheckpointError, match=r"shard-00000"):  # explain() has not taken it
                strategy.save(tmp_path)
            assert "could not be written" in finished(strategy)
        strategy.save(tmp_path)
        assert finished(strategy).startswith(f"checkpoints: the last one, '{tmp_path}")
        (tmp_path / "file").touch()
        with pytest.raises(muster.CheckpointError):
            strategy.save(tmp_path / "file")
        assert str(tmp_path / "file") in finished(strategy)
    assert "the last one could not be written" in checkpoints_line(strategy)


def test_explain_names_what_was_written_here_and_no_other_folder(tmp_path: Path) -> None:
    with mirrored() as strategy:
        (tmp_path / "snapshot-of-others").mkdir()
        (tmp_path / "snapshot-of-others" / "manifest.json").touch()
        strategy.save(tmp_path)
        written = tmp_path / NAMES["older"]
        assert f"the last one, '{written}' (" in finished(strategy)
        strategy.save(tmp_path)
        while not strategy._saving.writing._writer.is_done:  # type: ignore[union-attr]
            time.sleep(0.002)
        shutil.copytree(written, tmp_path / "snapshot-0000000009")
        assert f"the last one, '{tmp_path / NAMES['newest']}' (" in finished(strategy)


def test_explain_says_that_a_checkpoint_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mirrored() as strategy:
        strategy.save(tmp_path, big=torch.zeros(10_000))
        with monkeypatch.context() as patch:
            patch.setattr(strategy._saving.writing, "_writer", SimpleNamespace(is_done=False))
            line = checkpoints_line(strategy)
        assert re.fullmatch(rf"checkpoints: one of [\d.]+ kB is being written to '{tmp_path}' for \d+\.\d s", line)
        assert "was written" in finished(strategy)


def test_a_save_within_a_save_is_refused(tmp_path: Path) -> None:
    class Saves:
        """Its state is asked for in the middle of a save, where a signal handler may run."""

        def state_dict(self) -> dict[str, int]:
            strategy.save(tmp_path / "inner")
            return {}

    with mirrored() as strategy:
        job = Job(strategy)
        with pytest.raises(muster.InvalidArgument, match=r"save\(\) was called inside save\(\)"):
            strategy.save(tmp_path / "outer", saves=Saves())
        strategy.save(tmp_path / "outer", schedule=job.schedule)
    assert not (tmp_path / "inner").exists() and list((tmp_path / "outer").glob("snapshot-*"))
