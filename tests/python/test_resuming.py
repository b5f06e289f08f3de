"""The program in docs/resuming.md: a job that was interrupted ends like one that was not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import muster
from muster import saved_tree
from support.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resuming.md"
STEPS_PER_EPOCH = 13


def program() -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    return names


def strategy_of(kind: str) -> muster.Strategy:
    torch.manual_seed(7)
    options = {"threads_per_replica": 1, "timeout": 60.0}
    if kind == "mirrored":
        return muster.MirroredStrategy(["cpu:0", "cpu:1"], **options)
    return muster.MultiWorkerMirroredStrategy.from_env(**options)


Parameters = list[np.ndarray[Any, Any]]


class Killed(Exception):
    """Ends a job where it is."""


def interrupt(strategy: muster.Strategy, after: int | None, how: str) -> None:
    """Asks the job to stop in the step after which `after` were made, or kills it in the next one."""
    step = strategy.step

    def interrupted(*args: Any) -> muster.StepResult:
        if strategy.steps + 1 == after and how == "stop":
            strategy.stop()
        if strategy.steps == after:
            raise Killed
        return step(*args)

    strategy.step = interrupted  # type: ignore[method-assign]


def train(kind: str, folder: Path, stop_after: int | None, how: str) -> Parameters | None:
    """One job: the final parameters, or None when it was interrupted."""
    with strategy_of(kind) as strategy:
        interrupt(strategy, stop_after, how)
        model = None
        with contextlib.suppress(Killed):
            model = program()["train"](strategy, folder)
        return None if model is None else [parameter.detach().numpy().copy() for parameter in model.parameters()]


def train_as(kind: str, folder: Path, stop_after: int | None = None, how: str = "stop") -> Parameters | None:
    if kind == "mirrored":
        return train(kind, folder, stop_after, how)
    first, second = run_ranks(2, train, kind, folder, stop_after, how)
    assert same(first, second)
    return first


def same(left: Parameters | None, right: Parameters | None) -> bool:
    if left is None or right is None:
        return left is right
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    parameters = train_as("mirrored", tmp_path_factory.mktemp("uninterrupted") / "never_written")
    assert parameters is not None
    return parameters


@pytest.mark.parametrize(
    ("before", "stop_after", "after"),
    [
        ("mirrored", STEPS_PER_EPOCH // 2, "mirrored"),
        ("mirrored", STEPS_PER_EPOCH, "mirrored"),
        ("mirrored", STEPS_PER_EPOCH + 4, "mirrored"),
        ("multi_worker", STEPS_PER_EPOCH + 4, "multi_worker"),
        ("mirrored", STEPS_PER_EPOCH + 4, "multi_worker"),
        ("multi_worker", STEPS_PER_EPOCH // 2, "mirrored"),
    ],
)
def test_a_resumed_job_ends_with_the_bits_of_an_uninterrupted_one(
    before: str, stop_after: int, after: str, uninterrupted: Parameters, tmp_path: Path
) -> None:
    assert train_as(before, tmp_path, stop_after) is None
    assert same(train_as(after, tmp_path), uninterrupted)


@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_a_job_that_was_killed_goes_on_from_its_last_checkpoint(
    kind: str, uninterrupted: Parameters, tmp_path: Path
) -> None:
    assert train_as(kind, tmp_path, STEPS_PER_EPOCH + 4, "kill") is None
    snapshot = muster._C.read_asked_snapshot(tmp_path)
    assert snapshot is not None and snapshot[1]["steps"] == 15
    assert same(train_as(kind, tmp_path), uninterrupted)


SIZES = (6, 10, 14, 9, 22, 7)


class Pieces:
    """Batches of sentences of a length, say: of as many as fit."""

    def __iter__(self) -> Iterator[list[int]]:
        end = 0
        for size in SIZES:
            yield list(range(end, end + size))
            end += size

    def __len__(self) -> int:
        return len(SIZES)


def train_on_pieces(kind: str, folder: Path, stop_after: int | None = None) -> Parameters | None:
    numbers = torch.linspace(-2, 2, 5 * sum(SIZES)).view(-1, 5).sin()
    torch.manual_seed(1)
    module = torch.nn.Linear(5, 3)
    with strategy_of(kind) as strategy:
        data = DataLoader(torch.utils.data.TensorDataset(numbers), batch_sampler=Pieces())
        model, _, loader = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.3), data)
        strategy.load(folder)
        for (x,) in loader:
            strategy.step(lambda x: model(x).square().mean(), x)
            if strategy.steps == stop_after:
                strategy.save(folder)
                return None
    return [parameter.detach().numpy().copy() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_batches_of_any_size_go_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    def train(folder: Path, stop_after: int | None = None) -> Parameters | None:
        if kind == "mirrored":
            return train_on_pieces(kind, folder, stop_after)
        return cast(Parameters | None, run_ranks(2, train_on_pieces, kind, folder, stop_after)[0])

    expected = train(tmp_path / "none")
    assert expected is not None
    for stop_after in range(1, len(SIZES)):
        folder = tmp_path / str(stop_after)
        assert train(folder, stop_after) is None
        assert same(train(folder), expected)


def test_the_best_of_the_page_is_kept_and_loaded(tmp_path: Path) -> None:
    page = program()
    with strategy_of("mirrored") as strategy:
        model, loader = strategy.prepare(torch.nn.Linear(16, 4), DataLoader(page["data"], batch_size=50))
        checkpoints = muster.Checkpoints(strategy, tmp_path, mode="max")
        assert page["evaluate"](strategy, checkpoints, model, loader)
        assert not page["evaluate"](strategy, checkpoints, model, loader)
        assert 0 <= page["load_the_best"](strategy, tmp_path) <= 1


def terminated(folder: Path) -> bool:
    """SIGTERM to rank 0 alone before training: whether this rank stopped."""
    with strategy_of("multi_worker") as strategy:
        if strategy.is_chief:
            os.kill(os.getpid(), signal.SIGTERM)
        return program()["train"](strategy, folder) is None


def test_sigterm_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(2, terminated, tmp_path) == [True, True]
    snapshot = muster._C.read_asked_snapshot(tmp_path)
    assert snapshot is not None
    saved = saved_tree.decode(str(snapshot[1]["content"]), snapshot[0])
    (loader,) = saved["loaders"]
    assert loader.pop("sampler") == "BatchSampler, RandomSampler"
    assert loader == {"epoch": 0, "batches": 1, "generators": [], "batch_size": 8, "size": 100, "samples": 100}
    assert (saved["strategy"]["steps"], saved["strategy"]["calls"]) == (1, 1)
