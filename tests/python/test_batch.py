"""Dividing batches into parts."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from muster.batch import agreeing_rows, digest, emptied, part_sizes, place, rows, split
from muster.errors import InvalidArgument
from muster.per_replica import PerReplica


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    derived: Any = field(init=False, default=7)


@dataclass(slots=True)
class Slotted:
    x: Tensor
    names: list[str]


class Samples(list[Any]):
    """Knows more than its items."""

    def __init__(self, items: Any, *, source: str) -> None:
        super().__init__(items)
        self.source = source


class Fields(tuple[Any, ...]):
    source: str

    def __new__(cls, x: Any, y: Any) -> Fields:
        return super().__new__(cls, (x, y))


class NamedFields(Pair):
    source: str


class Immutable(Mapping[str, Any]):
    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members = dict(members)

    def __getitem__(self, key: str) -> Any:
        return self._members[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


class FromKeys(Immutable):
    def __init__(self, *, x: Any) -> None:
        super().__init__({"x": x})


class Opaque:
    pass


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 16])
def test_part_sizes_cover_all_larger_first_and_differ_by_at_most_one(parts: int) -> None:
    for n in range(50):
        sizes = part_sizes(n, parts)
        assert len(sizes) == parts
        assert sum(sizes) == n
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
    assert part_sizes(9, 4) == [3, 2, 2, 2]


def test_part_sizes_follow_capacities() -> None:
    assert part_sizes(16, 2, [0.75, 0.25]) == [12, 4]
    assert part_sizes(1, 3, [0.2, 0.5, 0.3]) == [0, 1, 0]
    for n in range(50):
        assert part_sizes(n, 7, [1 / 7] * 7) == part_sizes(n, 7)


def test_a_batch_is_split_by_capacities_unless_the_loader_tells_the_rows() -> None:
    x = torch.arange(8)
    first, second = split((x, list("abcdefgh"), 5), 2, capacities=[0.25, 0.75])
    assert first[0].tolist() == [0, 1] and second[0].tolist() == [2, 3, 4, 5, 6, 7]
    assert first[1:] == (["a", "b"], 5) and second[1:] == (list("cdefgh"), 5)
    assert [part[0].tolist() for part in split((x[:1],), 2, capacities=[0.25, 0.75])] == [[], [0]]
    assert [len(part[0]) for part in split((x,), 2, [4, 4], [0.25, 0.75])] == [4, 4]


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 9, 64, 131])
def test_tensors_are_split_contiguously_in_order(n: int, parts: int) -> None:
    x = torch.randn(n, 3)
    y = torch.arange(n)
    divided = split((x, {"y": y}), parts)
    assert [part[0].size(0) for part in divided] == part_sizes(n, parts)
    assert torch.equal(torch.cat([part[0] for part in divided]), x)
    assert torch.equal(torch.cat([part[1]["y"] for part in divided]), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_part_starts_on_64_bytes(dtype: torch.dtype) -> None:
    for n in (7, 64, 65):
        whole = torch.ones(n + 1, 3).to(dtype)
        for x in (whole[:n], whole[1:], whole[1:].t().contiguous()):
            for part in split((x,), 3) + split((x,), 1):
                assert part[0].numel() == 0 or part[0].data_ptr() % 64 == 0


def test_aligned_parts_are_views_and_one_part_is_the_same_object() -> None:
    x = torch.zeros(32, 16)
    first, second = split((x,), 2)
    second[0].fill_(1)
    assert x[16:].eq(1).all()
    assert first[0].data_ptr() == x.data_ptr()
    batch = {"x": x, "list": [x, "a"]}
    ((same,),) = split((batch,), 1)
    assert same is batch


def test_memory_formats_are_kept_in_views_and_copies() -> None:
    x = torch.randn(6, 3, 5, 7).to(memory_format=torch.channels_last)
    parts = [part[0] for part in split((x,), 4)]
    assert any(part.data_ptr() != x[i].data_ptr() for i, part in zip((0, 2, 4, 5), parts, strict=True)), "no copy made"
    for part in parts:
        assert part.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.cat(parts), x)


def test_what_belongs_to_no_row_goes_to_all() -> None:
    scale = torch.tensor(2.0)
    values: tuple[Any, ...] = (scale, 3, 2.5, 1j, True, None, "text", b"bytes", torch.Size([4, 4]), (224, 224), [], {})
    for part in split((torch.zeros(4), *values), 2):
        assert part[1] is scale
        assert part[1:] == values


def test_structures_keep_their_types() -> None:
    x = torch.arange(5)
    batch: dict[str, Any] = {
        "tuple": (x, [x]),
        "named": Pair(x, {"deep": x}),
        "frozen": Frozen(x),
        "slotted": Slotted(x, list("abcde")),
        "ordered": OrderedDict(b=x, a=x),
        "user": UserDict({"k": x}),
        "proxy": MappingProxyType({"k": x}),
        "max": torch.max(torch.zeros(5, 2), dim=1),
    }
    first, second = (part[0] for part in split((batch,), 2))
    assert list(first) == list(batch)
    for part, expected in ((first, [0, 1, 2]), (second, [3, 4])):
        assert part["tuple"][1][0].tolist() == expected
        assert type(part["tuple"]) is tuple
        assert type(part["named"]) is Pair
        assert part["named"].y["deep"].tolist() == expected
        assert type(part["frozen"]) is Frozen
        assert part["frozen"].x.tolist() == expected
        assert part["frozen"].derived == 7
        assert part["slotted"].names == ["abcde"[i] for i in expected]
        assert list(part["ordered"]) == ["b", "a"]
        assert type(part["ordered"]) is OrderedDict
        assert part["user"]["k"].tolist() == expected
        assert type(part["user"]) is UserDict
        assert part["proxy"]["k"].tolist() == expected
        assert part["max"].values.size(0) == len(expected)
    assert batch["frozen"].x.numel() == 5, "the batch itself was changed"
    assert batch["user"]["k"].numel() == 5


def from_file(fields: Any) -> Any:
    fields.source = "file"
    return fields


def first_of(structure: Any) -> Any:
    return next(iter(structure.values() if isinstance(structure, Mapping) else structure))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Samples([x, {"y": x}], source="file"),
        lambda x: from_file(Fields(x, {"y": x})),
        lambda x: from_file(NamedFields(x, {"y": x})),
        lambda x: defaultdict(list, {0: x, 1: {"y": x}}),
        lambda x: Immutable({"x": x}),
        lambda x: MappingProxyType({"x": x}),
        lambda x: torch.max(x.view(-1, 1), dim=1),
    ],
    ids=["list", "tuple", "named", "defaultdict", "immutable", "proxy", "struct"],
)
def test_structures_of_users_classes_are_rebuilt_whole(make: Callable[[Tensor], Any]) -> None:
    buffer = torch.arange(9.0)
    batch = make(buffer[:8])
    for (part,), values in zip(split((batch,), 2), buffer[:8].chunk(2), strict=True):
        assert type(part) is type(batch)
        assert torch.equal(first_of(part), values)
        for name in ("source", "default_factory"):
            assert getattr(part, name, None) == getattr(batch, name, None)
    unaligned = make(buffer[1:])
    ((alone,),) = split((unaligned,), 1)
    assert type(alone) is type(batch), "with one part types depend on where data starts"
    assert first_of(alone).data_ptr() % 64 == 0


def test_an_immutable_mapping_that_no_dict_makes_becomes_one() -> None:
    for part in split((FromKeys(x=torch.zeros(4)),), 2):
        assert part[0].keys() == {"x"}


def test_columns_of_plain_values_are_split_like_tensors() -> None:
    x = torch.arange(3)
    first, second = split((x, ["a", "b", "c"], ("d", "e", "f"), [1.5, 2, True]), 2)
    assert first[1:] == (["a", "b"], ("d", "e"), [1.5, 2])
    assert second[1:] == (["c"], ("f",), [True])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", "b"], r"argument 2: list of 2 plain values .* the batch has 3 rows"),
        (("a", "b"), r"argument 2: tuple of 2 plain values .* the batch has 3 rows"),
        ([0.9, 0.99], r"argument 2: list of 2 plain values .*PerReplica"),
    ],
)
def test_a_column_of_another_length_is_refused(column: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        split((torch.zeros(3), column), 2)


@pytest.mark.parametrize("numbers", [(1, 2, 3), (0.5, 1, True)])
def test_numbers_beside_as_many_tensors_are_refused(numbers: tuple[float, ...]) -> None:
    sequences = tuple(torch.ones(4, 2) for _ in numbers)
    for batch in ((sequences, numbers), [[numbers], {"x": list(sequences), "y": numbers}]):
        with pytest.raises(InvalidArgument, match=r"3 numbers beside as many.*collate_fn"):
            split((batch,), 2)
    (first, _) = split(((sequences, torch.Size((4, 4, 4)), sequences[:2], (1, 2)),), 2)
    assert first[0][1] == torch.Size((4, 4, 4))
    assert first[0][3] == (1, 2)
    assert [len(x) for x in first[0][0]] == [2, 2, 2]


def test_a_column_alone_is_refused_unless_the_loader_tells_the_rows() -> None:
    with pytest.raises(InvalidArgument, match="no tensor to tell"):
        split((["a", "b", "c"],), 2)
    assert split((["a", "b", "c"],), 2, [1, 2]) == [(["a"],), (["b", "c"],)]


def test_per_replica_gives_parts_explicitly_at_any_depth() -> None:
    explicit = PerReplica([Opaque(), Opaque()])
    nested = PerReplica([torch.zeros(9), torch.zeros(2)])
    first, second = split((explicit, {"k": [nested]}, torch.arange(3)), 2)
    assert first[0] is explicit[0]
    assert second[0] is explicit[1]
    assert second[1]["k"][0] is nested[1]
    assert second[2].tolist() == [2]
    ((only,),) = split((PerReplica([5]),), 1)
    assert only == 5


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_per_replica_of_another_length_is_refused(num_parts: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"argument 1.*2 parts.*{num_parts} local replicas"):
        split(((PerReplica([1, 2]),),), num_parts)
    with pytest.raises(InvalidArgument, match=rf"argument 2.*2 parts.*{num_parts} local replicas"):
        split((torch.zeros(3), PerReplica([1, 2])), num_parts)


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((torch.zeros(2), Opaque()), "argument 2"),
        (({"meta": [torch.zeros(2), 1, Opaque()]},), r"argument 1, key 'meta'\[2\]"),
        ((Pair(torch.zeros(2), (Opaque(),)),), r"argument 1\.y\[0\]"),
        ((torch.zeros(2), {3, 4}), "argument 2: object of type set"),
        ((torch.zeros(2).numpy(),), "argument 1: object of type ndarray"),
        ((torch.relu,), "argument 1"),
        ((torch.nn.utils.rnn.pack_sequence([torch.zeros(2)]),), "argument 1: object of type PackedSequence"),
    ],
)
def test_another_leaf_is_refused_by_its_path(args: tuple[Any, ...], path: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{path}.*cannot be split; pass PerReplica\(\[\.\.\.\]\)"):
        split(args, 2)


def test_tensors_that_disagree_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"argument 2, key 'y'.*7 rows.*beside argument 1, which has 8"):
        split((torch.zeros(8, 2), {"y": torch.zeros(7)}), 2)
    with pytest.raises(InvalidArgument, match=r"argument 1: .*10 rows.*the loader's batch, which has 8"):
        split((torch.zeros(10),), 2, [4, 4])


@pytest.mark.parametrize(
    "tensor", [torch.eye(4).to_sparse(), torch.nested.nested_tensor([torch.zeros(2)] * 4, layout=torch.jagged)]
)
def test_sparse_and_nested_tensors_are_refused(tensor: Tensor) -> None:
    with pytest.raises(InvalidArgument, match=r"argument 1\[0\]: a .* tensor cannot be split"):
        split(((tensor,),), 2)


def test_the_loaders_sizes_hold_for_tensors_beside_its_parts() -> None:
    first, second = split((PerReplica([torch.zeros(1), torch.zeros(3)]), torch.arange(4)), 2, [1, 3])
    assert first[1].tolist() == [0]
    assert second[1].tolist() == [1, 2, 3]


def test_one_part_accepts_anything() -> None:
    opaque = Opaque()
    ((same, x, y),) = split((opaque, torch.zeros(3), torch.zeros(4)), 1)
    assert same is opaque
    assert (x.size(0), y.size(0)) == (3, 4)


def test_gradients_flow_through_parts() -> None:
    x = torch.ones(3, requires_grad=True)
    sum(part[0].sum() * i for i, part in enumerate(split((x,), 3), start=1)).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 2, 3]


def test_rows_are_those_of_the_first_tensor_depth_first() -> None:
    assert rows(torch.zeros(3, 2)) == 3
    assert rows((1, torch.tensor(1.0), {"a": [torch.zeros(4)]}, torch.zeros(5))) == 4
    assert rows(Frozen(torch.zeros(2))) == 2
    assert rows((["a", "b"], None, Opaque())) is None
    assert rows(torch.zeros(0, 2)) == 0


def test_agreeing_rows_tell_whether_tensors_differ() -> None:
    assert agreeing_rows((torch.zeros(3, 2), {"a": torch.zeros(3)}, torch.tensor(1.0))) == 3
    assert agreeing_rows((torch.zeros(3), torch.zeros(4))) is None
    assert agreeing_rows("text") is None


def test_emptied_keeps_structure_and_dtypes() -> None:
    part: tuple[Any, ...] = (
        torch.ones(1, 3, dtype=torch.float64),
        {"a": torch.ones(1, dtype=torch.uint8), "s": ["x"], "t": ("y",), "n": 4, "q": (torch.ones(1), torch.ones(5))},
        torch.tensor(1.0),
    )
    empty = emptied(part, 1)
    assert empty[0].shape == (0, 3)
    assert empty[0].dtype == torch.float64
    assert empty[1]["a"].shape == (0,)
    assert empty[1]["a"].dtype == torch.uint8
    assert empty[1]["s"] == []
    assert empty[1]["t"] == ()
    assert empty[1]["n"] == 4
    assert empty[1]["q"][0].shape == (0,)
    assert empty[1]["q"][1].shape == (5,)
    assert empty[2] is part[2]
    assert empty[0].untyped_storage().nbytes() == 0


def test_place_aligns_and_otherwise_changes_nothing() -> None:
    cpu = torch.device("cpu", 1)
    point = namedtuple("point", "x y")
    batch = point(torch.zeros(4), {"y": torch.zeros(4), "o": Opaque(), "s": ["a"]})
    assert place(batch, cpu) is batch
    shifted = torch.arange(5.0)[1:]
    placed = place(point(batch.x, shifted), cpu)
    assert type(placed) is point
    assert placed.x is batch.x
    assert placed.y.data_ptr() % 64 == 0
    assert torch.equal(placed.y, shifted)


def test_place_moves_to_the_device() -> None:
    class Movable:
        def to(self, device: torch.device) -> torch.device:
            return device

    meta = torch.device("meta")
    batch: dict[str, Any] = {"x": torch.zeros(4), "n": 3, "o": Movable(), "p": Opaque()}
    placed = place(batch, meta)
    assert placed["x"].device == meta
    assert placed["o"] == meta


def test_digests_tell_batches_apart_by_any_value() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    y = torch.tensor([1, 2])
    assert digest([(x, {"y": y})]) == digest([(x.clone(), {"y": y.clone()})])
    assert digest([(x, {"y": y})]) != digest([(x, {"y": y + 1})])
    assert digest([(x,)]) != digest([(x.t(),)]) and digest([(x,)]) != digest([(x.double(),)])
    assert digest([(3, "a", torch.tensor(2.0))]) == ""
    z = torch.tensor([1 + 2j])
    assert digest((z.conj(),)) == digest((torch.tensor([1 - 2j]),)) != digest((z,))
    assert digest((x.bfloat16(),)) != digest((x.to_sparse(),)) != ""
