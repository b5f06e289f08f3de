"""The strategies: how a training step written once is spread over replicas."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, Unpack, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from muster import _C, _random
from muster.by_hand import ByHand
from muster.collectives import Collectives
from muster.default_group import DefaultGroup
from muster.errors import InvalidArgument
from muster.loader import Loader
from muster.loader_host import LoaderHost
from muster.options import Options, StrategyOptions, device_names, loss_scale_rule, options_of, with_options
from muster.passes import Passes, WeakHost
from muster.per_replica import PerReplica
from muster.precision import LossScaler, autocast
from muster.preparing import Preparation
from muster.replica_threads import ReplicaThreads, warn_of_one_lock
from muster.replicated import Replicated
from muster.saved_content import SavedContent
from muster.saving import Saving
from muster.several_hosts import SeveralHosts
from muster.step import StepResult
from muster.stepping import Stepping

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "Strategy",
    "StrategyOptions",
]


class Strategy:
    """What all strategies do; use a subclass. Externally synchronised: one thread prepares and steps."""

    def __init__(self, core: _C.StrategyCore, options: StrategyOptions) -> None:
        """For subclasses: `core` was made with `options`."""
        _random.install(core.devices)
        self._core = core
        self._options = options
        this = weakref.ref(self)
        host = cast(LoaderHost, WeakHost(this))
        self._passes = Passes(core, host, lambda: None if (strategy := this()) is None else strategy._connect())
        self._collectives = Collectives(core, self._passes.of_core.leave_passes)
        by_hand = ByHand(core, options.accumulate)
        leaf_types = (Strategy, Replicated, Optimizer, DataLoader, Loader)
        self._preparation = Preparation(core, options, this, host, by_hand, self._collectives, self._passes, leaf_types)
        self._threads = ReplicaThreads(core)
        self._stepping = Stepping(core, options, host, self._preparation, self._passes, self._threads, by_hand)
        content = SavedContent(core, options, host, self._preparation, self._stepping, self._collectives)
        self._saving = Saving(core, options, host, self._preparation, self._collectives, content)
        core.on_leaving(lambda: None if (strategy := this()) is None else strategy._leave())
        weakref.finalize(self, self._threads.end, os.getpid())
        weakref.finalize(self, self._saving.writing.end)

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

    def prepare(self, *objects: Any) -> Any:
        """`objects` are modules (or factories that build one), optimizers and loaders; returned in the same order.

        Collective. The chief's parameters, buffers and optimizer state go to every worker. Preparing an object again is
        a no-op. Raises LayoutMismatch naming the first difference between the models of two ranks, and InvalidArgument
        for anything that cannot be prepared, or that another open strategy has.
        """
        return self._preparation.prepare(objects)

    def prepare_loader(self, loader: Any, *, sharded: bool = False) -> Loader[Any]:
        """A Loader whose global batch is the loader's, divided over the replicas. `sharded`: its batches are this
        worker's own already. Collective; raises LayoutMismatch where the ranks' loaders differ in size."""
        return self._preparation.prepare_loader(loader, sharded=sharded)

    @property
    def first_replica(self) -> int:
        """The job-wide index of this process's first replica."""
        return self._core.first_replica

    @property
    def devices(self) -> list[torch.device]:
        """The device of each of this process's replicas."""
        return self._core.devices

    @property
    def seed(self) -> int:
        """The job's seed."""
        return self._core.seed

    @property
    def capacities(self) -> list[float]:
        """What share of a batch each replica gets; empty where parts are equal."""
        return self._core.capacities

    @property
    def passes(self) -> _C.Loaders | None:
        """Who begins passes that other workers have a part in; None where each batch is divided over all workers."""
        return None

    @property
    def joins(self) -> bool:
        """Whether this worker came to a job that others had begun."""
        return self._core.joins

    def any_has_more(self, has_more: bool) -> bool:
        """Collective: whether `has_more` is true on any worker."""
        return cast(bool, self.reduce(has_more, "max"))

    def broadcast_state(self, state: Tensor) -> Tensor:
        """Collective: the chief's `state`."""
        return self._core.broadcast([state], 0)[0]

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
        return self._stepping.step(fn, args, optimizers)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of steps, for evaluation outside them (`run` has it already)."""
        return autocast(self._options.precision, self.device)

    def loss_scaler(self, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> LossScaler:
        """The loss scale of the steps of these optimizers (None: all prepared), to look at, save and restore."""
        return LossScaler(self._core, self._stepping.sets.set_of(optimizers), loss_scale_rule(self._options))

    def flush(self) -> StepResult | None:
        """Closes the open window, or drops it with drop_incomplete; None when none is open. Collective."""
        return self._stepping.flush()

    def run(self, fn: Callable[..., Any], *args: Any) -> PerReplica[Any]:
        """`fn` on each replica's part of `args`, without gradients; None for an empty part. Local unless it reduces."""
        return self._stepping.run(fn, args)

    def reduce(self, value: Any, op: Literal["sum", "mean", "min", "max"] = "mean", *, weight: Any = None) -> Any:
        """The reduction by `op` of every leaf of `value` (tensors and numbers in tuples, lists, dicts) over replicas.

        Inside a step: between replicas with non-empty parts, differentiable; `mean` weighs each by its part's size, or
        by `weight`. Outside: `value` is a `PerReplica` (None parts contribute nothing; what `run` returned is weighed
        by the parts' sizes) or one value of this worker. Collective. A Python number or bool comes back as one.
        """
        return self._collectives.reduce(value, op, weight=weight)

    def gather(self, value: Any) -> Any:
        """Every leaf of `value` concatenated along dimension 0 in replica order (0-dim leaves and numbers stacked). As
        `reduce`."""
        return self._collectives.gather(value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """`value` of rank `source` (outside a step) or of replica `source` (inside). Tensors, numbers, strings, nested;
        a prepared module broadcasts its parameters and buffers in place. Collective. What other ranks pass is ignored;
        inside a step, replicas pass the same structure, with tensors of the same shapes, where there are tensors."""
        return self._collectives.broadcast(value, source)

    def barrier(self) -> None:
        """Waits for all workers; inside a step, for all replicas with non-empty parts."""
        self._collectives.barrier()

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None, **state: Any) -> None:
        """Writes a checkpoint: everything prepared, where training is, and `state`: objects that have `state_dict` and
        `load_state_dict`, tensors, numbers, strings, and tuples, lists and dicts of them.

        Collective, between steps; all ranks write together where they see the chief's `folder`; on other hosts they
        write what they alone have (state that is divided) into that of their own. (With parameter servers the chief
        acts alone, and others need not call it; the servers write what they hold, where they see the folder.) Returns
        when everything is copied: threads write meanwhile, and the next save(), load() and close() wait for them. A
        checkpoint is there whole or not at all. `keep`: how many of the newest stay (None: all). A folder belongs to
        one job at a time. Raises CheckpointError where this checkpoint or the last could not be written,
        InvalidArgument for an open window and for `state` that cannot be stored; what one rank raises, a state_dict()
        of `state` included, is a CheckpointError on the others.
        """
        self._saving.save(folder, keep, state)

    def load(self, folder: str | os.PathLike[str], **state: Any) -> dict[str, Any] | None:
        """Goes on from the newest good checkpoint in `folder`, or from one that is named
        (``FOLDER/snapshot-0000000007``): everything prepared, and the objects `state`, by the names that `save` was
        given, load it. Returns the values that were saved by name, and None where a folder has no checkpoint.

        Collective, after prepare(); the chief reads, and is given what other workers' hosts have alone. The strategy
        and the number of replicas may be others than those that saved. With parameter servers before the first step; a
        worker that joins a running job loads `state` alone, from its own disk. Each damaged checkpoint is named in a
        warning, and the one before it loaded. Raises CheckpointError where all are damaged, or the one that is named
        is, or is not there, and on every rank LayoutMismatch, before anything is loaded, where other objects are
        prepared than were saved.
        """
        # Steps write what it makes, outside of a caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return self._saving.load(folder, state)

    def stop(self) -> None:
        """Asks all ranks to stop: `stopping` turns True everywhere at the same window's end."""
        self._core.stop()

    def explain(self) -> str:
        """In plain words: who takes part, and what was chosen and why; where this process writes checkpoints, when the
        last one was written, where and how large, or that one is being written, and what went wrong with the last."""
        return self._core.explain(type(self).__name__) + self._saving.writing.explain()

    def close(self) -> None:
        """Ends the replica threads and leaves the job; prepared modules and optimizers are free again.

        Idempotent, and safe at any moment from any thread: it waits for a step that another thread is in, and for a
        replica that an interrupted step left behind. A signal handler that raises ends the wait; the next close() goes
        on. Inside a step function, a hook or a signal handler that came during a call it is InvalidArgument: stop()
        there. Raises CheckpointError, once all is ended, where the last checkpoint could not be written.
        """
        self._core.close()
        errors = []
        for end in self._ends():
            try:
                end()
            except BaseException as error:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"[close() went on, to {other!r}]")
            raise errors[0]

    def __reduce__(self) -> NoReturn:
        raise InvalidArgument(
            "a strategy is its process's own, and cannot be copied or pickled; make one in each process, and pass what "
            "it is made from"
        )

    def _ends(self) -> list[Callable[[], None]]:
        """What is to end once the core is closed."""
        return [self._threads.join, self._passes.end_workers, self._saving.writing.end]

    def _leave(self) -> None:
        """When it closes, before servers are left."""
        if self._core.has_servers:
            self._saving.writing.wait()  # servers that write may end with the job
        self._preparation.leave()

    def _connect(self) -> None:
        self._stepping.connect_servers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class MirroredStrategy(Strategy):
    """One process with a replica, and a thread, for each device.

    A repeated device, or cpu:0, cpu:1, ..., means logical replicas of it, which share parameter memory. No devices: all
    CUDA devices where this build has CUDA and there are some, else one CPU replica.

    Parts of a batch are contiguous, in replica order. With `balance` "equal" their sizes differ by at most one, larger
    first. With "auto" they are such that replicas finish together: equal at first, while each replica's time for
    forward and backward of its part, without what it waited for others, is measured over a few steps after one to warm
    up, and again as training goes on. Sizes change where the step is expected to take at least 5 % less time; a batch
    that was read before (by the loader's workers, say) keeps its parts. `explain()` says what was chosen.

    Gradients stay the exact mean whatever the sizes. But sums of parts of other sizes round otherwise, so that bits are
    equal to those of other strategies, and from run to run, while parts are equal.
    """

    @with_options(Options)
    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        *,
        balance: Literal["equal", "auto"] = "equal",
        **options: Unpack[Options],
    ) -> None:
        """A replica for each of `devices`, which share batches as `balance` says."""
        if balance not in ("equal", "auto"):
            raise InvalidArgument(f"balance={balance!r}: it must be 'equal' or 'auto'")
        chosen = options_of(options)
        super().__init__(_C.make_mirrored(device_names(devices), asdict(chosen), balance == "auto"), chosen)
        warn_of_one_lock(self.devices)


class MultiWorkerMirroredStrategy(Strategy):
    """A process per worker, each with a replica for each of its devices. None given: cuda:<local rank> where this build
    has CUDA and there are devices (the only one where the process sees no other), else one CPU replica.

    Workers of one host reduce through its memory. Between hosts gradients go through process groups (Gloo) that the
    strategy makes beside the default group of torch.distributed, with the same bits as on one host. With
    `process_group` (any torch.distributed.ProcessGroup) everything goes through that one, in its own order of
    additions; it must serve CPU tensors. On CUDA gradients go through NCCL, and the rest as it does on the CPU.

    Where the program has no default group of torch.distributed, the strategy makes one (Gloo) of the workers until it
    is closed, also for libraries that ask torch.distributed which rank they are.
    """

    @with_options(Options)
    def __init__(
        self,
        cluster: _C.Cluster,
        devices: Sequence[str | torch.device] | None = None,
        *,
        process_group: Any = None,
        **options: Unpack[Options],
    ) -> None:
        """A worker of the job that `cluster` describes, with a replica for each of `devices`; it talks to the others
        through `process_group` where one is given. Collective."""
        chosen = options_of(options)
        several = SeveralHosts.of(cluster, chosen.timeout) if process_group is None else None
        try:
            core = _C.make_multi_worker(
                cluster, device_names(devices), asdict(chosen), process_group, several.parts if several else None
            )
            super().__init__(core, chosen)
        except BaseException:
            if several is not None:
                several.leave()
            raise
        self._groups = several or DefaultGroup.of(cluster, self._core, chosen.timeout)
        if self._groups is not None:
            weakref.finalize(self, self._groups.leave)

    def _ends(self) -> list[Callable[[], None]]:
        return [*super()._ends(), *([] if self._groups is None else [self._groups.leave])]

    @classmethod
    @with_options(Options)
    def from_env(
        cls,
        devices: Sequence[str | torch.device] | None = None,
        *,
        process_group: Any = None,
        **options: Unpack[Options],
    ) -> Self:
        """The job that torchrun's, Slurm's or Open MPI's variables describe; a world of one without a launcher.
        `devices` and `process_group` as of the class."""
        return cls(_C.Cluster.from_env(), devices, process_group=process_group, **options)
