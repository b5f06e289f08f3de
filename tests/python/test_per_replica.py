"""PerReplica is a sequence of parts and refuses to be taken for a tensor."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import muster
from muster.errors import InvalidArgument
from muster.per_replica import PerReplica


@pytest.fixture
def pair() -> PerReplica[torch.Tensor]:
    return PerReplica([torch.arange(3.0), torch.arange(2.0)])


def test_it_is_a_sequence_of_its_parts(pair: PerReplica[torch.Tensor]) -> None:
    assert isinstance(pair, Sequence)
    assert len(pair) == 2
    assert [part.shape[0] for part in pair] == [3, 2]
    assert pair[0] is pair.parts[0]
    assert pair[-1] is pair.parts[1]
    assert pair[0:1] == (pair.parts[0],)
    first, second = pair
    assert first is pair[0]
    assert second is pair[1]
    with pytest.raises(IndexError):
        pair[2]


def test_it_is_immutable_and_keeps_no_reference_to_the_list() -> None:
    parts: list[int | None] = [1, None]
    per_replica: Any = PerReplica(parts)
    parts.append(3)
    assert per_replica.parts == (1, None)
    with pytest.raises(InvalidArgument):
        per_replica[0] = 5
    with pytest.raises(AttributeError):
        per_replica.parts = ()
    with pytest.raises(AttributeError):
        per_replica.other = 1


def _add_in_place(x: Any) -> None:
    x += 1


USES: dict[str, Callable[[Any], object]] = {
    "shape": lambda x: x.shape,
    "to": lambda x: x.to("cpu"),
    "size": lambda x: x.size(0),
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "tensor add": lambda x: x + torch.ones(3),
    "tensor radd": lambda x: torch.ones(3) + x,
    "in-place add": _add_in_place,
    "matmul": lambda x: x @ torch.ones(3),
    "neg": lambda x: -x,
    "equal": lambda x: x == x[0],
    "unequal": lambda x: x != 1,
    "greater": lambda x: x > 0,
    "float": float,
    "int": int,
    "round": round,
    "torch function": torch.relu,
    "torch function among others": lambda x: torch.add(torch.ones(3), x),
    "functional": lambda x: torch.nn.functional.cross_entropy(x, x),
    "module": lambda x: torch.nn.Linear(3, 1)(x),
    "numpy": np.asarray,
    "index with a mask": lambda x: x[torch.tensor([True, False])],
    "index with a tuple": lambda x: x[:, 0],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_use_as_a_tensor_says_where_the_code_belongs(
    pair: PerReplica[torch.Tensor], use: Callable[[Any], object]
) -> None:
    with pytest.raises(InvalidArgument, match=r"step function.*\.parts"):
        use(pair)
    with pytest.raises(TypeError):
        use(pair)


def test_probing_for_an_attribute_is_no_error(pair: PerReplica[torch.Tensor]) -> None:
    assert not hasattr(pair, "shape")
    assert getattr(pair, "device", None) is None


def test_it_survives_copy_pickle_and_weak_reference(pair: PerReplica[torch.Tensor]) -> None:
    assert weakref.ref(pair)() is pair
    assert len({pair, pair}) == 1
    for clone in (copy.copy(pair), copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert isinstance(clone, PerReplica)
        assert all(torch.equal(a, b) for a, b in zip(clone, pair, strict=True))
    assert copy.copy(pair)[0] is pair[0]


def test_copies_know_the_samples_of_their_parts() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        means = strategy.run(torch.mean, torch.tensor([1.0, 2.0, 6.0]))  # parts of 2 samples and 1
        for clone in (copy.copy(means), copy.deepcopy(means), pickle.loads(pickle.dumps(means))):
            assert float(strategy.reduce(clone)) == pytest.approx(3.0)


@pytest.mark.parametrize("parts", [[], torch.ones(2), "ab", {"a": 1}], ids=repr)
def test_it_needs_a_sequence_of_at_least_one_part(parts: Any) -> None:
    with pytest.raises(InvalidArgument):
        PerReplica(parts)


def test_repr_shows_the_parts() -> None:
    assert repr(PerReplica([1, None])) == "PerReplica([1, None])"
