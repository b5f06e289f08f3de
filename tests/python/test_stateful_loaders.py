"""Loaders of torchdata, and data sets that know where they are: across a kill every sample comes once in an epoch."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import muster
from support.jobs import Launcher, WorkerPool, make_job

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
StatefulDataLoader = stateful_dataloader.StatefulDataLoader

SIZE = 37


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def of_worker(share: Callable[[int, int], slice]) -> list[int]:
    """The items of this DataLoader worker."""
    info = get_worker_info()
    items = list(range(SIZE))
    return items if info is None else items[share(info.id, info.num_workers)]


def in_turn(worker: int, workers: int) -> slice:
    return slice(worker, None, workers)


def unequal(worker: int, workers: int) -> slice:
    return slice(0, SIZE - 9) if worker == 0 else slice(SIZE - 9, None)


class Stream(IterableDataset[int]):
    """Has no state; it shuffles by numbers that the loader seeds."""

    def __init__(self, share: Callable[[int, int], slice] = in_turn) -> None:
        self.share = share

    def __iter__(self) -> Iterator[int]:
        items = of_worker(self.share)
        random.shuffle(items)
        return iter(items)


class Resumable(Stream):
    """Goes on where its state says, and begins anew once it was at its end."""

    def __init__(self, share: Callable[[int, int], slice] = in_turn) -> None:
        super().__init__(share)
        self.order: list[int] = []
        self.at = 0
        self.read = 0
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[int]:
        if self.at == 0:
            items = of_worker(self.share)
            self.order = [items[i] for i in torch.randperm(len(items), generator=self.generator).tolist()]
        while self.at < len(self.order):
            self.at += 1
            self.read += 1
            yield self.order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]
        self.generator.set_state(state["generator"])


class Own(Stream):
    """Is its own iterator, which begins anew in each ``iter``, and loads its state afterwards."""

    def __iter__(self) -> Iterator[int]:
        self.items, self.at = of_worker(self.share), 0
        return self

    def __next__(self) -> int:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Separate(Stream):
    """Its iterators have states, and it has none."""

    def __iter__(self) -> Iterator[int]:
        own = Own(self.share)
        return iter(own)


class Ready(Resumable):
    """Its items are batches."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((2,), item) for item in super().__iter__())


def stateful(data: Any, workers: int, batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    context = "fork" if workers else None  # what is quick, in children of a fork server too
    return StatefulDataLoader(data, batch_size, num_workers=workers, multiprocessing_context=context, **options)


def plain(data: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(data, 4, num_workers=workers, multiprocessing_context="fork" if workers else None)


MAKERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "by index": lambda workers: stateful(Numbers(), workers),
    "shuffled": lambda workers: stateful(Numbers(), workers, shuffle=True),
    "stream": lambda workers: stateful(Stream(), workers),
    "unequal": lambda workers: stateful(Stream(unequal), workers),
    "plain unequal": lambda workers: plain(Stream(unequal), workers),
    "plain own": lambda workers: plain(Own(), workers),
    "resumable": lambda workers: stateful(Resumable(), workers),
    "resumable unequal": lambda workers: stateful(Resumable(unequal), workers),
    "persistent": lambda workers: stateful(Resumable(), workers, persistent_workers=workers > 0),
    "seldom": lambda workers: stateful(Resumable(unequal), workers, snapshot_every_n_steps=3),
    "own": lambda workers: stateful(Own(unequal), workers),
    "separate": lambda workers: stateful(Separate(), workers),
    "ready": lambda workers: stateful(Ready(), workers, batch_size=None),
}


def values(batch: Any) -> list[int]:
    """The samples of this worker's part of a batch."""
    parts: list[Tensor] = list(batch) if isinstance(batch, muster.PerReplica) else [batch]
    return [int(value) for part in parts for value in part]


def read(strategy: muster.Strategy, folder: Path, kind: str, workers: int, batches: int, epochs: int) -> list[Any]:
    """The samples of each batch, by epoch, from the checkpoint in the folder on, where there is one; saves after so
    many batches, and goes no further."""
    torch.manual_seed(11)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    loader = strategy.prepare(MAKERS[kind](workers))
    strategy.load(folder)
    found: list[Any] = []
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            found.append((epoch, values(batch)))
            if len(found) == batches:
                strategy.save(folder)
                return found
    return found


FORKING = ["shuffled", "plain unequal", "resumable unequal", "seldom", "own"]
"""What two workers with processes of their own read."""


@pytest.mark.parametrize(
    ("shape", "kind", "workers"),
    [
        *(("mirrored-2", kind, workers) for kind in MAKERS for workers in (0, 2)),
        *(("workers-2", kind, 0) for kind in MAKERS),
        *(("workers-2", kind, 2) for kind in FORKING),
    ],
)
def test_every_sample_comes_once_across_kills(
    shape: str, kind: str, workers: int, two_workers: WorkerPool, tmp_path: Path
) -> None:
    job = make_job(shape, two_workers)
    expected = job(read, tmp_path / "never", kind, workers, -1, 2)
    first = job(read, tmp_path, kind, workers, 9, 2)
    second = job(read, tmp_path, kind, workers, 9, 2)
    third = job(read, tmp_path, kind, workers, -1, 2)
    for rank in range(len(expected)):
        assert [*first[rank], *second[rank], *third[rank]] == expected[rank]
    for epoch in range(2):
        came = sorted(value for rank in expected for of, each in rank if of == epoch for value in each)
        assert came == sorted([*range(SIZE)] * (2 if kind == "ready" else 1))


@pytest.mark.parametrize("is_new", [True, False])
def test_persistent_workers_go_on_after_an_epoch(is_new: bool, tmp_path: Path) -> None:
    def epochs(loader: Any, last: int) -> list[list[int]]:
        return [[value for batch in loader for value in values(batch)] for _ in range(loader.epoch, last)]

    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        loader = strategy.prepare(MAKERS["persistent"](2))
        epochs(loader, 1)
        strategy.save(tmp_path)
        expected = epochs(loader, 3)
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        loader = strategy.prepare(MAKERS["persistent"](2))
        if not is_new:
            epochs(loader, 2)
        strategy.load(tmp_path)
        assert epochs(loader, 3) == expected


# --- sharded ----------------------------------------------------------------------------------------------------------
def read_own(strategy: muster.Strategy, folder: Path, kind: str, workers: int, batches: int) -> list[list[int]]:
    """The same of a loader of this rank's own data, which each rank shuffles in its own way."""
    torch.manual_seed(strategy.rank)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    loader: Any = MAKERS[kind](workers)
    if kind == "resumable unequal":
        loader.dataset.generator.manual_seed(strategy.rank)
    loader = strategy.prepare_loader(loader, sharded=True)
    strategy.load(folder)
    found: list[list[int]] = []
    while loader.epoch < 2:
        for batch in loader:
            found.append(values(batch))
            if len(found) == batches:
                strategy.save(folder)
                return found
    return found


@pytest.mark.parametrize(("kind", "workers"), [("shuffled", 0), ("resumable unequal", 0), ("resumable unequal", 2)])
def test_each_rank_goes_on_in_its_own_data(kind: str, workers: int, worker_job: Launcher, tmp_path: Path) -> None:
    expected = worker_job(read_own, tmp_path / "never", kind, workers, -1)
    first = worker_job(read_own, tmp_path, kind, workers, 14)
    second = worker_job(read_own, tmp_path, kind, workers, -1)
    assert [a + b for a, b in zip(first, second, strict=True)] == expected
    assert expected[0] != expected[1]


# --- what is refused, and what is not read ----------------------------------------------------------------------------
def test_another_number_of_readers_is_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    job = Launcher("mirrored-2", 0, 2)
    job(read, tmp_path, "resumable", 0, 4, 1)
    with pytest.raises(
        muster.LayoutMismatch, match=r"loader 0: .* 1 reader read, and now 2 readers would.*num_workers"
    ):
        job(read, tmp_path, "resumable", 2, -1, 1)


def test_a_state_that_is_none_is_refused(tmp_path: Path) -> None:
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        loader = strategy.prepare(MAKERS["resumable"](0))
        good = loader.state_dict()
        for streams in (3, [{}], [{"yielded": -1, "state": None}], [{"yielded": 1, "state": {"read": 1}}]):
            with pytest.raises(muster.InvalidArgument, match="no state of a StatefulDataLoader's streams"):
                loader.load_state_dict({**good, "batches": 1, "streams": streams})
        loader.load_state_dict({"epoch": 1, "batches": 0, "generators": []})
        assert loader.epoch == 1


def test_what_was_read_before_is_not_read_again(tmp_path: Path) -> None:
    read_before = []
    for epochs in (1, 2):
        with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
            data = Resumable()
            loader = strategy.prepare(stateful(data, 0))
            strategy.load(tmp_path)
            for number, _ in enumerate(loader, 1):
                if epochs == 1 and number == 6:
                    strategy.save(tmp_path)
                    break
            read_before.append(data.read)
    assert read_before == [24, SIZE - 24]
