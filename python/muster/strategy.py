"""The strategies: how a training step written once is spread over replicas."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from muster import _C, _random, structure, sync_batch_norm
from muster.batch import agreeing_rows, digest, place, split
from muster.data import Loader, LoaderHost, size_in_words
from muster.dealing import Dealer, Members
from muster.default_group import DefaultGroup
from muster.errors import InvalidArgument, LayoutMismatch
from muster.module_watch import ModuleWatch
from muster.optim import FlatStep
from muster.options import StrategyOptions, device_names, options_of
from muster.per_replica import PerReplica
from muster.precision import LossScale, LossScaler
from muster.prepared_optimizer import PreparedOptimizer
from muster.replicated import Replicated, counterparts, keep_to_replica, replicate
from muster.sharded_embedding import ShardedEmbedding
from muster.step import StepResult, as_record

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "Strategy",
    "StrategyOptions",
]

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_prepared_by: weakref.WeakKeyDictionary[Any, weakref.ref[Strategy]] = weakref.WeakKeyDictionary()
_parameters_prepared_by: MutableMapping[Tensor, weakref.ref[Strategy]] = WeakIdKeyDictionary()


class Strategy:
    """What all strategies do; use a subclass. Externally synchronised: one thread prepares and steps."""

    def __init__(self, core: _C.StrategyCore, options: StrategyOptions) -> None:
        _random.install(core.devices)
        self._core = core
        self._devices = core.devices
        self._options = options
        self._modules: list[tuple[nn.Module, Replicated[Any]]] = []
        self._watches: list[ModuleWatch] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._loaders: list[Loader[Any]] = []
        self._stepped_loaders: weakref.WeakSet[Loader[Any]] = weakref.WeakSet()
        self._run_loaders: weakref.WeakSet[Loader[Any]] = weakref.WeakSet()
        self._sets: dict[tuple[int, ...], tuple[int, tuple[tuple[int, ...], ...]]] = {}
        self._optimizers_of_set: dict[int, tuple[int, ...]] = {}
        self._hooked: dict[int, bool] = {}
        """By set: whether this worker's optimizers have hooks to call before a step."""
        self._warned_of_hooks = False
        self._stepped: list[PreparedOptimizer] = []
        """In the running call, whose post-hooks are to be called."""
        self._hook_error: BaseException | None = None
        self._gradients_are_applied = False
        self._is_first_step = True
        self._in_function = [False] * core.local_replicas
        self._was_interrupted = False
        self._others_passes: dict[str, tuple[int, dict[str, Any]]] = {}
        """By loader: epoch and standing, where this worker joined a synchronous job."""
        self._told_at = 0
        this = weakref.ref(self)
        core.on_leaving(lambda: None if (strategy := this()) is None else strategy._leave())
        core.describe_passes(lambda: "" if (strategy := this()) is None else strategy._describe_passes())
        self._threads = _start_threads(core) if core.local_replicas > 1 else []
        weakref.finalize(self, _end, core, self._threads, os.getpid())

    # --- who and where ------------------------------------------------------------------------------------------------
    @property
    def num_replicas(self) -> int:
        """Replicas of the whole job."""
        return self._core.num_replicas

    @property
    def num_workers(self) -> int:
        """Processes of the job."""
        return self._core.num_workers

    @property
    def rank(self) -> int:
        """This process's index among the workers."""
        return self._core.rank

    @property
    def local_rank(self) -> int:
        """This process's index among the workers of its host."""
        return self._core.local_rank

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self._core.rank == 0

    @property
    def replica(self) -> int:
        """The current replica's job-wide index inside a step; outside, that of this process's first replica."""
        return self._core.first_replica + max(self._core.current_local_replica, 0)

    @property
    def device(self) -> torch.device:
        """The current replica's device inside a step; outside, that of this process's first replica."""
        return self.devices[max(self._core.current_local_replica, 0)]

    @property
    def steps(self) -> int:
        """Windows closed."""
        return self._core.steps

    @property
    def stopping(self) -> bool:
        """True on all ranks from the same window's end on, after stop() or SIGTERM anywhere."""
        return self._core.stopping

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._core.closed

    # --- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, *objects: Any) -> Any:
        """Modules (or factories that build one), optimizers and loaders, in any order; returned in that order.

        Collective. The chief's parameters, buffers and optimizer state go to every worker. Preparing an object again is
        a no-op. Raises LayoutMismatch naming the first difference between the models of two ranks, and InvalidArgument
        for anything that cannot be prepared, or that another open strategy has.
        """
        for given in objects:
            self._check_preparable(given)
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
        if self.num_workers > 1 and not self._core.joins:
            for optimizer in self._optimizers:
                if not optimizer.is_compared:
                    optimizer.compare()
        results = tuple(prepared[position] for position in range(len(objects)))
        return results[0] if len(results) == 1 else results

    def prepare_loader(self, loader: Any, *, sharded: bool = False) -> Loader[Any]:
        """A Loader whose global batch is the loader's, divided over the replicas. `sharded`: its batches are this
        worker's own already. Collective; raises LayoutMismatch where the ranks' loaders differ in size."""
        if isinstance(loader, Loader):
            return loader
        known = _prepared_by.get(loader)
        if known is not None and known() is self:
            return next(prepared for prepared in self._loaders if prepared._loader is loader)
        index = len(self._loaders)
        prepared: Loader[Any] = Loader(loader, cast(LoaderHost, _Host(self)), index=index, sharded=sharded)
        if not sharded:
            self._core.compare_loader(index, size_in_words(loader))
        self._loaders.append(prepared)
        _prepared_by[loader] = weakref.ref(self)
        return prepared

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidArgument("the strategy is closed; make a new one")

    def _check_preparable(self, given: Any) -> None:
        self._check_open()
        if not (isinstance(given, (nn.Module, Optimizer, DataLoader, Loader)) or callable(given)):
            raise InvalidArgument(
                f"prepare() takes modules, module factories, optimizers and loaders; it got a {type(given).__name__}"
            )
        if isinstance(given, torch.jit.ScriptModule):
            raise InvalidArgument(
                f"a {type(given).__name__} cannot be prepared: torch gives scripted modules no hooks; prepare the "
                "module that it was made from"
            )
        if isinstance(given, nn.Module):
            _check_initialised(given)
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

    def _is_another_open_strategy(self, owner: weakref.ref[Strategy] | None) -> bool:
        other = None if owner is None else owner()
        return other is not None and other is not self and not other.closed

    def _prepare_module(self, given: Any) -> Replicated[Any]:
        if type(given) is Replicated:
            given = given.module
        for module, replicated in self._modules:
            if module is given:
                return replicated
        if isinstance(given, nn.Module):
            modules = replicate(given, self._core.local_replicas, [known for _, known in self._modules])
        else:
            modules = [given() for _ in range(self._core.local_replicas)]
            if not all(isinstance(module, nn.Module) for module in modules):
                raise InvalidArgument(f"the factory returned a {type(modules[0]).__name__}; it must build a module")
            if len({id(module) for module in modules}) < len(modules):
                raise InvalidArgument("the factory returned one module twice; it must build another one in each call")
        for module, device in zip(modules, self.devices, strict=True):
            if device.type != "cpu":
                module.to(device)
            sync_batch_norm.convert(module, self)
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
        for local, module in enumerate(modules):
            _prepared_by[module] = weakref.ref(self)
            if len(modules) > 1:
                keep_to_replica(module, self._core, local)
        for parameter in modules[0].parameters():
            _parameters_prepared_by[parameter] = weakref.ref(self)
        made: Replicated[Any] = Replicated(modules, weakref.ref(self), number)
        self._modules.append((modules[0], made))
        prepared = self._modules
        self._watches.append(
            ModuleWatch(
                modules,
                self._core,
                number,
                lambda local: counterparts([known for _, known in prepared], local),
                (Strategy, Replicated, Optimizer, DataLoader, Loader),
            )
        )
        return made

    def _prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if any(known.optimizer is optimizer for known in self._optimizers):
            return optimizer
        if self.devices[0].type != "cpu" and optimizer.state:
            _move_state(optimizer)
        prepared = PreparedOptimizer(optimizer, self)
        if self.num_workers > 1 and not self._core.joins:
            prepared.broadcast_state()
        self._optimizers.append(prepared)
        _prepared_by[optimizer] = weakref.ref(self)
        return optimizer

    # --- LoaderHost ---------------------------------------------------------------------------------------------------
    @property
    def first_replica(self) -> int:
        """The job-wide index of this process's first replica."""
        return self._core.first_replica

    @property
    def devices(self) -> list[torch.device]:
        """The device of each of this process's replicas."""
        return self._devices

    @property
    def seed(self) -> int:
        """The job's seed."""
        return self._core.seed

    @property
    def capacities(self) -> list[float]:
        """What share of a batch each replica gets; empty where parts are equal."""
        return self._core.capacities

    @property
    def dealer(self) -> Dealer | None:
        """Who deals whole batches to workers that step on their own; else None."""
        return None

    @property
    def members(self) -> Members | None:
        """Over whom batches are divided, where workers may die; None where that is all for good."""
        return None

    @property
    def joins(self) -> bool:
        """Whether this worker came to a job that others had begun."""
        return self._core.joins

    def any_has_more(self, has_more: bool) -> bool:
        """Collective: whether `has_more` is true on any worker."""
        return cast(bool, self.reduce(has_more, "max"))

    def broadcast_state(self, state: Tensor) -> Tensor:
        """Collective: the chief's tensor."""
        return self._core.broadcast([state], 0)[0]

    # --- steps --------------------------------------------------------------------------------------------------------
    def step(
        self, fn: Callable[..., Any], *args: Any, optimizers: Optimizer | Sequence[Optimizer] | None = None
    ) -> StepResult:
        """One micro-batch: `fn` on each replica's part of `args`, backward, and at a window's end the update.

        `fn` runs concurrently in every local replica and returns the loss as a 0-dim tensor or a `Loss`; it is not
        called for an empty part. Positional arguments are parts from a prepared loader, `PerReplica`s, or a batch of
        this worker's own, which is split over its replicas. `optimizers` says whose parameters take part (None: all
        prepared).

        Collective at a window's end. An exception of `fn` comes back as the same object with a note; other ranks get
        RemoteError, the window is dropped everywhere, and the strategy stays usable. Raises NonFinite after
        `max_skipped` windows in a row were skipped.
        """
        self._before_call()
        set_number = self._set_for(optimizers)
        self._connect_servers(set_number)
        self._note_hooks(set_number)
        parts, rows = self._divide(args, self._stepped_loaders)
        self._compare_first_batches(parts)
        outputs: list[Any] = [None] * len(parts)

        def call(local: int) -> Any:
            try:
                record, outputs[local] = as_record(fn(*parts[local]))
            except BaseException:
                # Else the next call would take what it finds replaced for the user's doing.
                with contextlib.suppress(InvalidArgument):
                    self._adopt_buffers(local)
                raise
            self._adopt_buffers(local)
            return record

        try:
            result = StepResult(
                **self._core.step(
                    self._on_replicas(call),
                    rows,
                    set_number,
                    any(loader.at_end for loader in self._loaders if self._counts(loader)),
                    self._is_fused(set_number),
                    lambda: self._apply(set_number),
                    lambda: self._optimizer_steps(set_number),
                    self._interrupt,
                    self._dealt_batches(args),
                    self._usual_rows(args),
                ),
                output=PerReplica(outputs),
            )
        except BaseException:
            self._settle(stepped=False)
            raise
        finally:
            self._after_call()
        self._gradients_are_applied = True
        if result.stepped:
            self._note_step(set_number)
            self._settle(stepped=True)
        self._call_post_hooks()
        return result

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of steps, for evaluation outside them (`run` has it already)."""
        if self._options.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, _AUTOCAST_DTYPES[self._options.precision])

    def loss_scaler(self, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> LossScaler:
        """The loss scale of the steps of these optimizers (None: all prepared), to look at, save and restore."""
        return LossScaler(self._core, self._set_for(optimizers), self._options.loss_scale or LossScale())

    def flush(self) -> StepResult | None:
        """Closes the open window, or drops it with drop_incomplete; None when none is open. Collective."""
        open_sets = tuple(self._optimizers_of_set)
        for set_number in open_sets:
            self._note_hooks(set_number)
        result = self._core.flush(self._apply, self._is_fused, self._optimizer_steps)
        if result is None:
            return None
        self._gradients_are_applied = True
        for set_number in open_sets:
            self._note_step(set_number)
        self._settle(stepped=True)
        self._call_post_hooks()
        return StepResult(**result, output=PerReplica([None] * self._core.local_replicas))

    def run(self, fn: Callable[..., Any], *args: Any) -> PerReplica[Any]:
        """`fn` on each replica's part, without gradients; None for an empty part. Local, unless `fn` reduces."""
        self._before_call()
        parts, rows = self._divide(args, self._run_loaders)
        results: list[Any] = [None] * len(parts)

        def call(local: int) -> None:
            results[local] = fn(*parts[local])
            self._adopt_buffers(local)

        try:
            self._core.run(self._on_replicas(call), rows, self._interrupt)
        finally:
            self._after_call()
        per_replica = PerReplica(results)
        per_replica._rows = rows
        return per_replica

    def _set_for(self, optimizers: Optimizer | Sequence[Optimizer] | None) -> int:
        if optimizers is None:
            chosen = tuple(range(len(self._optimizers)))
        else:
            given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
            chosen = tuple(sorted(self._position_of(optimizer) for optimizer in given))
        shapes = tuple(self._optimizers[position].shape() for position in chosen)
        known = self._sets.get(chosen)
        if known is not None and known[1] == shapes:
            return known[0]
        parameters = self._parameters_of(chosen)
        if known is None:
            number = self._core.set_of(parameters)
        else:
            number = known[0]
            self._core.change_set(number, parameters)
        self._sets[chosen] = (number, shapes)
        self._optimizers_of_set[number] = chosen
        return number

    def _position_of(self, optimizer: Optimizer) -> int:
        for position, prepared in enumerate(self._optimizers):
            if prepared.optimizer is optimizer:
                return position
        raise InvalidArgument(
            f"optimizers= names a {type(optimizer).__name__} that was not prepared; prepare() it first"
        )

    def _parameters_of(self, positions: Sequence[int]) -> list[int]:
        if not self._modules:
            raise InvalidArgument("no module is prepared; call strategy.prepare(model, optimizer) before step()")
        if not positions:
            return [index for _, replicated in self._modules for index in self._core.parameters_of(replicated._number_)]
        found: dict[int, int] = {}
        for position in positions:
            indices: list[int] = []
            for number, parameter in enumerate(self._optimizers[position].parameters()):
                index = self._core.find(parameter)
                if index < 0:
                    raise InvalidArgument(
                        f"parameter {number} (shape {tuple(parameter.shape)}) of "
                        f"{type(self._optimizers[position].optimizer).__name__} is in no prepared module; prepare() "
                        "the module it belongs to, and build the optimizer from that module's parameters"
                    )
                if found.setdefault(index, position) != position:
                    raise InvalidArgument(
                        f"parameter '{self._core.name_of(index)}' belongs to two optimizers that would step together; "
                        "say with optimizers= whose step it is"
                    )
                indices.append(index)
            self._optimizers[position].bind(indices)
        return list(found)

    def _connect_servers(self, set_number: int) -> None:
        if self._core.awaits_servers(set_number) and self._is_fused(set_number):
            self._optimizers[self._optimizers_of_set[set_number][0]].connect_servers(set_number)
            self._note_hooks(set_number)
            told = self._core.watch(set_number, lambda: self._apply(set_number))
            self._call_post_hooks()
            self._others_passes = json.loads(told) if told else {}
            self._told_at = self.steps
        elif self._core.has_servers:
            for position in self._optimizers_of_set[set_number]:
                self._optimizers[position].check_state()

    def _describe_passes(self) -> str:
        """For a worker that joins, in whose `_others_passes` it becomes."""
        standings = {index: loader.standing() for index, loader in enumerate(self._loaders)}
        return json.dumps({index: standing for index, standing in standings.items() if standing is not None})

    def _dealt_batches(self, args: tuple[Any, ...]) -> list[tuple[int, int, int]]:
        """Those that servers dealt, of which `args` are."""
        if self.dealer is None and self.members is None:
            return []
        used = [loader for loader in self._loaders if any(loader.part_rows_of(arg) is not None for arg in args)]
        return [batch for loader in used if (batch := loader.stepped()) is not None]

    def _settle(self, *, stepped: bool) -> None:
        """A window was closed, or dropped by an error."""
        if self.members is None and self.dealer is None:
            return
        members = None
        if stepped:
            members = [self.rank] if self.members is None else self._core.members
            if not members:  # another thread has closed the strategy since
                return
        for loader in self._loaders:
            loader.settle(members)

    def _release_passes(self) -> None:
        """Other workers may wait for what is left of a pass that was left early."""
        if self.dealer is not None:
            for loader in self._loaders:
                loader.release()

    def _before_call(self) -> None:
        self._check_open()
        self._release_passes()
        if self._was_interrupted and not self._core.busy:
            # A replica that had finished when the interrupt came must not get it in the next step.
            self._was_interrupted = False
            self._raise_in_replicas(None)
        if self._core.current_local_replica < 0:
            for watch in self._watches:
                watch.follow_first_replica()

    def _after_call(self) -> None:
        if self._core.current_local_replica < 0:
            for watch in self._watches:
                watch.note()

    def _adopt_buffers(self, local: int) -> None:
        for watch in self._watches:
            watch.adopt_buffers(local)

    def _note_step(self, set_number: int) -> None:
        for position in self._optimizers_of_set[set_number]:
            self._optimizers[position].note_step()

    def _divide(
        self, args: tuple[Any, ...], users: weakref.WeakSet[Loader[Any]]
    ) -> tuple[list[tuple[Any, ...]], list[int]]:
        hint = None
        for loader in self._loaders:
            for arg in args:
                rows = loader.part_rows_of(arg)
                if rows is not None:
                    users.add(loader)
                    hint = hint or rows
                    break
        parts = split(args, self._core.local_replicas, hint, self.capacities)
        if self.devices[0].type != "cpu":
            parts = [place(part, device) for part, device in zip(parts, self.devices, strict=True)]
        if hint is not None:
            return parts, hint
        counts = [agreeing_rows(part) for part in parts]
        return parts, [-1 if count is None else count for count in counts]

    def _usual_rows(self, args: tuple[Any, ...]) -> float:
        """Of a part of a full batch of the loader that `args` come from; 0 for a batch of the caller's own."""
        used = (loader for loader in self._loaders if any(loader.part_rows_of(arg) is not None for arg in args))
        return next((loader.usual_rows for loader in used), 0.0)

    def _compare_first_batches(self, parts: Sequence[Any]) -> None:
        """Collective in the first step: says so where every worker steps on the same samples, which are then those of
        one worker."""
        if not self._is_first_step:
            return
        self._is_first_step = False
        if self.num_workers == 1 or self.dealer is not None or self.joins:
            return
        digests = set(self._core.exchange_texts(digest(parts)))
        if len(digests) == 1 and digests != {""} and self.is_chief:
            logging.getLogger("muster").warning(
                "all %d workers stepped on the same samples, so that the job learns no more from them than one worker "
                "would; prepare() the loader, which divides each batch, or give every worker data of its own",
                self.num_workers,
            )

    def _counts(self, loader: Loader[Any]) -> bool:
        return loader in self._stepped_loaders or loader not in self._run_loaders

    def _on_replicas(self, call: Callable[[int], Any]) -> Callable[[int], Any]:
        """`call` with the caller's context variables, and a note on what it raises."""
        contexts = [contextvars.copy_context() for _ in range(self._core.local_replicas)]

        def run(local: int) -> Any:
            self._in_function[local] = True
            try:
                return contexts[local].run(call, local)
            except BaseException as error:
                replica = self._core.first_replica + local
                error.add_note(f"[raised in replica {replica} of {self.num_replicas}, rank {self.rank}]")
                raise
            finally:
                self._in_function[local] = False

        return run

    def _is_fused(self, set_number: int) -> bool:
        positions = self._optimizers_of_set[set_number]
        return bool(positions) and all(self._optimizers[position].is_flat for position in positions)

    def _optimizer_steps(self, set_number: int) -> list[FlatStep | list[str]]:
        """What workers compare before `_apply`."""
        optimizers = [self._optimizers[position] for position in self._optimizers_of_set[set_number]]
        is_fused = self._is_fused(set_number)
        return [optimizer.flat_step() if is_fused else optimizer.hyperparameters() for optimizer in optimizers]

    def _note_hooks(self, set_number: int) -> None:
        """Before a call: hooks that are registered in it are called from the next one on."""
        self._stepped, self._hook_error = [], None
        positions = self._optimizers_of_set[set_number]
        has_hooks = any(self._optimizers[position].has_hooks() for position in positions)
        if has_hooks != self._hooked.get(set_number, False):
            self._core.set_has_hooks(set_number, has_hooks)
            self._hooked[set_number] = has_hooks
        if has_hooks and not (self._warned_of_hooks or self._options.keep_gradients) and self._is_fused(set_number):
            self._warned_of_hooks = True
            logging.getLogger("muster").warning(
                "step pre-hooks of a flat optimizer do not see gradients: .grad is None; %s",
                "parameter servers step, so do without them, or use another strategy"
                if self._core.has_servers
                else "pass keep_gradients=True to the strategy, or fuse=False",
            )

    def _apply(self, set_number: int) -> None:
        optimizers = [self._optimizers[position] for position in self._optimizers_of_set[set_number]]
        if not optimizers:
            self._core.note_no_optimizer(set_number)
            return
        hooked = self._core.hooked(set_number)
        if not self._is_fused(set_number):
            self._apply_from_grad(set_number, optimizers, hooked)
            return

        def call_pre_hooks() -> None:
            for optimizer in optimizers:
                optimizer.call_pre_hooks()
            if not self._core.has_servers:
                self._optimizer_steps(set_number)  # what cannot be stepped is an error that ranks agree on, too

        if hooked:
            self._core.call_hooks(set_number, True, True, call_pre_hooks)
        for optimizer in optimizers:
            optimizer.step_fused(set_number)
        self._stepped += optimizers

    def _apply_from_grad(self, set_number: int, optimizers: Sequence[PreparedOptimizer], hooked: bool) -> None:
        def agree(is_first: bool, error: BaseException | None) -> None:
            def fail() -> None:
                if error is not None:
                    raise error

            self._core.call_hooks(set_number, False, is_first, fail)

        for position, optimizer in enumerate(optimizers):
            error = optimizer.step(partial(agree, position == 0) if hooked else None)
            self._hook_error = self._hook_error or error

    def _call_post_hooks(self) -> None:
        """After the steps of all optimizers, when peers no longer write parameters: what they raise is raised here
        alone, and the step is made everywhere."""
        stepped, self._stepped = self._stepped, []
        error, self._hook_error = self._hook_error, None
        for optimizer in stepped:
            optimizer.call_post_hooks()
        if error is not None:
            raise error

    def _interrupt(self) -> None:
        self._was_interrupted = True
        self._raise_in_replicas(KeyboardInterrupt)

    def _raise_in_replicas(self, error: type[BaseException] | None) -> None:
        for thread, in_function in zip(self._threads, self._in_function, strict=True):
            if thread.ident is not None and (in_function or error is None):
                _C.interrupt_thread(thread.ident, error)

    def _backward_by_hand(self, module: int) -> None:
        if self.closed:
            return  # torch's alone
        if self._options.accumulate > 1:
            raise InvalidArgument(
                "backward() by hand does not know accumulate; use strategy.step(fn, ...), or no_sync() with "
                "accumulate=1"
            )
        self._core.average_gradients(module)
        self._gradients_are_applied = False

    # --- collectives --------------------------------------------------------------------------------------------------
    def reduce(self, value: Any, op: Literal["sum", "mean", "min", "max"] = "mean", *, weight: Any = None) -> Any:
        """The reduction of every leaf of `value` (tensors and numbers in tuples, lists, dicts) over replicas.

        Inside a step: between replicas with non-empty parts, differentiable; `mean` weighs each by its part's size, or
        by `weight`. Outside: `value` is a `PerReplica` (None parts contribute nothing; what `run` returned is weighed
        by the parts' sizes) or one value of this worker. Collective. A Python number or bool comes back as one.
        """
        operation = _operation(op)
        if self._core.current_local_replica >= 0:
            description, leaves = structure.encode(value)
            scale = self._weight_in_step(weight) if op == "mean" else torch.ones(())
            return structure.decode(description, self._core.reduce_in_step(leaves, operation, scale), as_numbers=op)
        self._release_passes()
        values, weights = self._contributions(value, weight, weighted=op == "mean")
        encoded = [structure.encode(part) for part in values]
        description = self._agreed([text for text, _ in encoded])
        results = self._core.reduce([(leaves, w) for (_, leaves), w in zip(encoded, weights, strict=True)], operation)
        return structure.decode(description, results, as_numbers=op)

    def gather(self, value: Any) -> Any:
        """Every leaf concatenated along dimension 0 in replica order (0-dim leaves and numbers stacked). As
        `reduce`."""
        if self._core.current_local_replica >= 0:
            description, leaves = structure.encode(value)
            return structure.decode(description, self._core.gather_in_step(leaves), as_numbers="none")
        self._release_passes()
        values, weights = self._contributions(value, None, weighted=False)
        encoded = [structure.encode(part) for part in values]
        description = self._agreed([text for text, _ in encoded])
        results = self._core.gather([(leaves, w) for (_, leaves), w in zip(encoded, weights, strict=True)])
        return structure.decode(description, results, as_numbers="none")

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """`value` of rank `source` (outside a step) or of replica `source` (inside). Tensors, numbers, strings, nested;
        a prepared module broadcasts its parameters and buffers in place. Collective."""
        if type(value) is Replicated:
            state = [*value.module.parameters(), *value.module.buffers()]
            with torch.no_grad():
                for tensor, sent in zip(state, self.broadcast([t.detach() for t in state], source), strict=True):
                    tensor.copy_(sent)
            return value
        description, leaves = structure.encode(value, texts=True)
        if self._core.current_local_replica >= 0:
            if '"text"' in description:
                description = self._text_in_step(description, source)
            return structure.decode(description, self._core.broadcast_in_step(leaves, source))
        self._release_passes()
        if not 0 <= source < self.num_workers:
            raise InvalidArgument(f"source={source}: there are {self.num_workers} ranks")
        description = self._core.exchange_texts(description)[source]
        return structure.decode(description, self._core.broadcast(leaves, source))

    def barrier(self) -> None:
        """Waits for all workers; inside a step, for all replicas with non-empty parts."""
        if self._core.current_local_replica >= 0:
            self._core.barrier_in_step()
        else:
            self._release_passes()
            self._core.barrier()

    def _text_in_step(self, text: str, source: int) -> str:
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        (length,) = self._core.broadcast_in_step([torch.tensor(len(mine))], source)
        resized = torch.zeros(int(length), dtype=torch.uint8)
        resized[: len(mine)] = mine[: len(resized)]
        (sent,) = self._core.broadcast_in_step([resized], source)
        return bytes(sent.tolist()).decode()

    def _weight_in_step(self, weight: Any) -> Tensor:
        if weight is not None:
            return torch.as_tensor(weight)
        rows = self._core.current_rows
        if rows < 0:
            raise InvalidArgument("the number of samples in this part is unknown; pass weight= to reduce(..., 'mean')")
        return torch.tensor(float(rows), dtype=torch.float64)

    def _contributions(self, value: Any, weight: Any, *, weighted: bool) -> tuple[list[Any], list[float]]:
        if not isinstance(value, PerReplica):
            return [value], [1.0 if weight is None else float(weight)]
        sizes: Sequence[Any] = [1.0] * len(value) if value._rows is None else value._rows
        if weight is not None:
            sizes = weight if isinstance(weight, PerReplica) else [weight] * len(value)
        kept = [(part, float(size)) for part, size in zip(value, sizes, strict=True) if part is not None]
        if weighted and any(size < 0 for _, size in kept):
            raise InvalidArgument("the number of samples in the parts is unknown; pass weight=PerReplica([...])")
        return [part for part, _ in kept], [size for _, size in kept]

    def _agreed(self, descriptions: list[str]) -> str:
        everyones = [set(json.loads(text)) for text in self._core.exchange_texts(json.dumps(sorted(set(descriptions))))]
        different = sorted(set().union(*everyones))
        if len(different) > 1:
            raise LayoutMismatch(
                f"the values of the replicas differ in structure: {different[0]} and {different[1]}; pass the same "
                "structure, with numbers of the same types, everywhere"
            )
        return different[0] if different else "null"

    # --- the end ------------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Asks all ranks to stop: `stopping` turns True everywhere at the same window's end."""
        self._core.stop()

    def explain(self) -> str:
        """In plain words: who takes part, and what was chosen and why."""
        return self._core.explain(type(self).__name__)

    def close(self) -> None:
        """Ends the replica threads and leaves the job; prepared modules and optimizers are free again.

        Idempotent, and safe at any moment from any thread: it waits for a step that another thread is in, and for a
        replica that an interrupted step left behind. A signal handler that raises ends the wait; the next close() goes
        on. Inside a step function, a hook or a signal handler that came during a call it is InvalidArgument: stop()
        there.
        """
        self._core.close()
        for thread in self._threads:
            thread.join()
        self._threads = []
        for loader in self._loaders:
            loader.end_workers()

    def _leave(self) -> None:
        """Called by close() when nobody is in a call any more, and before servers are left."""
        for optimizer in self._optimizers:
            optimizer.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class MirroredStrategy(Strategy):
    """One process with a replica, and a thread, for each device.

    A repeated device, or cpu:0, cpu:1, ..., means logical replicas of it, which share parameter memory. No devices: all
    CUDA devices where this build has CUDA and there are some, else one CPU replica. Options are those of
    `StrategyOptions`.

    Parts of a batch are contiguous, in replica order. With `balance` "equal" their sizes differ by at most one, larger
    first. With "auto" they are such that replicas finish together: equal at first, while each replica's time for
    forward and backward of its part, without what it waited for others, is measured over a few steps after one to warm
    up, and again as training goes on. Sizes change where the step is expected to take at least 5 % less time; a batch
    that was read before (by the loader's workers, say) keeps its parts. `explain()` says what was chosen.

    Gradients stay the exact mean whatever the sizes. But sums of parts of other sizes round otherwise, so that bits are
    equal to those of other strategies, and from run to run, while parts are equal.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        *,
        balance: Literal["equal", "auto"] = "equal",
        **options: Any,
    ) -> None:
        if balance not in ("equal", "auto"):
            raise InvalidArgument(f"balance={balance!r}: it must be 'equal' or 'auto'")
        chosen = options_of(options)
        super().__init__(_C.make_mirrored(device_names(devices), asdict(chosen), balance == "auto"), chosen)


class MultiWorkerMirroredStrategy(Strategy):
    """A process per worker, each with a replica for each of its devices. None given: cuda:<local rank> where this build
    has CUDA and there are devices, else one CPU replica.

    Without `process_group` the workers must be on one host and reduce through its memory; with one (any
    torch.distributed.ProcessGroup), gradients go through it, in its own order of additions. On CUDA gradients go
    through NCCL, and a process group, which must serve CPU tensors, carries what the workers tell one another.

    Where the program has no default group of torch.distributed, the strategy makes one (Gloo) of the workers until it
    is closed, for libraries that ask torch.distributed which rank they are. The strategy itself does not use it.
    """

    def __init__(
        self,
        cluster: _C.Cluster,
        devices: Sequence[str | torch.device] | None = None,
        *,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        chosen = options_of(options)
        super().__init__(_C.make_multi_worker(cluster, device_names(devices), asdict(chosen), process_group), chosen)
        self._default_group = DefaultGroup.of(cluster, self._core, chosen.timeout)
        if self._default_group is not None:
            weakref.finalize(self, _leave, self._default_group, os.getpid())

    def close(self) -> None:
        """As of every strategy. Takes the default group of torch.distributed away where the strategy has made it."""
        super().close()
        if self._default_group is not None:
            self._default_group.leave()

    @classmethod
    def from_env(cls, devices: Sequence[str | torch.device] | None = None, **options: Any) -> Self:
        """The job that torchrun's, Slurm's or Open MPI's variables describe; a world of one without a launcher."""
        return cls(_C.Cluster.from_env(), devices, **options)


class ParameterServerStrategy(Strategy):
    """A process per worker, each with one CPU replica; parameters and optimizer state live on parameter servers.

    The servers are those of the cluster (``MUSTER_SERVERS``, ``muster serve``, ``muster run``), on this host so far;
    without any the chief hosts one in its process until all workers have left. The optimizer is one of AdamW, Adam, SGD
    and Adagrad. The first step connects: where the servers hold values already, of a job that was started again, all
    workers go on from them.

    `staleness` 0 is synchronous: each step is made of all workers' parts, with the bits of MultiWorkerMirroredStrategy,
    and collectives inside a step work as there. A worker that dies no longer counts after 5 s without a sign of life,
    and the others go on. With another `staleness` each step is one worker's, which may be so many steps ahead of the
    slowest live one (None: any number): loss, metrics, buffers and norm are its own, and collectives inside a step see
    it alone. A server that stays away for 5 s is PeerLost; started again with its snapshots before that, it is as if
    nothing had happened.

    Parameters must not be written between steps, and sparse gradients are refused but for a `ShardedEmbedding`'s.
    Options are those of `StrategyOptions` but fuse, keep_gradients, shard_optimizer and wire.
    """

    def __init__(self, cluster: _C.Cluster, *, staleness: int | None = 0, **options: Any) -> None:
        chosen = options_of(options)
        if not (staleness is None or (isinstance(staleness, int) and not isinstance(staleness, bool))):
            raise InvalidArgument(f"staleness={staleness!r}: it must be an int >= 0, or None")
        super().__init__(_C.make_parameter_server(cluster, staleness, asdict(chosen)), chosen)
        self._staleness = staleness

    @property
    def dealer(self) -> Dealer | None:
        """Servers deal whole batches unless the job is synchronous."""
        return None if self._staleness == 0 else self

    @property
    def members(self) -> Members | None:
        """The workers that are live divide batches where the job is synchronous."""
        return self if self._staleness == 0 else None

    @property
    def expected_members(self) -> Sequence[int]:
        """As `muster.dealing.Members`."""
        return self._core.expected_members if self._core.has_servers else range(self.num_workers)

    def pass_of_others(self, loader: int, epoch: int) -> Mapping[str, Any] | None:
        """As `muster.dealing.Members`."""
        if not self._core.joins:
            return None
        if not self._core.has_servers:
            self._connect_servers(self._set_for(None))
        others_epoch, standing = self._others_passes.get(str(loader), (-1, {}))
        if epoch < others_epoch:
            return {}
        self._others_passes.pop(str(loader), None)
        if epoch > others_epoch:
            return None
        if self.steps > self._told_at:
            raise InvalidArgument(
                "this worker joined others in a pass over this loader, and stepped before it began that pass; iterate "
                "over loaders in the order of the other workers"
            )
        return {**standing, "members": self._core.members} if standing else {}

    @property
    def patience(self) -> float:
        """Seconds to wait for other workers' batches."""
        return self._options.timeout

    def deal(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> int | None:
        """As `muster.dealing.Dealer`. Connects, where no step has."""
        if not self._core.has_servers:
            self._connect_servers(self._set_for(None))
        return self._core.deal(loader, epoch, batches, finished)

    def end_pass(self, loader: int, epoch: int, batches: int, finished: Sequence[int]) -> None:
        """As `muster.dealing.Dealer`."""
        if self._core.has_servers:
            self._core.end_pass(loader, epoch, batches, finished)

    def broadcast_state(self, state: Tensor) -> Tensor:
        """As `muster.data.LoaderHost`. Raises InvalidArgument where this worker joins a running job."""
        if self._core.joins:
            raise InvalidArgument(
                "a worker that joins a running job cannot know how far the generator is that the loader was given; "
                "leave generator= out, so that the order follows from the job's seed"
            )
        return super().broadcast_state(state)

    def any_has_more(self, has_more: bool) -> bool:
        """Of the workers that step together: with a staleness this one alone."""
        return has_more if self.dealer is not None else super().any_has_more(has_more)

    @classmethod
    def from_env(cls, *, staleness: int | None = 0, **options: Any) -> Self:
        """The job that torchrun's, Slurm's or Open MPI's variables and MUSTER_SERVERS describe; a world of one without
        a launcher."""
        return cls(_C.Cluster.from_env(), staleness=staleness, **options)

    @property
    def staleness(self) -> int | None:
        """Steps that a worker may be ahead of the slowest live one; None: any number."""
        return self._staleness


class _Host:
    """The strategy, as loaders know it: the strategy has them, and a cycle would keep their workers alive."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = weakref.ref(strategy)

    def __getattr__(self, name: str) -> Any:
        strategy = self._strategy()
        if strategy is None:
            raise InvalidArgument("the strategy that prepared this loader is gone; keep it as long as the loader")
        return getattr(strategy, name)


def _move_state(optimizer: Optimizer) -> None:
    """To where its parameters are; step counts stay, as torch's."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and name != "step":
                values[name] = value.to(parameter.device)


def _check_initialised(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InvalidArgument(
                f"'{name}' of this {type(module).__name__} is not initialised; run one forward pass before prepare()"
            )


def _operation(op: str) -> _C.ReduceOp:
    if op not in ("sum", "mean", "min", "max"):
        raise InvalidArgument(f"op={op!r}: it must be 'sum', 'mean', 'min' or 'max'")
    return cast(_C.ReduceOp, getattr(_C.ReduceOp, op))


def _raw(given: Any) -> Any:
    return given.module if type(given) is Replicated else given


def _start_threads(core: _C.StrategyCore) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=core.serve, args=(local,), name=f"muster-replica-{local}", daemon=True)
        for local in range(core.local_replicas)
    ]
    for thread in threads:
        thread.start()
    return threads


_left_behind: list[threading.Thread] = []
_is_exiting = False


def _end(core: _C.StrategyCore, threads: list[threading.Thread], process: int) -> None:
    # A forked DataLoader worker inherits what runs at exit, but not the threads.
    if os.getpid() != process:
        return
    # The garbage collector may call this anywhere, in one of the replicas too: nothing is waited for there.
    if threading.current_thread() in threads or (core.busy and not _is_exiting):
        core.leave()
        _left_behind.extend(threads)
        return
    core.close()
    for thread in threads:
        thread.join()


def _leave(group: DefaultGroup, process: int) -> None:
    if os.getpid() == process:
        group.leave()


@atexit.register
def _wait_for_replicas() -> None:
    # A thread that works while the interpreter and its libraries are taken down would crash.
    global _is_exiting
    _is_exiting = True
    for thread in _left_behind:
        thread.join()
