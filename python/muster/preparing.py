"""What a strategy has prepared: modules, optimizers and loaders."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from muster import _C, saved_loaders, sync_batch_norm
from muster.by_hand import ByHand
from muster.collectives import Collectives
from muster.errors import InvalidArgument
from muster.loader import Loader
from muster.loader_host import LoaderHost
from muster.module_watch import ModuleWatch
from muster.options import StrategyOptions
from muster.passes import Passes
from muster.prepared_optimizer import PreparedOptimizer
from muster.replicated import Replicated, counterparts, keep_to_replica, replicate
from muster.sharded_embedding import ShardedEmbedding
from muster.tasks import size_in_words

__all__ = ["Preparation"]

_prepared_by: weakref.WeakKeyDictionary[Any, weakref.ref[Preparation]] = weakref.WeakKeyDictionary()
_parameters_prepared_by: MutableMapping[Tensor, weakref.ref[Preparation]] = WeakIdKeyDictionary()


_MANY = 100
"""Objects of a kind, of which no program has so many that it uses all the time."""


class Preparation:
    """Claims objects for one strategy and keeps what it made of them. It lives as long as the strategy."""

    def __init__(
        self,
        core: _C.StrategyCore,
        options: StrategyOptions,
        strategy: weakref.ref[Any],
        host: LoaderHost,
        by_hand: ByHand,
        collectives: Collectives,
        passes: Passes,
        leaf_types: tuple[type, ...],
    ) -> None:
        """`passes` takes up prepared loaders. `leaf_types`: as of `ModuleWatch`."""
        self._core = core
        self._devices = core.devices
        self._options = options
        self._strategy = strategy
        self._host = host
        self._by_hand = by_hand
        self._collectives = collectives
        self._modules: list[tuple[nn.Module, Replicated[Any]]] = []
        self._replicas: list[list[nn.Module]] = []
        """Those of each prepared module."""
        self._leaf_types = leaf_types
        self._watches: list[ModuleWatch] = []
        self._user_loaders: list[DataLoader[Any]] = []
        self.module_numbers: list[int] = []
        """The numbers of the prepared modules in the core."""
        self.optimizers: list[PreparedOptimizer] = []
        self._passes = passes
        self._loaders: list[Loader[Any]] = []
        self._awaited: dict[int, Mapping[str, Any]] = {}
        """Where a checkpoint that was loaded has loaders which are not prepared yet, by number."""
        self._told_of: set[str] = set()
        """What was forgotten, as far as it was said."""

    def prepare(self, objects: tuple[Any, ...]) -> Any:
        """As `Strategy.prepare`."""
        for given in objects:
            self._check_preparable(given)
        # A module is copied with the parts that it shares with prepared ones.
        for watch in self._watches:
            watch.check_members()
        prepared: dict[int, Any] = {}
        # Optimizers look their parameters up, so modules come first.
        for position, given in enumerate(objects):
            if not isinstance(given, (Optimizer, DataLoader, Loader)):
                prepared[position] = self._prepare_module(given)
        for position, given in enumerate(objects):
            if isinstance(given, Optimizer):
                prepared[position] = self._prepare_optimizer(given)
            elif isinstance(given, (DataLoader, Loader)):
                prepared[position] = self.prepare_loader(given)
        if self._core.num_workers > 1 and not self._core.joins:
            for optimizer in self.optimizers:
                if not optimizer.is_compared:
                    optimizer.compare()
        results = tuple(prepared[position] for position in range(len(objects)))
        return results[0] if len(results) == 1 else results

    def prepare_loader(self, loader: Any, *, sharded: bool = False) -> Loader[Any]:
        """As `Strategy.prepare_loader`."""
        if isinstance(loader, Loader):
            return loader
        known = _prepared_by.get(loader) if isinstance(loader, DataLoader) else None  # others Loader() refuses
        if known is not None and known() is self:
            return next(
                prepared for prepared, own in zip(self._loaders, self._user_loaders, strict=True) if own is loader
            )
        index = len(self._loaders)
        prepared: Loader[Any] = Loader(loader, self._host, index=index, sharded=sharded)
        place = self._awaited.get(index)
        if place is not None:
            saved_loaders.compare(self._core, prepared, place, index)
        self._passes.add(prepared, "" if sharded else size_in_words(loader))
        if place is not None:
            saved_loaders.take_place(self._core, prepared, self._awaited.pop(index))
        self._loaders.append(prepared)
        self._user_loaders.append(loader)
        _warn_of_many("loaders", len(self._loaders))
        _prepared_by[loader] = weakref.ref(self)
        return prepared

    def take_places(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Loaders go on where a checkpoint has them, by number; those that are prepared later do when they are."""
        if len(saved) < len(self._loaders) and self._host.steps == 0:
            logging.getLogger("muster").warning(
                "the checkpoint has the places of %d loaders, and %d are prepared: those behind them begin anew",
                len(saved), len(self._loaders),
            )  # fmt: skip
        self._awaited = dict(itertools.islice(enumerate(saved), len(self._loaders), None))
        for number, place in enumerate(saved):
            # A loader that is prepared later may be too late for servers.
            if number in self._awaited or not self._loaders[number].has_place:
                saved_loaders.tell_servers(self._host, number, place)
            if number not in self._awaited:
                saved_loaders.take_place(self._core, self._loaders[number], place)

    @property
    def awaited_places(self) -> list[Mapping[str, Any]]:
        """Where the checkpoint that was loaded has loaders which are not prepared yet, in their order."""
        return list(self._awaited.values())

    @property
    def modules(self) -> list[Replicated[Any]]:
        """Those that are prepared, in their order."""
        return [replicated for _, replicated in self._modules]

    @property
    def loaders(self) -> list[Loader[Any]]:
        """Those that are prepared, in their order."""
        return list(self._loaders)

    @property
    def is_closed(self) -> bool:
        """Whether the strategy is closed."""
        return self._core.closed

    def check_open(self) -> None:
        """Raises InvalidArgument where the strategy is closed."""
        if self._core.closed:
            raise InvalidArgument("the strategy is closed; make a new one")

    def _check_preparable(self, given: Any) -> None:
        self.check_open()
        if not (isinstance(given, (nn.Module, Optimizer, DataLoader, Loader)) or callable(given)):
            raise InvalidArgument(
                f"prepare() takes modules, module factories, optimizers and loaders; it got a {type(given).__name__}"
            )
        if isinstance(given, nn.Module):
            _check_module(given)
        owner = _prepared_by.get(_raw(given)) if isinstance(given, (nn.Module, Optimizer, DataLoader)) else None
        if self._is_another_open_strategy(owner):
            raise InvalidArgument(
                f"this {type(_raw(given)).__name__} is prepared by another open strategy; close() that one first"
            )
        if isinstance(given, nn.Module):
            for name, parameter in _raw(given).named_parameters():
                if self._is_another_open_strategy(_parameters_prepared_by.get(parameter)):
                    raise InvalidArgument(
                        f"parameter '{name}' of this {type(_raw(given)).__name__} is prepared by another open "
                        "strategy; close() that one first"
                    )

    def _is_another_open_strategy(self, owner: weakref.ref[Preparation] | None) -> bool:
        other = None if owner is None else owner()
        return other is not None and other is not self and not other.is_closed

    def _prepare_module(self, given: Any) -> Replicated[Any]:
        if type(given) is Replicated:
            given = given.module
        for module, replicated in self._modules:
            if module is given:
                return replicated
        if isinstance(given, nn.Module):
            with torch.inference_mode(False):  # whatever the caller's: steps write to the copies
                modules = replicate(given, self._devices, [known for _, known in self._modules])
        else:
            modules = [given() for _ in range(self._core.local_replicas)]
            if not all(isinstance(module, nn.Module) for module in modules):
                raise InvalidArgument(f"the factory returned a {type(modules[0]).__name__}; it must build a module")
            _check_module(modules[0])
            if len({id(module) for module in modules}) < len(modules):
                raise InvalidArgument("the factory returned one module twice; it must build another one in each call")
        for module, device in zip(modules, self._devices, strict=True):
            if device.type != "cpu":
                module.to(device)
            sync_batch_norm.convert(module, self._collectives)
        number = self._core.add_module(
            [[(name, parameter) for name, parameter in module.named_parameters()] for module in modules],
            [list(module.named_buffers()) for module in modules],
        )
        for module in modules[0].modules():
            if isinstance(module, ShardedEmbedding):
                self._core.note_rows(
                    module.weight,
                    module.init,
                    module.scale,
                    module.seed,
                    module.placement,
                    module.row_wise_adagrad,
                )
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                self._core.expect_writes(module.weight)
        for local, module in enumerate(modules):
            _prepared_by[module] = weakref.ref(self)
            if len(modules) > 1:
                keep_to_replica(module, self._core, local)
        for parameter in modules[0].parameters():
            _parameters_prepared_by[parameter] = weakref.ref(self)
        self._by_hand.add_module(number, list(modules[0].parameters()))
        made: Replicated[Any] = Replicated(modules, weakref.ref(self._by_hand), number)
        self._modules.append((modules[0], made))
        self._replicas.append(modules)
        _warn_of_many("modules", len(self._modules))
        self.module_numbers.append(number)
        prepared = self._modules
        self._watches.append(
            ModuleWatch(
                modules,
                self._core,
                number,
                lambda local: counterparts([known for _, known in prepared], local),
                self._leaf_types,
            )
        )
        return made

    def _prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if any(known.optimizer is optimizer for known in self.optimizers):
            return optimizer
        if self._devices[0].type != "cpu" and optimizer.state:
            _move_state(optimizer)
        prepared = PreparedOptimizer(optimizer, self._core, self._options, self._by_hand, self._strategy())
        if self._core.num_workers > 1 and not self._core.joins:
            try:
                prepared.broadcast_state()
            except BaseException:
                prepared.leave()
                raise
        self.optimizers.append(prepared)
        _warn_of_many("optimizers", len(self.optimizers))
        _prepared_by[optimizer] = weakref.ref(self)
        return optimizer

    def follow_first_replica(self) -> None:
        """When a call begins: what user code changed in replica 0's modules since `note`, the others take over."""
        if self._core.current_local_replica < 0:
            for watch in self._watches:
                watch.follow_first_replica()

    def note(self) -> None:
        """When a call ends: whatever is written to replica 0's modules from here on is the user's."""
        if self._core.current_local_replica < 0:
            for watch in self._watches:
                watch.note()

    def look_for_forgotten(self, trained: Sequence[nn.Parameter]) -> None:
        """Says, once, which of `trained`, the parameters that a replica's loss depends on, no prepared module has, and
        which modules of theirs no prepared optimizer steps."""
        modules = [[_ids_of(module.parameters()) for module in replicas] for replicas in self._replicas]
        known = set().union(*itertools.chain(*modules))
        unknown = [str(tuple(parameter.shape)) for parameter in trained if id(parameter) not in known]
        if unknown and self._core.num_replicas > 1 and "modules" not in self._told_of:
            self._told_of.add("modules")
            logging.getLogger("muster").warning(
                "the loss of a step depends on parameters in no prepared module (%d, of shapes %s): their gradients "
                "are not averaged, and the replicas of a process add to them at once; prepare() their module and its "
                "optimizer, or freeze them with requires_grad_(False)",
                len(unknown), ", ".join([*unknown[:4], *(["..."] if len(unknown) > 4 else [])]),
            )  # fmt: skip
        stepped = _ids_of(p for optimizer in self.optimizers for group in optimizer.parameters() for p in group)
        ids = _ids_of(trained)
        names = [
            type(replicas[0]).__name__
            for replicas, (first, *others) in zip(self._replicas, modules, strict=True)
            if stepped.isdisjoint(first) and not ids.isdisjoint(first.union(*others))
        ]
        if names and self.optimizers and "optimizers" not in self._told_of:
            self._told_of.add("optimizers")
            logging.getLogger("muster").warning(
                "no prepared optimizer has parameters of %s, which the loss of a step depends on: their gradients are "
                "dropped, and .grad is None for an optimizer that is stepped by hand; prepare() its optimizer, or "
                "freeze the module with requires_grad_(False)",
                ", ".join(names),
            )

    def adopt_buffers(self, local: int) -> None:
        """After user code, by the replica's thread: its buffers may be other tensors than before."""
        for watch in self._watches:
            watch.adopt_buffers(local)

    def leave(self) -> None:
        """When the strategy closes, before servers are left: optimizers are torch's again."""
        for optimizer in self.optimizers:
            optimizer.leave()


def _ids_of(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _move_state(optimizer: Optimizer) -> None:
    """To where its parameters are; step counts stay, as torch's."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and name != "step":
                values[name] = value.to(parameter.device)


def _check_module(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            kind = f"a {type(part).__name__}"
            what = f"'{name}' of this {type(module).__name__}, {kind}," if name else kind
            raise InvalidArgument(
                f"{what} cannot be prepared: torch gives scripted modules no hooks; prepare the module that it was "
                "made from"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InvalidArgument(
                f"'{name}' of this {type(module).__name__} is not initialised; run one forward pass "
                "before prepare(), with Lightning in __init__ or configure_model"
            )


def _raw(given: Any) -> Any:
    return given.module if type(given) is Replicated else given


def _warn_of_many(kind: str, count: int) -> None:
    if count == _MANY:
        logging.getLogger("muster").warning(
            "%d %s have been prepared: the strategy keeps them, with their data, until it is closed, and looks at them "
            "in every step; prepare each once, and use it again",
            count,
            kind,
        )
