"""Replicas of one process, and workers with parameter servers, for Lightning's Fabric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from muster import strategy as strategies
from muster.errors import InvalidArgument
from muster.lightning.one_process import OneProcess
from muster.lightning.workers import Job, Workers, check_has_one_replica, cluster_of_environment
from muster.parameter_server import ParameterServerStrategy
from muster.per_replica import PerReplica
from muster.step import StepResult
from muster.strategy import Strategy

__all__ = ["FabricMirroredStrategy", "FabricParameterServerStrategy"]

_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16"}


class _Stepping(FabricStrategy, ABC):
    """What Fabric calls, over a strategy whose step is forward, backward and update together.

    ``fabric.strategy.step(fn, *batch)`` takes the place of forward, ``fabric.backward`` and ``optimizer.step``. A loop
    may have those where a mirrored strategy has one replica; else Muster refuses them.
    """

    _strategy: Strategy | None = None
    _in_step = False

    @abstractmethod
    def _made(self, precision: Literal["fp32", "bf16", "fp16"]) -> Strategy:
        """The strategy, with this precision."""

    @property
    def muster(self) -> Strategy:
        """Muster's strategy itself, which is made where it is first asked for."""
        return self._join()

    def _join(self) -> Strategy:
        if self._strategy is None:
            name = self.precision.precision
            if name not in _PRECISIONS:
                raise InvalidArgument(
                    f"precision '{name}': use {' or '.join(_PRECISIONS)}; for fp16, whose losses steps scale, give the "
                    "strategy muster_options={'precision': 'fp16'}"
                )
            self._strategy = self._made(_PRECISIONS[name])  # type: ignore[arg-type]
            self.precision = _StepsPrecision(self._strategy, self.precision)
        return self._strategy

    def step(
        self, fn: Callable[..., Any], *args: Any, optimizers: Optimizer | Sequence[Optimizer] | None = None
    ) -> StepResult:
        """As `muster.Strategy.step`: `fn` on each replica's part of `args`, backward, and the update of `optimizers`,
        which are Fabric's or torch's (None: of all)."""
        if isinstance(optimizers, (list, tuple)):
            optimizers = [_optimizer_of(optimizer) for optimizer in optimizers]
        elif optimizers is not None:
            optimizers = _optimizer_of(optimizers)
        with self._stepping():
            return self.muster.step(fn, *args, optimizers=optimizers)

    def run(self, fn: Callable[..., Any], *args: Any) -> PerReplica[Any]:
        """As `muster.Strategy.run`: `fn` on each replica's part of `args`, without gradients."""
        with self._stepping():
            return self.muster.run(fn, *args)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepares `module`."""
        has_own_forward = "forward" in vars(module)
        return _CurrentReplica(self.muster.prepare(module), has_own_forward)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepares `optimizer`."""
        prepared: Optimizer = self.muster.prepare(optimizer)
        return prepared

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state of replica 0's, with the newest parameters."""
        self.muster.run(lambda: None)
        return super().get_module_state_dict(module.module if isinstance(module, _CurrentReplica) else module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """`module` loads `state_dict`, as `strict` as torch's."""
        own = module.module if isinstance(module, _CurrentReplica) else module
        super().load_module_state_dict(own, state_dict, strict)

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """As Fabric's, of gradients of backward by hand."""
        _check_gradients(optimizer, "clip_norm")
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """As Fabric's, of gradients of backward by hand."""
        _check_gradients(optimizer, "clip_value")
        super().clip_gradients_value(module, optimizer, clip_val)

    def teardown(self) -> None:
        """As Fabric's; leaves the job."""
        try:
            if self._strategy is not None:
                self._strategy.close()
        finally:
            super().teardown()


class FabricMirroredStrategy(OneProcess, _Stepping, SingleDeviceStrategy):
    """A `muster.MirroredStrategy` with a replica for each of Fabric's devices."""

    def __init__(
        self,
        *,
        parallel_devices: Sequence[torch.device] | None = None,
        muster_options: dict[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        """`parallel_devices`: a replica for each; None: Fabric's. `muster_options` are those of
        `muster.MirroredStrategy`; `accelerator`, `checkpoint_io` and `precision` those of Fabric's ``Strategy``."""
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision=precision)
        self.parallel_devices = None if parallel_devices is None else list(parallel_devices)
        """The devices of the replicas. Fabric sets them where none were given."""
        self._options = dict(muster_options or {})

    @property
    def root_device(self) -> torch.device:
        """Replica 0's."""
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensor, since there is one process; refused in a step, where a replica has its part of it."""
        self._refuse_in_step("all_gather", "gather(x) joins the parts along dimension 0")
        return super().all_gather(tensor, group, sync_grads)

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As `all_gather`."""
        self._refuse_in_step("all_reduce", "reduce(x, 'sum') adds the replicas' values")
        return super().all_reduce(tensor, *args, **kwargs)

    def _refuse_in_step(self, what: str, instead: str) -> None:
        if self._in_step and len(self.muster.devices) > 1:
            raise InvalidArgument(
                f"{what} is between processes, and this one's replicas each have a part of the batch; in a step "
                f"fabric.strategy.muster.{instead}, differentiably"
            )

    def _made(self, precision: Literal["fp32", "bf16", "fp16"]) -> Strategy:
        return strategies.MirroredStrategy(self.parallel_devices, **{"precision": precision, **self._options})


class FabricParameterServerStrategy(Workers, _Stepping, ParallelStrategy):
    """A `muster.ParameterServerStrategy` over the workers and servers that ``muster run`` starts."""

    def __init__(
        self,
        *,
        muster_options: dict[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        """`muster_options` are those of `muster.ParameterServerStrategy`; `accelerator`, `checkpoint_io` and
        `precision` those of Fabric's ``Strategy``."""
        self._cluster = cluster_of_environment()
        super().__init__(
            cluster_environment=Job(self._cluster),
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._options = dict(muster_options or {})
        check_has_one_replica(self._options, "muster_options")
        self._num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        """The CPU: workers have CPU replicas."""
        return torch.device("cpu")

    @property
    def num_nodes(self) -> int:
        """What Fabric's `num_nodes` says."""
        return self._num_nodes

    def setup_environment(self) -> None:
        """As Fabric's; joins the job."""
        # Where Fabric chose an accelerator by itself, it gives that one's devices.
        devices = [device for device in self.parallel_devices or () if device.type == "cpu"]
        self.check_devices("Fabric", devices, self.num_nodes)
        self.tell_lightning_the_rank()
        super().setup_environment()
        self._join()

    def _made(self, precision: Literal["fp32", "bf16", "fp16"]) -> Strategy:
        self._muster = ParameterServerStrategy(self._cluster, **{"precision": precision, **self._options})
        return self._muster

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepares `module`, and lets its metrics meet."""
        self.connect_metrics(module)
        return super().setup_module(module)

    def teardown(self) -> None:
        """As Fabric's; leaves the job, and the metrics as they were."""
        self.disconnect_metrics()
        super().teardown()

    def module_to_device(self, module: nn.Module) -> None:
        """As Fabric's, of `module`."""
        module.to(self.root_device)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As `reduce`, of `tensor` over `group` by `reduce_op`."""
        return self.reduce(tensor, group, reduce_op)


class _StepsPrecision(Precision):
    """The precision of a strategy's steps, for code outside them."""

    def __init__(self, strategy: Strategy, given: Precision) -> None:
        self._strategy = strategy
        self._given = given

    def convert_input(self, data: Any) -> Any:
        return self._given.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self._given.convert_output(data)

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._strategy.autocast()


class _CurrentReplica(nn.Module):
    """A prepared module, as a module of torch's class: the current replica's in a step, else replica 0's."""

    def __init__(self, prepared: Any, has_own_forward: bool) -> None:
        """`prepared`: the module, which may have had a forward of its own, beside its class's, before Fabric."""
        super().__init__()
        self._own_forward = vars(prepared.module).get("forward") if has_own_forward else None
        self._prepared = (prepared,)  # which torch is not to take for a part of this one

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._prepared[0].module
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Fabric calls other methods by a forward that it gives to replica 0's module.
        if vars(self.module).get("forward") is not self._own_forward:
            if self._own_forward is None:
                del self.module.forward
            else:
                self.module.forward = self._own_forward
            raise InvalidArgument(
                "training_step and methods of mark_forward_method() cannot be called on every replica; write a forward "
                "that does what they do, or use strategy='muster_ddp'"
            )
        return self._prepared[0](*args, **kwargs)


def _optimizer_of(optimizer: Any) -> Optimizer:
    found: Optimizer = optimizer.optimizer if isinstance(optimizer, _FabricOptimizer) else optimizer
    return found


def _check_gradients(optimizer: Optimizer, option: str) -> None:
    if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
        raise InvalidArgument(
            "there are no gradients to clip: fabric.strategy.step() has stepped; give the strategy "
            f"muster_options={{'{option}': ...}}"
        )
