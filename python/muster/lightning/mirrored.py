"""Several replicas in one process, each with a part of every batch, for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.accelerators.accelerator import Accelerator
from lightning.pytorch.plugins.precision.precision import Precision
from lightning.pytorch.strategies.single_device import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from muster import strategy as strategies
from muster.errors import InvalidArgument
from muster.lightning.layers import ConvertedLayers
from muster.lightning.one_process import OneProcess
from muster.lightning.replica_steps import ReplicaSteps, check_module

__all__ = ["MirroredStrategy"]


class MirroredStrategy(ConvertedLayers, OneProcess, SingleDeviceStrategy):
    """A `muster.MirroredStrategy` with a replica for each of the Trainer's devices, which are one device: the CPU, say.
    For the Trainer.

    A training step divides its batch among the replicas, and gives the gradient of the whole batch to Lightning, which
    clips, accumulates and steps as it does on a single device. Validation, testing and prediction run on replica 0.
    """

    strategy_name = "muster_mirrored"

    def __init__(
        self,
        balance: Literal["equal", "auto"] = "equal",
        *,
        buffers: Literal["mean", "chief"] = "mean",
        seed: int | None = None,
        threads_per_replica: int | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """`balance`, `buffers`, `seed` and `threads_per_replica` are those of `muster.MirroredStrategy`.
        `parallel_devices`: a replica for each; None: the Trainer's. `accelerator`, `checkpoint_io` and
        `precision_plugin` are those of Lightning's ``Strategy``."""
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.parallel_devices = None if parallel_devices is None else list(parallel_devices)
        """The devices of the replicas. The Trainer sets them where none were given."""
        self._balance: Literal["equal", "auto"] = balance
        self._options: dict[str, Any] = {"buffers": buffers, "seed": seed, "threads_per_replica": threads_per_replica}
        self._muster: strategies.MirroredStrategy | None = None
        self._steps: ReplicaSteps | None = None
        self._parameters: list[nn.Parameter] = []
        self._in_step = False  # one that divides its batch

    @property
    def root_device(self) -> torch.device:
        """Replica 0's, where everything but training steps runs."""
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    @property
    def muster(self) -> strategies.MirroredStrategy:
        """Muster's strategy itself, while the Trainer fits."""
        if self._muster is None:
            raise InvalidArgument(
                "there are replicas only while the Trainer fits; use strategy.muster in training_step, or in hooks "
                "between on_fit_start and on_fit_end"
            )
        return self._muster

    def setup(self, trainer: pl.Trainer) -> None:
        """As Lightning's, for `trainer`; where it fits, replicas are made."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        module = trainer.lightning_module
        check_module(module, self.precision_plugin, self.strategy_name, len(self.parallel_devices or (None,)))
        if len(set(self.parallel_devices or ())) > 1:
            raise InvalidArgument(
                f"Lightning steps the parameters of one device, and replicas would be on {self.parallel_devices}; use "
                "strategy='muster_ddp' for several GPUs"
            )
        self.convert_layers(module)
        super().setup(trainer)
        self._muster = strategies.MirroredStrategy(self.parallel_devices, balance=self._balance, **self._options)
        self._steps = ReplicaSteps(self._muster, module, self.precision_plugin, self._options["buffers"])
        self._parameters = list(module.parameters())
        self._muster.prepare(_GradientsAlone(self._parameters))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step over the replicas. Its loss is the mean, whose backward adds the mean gradients to ``.grad``."""
        assert self._steps is not None
        batch, *rest = (*args, *kwargs.values())
        self._steps.check(batch)
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._in_step = len(self.muster.devices) > 1
        try:
            outcome = self._steps.step(batch, rest)
            gradients = [parameter.grad for parameter in self._parameters]
        finally:
            self._in_step = False
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
        if outcome is None:
            return None
        anchor = outcome.loss.new_zeros((), requires_grad=True)
        loss = _MeanLoss.apply(outcome.loss, anchor, self._parameters, gradients)  # type: ignore[no-untyped-call]
        return outcome.with_loss(loss)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensor, since there is one process; refused in a step, where a replica has its part of it."""
        self._refuse_in_step("all_gather", "gather(x) joins the parts along dimension 0")
        return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As `all_gather`."""
        self._refuse_in_step("reduce", "reduce(x, 'sum') adds the replicas' values")
        return super().reduce(tensor, *args, **kwargs)

    def _refuse_in_step(self, what: str, instead: str) -> None:
        if self._in_step:
            raise InvalidArgument(
                f"{what} is between processes, and this one's replicas each have a part of the batch; in training_step "
                f"self.trainer.strategy.muster.{instead}, differentiably"
            )

    def teardown(self) -> None:
        """As Lightning's; ends the replicas."""
        muster, self._muster, self._steps = self._muster, None, None
        self._parameters = []
        with ExitStack() as ending:  # each in its turn, whatever the others raise
            ending.callback(super().teardown)
            ending.callback(self.revert_layers)
            if muster is not None:
                ending.callback(muster.close)


class _GradientsAlone(Optimizer):
    """Leaves the mean gradients in ``.grad``, for Lightning's optimizers."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Changes nothing; there is no `closure`."""


class _MeanLoss(torch.autograd.Function):
    """A loss whose gradients are known. They are written, and not returned, since hooks of parameters have seen them
    in the replicas' backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, parameters: Any, gradients: Any) -> Tensor:
        ctx.parameters, ctx.gradients = parameters, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        for parameter, gradient in zip(ctx.parameters, ctx.gradients, strict=True):
            if gradient is not None:
                scaled = gradient * seeds[0].to(gradient.dtype)
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, torch.zeros_like(seeds[0]), None, None
