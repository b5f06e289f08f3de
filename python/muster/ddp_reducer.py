"""What torch's DistributedDataParallel asks of its reducer and its logger, over a strategy's backward by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.backward_watch import BackwardWatch
from muster.comm_hooks import HookedBuckets
from muster.errors import InvalidArgument
from muster.group_strategy import GroupStrategy

__all__ = ["Reducer"]


class Reducer:
    """Averages gradients at the end of each backward that reached parameters through a synchronised forward."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        expects_sparse: Sequence[bool],
        group: dist.ProcessGroup,
        *,
        buckets: Sequence[Sequence[int]],
        is_joining: Callable[[], bool],
        finds_unused: bool,
    ) -> None:
        """Of `parameters`, whose gradients are sparse where `expects_sparse` says so, over `group`. `buckets` are those
        that hooks get, of numbers of parameters. `is_joining`: whether ranks may run out of inputs, so that each
        forward has one reduction. `finds_unused`: parameters without a gradient on all ranks keep what they have, also
        where a hook says what becomes of gradients."""
        self._finds_unused = finds_unused
        self.parameters = list(parameters)
        """Those whose gradients are averaged."""
        self._group = group
        self._device = parameters[0].device
        self._sparse = [p for p, sparse in zip(parameters, expects_sparse, strict=True) if sparse]
        self._dense = [p for p, sparse in zip(parameters, expects_sparse, strict=True) if not sparse]
        self.hooked = HookedBuckets([[parameters[number] for number in bucket] for bucket in buckets], self._sparse)
        """Communication hooks, and their buckets."""
        self.num_averages = 0
        """How often gradients were averaged."""
        self._strategy: GroupStrategy | None = None
        self._joined: tuple[Any, bool] | None = None
        self._futures: list[Any] = []
        this = weakref.ref(self)
        self._watch = BackwardWatch(
            self.parameters, lambda: None if (reducer := this()) is None else reducer.average(), is_joining
        )

    def meet(self) -> GroupStrategy:
        """Collective, the first time, and where the parameters have moved: the strategy that averages."""
        device = self.parameters[0].device
        if self._strategy is None or self._device != device:
            self._strategy, self._device = GroupStrategy.over(self._group, device), device
            self._watch.memory = self._strategy.gradient_memory(self._dense)
        return self._strategy

    def watch(self, output: Any) -> None:
        """After a synchronised forward, which returned `output`: what differentiates that averages, also where nothing
        else refers to this any more."""
        self._watch.watch(output, self)

    def rest(self) -> None:
        """After a forward that is not synchronised."""
        self._watch.rest()

    def average(self) -> None:
        """Collective: replaces each gradient by its mean over ranks."""
        with torch.no_grad():
            factor = self._factor()
            if self.hooked.has_hook:
                self.hooked.run(self._used_by_any([p.grad is not None for p in self.parameters]))
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
                self._used_by_any([False] * len(self.parameters))
                self.hooked.run_without_gradients()
                return
            self.meet().add_nothing(self._dense)
            for parameter in self._sparse:
                dist.all_reduce(_no_rows(parameter), group=self._group)

    def _used_by_any(self, used: Sequence[bool]) -> set[nn.Parameter] | None:
        """Collective: the parameters that a rank has a gradient of; None where nobody asks."""
        if not self._finds_unused:
            return None
        counts = torch.tensor(used, dtype=torch.int32, device=self._device)
        dist.all_reduce(counts, group=self._group)
        return {parameter for parameter, count in zip(self.parameters, counts.tolist(), strict=True) if count > 0}

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

    # --- torch's names ------------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Before a synchronised forward: nothing to do."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """The next backward is synchronised, as one from `outputs` or, where there are none, from anywhere."""
        self.watch(outputs)

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: Any, divide_by_initial_world_size: bool) -> None:
        self._joined = work, divide_by_initial_world_size

    def _set_static_graph(self) -> None:
        pass

    def _check_reducer_finalized(self) -> None:
        if self._watch.is_queued:
            raise RuntimeError("a backward ended before its gradients were averaged")

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self._futures.extend(futures)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        pass

    def _remove_autograd_hooks(self) -> None:
        self._watch.end()


def _no_rows(parameter: nn.Parameter) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.long), parameter.detach().new_empty((0, *parameter.shape[1:])), parameter.shape
    ).coalesce()
