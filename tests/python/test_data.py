"""Prepared loaders: what each replica of a job gets, whichever workers the replicas live in."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.datapipes.iter import IterableWrapper

from muster.batch import part_sizes
from muster.errors import InvalidArgument
from muster.loader import Loader
from muster.loader_host import LoaderHost
from muster.per_replica import PerReplica
from muster.reader import Ended, Pinnable
from muster.stream_states import ReadBatch, ReaderState
from muster.streams import AgreedStream, epoch_seed, stream_seed


class Job:
    """`workers` hosts of `local` replicas each, as a strategy would be to its loaders; collectives are threads."""

    def __init__(self, workers: int = 1, local: int = 1, seed: int = 11) -> None:
        self.barrier = threading.Barrier(workers, timeout=30)
        self.flags = [False] * workers
        self.states: list[Tensor] = [torch.empty(0)] * workers
        self.hosts = [Host(self, rank, local, workers * local, seed) for rank in range(workers)]

    def prepare(self, make: Callable[[], DataLoader[Any]], **options: Any) -> list[Loader[Any]]:
        options = {"index": 0, **options}
        return [Loader(make(), host, **options) for host in self.hosts]

    def run(self, function: Callable[[Host], Any]) -> list[Any]:
        """Runs the function for every host at once, so that they may meet in collectives."""
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            return list(pool.map(function, self.hosts))


@dataclass
class Host:
    job: Job
    rank: int
    num_local: int
    num_replicas: int
    seed: int
    capacities: Sequence[float] = ()
    passes: None = None
    joins: bool = False
    steps: int = 0

    @property
    def first_replica(self) -> int:
        return self.rank * self.num_local

    @property
    def devices(self) -> Sequence[torch.device]:
        return [torch.device("cpu", i) for i in range(self.num_local)]

    def any_has_more(self, has_more: bool) -> bool:
        self.job.flags[self.rank] = has_more
        self.job.barrier.wait()
        result = any(self.job.flags)
        self.job.barrier.wait()
        return result

    def broadcast_state(self, state: Tensor) -> Tensor:
        self.job.states[self.rank] = state
        self.job.barrier.wait()
        return self.job.states[0].clone()


class Numbers(Dataset[int]):
    """Items 0 to n - 1; remembers which were read."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.read.append(int(index))
        return int(index)


class Stream(IterableDataset[int]):
    def __init__(self, n: int, shuffle: bool = False) -> None:
        self.n = n
        self.shuffle = shuffle
        self.epoch: int | None = None

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        if self.shuffle:
            random.shuffle(order)
            order = [order[i] for i in torch.randperm(self.n).tolist()]
            order = [order[i] for i in np.random.permutation(self.n).tolist()]
        return iter(order)


class Sized(Stream):
    def __len__(self) -> int:
        return self.n


class ByWorker(Stream):
    """Splits itself over DataLoader workers, and shuffles again and again, as a shuffle buffer does."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        left = list(range(self.n))[start::step]
        while left:
            yield left.pop(random.randrange(len(left)))


def noisy_collate(samples: list[int]) -> Tensor:
    torch.rand(len(samples))
    random.random()
    return torch.tensor(samples)


def parts_of(batch: Any) -> list[Any]:
    return list(batch.parts) if isinstance(batch, PerReplica) else [batch]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def epoch_of(loaders: list[Loader[Any]]) -> list[list[list[int]]]:
    """One pass of tensor batches: per batch, the items of every replica of the job in order."""
    passes = [[[part.tolist() for part in parts_of(batch)] for batch in loader] for loader in loaders]
    assert len({len(batches) for batches in passes}) == 1, "workers saw different numbers of batches"
    return [flat(batches) for batches in zip(*passes, strict=True)]


LAYOUTS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (3, 1)]


def test_the_issues_example() -> None:
    first, second = Job(2).prepare(lambda: DataLoader(Numbers(14), batch_size=8))
    assert [batch.tolist() for batch in first] == [[0, 1, 2, 3], [8, 9, 10]]
    assert [batch.tolist() for batch in second] == [[4, 5, 6, 7], [11, 12, 13]]


def test_a_host_is_a_loader_host() -> None:
    host: LoaderHost = Job().hosts[0]
    assert host.num_replicas == 1


@pytest.mark.parametrize(("workers", "local"), LAYOUTS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_is_in_exactly_one_part(workers: int, local: int, shuffle: bool) -> None:
    for n in (1, 2, 3, 5, 8, 13, 21):
        for batch_size in (1, 2, 3, 7, 8, 40):
            for drop_last in (False, True):
                loaders = Job(workers, local).prepare(
                    partial(DataLoader, Numbers(n), batch_size, shuffle, drop_last=drop_last)
                )
                batches = epoch_of(loaders)
                expected = [batch_size] * (n // batch_size) + [n % batch_size] * (n % batch_size > 0 and not drop_last)
                assert len(loaders[0]) == len(batches) == len(expected)
                for parts, size in zip(batches, expected, strict=True):
                    assert [len(part) for part in parts] == part_sizes(size, workers * local)
                seen = [item for parts in batches for part in parts for item in part]
                assert len(set(seen)) == len(seen) == sum(expected)
                if not shuffle:
                    assert seen == list(range(sum(expected)))


@pytest.mark.parametrize("make", [lambda: Numbers(37), lambda: Stream(37, shuffle=True)], ids=["index", "iterable"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_part_is_the_same_whichever_worker_its_replica_lives_in(make: Any, replicas: int) -> None:
    def loader() -> DataLoader[Any]:
        dataset = make()
        return DataLoader(dataset, 6, shuffle=None if isinstance(dataset, Stream) else True)

    results = []
    for workers in (1, replicas // 2, replicas):
        loaders = Job(workers, replicas // workers).prepare(loader)
        results.append([epoch_of(loaders) for _ in range(2)])
    assert results[0] == results[1] == results[2]
    assert results[0][0] != results[0][1], "the epochs have the same order"


def test_each_worker_reads_only_its_part() -> None:
    datasets = [Numbers(16) for _ in range(4)]
    remaining = iter(datasets)
    epoch_of(Job(4).prepare(lambda: DataLoader(next(remaining), 8)))
    assert [dataset.read for dataset in datasets] == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


# Structures


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclass
class Graph:
    nodes: Tensor


def graph_collate(samples: list[int]) -> Graph:
    return Graph(torch.tensor(samples))


class Structured(Dataset[Any]):
    def __init__(self, kind: str, n: int = 5) -> None:
        self.kind = kind
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        x = torch.full((3,), i, dtype=torch.float64)
        return {
            "tuple": (x, i),
            "dict": {"x": x, "meta": {"name": f"s{i}", "id": i}},
            "named": Point(x, f"s{i}"),
            "strings": f"s{i}",
            "tensor": x,
            "deep": ((x, [i]), {"k": (f"s{i}",)}),
        }[self.kind]


def test_one_local_replica_gets_its_part_itself() -> None:
    plain = next(iter(DataLoader(Structured("dict"), 5)))
    (loader,) = Job().prepare(lambda: DataLoader(Structured("dict"), 5))
    (batch,) = loader
    assert batch.keys() == plain.keys()
    assert torch.equal(batch["x"], plain["x"])
    assert batch["meta"]["name"] == plain["meta"]["name"]


def test_several_get_the_outer_structure_with_a_per_replica_in_each_field() -> None:
    def batches(kind: str) -> list[Any]:
        return list(Job(1, 2).prepare(lambda: DataLoader(Structured(kind), 3))[0])

    (x, i), (_, tail) = batches("tuple")
    assert type(batches("tuple")[0]) is tuple
    assert [part[:, 0].tolist() for part in x] == [[0, 1], [2]]
    assert [part.tolist() for part in i] == [[0, 1], [2]]
    assert [part.tolist() for part in tail] == [[3], [4]]

    first, _ = batches("dict")
    assert [part.tolist() for part in first["x"][1:]] == [[[2.0] * 3]]
    assert [part["name"] for part in first["meta"]] == [["s0", "s1"], ["s2"]]

    first, _ = batches("named")
    assert type(first) is Point
    assert [list(part) for part in first.label] == [["s0", "s1"], ["s2"]]

    first, _ = batches("strings")
    assert first.parts == (["s0", "s1"], ["s2"])

    first, _ = batches("tensor")
    assert [part.shape for part in first] == [(2, 3), (1, 3)]

    first, _ = batches("deep")
    assert [part[1][0].tolist() for part in first[0]] == [[0, 1], [2]]


def test_custom_batches_and_lists_of_samples_become_one_per_replica() -> None:
    (loader,) = Job(1, 2).prepare(lambda: DataLoader(Numbers(4), 4, collate_fn=graph_collate))
    (batch,) = loader
    assert [part.nodes.tolist() for part in batch] == [[0, 1], [2, 3]]

    for batch_size in (2, 3, 4, 5):
        (loader,) = Job(1, 2).prepare(
            partial(DataLoader, Structured("tuple", 11), batch_size, collate_fn=lambda samples: samples)
        )
        for batch in loader:
            assert isinstance(batch, PerReplica), "the form depends on the batch's size"
            assert loader.part_rows_of(batch) is not None


def time_first_collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
    stacked = torch.stack([x for x, _ in samples], dim=1)
    return stacked, stacked + 1, torch.tensor([i for _, i in samples])


@pytest.mark.parametrize("collate", [time_first_collate, lambda samples: tuple(zip(*samples, strict=True))])
def test_a_tuple_has_fields_whatever_the_number_of_samples(collate: Callable[..., Any]) -> None:
    for batch_size in (2, 3, 4, 5, 6):
        (loader,) = Job(1, 2).prepare(partial(DataLoader, Structured("tuple", 11), batch_size, collate_fn=collate))
        number = 0
        for batch in loader:
            *_, i = batch
            assert type(batch) is tuple and all(isinstance(field, PerReplica) for field in batch)
            counts = loader.part_rows_of(i)
            assert counts is not None and loader.part_rows_of(batch) == counts
            assert all(len(part) == count for part, count in zip(i, counts, strict=True) if count > 0)
            number += sum(counts)
        assert number == 11


@pytest.mark.parametrize("kind", ["tuple", "dict", "named", "strings", "tensor", "deep"])
@pytest.mark.parametrize("iterable", [False, True])
def test_an_empty_part_has_the_structure_with_no_rows(kind: str, iterable: bool) -> None:
    def check(empty: Any, full: Any) -> None:
        assert type(empty) is type(full)
        if isinstance(full, Tensor):
            assert empty.dtype == full.dtype
            assert empty.shape == (0, *full.shape[1:])
        elif isinstance(full, dict):
            assert empty.keys() == full.keys()
            for key in full:
                check(empty[key], full[key])
        elif isinstance(full[0], str):
            assert len(empty) == 0
        else:
            assert len(empty) == len(full)
            for a, b in zip(empty, full, strict=True):
                check(a, b)

    class Items(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([Structured(kind)[i] for i in range(5)])

    loaders = Job(4).prepare(lambda: DataLoader(Items() if iterable else Structured(kind), 4))
    batches = [list(loader) for loader in loaders]
    assert [len(of_worker) for of_worker in batches] == [2] * 4
    for of_worker in batches[1:]:
        check(of_worker[1], batches[0][1])
    assert [loader.part_rows_of(of[1]) for loader, of in zip(loaders, batches, strict=True)] == [[1], [0], [0], [0]]


def test_every_tensor_of_a_part_starts_on_64_bytes() -> None:
    buffer = torch.arange(1001.0)

    def views(samples: list[int]) -> dict[str, Tensor]:
        return {"view": buffer[samples[0] + 1 : samples[-1] + 2]}

    (loader,) = Job(1, 2).prepare(lambda: DataLoader(Numbers(20), 10, collate_fn=views))
    for batch in loader:
        for part in batch["view"]:
            assert part.data_ptr() % 64 == 0


# What the strategy asks


def test_part_rows_of_recognises_late_batches_and_their_fields() -> None:
    (loader,) = Job(1, 2).prepare(lambda: DataLoader(Structured("tuple"), 3))
    iterator = iter(loader)
    first = next(iterator)
    assert loader.part_rows_of(first) == loader.part_rows_of(first[0]) == loader.part_rows_of(first[1]) == [2, 1]
    assert loader.part_rows_of(tuple(first)) == [2, 1], "the very same tuple"
    assert loader.part_rows_of((first[0], first[1])) is None
    assert loader.part_rows_of(first[0][0]) is None
    assert loader.part_rows_of("other") is None
    second = next(iterator)
    assert loader.part_rows_of(first) == [2, 1] and loader.is_last(first) is False
    assert loader.part_rows_of(second[1]) == [1, 1] and loader.is_last(second[1]) is True
    assert loader.is_last("other") is None
    next(iter(loader))
    assert loader.part_rows_of(second) is None and loader.is_last(second) is None, "of another pass"


@pytest.mark.parametrize("kind", ["strings", "named", "dict", "tensor"])
def test_part_rows_of_one_local_replica(kind: str) -> None:
    (loader,) = Job(1, 1).prepare(lambda: DataLoader(Structured(kind), 3))
    for batch, rows in zip(loader, [[3], [2]], strict=True):
        assert loader.part_rows_of(batch) == rows
        fields = batch.values() if kind == "dict" else batch if kind == "named" else []
        assert all(loader.part_rows_of(field) == rows for field in fields)


def test_recognising_a_batch_does_not_keep_its_tensors_alive() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Structured("deep"), 5))
    batch = next(iter(loader))
    tensor = weakref.ref(batch[0][0])
    assert loader.part_rows_of(batch) == [5]
    del batch
    gc.collect()
    assert tensor() is None


def test_a_container_with_other_members_is_another_batch() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Structured("tuple"), 5))
    (batch,) = loader
    assert loader.part_rows_of(batch) == [5]
    kept = batch[1]
    batch[1] = kept.clone()
    assert loader.part_rows_of(batch) is None
    assert loader.part_rows_of(kept) == [5]


def test_plain_values_have_no_identity() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(2), 2, collate_fn=lambda items: (3, None, "a", torch.ones(2))))
    (batch,) = loader
    assert loader.part_rows_of(batch) == [2]
    for value in (3, None, "a", ()):
        assert loader.part_rows_of(value) is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_at_end_holds_from_the_last_batch_until_the_pass_is_advanced(num_workers: int) -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(5), 2, num_workers=num_workers))
    assert not loader.at_end
    assert [loader.at_end for _ in loader] == [False, False, True]
    assert not loader.at_end, "the loop asked for more"
    for batch in loader:
        if batch.tolist() == [4]:
            break
    assert loader.at_end
    next(iter(loader))
    assert not loader.at_end


def test_at_end_refers_to_the_pass_begun_last() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(2), 1))
    outer = iter(loader)
    next(outer)
    inner = iter(loader)
    next(outer)
    assert not loader.at_end
    assert [loader.at_end for _ in inner] == [False, True]


def test_no_batches_at_all() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(3), 4, drop_last=True))
    assert list(loader) == []
    assert not loader.at_end
    assert loader.epoch == 1


# Order, epochs and random streams


def test_the_seeds_are_those_of_the_cpp_side() -> None:
    state, outputs = 1234567, []
    for _ in range(3):  # the published sequence of SplitMix64 from this seed
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ (z >> 31))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    first = stream_seed(1234567, 0, 0)
    mixed = outputs[0]
    for _ in range(2):
        mixed = (mixed + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    assert first == mixed
    assert stream_seed(-1, 2, 3) == stream_seed(2**64 - 1, 2, 3)
    assert epoch_seed(7, 1, 2) == stream_seed(7 ^ int.from_bytes(b"loader", "big"), 1, 2)
    seeds = {stream_seed(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_order_of_a_shuffle_is_the_documented_one(num_workers: int) -> None:
    (loader,) = Job(seed=5).prepare(lambda: DataLoader(Numbers(23), 4, shuffle=True, num_workers=num_workers), index=3)
    for epoch in range(2):
        default = torch.Generator().manual_seed(epoch_seed(5, 3, epoch))
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=default))
        order = torch.randperm(23, generator=torch.Generator().manual_seed(drawn))
        assert torch.equal(torch.cat(list(loader)), order)


class PythonSampler(Sampler[int]):
    """Draws from all three ambient generators, bit by bit."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield random.randrange(40) + int(torch.randint(40, ())) + int(np.random.randint(20))

    def __len__(self) -> int:
        return 12


class ShuffledChunks(Sampler[list[int]]):
    """A batch sampler with batches of its own sizes, as tensors."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.split(torch.randperm(20), [7, 1, 9, 3]))


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"shuffle": True, "batch_size": 5},
        lambda: {"sampler": RandomSampler(Numbers(100), replacement=True, num_samples=40), "batch_size": 7},
        lambda: {"sampler": WeightedRandomSampler([1.0] * 50 + [3.0] * 50, 30), "batch_size": 7},
        lambda: {"sampler": SubsetRandomSampler(range(17)), "batch_size": 4, "drop_last": True},
        lambda: {"sampler": PythonSampler(), "batch_size": 5},
        lambda: {"batch_sampler": ShuffledChunks()},
        lambda: {"batch_sampler": BatchSampler(PythonSampler(), 4, False)},
    ],
    ids=["shuffle", "replacement", "weighted", "subset", "python", "batch sampler", "batch sampler of a sampler"],
)
def test_any_sampler_agrees_on_all_ranks_and_changes_by_epoch(options: Callable[[], dict[str, Any]]) -> None:
    def batches(workers: int, local: int) -> list[list[int]]:
        """The global batches of three epochs, each worker advancing with ambient generators of its own."""
        loaders = Job(workers, local).prepare(lambda: DataLoader(Numbers(100), **options()))
        found: list[list[Any]] = []
        for rank, loader in enumerate(loaders):
            found.append([])
            for _ in range(3):
                for batch in loader:
                    torch.manual_seed(rank)
                    random.seed(rank)
                    np.random.seed(rank)
                    found[-1].append(torch.cat(parts_of(batch)).tolist())
        return [flat(parts) for parts in zip(*found, strict=True)]

    single = batches(1, 1)
    assert batches(3, 1) == batches(1, 3) == single
    third = len(single) // 3
    assert len({str(single[i * third : (i + 1) * third]) for i in range(3)}) == 3


def test_the_ambient_generators_are_left_alone() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(100), 7, sampler=PythonSampler()))
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    expected = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    for _ in loader:
        pass
    list(Job().prepare(lambda: DataLoader(Stream(10, shuffle=True), 3))[0])
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert str(np.random.get_state()) == str(expected[2])


def test_a_stream_goes_on_where_it_stopped_also_after_an_error() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    with AgreedStream(3):
        whole = [draw() for _ in range(3)]
    stream = AgreedStream(3)
    pieces = []
    torch.manual_seed(0)
    for _ in range(3):
        before = torch.get_rng_state()
        with pytest.raises(KeyError), stream:
            pieces.append(draw())
            raise KeyError
        assert torch.equal(torch.get_rng_state(), before)
        draw()
    assert pieces == whole


def drawn_from_all() -> list[float]:
    """Two normal numbers are made at once: what is drawn first may be the second of a pair."""
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.randn()]


@pytest.fixture
def another_numpy_generator() -> Iterator[Any]:
    """NumPy's global generator is not the Mersenne Twister."""
    before, state = np.random.get_bit_generator(), np.random.get_state()
    bits = np.random.PCG64(5)
    np.random.set_bit_generator(bits)
    yield bits
    np.random.set_bit_generator(before)
    np.random.set_state(state)


def test_a_stream_draws_the_same_whatever_numpys_generator_is(another_numpy_generator: Any) -> None:
    with AgreedStream(3):
        inside = drawn_from_all()
    np.random.randn()  # its second number is kept
    expected = np.random.get_state(legacy=False)
    stream = AgreedStream(3)
    with stream:
        pass
    assert np.random.get_bit_generator() is another_numpy_generator
    assert np.random.get_state(legacy=False) == expected
    np.random.set_bit_generator(np.random.MT19937(1))
    with stream:
        assert drawn_from_all() == inside


def test_a_stream_that_cannot_begin_leaves_the_generators_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def states() -> str:
        return str((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))

    stream, before, set_state = AgreedStream(3), states(), np.random.set_state
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(_: Any) -> None:
            patch.setattr(np.random, "set_state", set_state)
            raise KeyboardInterrupt

        patch.setattr(np.random, "set_state", interrupted)
        with stream:
            pass
    assert states() == before


def test_epochs_count_passes() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(6), 3, shuffle=True))

    def order() -> list[int]:
        return [item for batch in loader for item in batch.tolist()]

    assert loader.epoch == 0
    orders = []
    for epoch in range(3):
        assert loader.epoch == epoch
        for position, _ in enumerate(loader):
            assert loader.epoch == epoch, position
        assert loader.epoch == epoch + 1
        loader.epoch = epoch
        orders.append(order())
        assert loader.epoch == epoch + 1
    for _ in loader:
        break
    assert loader.epoch == 3
    fifth = order()
    assert loader.epoch == 5, "a pass left early counts"
    loader.epoch = 1
    assert order() == orders[1]
    loader.epoch = 4
    assert order() == fifth


def test_setting_the_epoch_within_a_pass_is_for_the_next() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(6), 3))
    for _ in loader:
        loader.epoch = 7
    assert loader.epoch == 7
    for _ in loader:
        assert loader.epoch == 7
    for bad in (-1, 1.5, True, None):
        with pytest.raises(InvalidArgument):
            loader.epoch = bad  # type: ignore[assignment]


def test_loaders_of_one_job_have_orders_of_their_own() -> None:
    job = Job()
    first, second = (job.prepare(lambda: DataLoader(Numbers(50), 50, shuffle=True), index=i)[0] for i in range(2))
    assert next(iter(first)).tolist() != next(iter(second)).tolist()


def test_passes_may_be_nested() -> None:
    for make in (lambda: DataLoader(Numbers(5), 2), lambda: DataLoader(Stream(5), 2)):
        (loader,) = Job().prepare(make)
        pairs = [(a.tolist(), b.tolist()) for a in loader for b in loader]
        items = [[0, 1], [2, 3], [4]]
        assert pairs == [(a, b) for a in items for b in items]


class Epochs(Sampler[int]):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epochs[-1], self.epochs[-1] + 4))


def test_set_epoch_is_called_on_samplers_and_batch_samplers() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(100), 2, sampler=Epochs()))
    for epoch in (0, 1, 9):
        loader.epoch = epoch
        assert torch.cat(list(loader)).tolist() == list(range(epoch, epoch + 4))
    epochs = Epochs()
    sampler = BatchSampler(epochs, 3, True)
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(100), batch_sampler=sampler))
    assert torch.cat(list(loader)).tolist() == [0, 1, 2]
    assert epochs.epochs == [0]


def test_the_users_generator_decides_and_is_the_chiefs() -> None:
    plain = DataLoader(Numbers(30), 6, shuffle=True, generator=torch.Generator().manual_seed(0))
    expected = [[batch.tolist() for batch in plain] for _ in range(2)]

    job = Job(2)

    def run(host: Host) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(host.rank)
        loader: Loader[Tensor] = Loader(DataLoader(Numbers(30), 6, shuffle=True, generator=generator), host, index=0)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    first, second = job.run(run)
    both = [[a + b for a, b in zip(*epochs, strict=True)] for epochs in zip(first, second, strict=True)]
    assert both == expected


# Iterable data sets


@pytest.mark.parametrize(("workers", "local"), LAYOUTS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_iterable_is_dealt_round_robin(workers: int, local: int, drop_last: bool) -> None:
    replicas = workers * local
    for n in (0, 1, 5, 12, 13):
        for batch_size in (1, 4, 6):
            loaders = Job(workers, local).prepare(partial(DataLoader, Stream(n), batch_size, drop_last=drop_last))
            batches = epoch_of(loaders)
            whole = [list(range(n))[i : i + batch_size] for i in range(0, n, batch_size)]
            if drop_last:
                whole = [batch for batch in whole if len(batch) == batch_size]
            assert batches == [[batch[replica::replicas] for replica in range(replicas)] for batch in whole]
            for parts, batch in zip(batches, whole, strict=True):
                assert [len(part) for part in parts] == part_sizes(len(batch), replicas)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_a_shuffling_iterable_agrees_whatever_collate_draws(options: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(ByWorker(29), 6, collate_fn=noisy_collate, **options)

    loaders = Job(2).prepare(make)
    epochs = [epoch_of(loaders) for _ in range(2)]
    for batches in epochs:
        seen = [item for parts in batches for part in parts for item in part]
        assert sorted(seen) == list(range(29))
    assert epochs[0] != epochs[1]
    loaders[0].epoch = loaders[1].epoch = 0
    assert epoch_of(loaders) == epochs[0], "an epoch repeated is not the same"


def test_an_iterable_left_early_starts_afresh_with_persistent_workers() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Stream(20), 2, num_workers=1, persistent_workers=True))
    for _ in range(2):
        assert next(iter(loader)).tolist() == [0, 1]
    assert torch.cat(list(loader)).tolist() == list(range(20))


def test_set_epoch_is_called_on_an_iterable() -> None:
    class Told(Stream):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            assert self.epoch is not None
            return iter([self.epoch])

    for num_workers in (0, 1):
        (loader,) = Job().prepare(partial(DataLoader, Told(1), 1, num_workers=num_workers))
        loader.epoch = 4
        assert [batch.tolist() for _ in range(2) for batch in loader] == [[4], [5]]


def test_lengths() -> None:
    def length(make: Callable[[], DataLoader[Any]], **options: Any) -> int:
        return len(Job(2).prepare(make, **options)[0])

    assert length(lambda: DataLoader(Numbers(14), 8)) == 2
    assert length(lambda: DataLoader(Sized(14), 8, drop_last=True)) == 1
    assert length(lambda: DataLoader(Numbers(14), 4), sharded=True) == 4
    assert length(lambda: DataLoader(Numbers(14), None)) == 14
    with pytest.raises(TypeError):
        length(lambda: DataLoader(Stream(14), 8))


# Capacities


def test_an_iterable_is_dealt_round_robin_while_capacities_are_equal() -> None:
    (batch,) = balanced(lambda: DataLoader(Stream(7), 7), [1 / 3] * 3)
    assert [part.tolist() for part in batch] == [[0, 3, 6], [1, 4], [2, 5]]


def balanced(make: Callable[[], DataLoader[Any]], capacities: Sequence[float]) -> Loader[Any]:
    job = Job(1, len(capacities))
    job.hosts[0].capacities = capacities
    return job.prepare(make)[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "drop_last"),
    [("index", False), ("index", True), ("iterable", False), ("iterable", True), ("ready", False)],
)
def test_parts_follow_capacities_in_order(kind: str, drop_last: bool, num_workers: int) -> None:
    capacities = [0.2, 0.7, 0.1]
    for n in (0, 1, 2, 9, 13, 20):
        whole = [list(range(n))[i : i + 10] for i in range(0, n, 10)]
        if drop_last:
            whole = [batch for batch in whole if len(batch) == 10]
        if kind == "ready":
            make = partial(DataLoader, [torch.tensor(batch) for batch in whole], batch_size=None)
        else:
            make = partial(DataLoader, Numbers(n) if kind == "index" else Stream(n), 10, drop_last=drop_last)
        # Each worker of an iterable would read all of it.
        loader = balanced(
            partial(make, num_workers=min(num_workers, 1) if kind == "iterable" else num_workers), capacities
        )
        seen = []
        for batch in loader:
            parts = [part.tolist() for part in parts_of(batch)]
            assert loader.part_rows_of(batch) == [len(part) for part in parts]
            assert [len(part) for part in parts] == part_sizes(sum(map(len, parts)), 3, capacities)
            seen.append(flat(parts))
        assert seen == whole


def test_a_part_that_its_capacity_leaves_empty_keeps_the_structure() -> None:
    loader = balanced(lambda: DataLoader(TensorDataset(torch.randn(6, 4), torch.arange(6)), 3), [0.05, 0.95])
    for x, y in loader:
        assert x[0].shape == (0, 4) and y[0].shape == (0,) and y[0].dtype == torch.int64
        assert x[1].shape == (3, 4)


@pytest.mark.parametrize(("num_workers", "ahead"), [(0, 1), (1, 4)])
@pytest.mark.parametrize("iterable", [False, True])
def test_other_capacities_hold_for_batches_asked_for_later(iterable: bool, num_workers: int, ahead: int) -> None:
    """`ahead`: batches that were asked for when the first arrives, itself among them."""
    loader = balanced(
        lambda: DataLoader(Stream(80) if iterable else Numbers(80), 8, num_workers=num_workers), [0.5, 0.5]
    )
    host = loader._host
    assert isinstance(host, Host)
    sizes, seen = [], []
    for batch in loader:
        host.capacities = [0.75, 0.25]
        sizes.append([len(part) for part in batch])
        assert loader.part_rows_of(batch) == sizes[-1]
        seen += sorted(flat(part.tolist() for part in batch))
    assert seen == list(range(80))
    assert sizes == [[4, 4]] * ahead + [[6, 2]] * (10 - ahead)


# Ready batches


@pytest.mark.parametrize("iterable", [False, True])
def test_ready_batches_are_divided_by_their_rows(iterable: bool) -> None:
    batches = [{"x": torch.arange(5), "s": ["a", "b", "c", "d", "e"]}, {"x": torch.arange(1), "s": ["f"]}]

    class Ready(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    loaders = Job(2).prepare(lambda: DataLoader(Ready() if iterable else batches, batch_size=None))  # type: ignore[arg-type]
    (first, first_tail), (second, second_tail) = (list(loader) for loader in loaders)
    assert first["x"].tolist() == [0, 1, 2]
    assert second["s"] == ["d", "e"]
    assert first_tail["s"] == ["f"]
    assert second_tail["x"].shape == (0,)
    assert loaders[1].part_rows_of(second_tail) == [0]


def test_ready_batches_of_one_replica_may_be_anything() -> None:
    batch = object()
    (loader,) = Job().prepare(lambda: DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    (found,) = loader
    assert found is batch
    assert loader.part_rows_of(found) is None
    (loader, _) = Job(2).prepare(lambda: DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"batch_size=None.*give the loader a batch_size"):
        next(iter(loader))


# Ready-sharded data


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("local", [1, 2])
def test_a_worker_that_runs_out_goes_on_with_empty_parts(iterable: bool, local: int) -> None:
    job = Job(3, local)
    sizes = [7, 3, 1]

    def run(host: Host) -> list[tuple[list[list[int]], list[int] | None, bool]]:
        dataset: Dataset[int] = Stream(sizes[host.rank]) if iterable else Numbers(sizes[host.rank])
        loader: Loader[Any] = Loader(DataLoader(dataset, 3), host, index=0, sharded=True)
        found = []
        for _ in range(2):
            found = [
                ([part.tolist() for part in parts_of(batch)], loader.part_rows_of(batch), loader.at_end)
                for batch in loader
            ]
        return found

    for rank, found in enumerate(job.run(run)):
        assert [at_end for *_, at_end in found] == [False, False, True]
        for i, (parts, rows, _) in enumerate(found):
            assert sorted(flat(parts)) == list(range(sizes[rank]))[3 * i : 3 * i + 3]
            assert rows == [len(part) for part in parts] == part_sizes(len(flat(parts)), local)


def test_a_worker_without_any_batch_says_so() -> None:
    def run(host: Host) -> str:
        loader: Loader[Any] = Loader(DataLoader(Stream(0 if host.rank else 3), 3), host, index=0, sharded=True)
        try:
            return str([batch.tolist() for batch in loader])
        except InvalidArgument as error:
            return str(error)

    for workers in (2, 3):
        messages = Job(workers).run(run)
        assert messages[0].startswith("another worker's loader")
        for message in messages[1:]:
            assert "this worker's loader (sharded=True) has never had a batch" in message


def test_a_worker_empty_in_a_later_epoch_models_its_parts_on_an_earlier_one() -> None:
    class Once(Stream):
        def set_epoch(self, epoch: int) -> None:
            self.n = 0 if epoch else self.n

    def run(host: Host) -> list[Any]:
        dataset = Once(2) if host.rank else Stream(2)
        loader: Loader[Any] = Loader(DataLoader(dataset, 3), host, index=0, sharded=True)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    assert Job(2).run(run) == [[[[0, 1]], [[0, 1]]], [[[0, 1]], [[]]]]


# Errors


def test_a_prepared_loader_refuses_to_be_copied() -> None:
    (prepared,) = Job().prepare(lambda: DataLoader(Numbers(3)))
    with pytest.raises(InvalidArgument, match="copy the DataLoader, and prepare the copy"):
        copy.deepcopy(prepared)
    with pytest.raises(InvalidArgument, match="prepare the copy"):
        pickle.dumps(prepared)


def test_what_cannot_be_prepared_is_refused() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(())

    distributed: Sampler[int] = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    (prepared,) = Job().prepare(lambda: DataLoader(Numbers(3)))
    cases: list[tuple[Any, str]] = [
        ([1, 2], "a list cannot be prepared"),
        (prepared, "prepared already"),
        (Own(Numbers(3)), "Own iterates in a way of its own"),
        (DataLoader(Numbers(8), sampler=distributed), r"DistributedSampler.*sharded=True"),
        (DataLoader(Numbers(8), batch_sampler=BatchSampler(distributed, 2, False)), "DistributedSampler"),
        (DataLoader(Numbers(8), num_workers=1, in_order=False), "in_order"),
    ]
    for loader, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            Loader(loader, Job(2).hosts[0], index=0)
    own_shard: Loader[Tensor] = Loader(
        DataLoader(Numbers(8), sampler=distributed), Job().hosts[0], index=0, sharded=True
    )
    assert len(list(own_shard)) == 4


class Failing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise KeyError("item 4")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_reading_ahead_waits_for_its_batch(num_workers: int) -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Failing(8), 2, num_workers=num_workers))
    seen = []
    with pytest.raises(KeyError, match="item 4"):
        for batch in loader:
            seen.append(batch.tolist())
            assert not loader.at_end
    assert seen == [[0, 1], [2, 3]]


def passing_over_errors(loader: Loader[Tensor]) -> list[list[int]]:
    batches, seen = iter(loader), []
    while True:
        try:
            seen.append(next(batches).tolist())
        except KeyError:
            seen.append([])
        except StopIteration:
            return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_who_passes_over_an_error_gets_what_comes_after_it(num_workers: int) -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Failing(8), 2, num_workers=num_workers))
    assert passing_over_errors(loader) == [[0, 1], [2, 3], [], [6, 7]]
    assert loader.epoch == 1 and passing_over_errors(loader) == [[0, 1], [2, 3], [], [6, 7]]
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    with pytest.raises(KeyError):
        next(batches)
    assert loader.state_dict()["batches"] == 3
    (other,) = Job().prepare(lambda: DataLoader(Failing(8), 2))
    other.load_state_dict(loader.state_dict())
    assert passing_over_errors(other) == [[6, 7]]


def test_ranks_of_a_sharded_loader_pass_over_errors_each_by_itself() -> None:
    def read(host: Host) -> list[list[int]]:
        own = Failing(8) if host.rank == 0 else Numbers(8)
        return passing_over_errors(Loader(DataLoader(own, 2), host, index=0, sharded=True))

    seen = Job(2).run(read)
    assert seen == [[[0, 1], [2, 3], [], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_a_rank_whose_first_batches_cannot_be_read_has_no_empty_ones() -> None:
    def read(host: Host) -> list[Any]:
        own = Subset(Failing(8), [4]) if host.rank == 0 else Numbers(2)
        batches = iter(Loader(DataLoader(own, 1), host, index=0, sharded=True))
        if host.rank == 1:
            return [next(batches).tolist()]
        with pytest.raises(KeyError):
            next(batches)
        with pytest.raises(InvalidArgument, match="never had a batch to model"):
            next(batches)
        return list(batches)

    assert Job(2).run(read) == [[], [[0]]]


def test_other_errors_end_the_pass_and_count_no_batch() -> None:
    class Once(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise KeyError("the sampler")

        def __len__(self) -> int:
            return 8

    (loader,) = Job().prepare(lambda: DataLoader(Numbers(8), 2, sampler=Once()))
    assert passing_over_errors(loader) == [[0, 1], [2, 3], []]
    (first, _) = Job(2).prepare(lambda: DataLoader(Failing(8), 2))  # of whose batches each rank has a part
    assert passing_over_errors(first) == [[0], [2], []]


def test_a_batch_of_a_stream_that_cannot_be_collated_counts() -> None:
    def collate(numbers: list[int]) -> Tensor:
        if 2 in numbers:
            raise KeyError("2")
        return torch.tensor(numbers)

    (loader,) = Job().prepare(lambda: DataLoader(Stream(8), 2, collate_fn=collate))
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyError):
        next(batches)
    (other,) = Job().prepare(lambda: DataLoader(Stream(8), 2, collate_fn=collate))
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[4, 5], [6, 7]] == [batch.tolist() for batch in batches]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_pipes_are_shuffled_and_shared_among_workers_as_in_torch(num_workers: int) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(IterableWrapper(range(12)).shuffle().sharding_filter(), 2, num_workers=num_workers)

    (prepared,) = Job().prepare(loader)
    first, second = ([number for batch in prepared for number in batch.tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_of_a_sharded_loader_share_a_data_pipe(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    own = DataLoader(IterableWrapper(range(12)).sharding_filter(), 2, num_workers=num_workers)
    batches: list[Tensor] = list(Loader(own, Job().hosts[0], index=0, sharded=True))
    assert sorted(number for batch in batches for number in batch.tolist()) == [1, 3, 5, 7, 9, 11]


def test_an_empty_global_batch_is_refused() -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(3), batch_sampler=[[0], []]))
    with pytest.raises(InvalidArgument, match="no samples"):
        list(loader)


# DataLoader workers


class Reporting(Numbers):
    """Items tell which data set the worker's start function was shown."""

    offset = 0

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def start(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Reporting)
    info.dataset.offset = 100


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_start_beside_live_threads(method: str) -> None:
    stop = threading.Event()
    turns = [0, 0]

    def replica(i: int) -> None:
        x = torch.randn(64, 64)
        while not stop.is_set():
            x = torch.nn.functional.normalize(x @ x)
            turns[i] += 1
            stop.wait(0.001)

    threads = [threading.Thread(target=replica, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        (loader,) = Job(1, 2).prepare(
            lambda: DataLoader(
                Reporting(10),
                4,
                num_workers=1,
                multiprocessing_context=method,
                worker_init_fn=start,
                persistent_workers=True,
                timeout=120,
            )
        )
        for _ in range(2):
            found = [[part.tolist() for part in batch] for batch in loader]
            assert found == [[[100, 101], [102, 103]], [[104, 105], [106, 107]], [[108], [109]]]
        (stream,) = Job(1, 2).prepare(
            lambda: DataLoader(
                Stream(5), 4, num_workers=1, multiprocessing_context=multiprocessing.get_context(method), timeout=120
            )
        )
        assert [[part.tolist() for part in batch] for batch in stream] == [[[0, 2], [1, 3]], [[4], []]]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert min(turns) > 0


def test_leaving_a_pass_early_ends_its_workers_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        for make in (
            partial(DataLoader, Numbers(50), 2, num_workers=1),
            partial(DataLoader, Stream(50), num_workers=1),
        ):
            before = set(multiprocessing.active_children())
            (loader,) = Job().prepare(make)
            for _ in loader:
                assert set(multiprocessing.active_children()) > before
                break
            assert set(multiprocessing.active_children()) == before
    finally:
        gc.enable()


def test_map_style_workers_differ_in_their_seeds_by_rank_and_epoch() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> int:
            return int(torch.randint(2**40, ()))

    loaders = Job(2).prepare(lambda: DataLoader(Draws(4), 4, num_workers=1))
    drawn = [item for _ in range(2) for batch in epoch_of(loaders) for part in batch for item in part]
    assert len(set(drawn)) == 8


def test_getitems_of_the_data_set_is_used() -> None:
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-index for index in indices]

    first, second = Job(2).prepare(lambda: DataLoader(Batched(4), 4))
    assert next(iter(first)).tolist() == [0, -1]
    assert next(iter(second)).tolist() == [-2, -3]


def test_a_tensor_data_set_as_in_the_readme() -> None:
    dataset = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    (loader,) = Job(1, 2).prepare(lambda: DataLoader(dataset, 3))
    for x, y in loader:
        assert [part.shape for part in x] == [(2, 2), (1, 2)]
        assert [part.tolist() for part in y] == [[0, 1], [2]]


# --- going on within an epoch -----------------------------------------------------------------------------------------
def _kinds() -> dict[str, Callable[[Any], DataLoader[Any]]]:
    return {
        "by index": lambda data: DataLoader(data or Numbers(23), 4, shuffle=True),
        "own generator": lambda data: DataLoader(
            data or Numbers(23), 4, shuffle=True, generator=torch.Generator().manual_seed(5)
        ),
        "with workers": lambda data: DataLoader(data or Numbers(23), 4, shuffle=True, num_workers=2),
        "persistent": lambda data: DataLoader(
            data or Numbers(23), 4, shuffle=True, num_workers=1, persistent_workers=True
        ),
        "ready": lambda data: DataLoader(
            TensorDataset(torch.arange(24).reshape(6, 4)), None, sampler=RandomSampler(range(6))
        ),
        "iterable": lambda data: DataLoader(Stream(23, shuffle=True), 4),
        "iterable with workers": lambda data: DataLoader(Stream(23, shuffle=True), 4, num_workers=2),
    }


def _values(batches: Iterable[Any]) -> list[str]:
    return [str(batch) for batch in batches]


@pytest.mark.parametrize("kind", list(_kinds()))
@pytest.mark.parametrize("taken", [0, 1, 5, 6])
def test_a_loader_goes_on_where_its_state_says(kind: str, taken: int) -> None:
    (loader,) = Job(local=2).prepare(partial(_kinds()[kind], None))
    list(loader)
    passing = iter(loader)
    for _ in range(taken):
        next(passing)
    state = loader.state_dict()
    expected = [_values(passing), _values(loader)]

    (again,) = Job(local=2).prepare(partial(_kinds()[kind], None))
    again.load_state_dict(state)
    assert again.state_dict()["batches"] == taken and again.epoch == 1
    assert [_values(again), _values(again)] == expected
    assert again.epoch == loader.epoch == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_that_share_a_generator_go_on_in_whatever_order_they_are_loaded(
    order: tuple[int, int], workers: int
) -> None:
    def prepared() -> tuple[torch.Generator, list[Loader[Any]]]:
        generator, job = torch.Generator().manual_seed(5), Job()
        makers = (
            lambda: DataLoader(Numbers(23), 4, shuffle=True, generator=generator, num_workers=workers),
            lambda: DataLoader(Numbers(6), 2, shuffle=True, generator=generator),
        )
        return generator, [job.prepare(maker, index=index)[0] for index, maker in enumerate(makers)]

    generator, (first, second) = prepared()
    list(first), list(second)
    passing = iter(first)
    next(passing), next(passing)
    list(second)
    torch.rand(3, generator=generator)
    states = [first.state_dict(), second.state_dict()]
    expected = [_values(passing), _values(second), _values(first)]

    again = prepared()[1]
    for number in order:
        again[number].load_state_dict(states[number])
    assert [again[number].state_dict()["batches"] for number in (0, 1)] == [2, 0]
    assert [_values(again[0]), _values(again[1]), _values(again[0])] == expected


def _zipped(loaders: list[Loader[Any]], epochs: int) -> Iterator[str]:
    for _ in range(epochs):
        for batches in zip(*loaders, strict=True):
            yield str(batches)


@pytest.mark.parametrize(
    ("count", "samples", "drop_last", "workers"),
    [
        *((count, *data, 0) for count in (1, 2) for data in ((32, False), (30, False), (30, True))),
        (1, 32, False, 1),  # those start processes at each of their stops
        (1, 30, True, 2),
        (2, 30, False, 2),
    ],
)
def test_passes_over_a_generator_of_ones_own_go_on_anywhere(
    count: int, samples: int, drop_last: bool, workers: int
) -> None:
    def prepared() -> list[Loader[Any]]:
        generator, job = torch.Generator().manual_seed(5), Job()

        def make() -> DataLoader[Any]:
            options: Any = {"shuffle": True, "drop_last": drop_last, "num_workers": workers}
            return DataLoader(Numbers(samples), 8, generator=generator, **options)

        return [job.prepare(make, index=index)[0] for index in range(count)]

    expected = list(_zipped(prepared(), 3))
    for stop in range(1, len(expected)):
        loaders = prepared()
        passing = _zipped(loaders, 3)
        found = [next(passing) for _ in range(stop)]
        again = prepared()
        for loader, stopped in zip(again, loaders, strict=True):
            loader.load_state_dict(stopped.state_dict())
        found += _zipped(again, 3 - again[0].epoch)
        assert found == expected, stop


def test_a_place_within_an_epoch_is_of_one_order() -> None:
    def state_of(make: Callable[[], DataLoader[Any]]) -> Any:
        (loader,) = Job().prepare(make)
        next(iter(loader))
        return loader.state_dict()

    (loader,) = Job().prepare(lambda: DataLoader(Numbers(23), 4))
    with pytest.raises(InvalidArgument, match=r"the order of .*RandomSampler, and now .*SequentialSampler"):
        loader.load_state_dict(state_of(lambda: DataLoader(Numbers(23), 4, shuffle=True)))
    (stream,) = Job().prepare(lambda: DataLoader(Stream(23), 4, num_workers=1))
    with pytest.raises(InvalidArgument, match=r"2 DataLoader worker\(s\) that read a stream, and now 1"):
        stream.load_state_dict(state_of(lambda: DataLoader(Stream(23), 4, num_workers=2)))
    stream.load_state_dict(state_of(lambda: DataLoader(Stream(23), 4)))


def test_a_state_without_what_generators_had_when_it_was_saved_is_taken() -> None:
    (loader,) = Job().prepare(partial(_kinds()["own generator"], None))
    passing = iter(loader)
    next(passing)
    state = {name: loader.state_dict()[name] for name in ("epoch", "batches", "generators")}
    (again,) = Job().prepare(partial(_kinds()["own generator"], None))
    again.load_state_dict(state)
    assert [_values(again), _values(again)] == [_values(passing), _values(loader)]


@pytest.mark.parametrize("taken", [0, 2, 6])
@pytest.mark.parametrize("is_new", [True, False])
def test_persistent_workers_draw_from_the_generator_once(taken: int, is_new: bool) -> None:
    def prepared() -> Loader[Any]:
        generator = torch.Generator().manual_seed(5)
        make = partial(DataLoader[int], Numbers(23), 4, shuffle=True, generator=generator)
        return Job().prepare(lambda: make(num_workers=1, persistent_workers=True))[0]

    loader = prepared()
    list(loader)
    rest = iter(loader) if taken else loader
    for _ in range(taken):
        next(rest)
    state = loader.state_dict()
    expected = [_values(rest), _values(loader)]
    again = prepared()
    if not is_new:
        list(again)
    again.load_state_dict(state)
    again.load_state_dict(again.state_dict())
    assert [_values(again), _values(again)] == expected


def test_a_pass_that_was_left_before_the_last_step_counts_as_an_epoch() -> None:
    job = Job()
    (loader,) = job.prepare(partial(_kinds()["own generator"], None))
    (host,) = job.hosts

    def place() -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["batches"]

    for _ in loader:
        host.steps += 1
        if host.steps == 2:
            break
    assert place() == (0, 2), "left after the last step"
    host.steps += 1
    state = loader.state_dict()
    assert place() == (1, 0) and loader.epoch == 0
    passing = iter(loader)
    expected = _values(passing)
    assert place() == (2, 0)
    passing = iter(loader)
    next(passing)
    host.steps += 1
    assert place() == (2, 1), "it is still there"

    (again,) = Job().prepare(partial(_kinds()["own generator"], None))
    again.load_state_dict(state)
    assert again.epoch == 1 and _values(again) == expected


def test_a_pass_ends_where_its_loader_is_loaded() -> None:
    (loader,) = Job().prepare(partial(_kinds()["by index"], None))
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    expected = _values(passing)
    passing = iter(loader)
    next(passing)
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="loaded while a loop over it ran; begin a new loop"):
            next(passing)
    assert loader.state_dict() == state
    assert _values(loader) == expected


def test_batches_that_a_loader_passes_over_are_not_read() -> None:
    data = Numbers(23)
    (loader,) = Job().prepare(lambda: _kinds()["by index"](data))
    loader.load_state_dict({"epoch": 0, "batches": 4})
    list(loader)
    assert len(data.read) == 23 - 4 * 4
    loader.load_state_dict({"epoch": 0, "batches": 4})
    loader.epoch = 0
    assert len(list(loader)) == 6


def test_the_state_of_an_epoch_that_ended_is_the_next_ones_begin() -> None:
    (loader,) = Job().prepare(partial(_kinds()["by index"], None))
    data = {"batch_size": 4, "size": 23, "samples": 23, "sampler": "BatchSampler, RandomSampler"}
    assert loader.state_dict() == {"epoch": 0, "batches": 0, "generators": [], **data}
    for batch, _ in enumerate(loader):
        assert loader.state_dict()["batches"] == batch + 1
    assert loader.state_dict() == {"epoch": 1, "batches": 0, "generators": [], **data}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: DataLoader(Numbers(23), 8, shuffle=True), "batches of 4, and now 8"),
        (lambda: DataLoader(Numbers(29), 4, shuffle=True), "a data set of 23, and now 29"),
        (lambda: DataLoader(Numbers(23), batch_sampler=BatchSampler(range(23), 8, False)), "batches of 4, and now 8"),
        (
            lambda: DataLoader(Numbers(23), 4, sampler=RandomSampler(range(9))),
            "a sampler that draws 23 samples, and now 9",
        ),
    ],
)
def test_the_place_in_other_batches_is_refused(make: Callable[[], DataLoader[Any]], told: str) -> None:
    (loader,) = Job().prepare(lambda: DataLoader(Numbers(23), 4, shuffle=True))
    next(iter(loader))
    within = loader.state_dict()
    list(loader)
    (other,) = Job().prepare(make)
    with pytest.raises(InvalidArgument, match=told):
        other.load_state_dict(within)
    assert other.state_dict()["batches"] == 0
    other.load_state_dict(loader.state_dict())
    assert other.epoch == 2
    other.load_state_dict({"epoch": 0, "batches": 1, "generators": []})


def test_the_place_in_data_of_unknown_size_and_a_sharded_one_are_taken() -> None:
    def place_in(loader: DataLoader[Any], **options: Any) -> dict[str, Any]:
        (prepared,) = Job().prepare(lambda: loader, **options)
        next(iter(prepared))
        state = prepared.state_dict()
        prepared.load_state_dict(state)
        return {name: state[name] for name in ("batch_size", "size") if name in state}

    assert place_in(DataLoader(Stream(23), 4)) == {"batch_size": 4, "size": None}
    assert place_in(DataLoader(Numbers(23), batch_sampler=[[0], [1, 2]])) == {"batch_size": None, "size": 23}
    assert place_in(DataLoader(Numbers(23), 4), sharded=True) == {}


def test_a_state_of_another_loader_is_refused() -> None:
    (loader,) = Job().prepare(partial(_kinds()["own generator"], None))
    for state in ({}, {"epoch": 0, "batches": 1}, {**loader.state_dict(), "batches": -1}):
        with pytest.raises(InvalidArgument, match="no state of a loader with 1 generators"):
            loader.load_state_dict(state)


def test_attributes_are_those_of_the_users_loader() -> None:
    data = Numbers(23)
    user = DataLoader(data, 4, num_workers=0)
    (loader,) = Job().prepare(lambda: user)
    assert loader.dataset is data and loader.batch_size == 4 and loader.sampler is user.sampler
    with pytest.raises(AttributeError, match="nonsense"):
        loader.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="_nonsense"):
        loader._nonsense  # noqa: B018


def test_a_stateful_loader_is_divided_like_its_data() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    jobs = [Job(local=2).prepare(lambda make=make: make(Numbers(23), 4))[0] for make in (stateful, DataLoader)]
    assert _values(jobs[0]) == _values(jobs[1])


# --- pinned memory ----------------------------------------------------------------------------------------------------


class Pinned(NamedTuple):
    """A structure that torch's own walk keeps, in one that it makes a list of."""

    values: tuple[Tensor, str]


class OwnBatch:
    """An object that knows how to be pinned."""

    def pin_memory(self) -> str:
        return "pinned"


@pytest.mark.parametrize("pins_objects", [False, True])
def test_pinning_keeps_structures(monkeypatch: pytest.MonkeyPatch, pins_objects: bool) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, pin_memory: tensor)
    monkeypatch.setattr(Tensor, "copy_", lambda tensor, source: source + 100)
    own = OwnBatch()
    parts = ([Pinned((torch.tensor([1]), "a")), own, torch.eye(2).to_sparse()], [3, 1, 2])
    state = ReaderState(1, {"buffer": torch.tensor([5])}, own, ended=False)
    for result in (parts, ReadBatch(parts, 0, state)):
        pinned = pin_memory(Pinnable(result, pins_objects)).result
        values, counts = pinned.parts if isinstance(pinned, ReadBatch) else pinned
        assert type(values[0]) is Pinned
        assert values[0].values == (torch.tensor([101]), "a")
        assert values[1] == "pinned" if pins_objects else values[1] is own
        assert values[2] is parts[0][2]
        assert counts == [3, 1, 2]
    assert pinned.state is state
    ended = Pinnable(Ended(0), pins_objects)
    assert pin_memory(ended) is ended


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_is_to_pin_yields_what_another_does(num_workers: int) -> None:
    """Without a GPU nothing is pinned; tests/gpu/test_data.py has one."""
    values = [(torch.full((3,), i), str(i)) for i in range(5)]
    plain, pinning = (
        list(Job().prepare(lambda: DataLoader(values, 2, pin_memory=asked, num_workers=num_workers))[0])  # noqa: B023
        for asked in (False, True)
    )
    assert str(pinning) == str(plain)
