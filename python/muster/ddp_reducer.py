"""What torch's DistributedDataParallel asks of its reducer and its logger, over a strategy's backward by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch.utils._pytree import tree_leaves

from muster.comm_hooks import HookedBuckets
from muster.errors import InvalidArgument
from muster.group_strategy import GroupStrategy

__all__ = ["Reducer"]

_PROVING_BACKWARDS = 3
"""In which every parameter is watched, to see that gradients come through the outputs."""
_SENTINELS = 64
"""Parameters that stay watched after that."""


class Reducer:
    """Averages gradients at the end of each backward that reached parameters through a synchronised forward.

    A hook on the forward's outputs runs in the outermost graph task, so that its callback comes when all of backward is
    done, reentrant checkpoints included. Hooks on parameters say whether gradients arrived at all (torch.autograd.grad
    leaves none), and stand in where they arrive by another way than outputs: in a gradient penalty, or where a loss was
    kept elsewhere. Each is a call into Python: once some backwards have come through outputs alone, only a few
    parameters stay watched, and the graph is asked about the others.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        expects_sparse: Sequence[bool],
        group: dist.ProcessGroup,
        *,
        buckets: Sequence[Sequence[int]],
        is_joining: Callable[[], bool],
    ) -> None:
        """Of `parameters`, whose gradients are sparse where `expects_sparse` says so, over `group`. `buckets` are those
        that hooks get, of numbers of parameters. `is_joining`: whether ranks may run out of inputs, so that each
        forward has one reduction."""
        self.parameters = list(parameters)
        """Those whose gradients are averaged."""
        self._group = group
        self._device = parameters[0].device
        self._sparse = [p for p, sparse in zip(parameters, expects_sparse, strict=True) if sparse]
        self._dense = [p for p, sparse in zip(parameters, expects_sparse, strict=True) if not sparse]
        self._is_joining = is_joining
        self.hooked = HookedBuckets([[parameters[number] for number in bucket] for bucket in buckets], self._sparse)
        """Communication hooks, and their buckets."""
        self.num_averages = 0
        """How often gradients were averaged."""
        self._strategy: GroupStrategy | None = None
        self._joined: tuple[Any, bool] | None = None
        self._futures: list[Any] = []
        self._is_expected = False  # the last forward was synchronised
        self._queued_in: int | None = None  # the graph task at whose end gradients are looked at
        self._is_reached = False  # in that task, parameters got gradients
        self._handles: list[Any] = []
        self._accumulators: list[Any] = []  # once few parameters are watched
        self._num_proven: int | None = 0  # backwards that came through outputs; None once one did not
        self._watch_parameters(self.parameters)
        weakref.finalize(self, _remove, self._handles)

    def meet(self) -> GroupStrategy:
        """Collective, the first time: the strategy that averages."""
        if self._strategy is None:
            self._strategy = GroupStrategy.over(self._group, self._device)
        return self._strategy

    def watch(self, output: Any) -> None:
        """After a synchronised forward, which returned `output`."""
        self._is_expected = True
        self._queued_in, self._is_reached = None, False
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output)  # type: ignore[no-untyped-call]
        if not tensors or any(tensor.grad_fn is None for tensor in tensors):
            self._distrust_outputs()

    def rest(self) -> None:
        """After a forward that is not synchronised."""
        self._is_expected = False

    def average(self) -> None:
        """Collective: replaces each gradient by its mean over ranks."""
        with torch.no_grad():
            factor = self._factor()
            if self.hooked.has_hook:
                self.hooked.run()
            else:
                self.meet().average(self._dense)
                self._average_sparse()
                if factor != 1:
                    torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        for future in self._futures:
            future.wait()
        self._futures.clear()
        self.num_averages += 1

    def average_others(self) -> None:
        """Collective: the part in average() of a rank that has no more inputs."""
        with torch.no_grad():
            if self.hooked.has_hook:
                self.hooked.run_without_gradients()
                return
            self.meet().add_nothing(self._dense)
            for parameter in self._sparse:
                dist.all_reduce(_no_rows(parameter), group=self._group)

    def _average_sparse(self) -> None:
        for parameter in self._sparse:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                raise InvalidArgument(
                    "an embedding with sparse=True got a dense gradient, since its weight is also used otherwise; "
                    "build it with sparse=False"
                )
            total = _no_rows(parameter) if gradient is None else gradient.coalesce()
            dist.all_reduce(total, group=self._group)
            if gradient is not None or total.indices().numel() > 0:
                parameter.grad = total / self._group.size()

    def _factor(self) -> float:
        """What a mean over all ranks is to be multiplied by."""
        if self._joined is None:
            return 1.0
        work, divide_by_initial = self._joined
        self._joined = None
        work.wait()
        (present,) = work.get_future().value()
        return 1.0 if divide_by_initial else self._group.size() / float(present)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _on_output(self, gradient: Tensor) -> None:
        task = _current_graph_task_id()
        if self._queued_in == task or (self._is_joining() and not self._is_expected):
            return
        self._is_reached = any(map(_is_executed, self._accumulators))
        self._queue(task)

    def _on_parameter(self) -> None:
        if self._is_reached:
            return
        if self._queued_in is None:
            if not self._is_expected:
                return
            self._distrust_outputs()
            self._queue(_current_graph_task_id())
        self._is_reached = True

    def _queue(self, task: int) -> None:
        self._queued_in = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        is_reached, self._is_reached, self._queued_in = self._is_reached, False, None
        if not is_reached:
            return
        # Where outputs do not tell, one backward may end several times: after each reentrant checkpoint.
        self._is_expected = self._num_proven is None and not self._is_joining()
        self.average()
        if self._num_proven is not None:
            self._num_proven += 1
            if self._num_proven == _PROVING_BACKWARDS:
                with _unfrozen(self.parameters):
                    self._accumulators = [torch.autograd.graph.get_gradient_edge(p).node for p in self.parameters]
                self._watch_parameters(self.parameters[:: len(self.parameters) // _SENTINELS + 1])

    def _watch_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        _remove(self._handles)
        this = weakref.ref(self)

        def on_parameter(_: Tensor) -> None:
            if (reducer := this()) is not None:
                reducer._on_parameter()

        with _unfrozen(parameters):
            self._handles.extend(
                cast(Any, parameter).register_post_accumulate_grad_hook(on_parameter) for parameter in parameters
            )

    def _distrust_outputs(self) -> None:
        if self._num_proven is not None and self._accumulators:
            self._accumulators = []
            self._watch_parameters(self.parameters)
        self._num_proven = None

    # --- torch's names ------------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Before a synchronised forward: nothing to do."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: Any, divide_by_initial_world_size: bool) -> None:
        self._joined = work, divide_by_initial_world_size

    def _set_static_graph(self) -> None:
        pass

    def _check_reducer_finalized(self) -> None:
        if self._queued_in is not None:
            raise RuntimeError("a backward ended before its gradients were averaged")

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self._futures.extend(futures)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        pass

    def _remove_autograd_hooks(self) -> None:
        _remove(self._handles)
        self._accumulators, self._num_proven = [], None


@contextlib.contextmanager
def _unfrozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within it hooks can be given to parameters, and nodes asked of them, that are frozen for a while."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _is_executed(node: Any) -> bool:
    try:
        return _will_engine_execute_node(node)
    except RuntimeError:  # of a leaf whose gradient torch.autograd.grad returns
        return False


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in tuples, lists, dicts, what torch's pytree knows, dataclasses, and attributes of other objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))
        elif not isinstance(leaf, (nn.Module, type, str, int, float)) and hasattr(leaf, "__dict__"):
            yield from (held for held in tree_leaves(vars(leaf)) if isinstance(held, Tensor))


def _no_rows(parameter: nn.Parameter) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.long), parameter.detach().new_empty((0, *parameter.shape[1:])), parameter.shape
    ).coalesce()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
