"""PerReplica: what each of this worker's replicas has of one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from muster.errors import InvalidArgument

__all__ = ["PerReplica", "rows_of", "with_rows"]

T_co = TypeVar("T_co", covariant=True)


class _NotATensorError(InvalidArgument, TypeError, AttributeError):
    """Also an AttributeError, so that ``hasattr`` and ``getattr`` with a default keep their meaning."""


class PerReplica(Sequence[T_co]):
    """An immutable sequence of this worker's parts, one per local replica, in replica order.

    A loader yields one where several replicas live in the process, ``Strategy.run`` returns one, and a user makes one
    to give each replica its own value explicitly. Indexing, iteration, ``len`` and ``parts`` reach the parts; a part
    is None where a result comes from an empty part of a batch. Using the whole as a tensor (attributes, arithmetic,
    comparison, ``float``, torch functions) raises InvalidArgument, which is also a TypeError: such code belongs in the
    step function, where each replica sees its own part.

    Parts are held, not copied. Equality would be tensor arithmetic and is refused; hashing is by identity.
    """

    __slots__ = ("__weakref__", "_parts", "_rows")

    _parts: tuple[T_co, ...]
    # Samples that each part stands for, where Strategy.run knows them; -1: unknown.
    _rows: Sequence[int] | None

    def __init__(self, parts: Iterable[T_co]) -> None:
        """Raises InvalidArgument when `parts` is empty or a single tensor, string or mapping."""
        if isinstance(parts, (str, bytes, dict)) or hasattr(parts, "__torch_function__"):
            raise InvalidArgument(
                f"PerReplica takes a sequence of parts, one per local replica, not one {_name(parts)}; "
                "write PerReplica([part0, part1, ...])"
            )
        self._parts = tuple(parts)
        self._rows = None
        if not self._parts:
            raise InvalidArgument("PerReplica needs at least one part; give one per local replica of the strategy")

    @property
    def parts(self) -> tuple[T_co, ...]:
        """The parts in replica order."""
        return self._parts

    def __len__(self) -> int:
        """The number of parts, which is the number of local replicas; not the number of rows."""
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        if not isinstance(index, (int, slice)):
            _refuse(f"indexing with {_name(index)}")
        return self._parts[index]

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._parts)

    def __repr__(self) -> str:
        return f"PerReplica({list(self._parts)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return with_rows, (self._parts, self._rows)

    __hash__ = object.__hash__

    if not TYPE_CHECKING:  # a type checker is to say "has no attribute"

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__") and name.endswith("__"):
                raise AttributeError(name)
            _refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"torch function {getattr(func, '__name__', func)!r}")


def with_rows(parts: Iterable[T_co], rows: Sequence[int] | None) -> PerReplica[T_co]:
    """A result of Strategy.run, whose parts stand for so many samples each (-1: unknown); None: of the user's own."""
    made = PerReplica(parts)
    made._rows = rows
    return made


def rows_of(parts: PerReplica[Any]) -> Sequence[int] | None:
    """The samples that each part stands for, where Strategy.run made it."""
    return parts._rows


def _name(value: object) -> str:
    return type(value).__name__


def _refuse(use: str) -> NoReturn:
    raise _NotATensorError(
        f"a PerReplica holds one part per local replica and is no tensor, so {use} has no meaning on it; move this "
        "code into the step function, where each replica sees its own part, or use .parts or an index to reach the "
        "parts"
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: PerReplica[Any], *_: Any) -> NoReturn:
        _refuse(name)

    method.__name__ = name
    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert", "float", "int", "complex", "index", "round", "trunc", "floor", "ceil", "array")

for _operator in (
    *_BINARY,
    *("r" + name for name in _BINARY),
    *("i" + name for name in _BINARY),
    *_COMPARISON,
    *_UNARY,
    "divmod",
    "rdivmod",
    "setitem",
):
    setattr(PerReplica, f"__{_operator}__", _refusing(f"__{_operator}__"))
