"""Random numbers outside steps go on from a checkpoint as if there had been none."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import muster
from muster import _C, random_states, saved_tree
from muster.checkpoint.describing import described, lines_of
from muster.checkpoint.reading import read
from support.jobs import Launcher, WorkerPool, make_job
from support.saving import mirrored


@pytest.fixture(autouse=True)
def ambient() -> Iterator[None]:
    """What tests make of the generators stays with them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> list[float]:
    """From every generator, numbers of both kinds: of normal ones each makes two, and keeps the second."""
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*numbers, *torch.rand(2).tolist()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def drawn_twice(strategy: muster.Strategy, folder: Path) -> tuple[list[float], list[float]]:
    seed_all(5 + strategy.rank)
    draw()
    strategy.save(folder)
    first = draw()
    seed_all(1)
    strategy.load(folder)
    return first, draw()


@pytest.mark.parametrize("kind", ["mirrored-2", "workers-2"])
def test_each_rank_goes_on_with_its_own_numbers(kind: str, two_workers: WorkerPool, tmp_path: Path) -> None:
    ranks = make_job(kind, two_workers)(drawn_twice, tmp_path)
    assert all(first == second for first, second in ranks)
    assert len({tuple(first) for first, _ in ranks}) == len(ranks)


def drawn_after_load(strategy: muster.Strategy, folder: Path) -> list[float]:
    seed_all(9)
    strategy.load(folder)
    return draw()


def test_where_the_number_of_workers_is_another_they_are_left_alone(worker_job: Launcher, tmp_path: Path) -> None:
    with mirrored() as strategy:
        seed_all(5)
        strategy.save(tmp_path)
    seed_all(9)
    assert worker_job(drawn_after_load, tmp_path) == [draw()] * 2


def rewritten(folder: Path, change: Any) -> None:
    """Another checkpoint in the folder, whose document `change` has changed."""
    found = _C.read_asked_snapshot(folder)
    assert found is not None
    content = saved_tree.decode(str(found[1]["content"]), found[0])
    change(content)
    document, tensors = saved_tree.encode(content)
    _C._checkpoint.write_snapshot(folder, tensors, {**found[1], "content": document})


def test_a_checkpoint_without_them_is_loaded(tmp_path: Path) -> None:
    with mirrored() as strategy:
        strategy.save(tmp_path)
    rewritten(tmp_path, lambda content: content.pop("random"))
    with mirrored() as strategy:
        seed_all(2)
        expected = draw()[:4]
        seed_all(2)
        assert strategy.load(tmp_path) == {}
        assert draw()[:4] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("python", torch.full((1, 627), -1)),
        ("numpy", torch.full((1, 627), 1 << 32)),
        ("numpy", torch.zeros(2, 627, dtype=torch.int64)),
        ("python", torch.zeros(1, 627)),
        ("cuda", torch.full((2, 33), 77, dtype=torch.uint8)),
        ("python", None),
    ],
)
def test_states_that_are_none_are_refused_and_nothing_loaded(name: str, value: Any, tmp_path: Path) -> None:
    with mirrored() as strategy:
        strategy.save(tmp_path)
    rewritten(tmp_path, lambda content: content["random"].update({name: value}))
    with mirrored() as strategy, pytest.raises(muster.CheckpointError, match="'random' is not what a checkpoint has"):
        strategy.load(tmp_path)


def test_numpy_is_left_out_where_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_all(3)
    assert random_states.states_here([torch.device("cpu")])["numpy"].any()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        saved: dict[str, Any] = random_states.states_here([torch.device("cpu")])
    assert not saved["numpy"].any()
    expected = np.random.get_state()
    random_states.restore({**saved, "cuda": None}, 0, 0, [torch.device("cpu")])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), expected, strict=True))


def test_a_generator_of_numpy_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    with mirrored() as strategy:
        seed_all(5)
        strategy.save(tmp_path)
        expected = random.random()
        before = np.random.get_bit_generator()
        np.random.set_bit_generator(np.random.PCG64(3))
        try:
            state = np.random.get_state(legacy=False)
            assert strategy.load(tmp_path) == {}
            assert np.random.get_state(legacy=False) == state
            assert random.random() == expected
        finally:
            np.random.set_bit_generator(before)


def test_a_device_of_cuda_has_the_state_of_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {device: torch.full((16,), device, dtype=torch.uint8) for device in (0, 1)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device.index: state}))
    devices = [torch.device("cuda:1"), torch.device("cpu"), torch.device("cuda:0")]
    saved = random_states.states_here(devices)
    assert random_states.is_of_form(saved)
    before = dict(states)
    states.update({0: torch.zeros(16, dtype=torch.uint8), 1: torch.zeros(16, dtype=torch.uint8)})
    # The second worker of two, each with such replicas.
    both = {name: torch.cat([torch.zeros_like(rows), rows]) for name, rows in saved.items()}
    random_states.restore(both, 1, 3, devices)
    assert all(torch.equal(states[device], before[device]) for device in (0, 1))


def test_show_names_them(tmp_path: Path) -> None:
    with mirrored() as strategy:
        strategy.save(tmp_path)
    found = described(read(tmp_path))
    assert found["random"] == ["numpy", "python"]
    assert any("one of 1 worker, and those of numpy, python" in line for line in lines_of(found))
