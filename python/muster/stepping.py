"""One call of step, flush or run."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from muster import _C, per_replica
from muster.batch import digest, fewer_rows
from muster.by_hand import ByHand
from muster.errors import InvalidArgument
from muster.flat_state import FlatGroups, FlatStep
from muster.loader_host import LoaderHost
from muster.optimizer_sets import OptimizerSets
from muster.options import StrategyOptions
from muster.passes import Passes, dealt_batches, mark_in_run, mark_in_step, usual_rows
from muster.per_replica import PerReplica
from muster.prepared_optimizer import PreparedOptimizer
from muster.preparing import Preparation
from muster.replica_threads import ReplicaThreads
from muster.step import Record, StepResult, as_record, parameters_of

__all__ = ["Stepping"]

_Update = tuple[
    list[FlatStep] | list[list[str]],
    Callable[[], list[FlatGroups]] | None,
    Callable[[], None] | None,
]


class Stepping:
    """The calls of a strategy that run user code on its replicas. Owned by the thread that steps."""

    def __init__(
        self,
        core: _C.StrategyCore,
        options: StrategyOptions,
        host: LoaderHost,
        preparation: Preparation,
        passes: Passes,
        threads: ReplicaThreads,
        by_hand: ByHand,
    ) -> None:
        self._core = core
        self._options = options
        self._host = host
        self._preparation = preparation
        self._passes = passes
        self._threads = threads
        self._by_hand = by_hand
        self.sets = OptimizerSets(core, preparation.module_numbers, preparation.optimizers)
        self._hooked: dict[int, bool] = {}
        """By set: whether this worker's optimizers have hooks to call before a step."""
        self._warned_of_hooks = False
        self._weighs_parts = core.num_replicas * options.accumulate > 1
        self._warned_of_rows = False
        self._looked_at: dict[tuple[int, int], object] = {}
        """By set and number of modules: the part whose loss was looked at for what was not prepared."""
        self._stepped: list[PreparedOptimizer] = []
        """In the running call, whose post-hooks are to be called."""
        self._hook_error: BaseException | None = None
        self._is_first_step = True

    def step(
        self, fn: Callable[..., Any], args: tuple[Any, ...], optimizers: Optimizer | Sequence[Optimizer] | None
    ) -> StepResult:
        """As `Strategy.step`."""
        self._before_call()
        _refuse_compiled_autograd()
        if isinstance(optimizers, Sequence) and not optimizers and self._preparation.optimizers:
            raise InvalidArgument(
                "optimizers= names none, and a step without an optimizer would learn nothing; leave it out for all "
                "that are prepared"
            )
        set_number = self.sets.set_of(optimizers)
        self._connect_servers(set_number)
        self._note_hooks(set_number)
        sources = self._passes.sources_of(args)
        mark_in_step(sources)
        parts, rows = self._passes.divide(args, sources)
        self._compare_first_batches(parts)
        self._by_hand.rest()
        outputs: list[Any] = [None] * len(parts)
        updates = self._core.num_updates(set_number)

        def call(local: int) -> Any:
            with self._adopting_buffers(local):
                record, outputs[local] = as_record(fn(*parts[local]))
                self._tell_of_hooks(set_number, in_call=True)
                self._look_for_fewer_rows(record, parts[local], rows[local])
                self._look_for_forgotten(set_number, record)
            return record

        try:
            result = StepResult(
                **self._core.step(
                    self._threads.on_replicas(call),
                    rows,
                    set_number,
                    self._passes.has_ended(set_number, sources),
                    *self._update_of(set_number),
                    self._threads.interrupt,
                    dealt_batches(sources),
                    usual_rows(sources),
                ),
                output=PerReplica(outputs),
            )
        except BaseException:
            self._passes.of_core.end_step(_C.WindowEnd.dropped)
            raise
        finally:
            self._preparation.note()
            self._publish(set_number, updates)
        self._by_hand.gradients_are_applied = True
        if result.stepped:
            self._note_step(set_number)
        self._passes.of_core.note_step(set_number, result.stepped)
        self._call_post_hooks()
        return result

    def flush(self) -> StepResult | None:
        """As `Strategy.flush`."""
        numbers = self.sets.numbers()
        for set_number in numbers:
            self._note_hooks(set_number)
        open_sets = [] if self._options.drop_incomplete else self._core.open_sets()
        updates = {set_number: self._core.num_updates(set_number) for set_number in open_sets}
        try:
            result = self._core.flush([(set_number, *self._update_of(set_number)) for set_number in open_sets])
        except BaseException:
            self._passes.of_core.end_step(_C.WindowEnd.dropped)
            raise
        finally:
            for set_number, before in updates.items():
                self._publish(set_number, before)
        if result is None:
            self._passes.of_core.end_step(_C.WindowEnd.dropped)
            return None
        self._by_hand.gradients_are_applied = True
        for set_number in numbers:
            self._note_step(set_number)
        self._passes.of_core.end_step(_C.WindowEnd.closed)
        self._call_post_hooks()
        return StepResult(**result, output=PerReplica([None] * self._core.local_replicas))

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> PerReplica[Any]:
        """As `Strategy.run`."""
        self._before_call()
        sources = self._passes.sources_of(args)
        mark_in_run(sources)
        parts, rows = self._passes.divide(args, sources)
        results: list[Any] = [None] * len(parts)

        def call(local: int) -> None:
            with self._adopting_buffers(local):
                results[local] = fn(*parts[local])

        try:
            self._core.run(self._threads.on_replicas(call), rows, self._threads.interrupt)
        finally:
            self._preparation.note()
        return per_replica.with_rows(results, rows)

    @contextlib.contextmanager
    def _adopting_buffers(self, local: int) -> Iterator[None]:
        """Around user code on a replica, which may replace buffers."""
        try:
            yield
        except BaseException:
            # Else the next call would take what it finds replaced for the user's doing.
            with contextlib.suppress(InvalidArgument):
                self._preparation.adopt_buffers(local)
            raise
        self._preparation.adopt_buffers(local)

    def connect_servers(self) -> None:
        """Where no step has connected to parameter servers yet: connects, for all optimizers."""
        if not self._core.has_servers:
            self._connect_servers(self.sets.set_of(None))

    def _connect_servers(self, set_number: int) -> None:
        if self._core.awaits_servers(set_number) and self.sets.is_fused(set_number):
            self.sets.optimizers_of(set_number)[0].connect_servers(set_number)
            _C.return_freed_memory()  # tables, and state that servers have now
            self._note_hooks(set_number)
            updates = self._core.num_updates(set_number)
            told = self._core.watch(set_number, *self._update_of(set_number))
            self._publish(set_number, updates)
            self._call_post_hooks()
            self._passes.of_core.joined(told)
        elif self._core.has_servers:
            for optimizer in self.sets.optimizers_of(set_number):
                optimizer.check_state()

    def _before_call(self) -> None:
        self._preparation.check_open()
        self._passes.of_core.leave_passes()
        self._threads.take_back_interrupt()
        self._preparation.follow_first_replica()

    def _note_step(self, set_number: int) -> None:
        for optimizer in self.sets.optimizers_of(set_number):
            optimizer.note_step()

    def _compare_first_batches(self, parts: Sequence[Any]) -> None:
        """Collective in the first step: says so where every worker steps on the same samples, which are then those of
        one worker."""
        if not self._is_first_step:
            return
        self._is_first_step = False
        if self._core.num_workers == 1 or self._passes.of_core.are_dealt or self._core.joins:
            return
        digests = set(self._core.exchange_texts(digest(parts), "step()"))
        if len(digests) == 1 and digests != {""} and self._core.rank == 0:
            logging.getLogger("muster").warning(
                "all %d workers stepped on the same samples, so that the job learns no more from them than one worker "
                "would; prepare() the loader, which divides each batch, or give every worker data of its own",
                self._core.num_workers,
            )

    def _look_for_fewer_rows(self, record: Record, part: tuple[Any, ...], samples: int) -> None:
        """Where a loss counts as that of `samples`, of which its part may have been collated without some."""
        _, weight, _, is_sum = record
        if weight is not None or is_sum or not self._weighs_parts or self._warned_of_rows:
            return
        num_rows = fewer_rows(part, samples)
        if num_rows is None:
            return
        self._warned_of_rows = True
        logging.getLogger("muster").warning(
            "a part of %d samples was collated into %d rows, and its mean loss counts as that of %d samples; where "
            "some were left out, return muster.Loss(loss, weight=...) with the number of those that were not",
            samples, num_rows, samples,
        )  # fmt: skip

    def _look_for_forgotten(self, set_number: int, record: Record) -> None:
        """In a set's first step with these modules: one part's loss stands for all."""
        part = object()
        if self._looked_at.setdefault((set_number, len(self._preparation.module_numbers)), part) is part:
            self._preparation.look_for_forgotten(parameters_of(record[0]))

    def _update_of(self, set_number: int) -> _Update:
        """The optimizers of a set, before a call: flat ones as the core steps them, or what workers compare of others;
        what is called before flat ones step; and what steps others."""
        optimizers = self.sets.optimizers_of(set_number)
        if self.sets.is_fused(set_number):
            steps = [optimizer.flat_step() for optimizer in optimizers]
            return steps, partial(self._before_update, optimizers), None
        if not optimizers:
            return [], None, None
        is_compared = self._core.num_workers > 1
        words = [optimizer.hyperparameters() for optimizer in optimizers] if is_compared else []
        return words, None, partial(self._update_from_grad, set_number, optimizers)

    def _before_update(self, optimizers: Sequence[PreparedOptimizer]) -> list[FlatGroups]:
        """Called by the core before it steps flat optimizers: calls their hooks, and reads what these and the user's
        function left in groups and state. Where there are hooks, ranks agree on what it raises."""
        for optimizer in optimizers:
            optimizer.call_pre_hooks()
        return [optimizer.flat_groups() for optimizer in optimizers]

    def _publish(self, set_number: int, before: int) -> None:
        """After a call, before which `num_updates` was `before`."""
        made = self._core.num_updates(set_number) - before
        if made == 0:
            return
        optimizers = self.sets.optimizers_of(set_number)
        for optimizer in optimizers[:made]:
            optimizer.publish()
        self._stepped += optimizers * (made // len(optimizers))

    def _note_hooks(self, set_number: int) -> None:
        """Before a call."""
        self._stepped, self._hook_error = [], None
        for optimizer in self.sets.optimizers_of(set_number):
            optimizer.check_step()
        self._tell_of_hooks(set_number)

    def _tell_of_hooks(self, set_number: int, *, in_call: bool = False) -> None:
        """Before ranks agree on whether there are hooks. Replicas' threads that look at once do so `in_call`: what one
        has seen there, none takes back."""
        was_hooked = self._hooked.get(set_number, False)
        optimizers = self.sets.optimizers_of(set_number)
        has_hooks = (in_call and was_hooked) or any(optimizer.has_hooks() for optimizer in optimizers)
        if has_hooks != was_hooked:
            self._core.set_has_hooks(set_number, has_hooks)
            self._hooked[set_number] = has_hooks
        if has_hooks and not (self._warned_of_hooks or self._options.keep_gradients) and self.sets.is_fused(set_number):
            self._warned_of_hooks = True
            logging.getLogger("muster").warning(
                "step pre-hooks of a flat optimizer do not see gradients: .grad is None; %s",
                "parameter servers step, so do without them, or use another strategy"
                if self._core.has_servers
                else "pass keep_gradients=True to the strategy, or fuse=False",
            )

    def _update_from_grad(self, set_number: int, optimizers: Sequence[PreparedOptimizer]) -> None:
        """Called by the core where a window closed: steps optimizers that are not flat."""
        hooked = self._core.hooked(set_number)

        def agree(is_first: bool, error: BaseException | None) -> None:
            def fail() -> None:
                if error is not None:
                    raise error

            self._core.call_hooks(set_number, is_first, fail)

        for position, optimizer in enumerate(optimizers):
            error = optimizer.step(partial(agree, position == 0) if hooked else None)
            self._hook_error = self._hook_error or error

    def _call_post_hooks(self) -> None:
        """After the steps of all optimizers, when peers no longer write parameters: the first error is raised here
        alone, once all are called, and the step is made everywhere."""
        stepped, self._stepped = self._stepped, []
        error, self._hook_error = self._hook_error, None
        for optimizer in stepped:
            try:
                optimizer.call_post_hooks()
            except BaseException as raised:
                error = error or raised
        if error is not None:
            raise error


def _refuse_compiled_autograd() -> None:
    """As the library's hooks do, which torch calls for one replica alone: it runs no two compiled backwards at once."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        _C.refuse_compiled_autograd()
