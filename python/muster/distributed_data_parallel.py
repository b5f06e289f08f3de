"""DistributedDataParallel: torch's, whose gradients are averaged as a strategy's are."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from muster.ddp_logger import Logger
from muster.ddp_reducer import Reducer
from muster.errors import InvalidArgument
from muster.group_strategy import compare

__all__ = ["DistributedDataParallel"]

_BUILTIN_HOOKS: dict[str, Callable[..., Any]] = {
    "ALLREDUCE": default_hooks.allreduce_hook,
    "FP16_COMPRESS": default_hooks.fp16_compress_hook,
}


class DistributedDataParallel(TorchDDP):
    """A drop-in for ``torch.nn.parallel.DistributedDataParallel``, of which it is a subclass: the same arguments, the
    same training loop, the same results within rounding.

    Ranks meet through the process group. Gradients are averaged in the memory of the host where all are on one; on the
    CPU of hosts that have several ranks each, in each host's memory and then between them; else over the group. A
    gradient is averaged when all of backward has ended.

    What arguments mean here:

    - `module`, `device_ids`, `output_device`, `dim`, `broadcast_buffers`, `forward_sync_buffers`, `init_sync`,
      `process_group`, `device_mesh`, `check_reduction`, `delay_all_reduce_named_params`, `param_to_hook_all_reduce`: as
      in torch, whose code looks at them. All parameters must be on one device.
    - `bucket_cap_mb`, `bucket_cap_mb_list`: sizes of the buckets that communication hooks get; without a hook there are
      no buckets.
    - `find_unused_parameters`, `static_graph`, `skip_all_reduce_unused_params`: accepted; unused parameters, reentrant
      backward and changing graphs need no option, and a parameter that no rank uses keeps its `.grad`.
    - `gradient_as_bucket_view`: nothing to do; gradients keep the memory that backward gave them.
    - `batched_grad_copy`: accepted; small gradients are always copied together.
    - `mixed_precision`: InvalidArgument; use torch.autocast.
    """

    reducer: Any
    logger: Any

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(TorchDDP.__init__).bind(self, module, *args, **kwargs).arguments
        if given.get("mixed_precision") is not None:
            raise InvalidArgument(
                "mixed_precision is torch's experiment with parameters of two dtypes, which is not supported; run "
                "forward and the loss under torch.autocast"
            )
        self._compares_ranks = given.get("init_sync", True)
        super().__init__(module, *args, **kwargs)
        # Copies and pickles meet when they first average: one rank alone may have made them.
        if self._compares_ranks and "reducer" in self.__dict__:
            self._compares_ranks = False
            self.logger.note_way(self.reducer.meet().way)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's: `hook` is called with `state` and each bucket of gradients, as flat tensors, at the end of
        backward, and its future holds what they become."""
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        if getattr(hook, "__module__", "").endswith("ddp_zero_hook"):
            self._refuse("a hook that overlaps ZeroRedundancyOptimizer with backward", "call its step() after backward")
        self._use_hook(state, hook, hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if comm_hook_type.name not in _BUILTIN_HOOKS:
            raise InvalidArgument(f"there are built-in hooks {', '.join(_BUILTIN_HOOKS)}, not {comm_hook_type}")
        self._use_hook(self.process_group, _BUILTIN_HOOKS[comm_hook_type.name], str(comm_hook_type))

    def _use_hook(self, state: object, hook: Callable[..., Any], name: str) -> None:
        self.reducer.hooked.set_hook(state, hook)
        self.logger.note_hook(name)
        self._comm_hooks.append((hook, state))

    # --- what torch's class asks for ----------------------------------------------------------------------------------

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expects_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._compares_ranks:
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            compare(
                [f"parameter '{names[p]}' {list(p.shape)} {p.dtype}" for p in parameters],
                self.process_group,
                parameters[0].device,
            )
        return parameters, expects_sparse

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        if self._use_python_reducer:
            raise InvalidArgument(
                'torch._dynamo.config.optimize_ddp = "python_reducer" compiles torch\'s own reduction; leave it at True'
            )
        devices = {parameter.device for parameter in parameters}
        if len(devices) > 1:
            raise InvalidArgument(
                f"the module's parameters are on several devices ({', '.join(sorted(map(str, devices)))}), and each "
                "rank reduces from one; use torch.nn.parallel.DistributedDataParallel for it"
            )
        first = _DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else self.bucket_bytes_cap
        limits = getattr(self, "bucket_bytes_cap_list", None) or [first, self.bucket_bytes_cap]
        buckets, _ = _compute_bucket_assignment_by_size(list(parameters), limits, expect_sparse_gradient)
        self.reducer = Reducer(
            parameters,
            expect_sparse_gradient,
            self.process_group,
            buckets=list(reversed(buckets)),
            is_joining=_Joining(self),
            finds_unused=self.find_unused_parameters,
        )
        # What outputs keep of a model that is gone averages their backward alone.
        weakref.finalize(self, self.reducer.rest).atexit = False
        self.logger = Logger(self)
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        if not self._delay_all_reduce_all_params:
            if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
                self._sync_buffers()  # type: ignore[no-untyped-call]
            is_synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
            self.require_forward_param_sync = is_synchronised
            if is_synchronised:
                self.reducer.watch(output)
            elif torch.is_grad_enabled():
                self.reducer.rest()
        self._clear_grad_buffer()  # type: ignore[no-untyped-call]
        return output

    def _delayed_all_reduce_hook(self, grad: Tensor) -> Tensor:
        buffer = self._delay_grad_buffer
        assert buffer is not None
        buffer.div_(dist.get_world_size(self.process_group))
        work = dist.all_reduce(buffer, group=self.process_group, async_op=True)
        # torch's waits for nothing, which is right on a stream alone.
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        return grad

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer.average_others()

    def _match_unused_params_allreduce(self) -> None:
        pass  # what is used travels with the gradients

    def _setup_in_backward_optimizers(self) -> None:
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._module_parameters):
            self._refuse("optimizers that step in backward", "call optimizer.step() after backward")

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        self._refuse("_register_fused_optim", "call optimizer.step() after backward")

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        self._refuse("_set_sparse_metadata", "leave it out: sparse gradients are summed whole")

    def _update_process_group(self, new_process_group: Any) -> None:
        self._refuse("_update_process_group", "wrap the module anew with process_group=")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise InvalidArgument(f"{what} needs the reducer of torch's DistributedDataParallel; {instead}")


class _Joining:
    """Whether a model is in join(). Does not keep it: what is left of a model would average in turns of its own."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and ddp._join_config.enable


functools.update_wrapper(cast(Any, DistributedDataParallel).__init__, TorchDDP.__init__)
