"""DistributedOptimizer: an optimizer whose gradients are reduced over ranks while backward computes the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster.errors import InvalidArgument
from muster.horovod.adasum_optimizer import AdasumDeltas
from muster.horovod.compression import Compression, Compressor
from muster.horovod.functions import broadcast_object
from muster.horovod.gradients import Reductions, add_names, named
from muster.horovod.handles import synchronize
from muster.horovod.operations import (
    Adasum,
    Average,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from muster.horovod.process_sets import ProcessSet, global_process_set
from muster.horovod.runtime import running

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802 (a function in Horovod, too)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Optimizer:
    """An optimizer of the class of `optimizer`, over its parameter groups, whose step() takes gradients reduced by `op`
    over the ranks of `process_set`.

    `named_parameters`: model.named_parameters(), whose names say which gradients belong together; without them their
    order does. Gradients travel as `compression` makes them, each when backward has it for the
    `backward_passes_per_step`-th time since the last step. With Average they are divided by
    `gradient_predivide_factor` before they are summed, and what is left of the number of ranks after. `groups`: how
    many groups of parameters are reduced at once, or which; the rest by itself (`num_groups`: its old name).
    `sparse_as_dense`: sparse gradients are reduced as dense ones. With Adasum over several ranks each rank steps by
    itself, and what its step changed is combined.

    It has besides: synchronize(), which waits for all reductions; skip_synchronize(), within which step() does not; and
    set_backward_passes_per_step(). zero_grad() between backward and step() is an error. Groups and state are those of
    `optimizer`, whose schedulers go on, also after either of the two has loaded a state. Copies are refused. Raises
    ValueError for names and options that cannot be, NotImplementedError for Adasum over a set of some ranks. Collective
    where there are `groups`.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise InvalidArgument("gradient_predivide_factor is for op=Average; leave it at 1")
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise InvalidArgument(f"backward_passes_per_step={backward_passes_per_step}: it is 1 or more")
    parameters = named(optimizer, named_parameters)
    base = type(optimizer)
    is_adasum = op == Adasum and running().size > 1
    if is_adasum and process_set.process_set_id != 0:
        raise NotImplementedError("Adasum is over all ranks; leave process_set= away")
    part: type[Any] = AdasumDeltas if is_adasum else _Reducing
    attributes = {"__module__": __name__, "__doc__": base.__doc__, "__reduce_ex__": _refuse_copies}
    made: type[Any] = type(base.__name__, (part, base), attributes)
    distributed: Any = object.__new__(made)
    # The same object in another class, as a copy: groups, state, defaults and hooks are those of the optimizer.
    # But for a step() that a scheduler put there, which would be the optimizer's.
    distributed.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    _load_in_place(distributed)
    if is_adasum:
        distributed.begin(parameters, compression, backward_passes_per_step)
    else:
        reduction = _Reduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
        distributed.begin(parameters, reduction, backward_passes_per_step, groups)
    return cast(Optimizer, distributed)


def _load_in_place(optimizer: Optimizer) -> None:
    """Has load_state_dict() write into the groups and the state that `optimizer` shares with the one that it was made
    from, and with that one's schedulers, rather than replace them: whichever of the two loads."""
    groups, state = optimizer.param_groups, optimizer.state

    def share_again(loaded: Optimizer) -> None:
        for group, values in zip(groups, loaded.param_groups, strict=True):
            if group is not values:
                group.clear()
                group.update(values)
        loaded.param_groups = groups
        if state is not loaded.state:
            state.clear()
            state.update(loaded.state)
            loaded.state = state

    optimizer.register_load_state_dict_post_hook(share_again)


def _refuse_copies(optimizer: Optimizer, protocol: Any) -> NoReturn:
    raise TypeError(
        "a DistributedOptimizer is neither copied nor pickled: it follows the gradients of its parameters; keep "
        "copy.deepcopy(optimizer.state_dict()), or copy the optimizer that it was made from and wrap the copy"
    )


class _Reduction:
    """How a gradient is reduced."""

    def __init__(
        self,
        compression: type[Compressor],
        op: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.process_set = process_set
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        factors = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._options: dict[str, Any] = {"op": op, "process_set": process_set}
        self._factors = {"prescale_factor": factors[0], "postscale_factor": factors[1]}

    def begin(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Callable[[], None]:
        """Begins to reduce the gradients of `parameters`; what it returns waits, and puts them into .grad."""
        for parameter in parameters:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
        gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
        if len(gradients) == 1 and gradients[0].is_sparse and not self._sparse_as_dense:
            wait = sparse_allreduce_async(gradients[0], names[0], **self._options)
            return lambda: _replace(gradients, [wait()])
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        sent, contexts = zip(*(self._compression.compress(gradient) for gradient in dense), strict=True)
        options = {**self._options, **self._factors}
        if len(parameters) == 1:
            handle = allreduce_async_(sent[0], name=names[0], **options)
        else:
            handle = grouped_allreduce_async_(sent, name=names[0], **options)

        def finish() -> None:
            results = synchronize(handle)
            results = [results] if len(parameters) == 1 else results
            plain = [self._compression.decompress(r, ctx) for r, ctx in zip(results, contexts, strict=True)]
            _replace(gradients, plain)

        return finish


def _replace(gradients: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for gradient, result in zip(gradients, results, strict=True):
            if result is gradient:
                continue
            if gradient.is_sparse:
                gradient.zero_().add_(result if result.is_sparse else result.to_sparse())
            else:
                gradient.copy_(result)


class _Reducing(Optimizer):
    """What DistributedOptimizer adds to an optimizer's class."""

    def begin(
        self,
        parameters: dict[Tensor, str],
        reduction: _Reduction,
        passes: int,
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        self._should_synchronize = True
        self._is_synchronized = False
        self._takes_part = reduction.process_set.included() and running().size > 1
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        together = _groups(trained, parameters, groups, reduction.process_set) if self._takes_part else []
        self._names = parameters
        self._reductions = Reductions(parameters, together, passes, reduction.begin)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes from now on make up a step."""
        self._reductions.restart(passes)

    def load_state_dict(self, state_dict: Any) -> None:
        """As of every optimizer; passes are counted anew."""
        self._reductions.restart()
        self._is_synchronized = False
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced, those that no backward pass came to included. Collective.

        Parameters that were added, or train only now, are reduced with the others from here on. Raises AssertionError
        where another tensor has become a parameter's .grad since backward().
        """
        if self._takes_part:
            add_names(self._names, self)
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.requires_grad and parameter not in self._reductions:
                    self._reductions.add((parameter,))
            self._reductions.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it step() does not wait: after synchronize(), for what changes gradients in between."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """As of the optimizer, after synchronize() but within skip_synchronize(). Collective. With a `closure`, which
        computes gradients, synchronize() comes after each call of it."""
        if not self._should_synchronize:
            self._is_synchronized = False
            return super().step(closure)
        if closure is None:
            self._reduce()
            return super().step()

        def reduced() -> Any:
            loss = closure()
            self._reduce()
            return loss

        return super().step(reduced)

    def _reduce(self) -> None:
        if self._is_synchronized:
            warnings.warn(
                "step() after synchronize() reduces gradients again; call it within optimizer.skip_synchronize()",
                stacklevel=3,
            )
        self.synchronize()
        self._is_synchronized = False

    # torch wraps a step() without this mark when a state is loaded: hooks, which are the base's, would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the optimizer. Raises AssertionError while gradients are being reduced."""
        self._reductions.check_is_idle()
        super().zero_grad(set_to_none)


def _groups(
    trained: Sequence[Tensor],
    names: Mapping[Tensor, str],
    groups: int | Sequence[Sequence[Tensor]] | None,
    process_set: ProcessSet,
) -> list[tuple[Tensor, ...]]:
    """Which of the parameters `trained` are reduced at once: all of them, each once."""
    if groups is None:
        return [(parameter,) for parameter in trained]
    ranks = process_set.ranks
    order = broadcast_object([names[p] for p in trained], ranks[0], "groups", process_set)
    place = {name: index for index, name in enumerate(order)}
    ordered = sorted(trained, key=lambda p: place[names[p]])
    if isinstance(groups, int):
        if groups <= 0:
            raise InvalidArgument(f"groups={groups}: how many groups, 1 or more, or lists of parameters")
        count = min(groups, len(ordered))
        sizes = [len(ordered) // count + (index < len(ordered) % count) for index in range(count)]
        return [tuple(ordered[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(count)]
    members = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, Tensor) for parameter in members):
        raise InvalidArgument("groups= consists of lists of parameters")
    if len({id(parameter) for parameter in members}) < len(members):
        raise InvalidArgument("groups= names a parameter twice")
    known = {id(parameter) for parameter in trained}
    named_groups = [tuple(p for p in group if id(p) in known) for group in groups]
    grouped = {id(parameter) for parameter in members}
    return [group for group in named_groups if group] + [(p,) for p in ordered if id(p) not in grouped]
