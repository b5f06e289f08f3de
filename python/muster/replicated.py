"""Replicated: a prepared module, as user code sees it."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from muster import _C
from muster.attributes import compiled_alike, parametrized_apart, share_within, view_of
from muster.by_hand import ByHand
from muster.errors import InvalidArgument

__all__ = ["Replicated", "counterparts", "keep_to_replica", "replicate"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_OWN = frozenset({"_modules_", "_by_hand_", "_number_", "_syncing_", "_views_"})


def replicate(
    module: nn.Module, devices: Sequence[torch.device], prepared: Sequence[Replicated[Any]] = ()
) -> list[nn.Module]:
    """`module` itself and copies of it, one for each local replica's device, which share with the copies of `prepared`
    modules whatever `module` shares with those. Raises InvalidArgument where a copy cannot be made."""
    replicas = len(devices)
    known = [counterparts(prepared, replica) for replica in range(1, replicas)]
    for memo, device in zip(known, devices[1:], strict=True):
        share_within(module, memo)
        here = [parameter for parameter in module.parameters() if parameter.device == device == devices[0]]
        _keep_memory(here, memo)
        _keep_computed(module, here, memo)
    try:
        copies = _copies_of(module, known)
    except Exception as error:
        raise InvalidArgument(
            f"{type(module).__name__} cannot be copied for {replicas} replicas ({type(error).__name__}: {error}); make "
            "it deep-copyable, or pass a factory: strategy.prepare(lambda: build_model())"
        ) from error
    for other, memo in zip(copies, known, strict=True):
        compiled_alike(module, other)
        parametrized_apart(module, other)
        _copy_attributes(module, other, memo)
    return [module, *copies]


def _copy_attributes(module: nn.Module, other: nn.Module, memo: dict[int, Any]) -> None:
    """Those that the program gave to parameters, which torch's copies leave out."""
    for parameter, own in zip(module.parameters(), other.parameters(), strict=True):
        given = {name: value for name, value in vars(parameter).items() if name not in vars(own)}
        vars(own).update(copy.deepcopy(given, memo))


def _keep_computed(module: nn.Module, shared: Sequence[nn.Parameter], memo: dict[int, Any]) -> None:
    """Gives deepcopy, whose `memo` it is, copies of the tensors that modules hold as plain attributes and have computed
    from others, which it refuses (the weight of a pruned layer, say). Views of `shared` parameters, whose memory is one
    for all replicas, become views of the replica's own, which get their gradients."""
    bases = {id(parameter): parameter for parameter in shared}
    for part in module.modules():
        for value in vars(part).values():
            if not isinstance(value, Tensor) or value.is_leaf:
                continue
            base = bases.get(id(value._base))
            if base is not None and id(base) not in memo:
                memo[id(base)] = type(base)(base.detach(), base.requires_grad)
            memo[id(value)] = view_of(value, memo) if base is not None else value.detach().clone()


def _copies_of(module: nn.Module, known: Sequence[dict[int, Any]]) -> list[nn.Module]:
    original = getattr(module, "_orig_mod", None)
    if original is None:
        return [copy.deepcopy(module, memo) for memo in known]
    # A compiled module is compiled anew for each replica: guards hold on to the module they were made for.
    compiled = cast(Any, module)
    return [torch._dynamo.OptimizedModule(copy.deepcopy(original, memo), compiled.dynamo_ctx) for memo in known]


def counterparts(prepared: Sequence[Replicated[Any]], replica: int) -> dict[int, Any]:
    """deepcopy's memo: what a replica has for each part of replica 0's modules."""
    memo: dict[int, Any] = {}
    for replicated in prepared:
        for first, own in zip(replicated._modules_[0].modules(), replicated._modules_[replica].modules(), strict=True):
            memo[id(first)] = own
            for tensors, own_tensors in ((first._parameters, own._parameters), (first._buffers, own._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None and own_tensors.get(name) is not None:
                        memo[id(tensor)] = own_tensors[name]
            pairs = zip(first.parameters(recurse=False), own.parameters(recurse=False), strict=False)
            _keep_memory([tensor for tensor, copied in pairs if tensor.device == copied.device], memo)
    return memo


def _keep_memory(parameters: Iterable[nn.Parameter], memo: dict[Any, Any]) -> None:
    """Lets deepcopy, whose `memo` it is, keep the memory of parameters, which is one for all replicas of a device: of a
    plain attribute that lies there (`layer.weight.detach()`, say), the copies do, too."""
    for parameter in parameters:
        if parameter.layout == torch.strided and not nn.parameter.is_lazy(parameter):
            storage = parameter.untyped_storage()
            memo.setdefault("torch", {})[storage._cdata] = storage  # as UntypedStorage.__deepcopy__ notes copies


class _OwnCalls:
    """What torch calls in the place of a module's `_call_impl`: a module that could change what belongs to its replica
    may not be called in another replica's step.

    In the place where torch keeps what Module.compile made, which copies and pickles leave out, so that these belong
    to no strategy. Gradients of parameters are watched elsewhere, in C++ too; this is for buffers.
    """

    def __init__(self, module: nn.Module, core: _C.StrategyCore, local: int) -> None:
        self._module = weakref.ref(module)
        self._core = core
        self._local = local

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            current = self._core.current_local_replica
            if current >= 0 and current != self._local:
                raise InvalidArgument(
                    f"the module of local replica {self._local} was called in the step of local replica {current}; use "
                    "the module that prepare() returned, or what is read from it, not the raw one"
                )
        return cast(Any, self._module())._call_impl(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules with a __getstate__ of their own


def keep_to_replica(module: nn.Module, core: _C.StrategyCore, local: int) -> None:
    """Refuses calls of the module, and of its parts that have buffers, in the steps of other replicas."""
    for part in module.modules():
        is_watched = part is module or any(buffer is not None for buffer in part._buffers.values())
        is_compiled = not isinstance(part.__dict__.get("_compiled_call_impl"), (_OwnCalls, type(None)))
        if is_watched and not is_compiled and "_orig_mod" not in part._modules:
            part.__dict__["_compiled_call_impl"] = _OwnCalls(part, core, local)
            # torch.jit.script cannot read torch's own annotation of that attribute.
            ignored = getattr(part, "__jit_ignored_attributes__", [])
            part.__dict__["__jit_ignored_attributes__"] = sorted({*ignored, "_compiled_call_impl"})


class Replicated(Generic[ModuleT]):
    """A module with a copy per local replica; they share parameter memory where they share a device.

    Calling or reading it means the current replica's module inside a step, replica 0's outside. What is read outside a
    step and used inside means the current replica's, too: a submodule (by name, index, iteration or `children`) is
    itself a Replicated, a bound method calls the current replica's. `modules()` gives replica 0's own: to configure
    them, since the others follow; a gradient that reaches them in another replica's step is InvalidArgument there.

    Outside a step ``train``, ``eval``, ``requires_grad_``, ``load_state_dict``, ``apply``, ``zero_grad``, ``compile``,
    ``share_memory``, ``to``, ``cpu``, ``cuda``, ``to_empty`` and the like (each replica stays on its own device), and
    setting and deleting an attribute act on all replicas, inside on the current one. Whatever else user code changes
    between calls in replica 0's modules (attributes, lists, dicts and objects that they hold, hooks of modules and
    parameters) the other replicas take over when the next call begins; what forward writes stays the replica's own.

    ``backward()`` by hand, with one replica a process, averages gradients of what calling the prepared module, or its
    ``forward``, returned. Those of what a part or another method returned outside a step stay local, as they do with
    DistributedDataParallel's ``module``.

    ``state_dict`` has plain keys. For ``isinstance``, ``==`` and ``hash`` it is the module it stands for; copies and
    pickles are of that.
    """

    _modules_: list[ModuleT]
    _by_hand_: weakref.ref[ByHand]
    _number_: int
    _syncing_: bool
    _views_: weakref.WeakValueDictionary[int, Replicated[Any]]

    def __init__(
        self,
        modules: list[ModuleT],
        by_hand: weakref.ref[ByHand],
        number: int,
        views: weakref.WeakValueDictionary[int, Replicated[Any]] | None = None,
    ) -> None:
        """As `Strategy.prepare` makes it of the replicas' `modules`: its `number` in the strategy, what it knows of
        that `by_hand`, and `views` of the prepared module that `modules` are parts of, by id of replica 0's part."""
        set_own = object.__setattr__
        set_own(self, "_modules_", modules)
        set_own(self, "_by_hand_", by_hand)
        set_own(self, "_number_", number)
        set_own(self, "_syncing_", True)
        set_own(self, "_views_", weakref.WeakValueDictionary() if views is None else views)
        self._views_[id(modules[0])] = self

    @property
    def module(self) -> ModuleT:
        """Replica 0's module: the one that was prepared."""
        return self._modules_[0]

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._modules_[0])

    def _local_(self) -> int:
        """The current replica; -1 outside a step."""
        by_hand = self._by_hand_()
        return by_hand.current_local_replica if by_hand is not None else -1

    def _current(self) -> ModuleT:
        return self._modules_[max(self._local_(), 0)]

    def _outlives_steps_(self) -> bool:
        """Whether what is read here may be used by another replica."""
        return len(self._modules_) > 1 and self._local_() < 0

    def _joined_(self, values: Sequence[Any]) -> Any:
        """For what the replicas have in one place: replica 0's, or one that stands for all where those are modules."""
        first = values[0]
        if not all(isinstance(value, nn.Module) for value in values) or values[1] is first:
            return first
        known = self._views_.get(id(first))
        return Replicated(list(values), self._by_hand_, self._number_, self._views_) if known is None else known

    def _part_(self, module: Any) -> Any:
        """For a part of replica 0's module: what stands for it in all replicas. Anything else is itself."""
        if isinstance(module, nn.Module):
            for values in zip(*(own.modules() for own in self._modules_), strict=True):
                if values[0] is module:
                    return self._joined_(values)
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched_(self._current()(*args, **kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As calling it, without the module's own hooks."""
        return self._watched_(self._current().forward(*args, **kwargs))

    def _watched_(self, output: Any) -> Any:
        """What the current replica's module returned, whose backward by hand is to average gradients."""
        by_hand = self._by_hand_()
        if by_hand is not None and torch.is_grad_enabled() and by_hand.current_local_replica < 0:
            if self._syncing_:
                by_hand.watch(self._number_, output)
            else:
                by_hand.rest(self._number_)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward by hand of outputs computed within adds local gradients; the next one outside averages the sum."""
        previous = self._syncing_
        object.__setattr__(self, "_syncing_", False)
        try:
            yield
        finally:
            object.__setattr__(self, "_syncing_", previous)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Replica 0's module loads it; the others follow, in parameters and buffers."""
        first, *others = (self._modules_[local] for local in self._acting_())
        result = first.load_state_dict(state_dict, *args, **kwargs)
        for other in others:
            other.load_state_dict(state_dict, *args, **{**kwargs, "assign": False})
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Replica 0's."""
        return self.module.state_dict(*args, **kwargs)

    def _acting_(self) -> range:
        """The local replicas whose modules are changed by what changes this one."""
        local = self._local_()
        return range(len(self._modules_)) if local < 0 else range(local, local + 1)

    def _on_all(self, method: str, args: Any, kwargs: Any) -> Any:
        acting = self._acting_()
        results = [getattr(self._modules_[local], method)(*args, **kwargs) for local in acting]
        by_hand = self._by_hand_()
        if method in _MOVES and by_hand is not None and by_hand.devices[0].type != "cpu":
            for local in acting:
                self._modules_[local].to(by_hand.devices[local])
        return self if results[0] is self._modules_[acting[0]] else results[0]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._current(), name)
        if callable(value) and name in _ACT_ON_ALL:
            return _OnAll(self, name)
        if not self._outlives_steps_():
            return value
        if isinstance(value, nn.Module):
            return self._everywhere_(value, operator.attrgetter(name))
        if isinstance(value, MethodType) and value.__self__ is self.module:
            return _Method(self, name, value)
        return value

    def _everywhere_(self, first: Any, read: Callable[[ModuleT], Any]) -> Any:
        try:
            return self._joined_([first, *map(read, self._modules_[1:])])
        except (AttributeError, KeyError, IndexError):  # the others follow when the next call begins
            return first

    def __setattr__(self, name: str, value: Any) -> None:
        for local, of_replica in self._for_each_(value):
            setattr(self._modules_[local], name, of_replica)

    def _for_each_(self, value: Any) -> Iterator[tuple[int, Any]]:
        values = value._modules_ if type(value) is Replicated else [value] * len(self._modules_)
        return ((local, values[local]) for local in self._acting_())

    def __delattr__(self, name: str) -> None:
        acting, missing = self._acting_(), []
        for local in acting:
            try:
                delattr(self._modules_[local], name)
            except AttributeError as error:  # of what one replica alone was given, or has written in a step
                missing.append(error)
        if len(missing) == len(acting):
            raise missing[0]

    def __getitem__(self, key: Any) -> Any:
        value = self._current()[key]  # type: ignore[index]
        return self._everywhere_(value, lambda module: module[key]) if self._outlives_steps_() else value  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        for local, of_replica in self._for_each_(value):
            cast(Any, self._modules_[local])[key] = of_replica

    def __delitem__(self, key: Any) -> None:
        for local in self._acting_():
            del cast(Any, self._modules_[local])[key]

    def __len__(self) -> int:
        return len(self._current())  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._current())

    def __contains__(self, item: Any) -> bool:
        if type(item) is Replicated:
            item = item._current()
        return item in self._current()  # type: ignore[operator]

    def __iter__(self) -> Iterator[Any]:
        if self._outlives_steps_():
            return map(self._joined_, zip(*cast("list[Iterable[Any]]", self._modules_), strict=True))
        return iter(self._current())  # type: ignore[call-overload, no-any-return]

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.module)} - _OWN)

    def __repr__(self) -> str:
        return f"Replicated({self.module!r})"

    def __eq__(self, other: object) -> bool:
        return bool(self.module == (other.module if type(other) is Replicated else other))

    def __hash__(self) -> int:
        return hash(self.module)

    def __copy__(self) -> ModuleT:
        return copy.copy(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleT:
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any, ...]]:
        # Of the standard library, so that the module can be loaded where Muster is not.
        return operator.itemgetter(0), ((self.module,),)


_MOVES = frozenset({"cpu", "cuda", "ipu", "mtia", "to", "to_empty", "xpu"})
_ACT_ON_ALL = _MOVES | {
    "apply", "bfloat16", "compile", "double", "eval", "float", "half", "register_buffer", "requires_grad_",
    "share_memory", "train", "type", "zero_grad",
}  # fmt: skip
_CHILDREN = frozenset({"children", "named_children"})


class _OnAll:
    """A method of the module that is called on every replica's."""

    def __init__(self, replicated: Replicated[Any], method: str) -> None:
        self._replicated = replicated
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replicated._on_all(self._method, args, kwargs)


class _Method:
    """A method that was read from a prepared module outside a step: that of the current replica's when called."""

    def __init__(self, replicated: Replicated[Any], name: str, bound: MethodType) -> None:
        functools.update_wrapper(self, bound)
        self._replicated = replicated
        self._name = name
        self.__self__ = replicated
        self.__func__ = bound.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replicated = self._replicated
        result = getattr(replicated._current(), self._name)(*args, **kwargs)
        if not replicated._outlives_steps_():
            return result
        if self._name in _CHILDREN or (self._name in ("values", "items") and isinstance(replicated, nn.ModuleDict)):
            return self._children(result)
        return replicated._part_(result)

    def _children(self, result: Iterable[Any]) -> Any:
        for item in result:
            named = isinstance(item, tuple) and len(item) == 2
            yield (item[0], self._replicated._part_(item[1])) if named else self._replicated._part_(item)

    def _bound(self) -> Any:
        return getattr(self._replicated.module, self._name)

    def __eq__(self, other: object) -> bool:
        return bool(self._bound() == (other._bound() if isinstance(other, _Method) else other))

    def __hash__(self) -> int:
        return hash(self._bound())

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._replicated!r}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self._replicated.module, self._name)
