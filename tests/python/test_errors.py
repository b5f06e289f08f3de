"""The error types: their bases, their attributes, and their way from C++."""

from __future__ import annotations

import pickle

import pytest

import muster
from muster import errors

BUILT_IN = {
    "InvalidArgument": (errors.Error, ValueError),
    "LayoutMismatch": (errors.Error, ValueError),
    "CommError": (errors.Error, RuntimeError),
    "PeerLost": (errors.CommError, ConnectionError),
    "Timeout": (errors.CommError, TimeoutError),
    "RemoteError": (errors.Error, RuntimeError),
    "NonFinite": (errors.Error, FloatingPointError),
    "CheckpointError": (errors.Error, OSError),
    "AuthError": (errors.Error, PermissionError),
    "NotBuilt": (errors.Error, ImportError),
}


def test_the_table_is_complete() -> None:
    assert {*BUILT_IN, "Error"} == set(errors.__all__)
    assert all(getattr(muster, name) is getattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_error_is_also_the_built_in(name: str) -> None:
    cls = getattr(errors, name)
    for base in BUILT_IN[name]:
        with pytest.raises(base, match="what to do"):
            raise cls("what to do")
    assert str(cls("what to do")) == "what to do"


@pytest.mark.parametrize("name", errors.__all__)
def test_cpp_raises_the_class_of_the_same_name(name: str) -> None:
    with pytest.raises(errors.Error, match=r"^what to do$") as caught:
        muster._C._raise(name, "what to do")
    assert type(caught.value) is getattr(errors, name)


def test_attributes_come_along() -> None:
    with pytest.raises(errors.PeerLost) as lost:
        muster._C._raise("PeerLost", "gone")
    assert lost.value.rank == 3
    with pytest.raises(errors.RemoteError) as remote:
        muster._C._raise("RemoteError", "there")
    e = remote.value
    assert (e.rank, e.replica, e.type, e.text) == (3, 7, "ValueError", "bad batch")


def test_a_python_exception_crosses_cpp_as_the_same_object() -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        muster._C._raise_through_torch(mine)
    assert caught.value is mine


@pytest.mark.parametrize(
    "error", [errors.PeerLost("gone", rank=3), errors.RemoteError("there", rank=1, replica=2, type="T", text="x")]
)
def test_errors_survive_pickling(error: errors.Error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
