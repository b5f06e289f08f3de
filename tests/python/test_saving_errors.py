"""What goes wrong while a checkpoint is written or read: it is said on every rank, once, and training goes on."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import muster
from muster.writing import Writing
from support.ranks import run_ranks
from support.saving import Job, mirrored


@contextmanager
def small_files() -> Iterator[None]:
    """No file grows beyond 4 KB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


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
        strategy.save(tmp_path, number=3, **big)
    strategy.close()
    with mirrored() as strategy:
        Job(strategy)
        found = strategy.load(tmp_path)
        assert found is not None and found["number"] == (1 if how == "close" else 3)


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


def test_a_fork_of_the_process_neither_waits_nor_writes(tmp_path: Path) -> None:
    def child() -> None:
        strategy._saving.writing.end()
        strategy._saving.writing = Writing()
        gc.collect()

    with mirrored() as strategy:
        Job(strategy)
        strategy.save(tmp_path, big=torch.zeros(20_000_000))
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(20)
        assert process.exitcode == 0
        assert set(strategy.load(tmp_path) or {}) == {"big"}
