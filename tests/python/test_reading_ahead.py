"""When a prepared loader reads its batches: as torch does, where nobody must know the end of a pass before it."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import muster


def prepared(loader: DataLoader[Any], replicas: int = 1, **options: Any) -> tuple[muster.Strategy, Any]:
    strategy = muster.MirroredStrategy(["cpu"] * replicas, seed=1, threads_per_replica=1, **options)
    return strategy, strategy.prepare_loader(loader)


class Refilled(IterableDataset[Tensor]):
    """Ready batches in one and the same memory."""

    def __init__(self) -> None:
        self.batch = torch.empty(4, 1)

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(4):
            yield self.batch.fill_(number)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def collated(into: Tensor) -> Callable[[list[int]], Tensor]:
    def collate(items: list[int]) -> Tensor:
        return into[: len(items)].copy_(torch.tensor(items))

    return collate


@pytest.mark.parametrize("replicas", [1, 2])
def test_memory_that_data_fills_again_is_a_batchs_until_the_next_one(replicas: int) -> None:
    strategy, loader = prepared(DataLoader(Refilled(), batch_size=None), replicas)
    with strategy:
        found = [strategy.run(lambda x: x.flatten().tolist(), batch) for batch in loader]
    assert [[value for part in parts for value in part] for parts in found] == [[n] * 4 for n in (0.0, 1.0, 2.0, 3.0)]


def test_so_is_memory_that_collate_fn_fills_again() -> None:
    strategy, loader = prepared(DataLoader(Numbers(), batch_size=2, collate_fn=collated(torch.empty(2))))
    with strategy:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_it_is_where_windows_take_several_batches_that_a_sampler_counts() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(), batch_size=2, collate_fn=collated(torch.empty(2)))
    strategy, batches = prepared(loader, accumulate=3)
    weight = nn.Linear(1, 1)
    with strategy:
        module, _ = strategy.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.0))
        seen, stepped = [], []
        for batch in batches:

            def loss(x: Tensor) -> Tensor:
                seen.append(x.tolist())
                return module(x[:, None]).square().mean()

            stepped.append(strategy.step(loss, batch).stepped)
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert stepped == [False, False, True, True]


class ItsOwnIterator(IterableDataset[int]):
    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next == 4:
            raise StopIteration
        self.next += 1
        return self.next


def test_a_loop_that_is_left_takes_nothing_from_data_that_go_on() -> None:
    strategy, loader = prepared(DataLoader(ItsOwnIterator(), batch_size=None))
    found = []
    with strategy:
        for _ in range(2):
            for item in loader:
                found.append(item)
                if len(found) % 2 == 0:
                    break
    assert found == [1, 2, 3, 4]


class Queue(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.items = deque([torch.zeros(2, 1)])

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.items.popleft()  # an IndexError where the loop has not put another one there


def test_a_loop_may_feed_the_data_that_it_reads() -> None:
    data = Queue()
    strategy, loader = prepared(DataLoader(data, batch_size=None))
    found = []
    with strategy:
        for batch in loader:
            found.append(batch.sum().item())
            if len(found) == 4:
                break
            data.items.append(batch + 1)
    assert found == [0, 2, 4, 6]


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.batches):
            self.read += 1
            yield torch.full((2, 1), float(number))


def test_the_end_of_a_stream_is_looked_for_when_it_is_asked_for() -> None:
    data = Stream(3)
    strategy, loader = prepared(DataLoader(data, batch_size=None))
    with strategy:
        batches = iter(loader)
        first = next(batches)
        assert data.read == 1
        assert loader.is_last(first) is False and data.read == 2
        assert not loader.at_end and data.read == 2
        second = next(batches)
        assert second[0, 0] == 1 and data.read == 2
        third = next(batches)
        assert loader.is_last(third) is True and loader.at_end
        assert loader.is_last(second) is False
        assert list(batches) == [] and loader.epoch == 1


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_close_their_last_window_at_a_streams_end(accumulate: int, asks: bool) -> None:
    strategy, loader = prepared(DataLoader(Stream(5), batch_size=None), accumulate=accumulate)
    model = nn.Linear(1, 1)
    with strategy:
        module, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            for batch in loader:
                if asks:
                    loader.is_last(batch)
                result = strategy.step(lambda x: module(x).square().mean(), batch)
            assert result.stepped
        assert strategy.steps == 2 * (5 if accumulate == 1 else 3)
        assert strategy.flush() is None


def test_an_error_in_a_batch_that_was_looked_for_comes_with_that_batch() -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(2, 1)
            raise OSError("the disk is gone")

    strategy, loader = prepared(DataLoader(Broken(2), batch_size=None))
    with strategy:
        batches = iter(loader)
        assert loader.is_last(next(batches)) is False
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)


@pytest.mark.parametrize("stops_after", [1, 3])
@pytest.mark.parametrize("asks", [False, True])
def test_a_place_is_that_of_what_was_given_out(stops_after: int, asks: bool) -> None:
    strategy, loader = prepared(DataLoader(Stream(3), batch_size=None))
    with strategy:
        batches = iter(loader)
        for _ in range(stops_after):
            batch = next(batches)
        if asks:
            loader.is_last(batch)
        state = loader.state_dict()
    strategy, again = prepared(DataLoader(Stream(3), batch_size=None))
    with strategy:
        again.load_state_dict(state)
        assert [batch[0, 0].item() for batch in again] == list(range(stops_after, 3))
        assert again.epoch == 1
        assert len(list(again)) == 3


def test_packed_sequences_go_with_their_loop() -> None:
    packed: list[weakref.ref[Tensor]] = []

    def collate(items: list[int]) -> PackedSequence:
        batch = pack_sequence([torch.full((2, 1), item / 2) for item in items])
        packed.append(weakref.ref(batch.data))
        return batch

    strategy, loader = prepared(DataLoader(Numbers(), batch_size=2, collate_fn=collate))
    with strategy:
        for batch in loader:
            assert loader.part_rows_of(batch) is not None
            assert loader.is_last(batch) is (batch.data.max().item() == 3.5)
        del batch
        gc.collect()
        assert [each() for each in packed] == [None] * 4


def stepping(loader: DataLoader[Any], replicas: int = 1, **options: Any) -> tuple[muster.Strategy, Any, Any]:
    """And a module that has an optimizer."""
    strategy, batches = prepared(loader, replicas, **options)
    model = nn.Linear(1, 1)
    module, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return strategy, batches, module


@pytest.mark.parametrize("ahead", [2, 5])
def test_batches_that_were_fetched_before_their_steps_close_the_passs_last_window(ahead: int) -> None:
    def fetched_ahead() -> Iterator[Tensor]:
        fetched: deque[Tensor] = deque()
        for batch in loader:
            fetched.append(batch)
            if len(fetched) > ahead:
                yield fetched.popleft()
        yield from fetched

    strategy, loader, module = stepping(DataLoader(Stream(5), batch_size=None), accumulate=3)
    with strategy:
        for _ in range(2):
            stepped = [strategy.step(lambda x: module(x).mean(), batch).stepped for batch in fetched_ahead()]
            assert stepped == [False, False, True, False, True]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_fills_its_window_reads_nothing_ahead(accumulate: int) -> None:
    data = Stream(6)
    strategy, loader, module = stepping(DataLoader(data, batch_size=None), accumulate=accumulate)
    with strategy:
        for number, batch in enumerate(loader, start=1):
            full = strategy.step(lambda x: module(x).mean(), batch).stepped
            assert data.read == number + (not full)


class SlowStream(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            time.sleep(0.002)
            yield batch


def test_replicas_that_ask_for_the_end_lose_no_batch() -> None:
    strategy, loader, module = stepping(DataLoader(SlowStream(6), batch_size=None), replicas=2)

    def loss(x: Tensor) -> Tensor:
        assert loader.at_end is (x[0, 0].item() == 5)
        return module(x).mean()

    with strategy:
        assert sum(strategy.step(loss, batch).stepped for batch in loader) == 6


def test_a_thread_that_fetches_beside_the_steps_loses_no_batch() -> None:
    strategy, loader, module = stepping(DataLoader(SlowStream(40), batch_size=None), accumulate=2)
    fetched: queue.Queue[Tensor | None] = queue.Queue(2)

    def fetch() -> None:
        for batch in loader:
            fetched.put(batch)
        fetched.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    seen = []
    with strategy:
        while (batch := fetched.get()) is not None:
            strategy.step(lambda x: module(x).mean(), batch)
            seen.append(int(batch[0, 0]))
    thread.join()
    assert seen == list(range(40))


class Batches(Sampler[list[int]]):
    def __init__(self, batch_size: Any) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


class Raising(Batches):
    @property
    def batch_size(self) -> int:
        raise RuntimeError("it varies")

    @batch_size.setter
    def batch_size(self, _: object) -> None:
        pass


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Batches(2), 2),
        (Batches(np.int64(2)), 2),
        (Batches([2, 2]), None),
        (Batches(torch.ones(2)), None),
        (Batches(True), None),
        (Batches(len), None),
        (Raising(2), None),
    ],
)
def test_a_batch_samplers_size_is_a_number_or_none(sampler: Batches, expected: int | None, tmp_path: Path) -> None:
    strategy, loader = prepared(DataLoader(Numbers(), batch_sampler=sampler))
    with strategy:
        next(iter(loader))
        assert loader.state_dict()["batch_size"] == expected
        strategy.save(tmp_path)
        assert strategy.load(tmp_path) == {}
