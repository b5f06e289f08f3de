"""Replicated: a prepared module, as user code sees it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from muster.errors import InvalidArgument

if TYPE_CHECKING:
    from muster.strategy import Strategy

__all__ = ["Replicated"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_OWN = frozenset({"_modules_", "_strategy_", "_number_", "_syncing_"})


def replicate(module: nn.Module, replicas: int, prepared: Sequence[Replicated[Any]] = ()) -> list[nn.Module]:
    """`module` itself and copies of it, one per local replica, which share with the copies of `prepared` modules
    whatever `module` shares with those. Raises InvalidArgument where a copy cannot be made."""
    known = [{**_copies(prepared, replica), **_computed(module)} for replica in range(1, replicas)]
    try:
        # A compiled module is compiled anew for each replica: guards hold on to the module they were made for.
        original = getattr(module, "_orig_mod", None)
        if original is None:
            return [module, *(copy.deepcopy(module, memo) for memo in known)]
        compiled = cast(Any, module)
        return [
            module,
            *(torch._dynamo.OptimizedModule(copy.deepcopy(original, memo), compiled.dynamo_ctx) for memo in known),
        ]
    except Exception as error:
        raise InvalidArgument(
            f"{type(module).__name__} cannot be copied for {replicas} replicas ({type(error).__name__}: {error}); make "
            "it deep-copyable, or pass a factory: strategy.prepare(lambda: build_model())"
        ) from error


def _computed(module: nn.Module) -> dict[int, Any]:
    """deepcopy's memo: copies of the tensors that modules hold as plain attributes and have computed from others, which
    deepcopy refuses (the weight of a pruned layer, say)."""
    return {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


def _copies(prepared: Sequence[Replicated[Any]], replica: int) -> dict[int, Any]:
    """deepcopy's memo: what a replica has for each part of replica 0's modules."""
    memo: dict[int, Any] = {}
    for replicated in prepared:
        pair = (replicated._modules_[0], replicated._modules_[replica])
        for members in (nn.Module.modules, nn.Module.parameters, nn.Module.buffers):
            memo.update((id(a), b) for a, b in zip(*(members(module) for module in pair), strict=True))
    return memo


class Replicated(Generic[ModuleT]):
    """A module with a copy per local replica; they share parameter memory where they share a device.

    Calling or reading it means the current replica's module inside a step, replica 0's outside. Setting an attribute,
    ``train``, ``eval``, ``requires_grad_``, ``load_state_dict``, ``apply``, ``zero_grad``, ``to`` and hooks act on all.
    ``state_dict`` has plain keys. For ``isinstance`` it is the module it stands for.
    """

    _modules_: list[ModuleT]
    _strategy_: weakref.ref[Strategy]
    _number_: int
    _syncing_: bool

    def __init__(self, modules: list[ModuleT], strategy: Strategy, number: int) -> None:
        set_own = object.__setattr__
        set_own(self, "_modules_", modules)
        set_own(self, "_strategy_", weakref.ref(strategy))
        set_own(self, "_number_", number)
        set_own(self, "_syncing_", True)

    @property
    def module(self) -> ModuleT:
        """Replica 0's module: the one that was prepared."""
        return self._modules_[0]

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._modules_[0])

    def _current(self) -> ModuleT:
        strategy = self._strategy_()
        local = strategy._core.current_local_replica if strategy is not None else -1
        return self._modules_[max(local, 0)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy_()
        output = self._current()(*args, **kwargs)
        if strategy is not None and torch.is_grad_enabled() and strategy._core.current_local_replica < 0:
            self._watch_backward(strategy, output)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As calling it, without the module's own hooks."""
        return self._current().forward(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward by hand of outputs computed within adds local gradients; the next one outside averages the sum."""
        previous = self._syncing_
        object.__setattr__(self, "_syncing_", False)
        try:
            yield
        finally:
            object.__setattr__(self, "_syncing_", previous)

    # Backward by hand: a hook on the outputs runs in the outermost graph task, so that its callback comes when all of
    # backward is done; parameters' hooks would come too early under reentrant checkpointing.
    def _watch_backward(self, strategy: Strategy, output: Any) -> None:
        syncing = self._syncing_
        queued = False

        def finished() -> None:
            nonlocal queued
            queued = False
            strategy._backward_by_hand(self._number_)

        def on_gradient(gradient: Tensor) -> Tensor:
            nonlocal queued
            if syncing and not queued:
                queued = True
                torch.autograd.Variable._execution_engine.queue_callback(finished)
            return gradient

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Replica 0's module loads it; the others follow, in parameters and buffers."""
        result = self.module.load_state_dict(state_dict, *args, **kwargs)
        for other in self._modules_[1:]:
            other.load_state_dict(state_dict, *args, **{**kwargs, "assign": False})
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Replica 0's."""
        return self.module.state_dict(*args, **kwargs)

    def _on_all(self, method: str, args: Any, kwargs: Any) -> Any:
        results = [getattr(module, method)(*args, **kwargs) for module in self._modules_]
        return self if results[0] is self.module else results[0]

    def to(self, *args: Any, **kwargs: Any) -> Replicated[ModuleT]:
        """As torch's, on all replicas, each of which stays on its own device."""
        result = cast("Replicated[ModuleT]", self._on_all("to", args, kwargs))
        strategy = self._strategy_()
        if strategy is not None and strategy.devices[0].type != "cpu":
            for module, device in zip(self._modules_, strategy.devices, strict=True):
                module.to(device)
        return result

    def train(self, mode: bool = True) -> Replicated[ModuleT]:
        """As torch's, on all replicas."""
        return cast("Replicated[ModuleT]", self._on_all("train", (mode,), {}))

    def eval(self) -> Replicated[ModuleT]:
        """As torch's, on all replicas."""
        return cast("Replicated[ModuleT]", self._on_all("eval", (), {}))

    def requires_grad_(self, requires_grad: bool = True) -> Replicated[ModuleT]:
        """As torch's, on all replicas."""
        return cast("Replicated[ModuleT]", self._on_all("requires_grad_", (requires_grad,), {}))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._current(), name)
        if name in _ACT_ON_ALL and callable(value):
            return _OnAll(self, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        for module in self._modules_:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        for module in self._modules_:
            delattr(module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._current()[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._current())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._current())  # type: ignore[call-overload, no-any-return]

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.module)} - _OWN)

    def __repr__(self) -> str:
        return f"Replicated({self.module!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleT:
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Callable[[ModuleT], ModuleT], tuple[ModuleT]]:
        return _same, (self.module,)


_ACT_ON_ALL = frozenset({
    "apply", "bfloat16", "compile", "double", "float", "half", "register_buffer", "register_forward_hook",
    "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook", "type",
    "zero_grad",
})  # fmt: skip


class _OnAll:
    """A method of the module that is called on every replica's."""

    def __init__(self, replicated: Replicated[Any], method: str) -> None:
        self._replicated = replicated
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replicated._on_all(self._method, args, kwargs)


def _same(module: ModuleT) -> ModuleT:
    return module
