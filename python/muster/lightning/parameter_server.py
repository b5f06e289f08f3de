"""Workers whose parameters are stepped by servers, for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.accelerators.accelerator import Accelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from muster.errors import InvalidArgument, NonFinite
from muster.lightning.layers import ConvertedLayers
from muster.lightning.replica_steps import ReplicaSteps, check_module
from muster.lightning.workers import Job, Workers, check_has_one_replica, cluster_of_environment
from muster.parameter_server import ParameterServerStrategy as Servers
from muster.step import StepResult

__all__ = ["ParameterServerStrategy"]

_SEE_GRADIENTS = (
    "backward", "configure_gradient_clipping", "on_after_backward", "on_before_backward", "on_before_optimizer_step",
    "optimizer_step",
)  # fmt: skip

_TRAIN_OTHERWISE = {
    BaseFinetuning: "adds parameters to the optimizer",
    BatchSizeFinder: "takes steps back",
    LearningRateFinder: "takes steps back",
    StochasticWeightAveraging: "runs steps of BatchNorm layers that step nothing",
}

_hold_parameters: set[tuple[str, ...]] = set()
"""Servers of their own processes, to which a fit of this process gave its parameters, stepped or not."""


class _Dropped(Exception):
    """A window is given up."""


class ParameterServerStrategy(Workers, ConvertedLayers, ParallelStrategy):
    """A `muster.ParameterServerStrategy` over the workers and servers that ``muster run`` starts. For the Trainer.

    One training step is forward, backward and the push to the servers, which step. The Trainer's accumulation and
    clipping become options of the strategy; hooks that would see gradients are refused.
    """

    strategy_name = "muster_ps"

    def __init__(
        self,
        staleness: int | None = 0,
        *,
        server_options: dict[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """`staleness`, and `server_options` (``patience``, ``heartbeat``, ``log_bytes``, ``seed``, ``buffers``,
        ``timeout``, ...): as of `muster.ParameterServerStrategy`. `accelerator`, `checkpoint_io` and `precision_plugin`
        are those of Lightning's ``Strategy``."""
        self._cluster = cluster_of_environment()
        super().__init__(
            cluster_environment=Job(self._cluster),
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        given = dict(server_options or {})
        for name in sorted(given.keys() & _OF_TRAINER.keys()):
            raise InvalidArgument(f"server_options has {name!r}; give it as Trainer({_OF_TRAINER[name]})")
        check_has_one_replica(given, "server_options")
        self._options = {"staleness": staleness, **given}
        self.num_nodes = 1
        """What the Trainer's `num_nodes` says."""
        self._steps: ReplicaSteps | None = None
        self._accumulate = 1
        self._last: StepResult | None = None
        self._window_from: int | None = None
        """Number of the first batch of the window that is open; None where none is."""

    # --- the job ------------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The CPU: workers have CPU replicas."""
        return torch.device("cpu")

    @property
    def is_distributed(self) -> bool:
        """True: the Trainer gives each worker its share of the samples."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """What the Trainer makes samplers with."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tells Lightning who is rank 0."""
        self.tell_lightning_the_rank()

    def setup_environment(self) -> None:
        """As Lightning's; joins the job."""
        if not isinstance(self.accelerator, CPUAccelerator):
            raise InvalidArgument("muster_ps has CPU replicas; use Trainer(accelerator='cpu')")
        self.check_devices("the Trainer", self.parallel_devices, self.num_nodes)
        super().setup_environment()
        if self._muster is None:
            module = self.lightning_module
            assert module is not None
            self._accumulate = module.trainer.accumulate_grad_batches
            self._muster = Servers(self._cluster, **self._options, **_options_of(module.trainer))

    def setup(self, trainer: pl.Trainer) -> None:
        """As Lightning's, for `trainer`; prepares module and optimizer."""
        module, fits = trainer.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if fits:
            if self._cluster.servers in _hold_parameters:
                raise InvalidArgument(
                    "the servers hold the parameters of this process's fit before, and another would go on from them; "
                    "start a job for each fit, or muster run --servers 0, where each fit has a server in the chief's "
                    "process"
                )
            check_module(module, self.precision_plugin, self.strategy_name, 1)
            _check_hooks(trainer)
            self.convert_layers(module)
        super().setup(trainer)
        self._last, self._window_from = None, None
        if fits:
            num_optimizers = len(_optimizers_over(module, self.optimizers))
            if num_optimizers != 1 or len(self.optimizers) != 1:
                raise InvalidArgument(
                    f"configure_optimizers gave {num_optimizers} optimizers of the module's parameters, and servers "
                    "step one; give it groups of parameters, or use strategy='muster_ddp'"
                )
            self._steps = ReplicaSteps(self._job, module, self.precision_plugin)
            self._job.prepare(self.optimizers[0])
        else:
            self._job.prepare(module)
        self.connect_metrics(module)

    def model_to_device(self) -> None:
        """As Lightning's."""
        assert self.model is not None
        self.model.to(self.root_device)

    def teardown(self) -> None:
        """As Lightning's; leaves the job."""
        muster, self._muster, self._steps = self._muster, None, None
        with ExitStack() as ending:  # each in its turn, whatever the others raise
            ending.callback(super().teardown)
            ending.callback(self.revert_layers)
            ending.callback(self.disconnect_metrics)
            if muster is not None:
                ending.callback(muster.close)

    # --- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, backward and, at a window's end, the servers' step; returns this worker's loss."""
        assert self._steps is not None
        batch, *rest = (*args, *kwargs.values())
        self._begin_window()
        if self._cluster.servers:
            _hold_parameters.add(self._cluster.servers)
        outcome = self._steps.step(batch, rest, self._scale(), 1.0)
        if outcome is None:
            if self.world_size == 1 and self._window_from is None:
                return None
            raise InvalidArgument(
                "training_step returned None, and other workers, or the micro-batches before it, wait; return a loss "
                "that is 0"
            )
        self._last = outcome.result
        if outcome.result.stepped:
            self._window_from = None
        elif self._window_from is None:
            self._window_from = self._batch_idx
        return outcome.output

    @property
    def _batch_idx(self) -> int:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx

    def _begin_window(self) -> None:
        """Drops what is left of a window where Lightning begins one: it does so where an epoch was ended early."""
        if self._window_from is None or self._batch_idx % self._accumulate != 0:
            return

        def give_up() -> Tensor:
            raise _Dropped

        with suppress(_Dropped):
            self._job.step(give_up)
        self._window_from = None

    def _scale(self) -> float:
        """What losses are multiplied by: Lightning divides by all of a window's micro-batches, also where it has fewer,
        as an epoch's last one, and the first one after a checkpoint."""
        if self._accumulate == 1:
            return 1.0
        assert self.lightning_module is not None
        num_batches = self.lightning_module.trainer.num_training_batches
        if num_batches == float("inf"):
            raise InvalidArgument(
                "accumulate_grad_batches over data of unknown length: the last window's size is not known; use "
                "limit_train_batches, or strategy='muster_ddp'"
            )
        begin = self._batch_idx if self._window_from is None else self._window_from
        end = min(int(num_batches), (begin // self._accumulate + 1) * self._accumulate)
        return (end - begin) / self._accumulate

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing to do: the step has differentiated."""
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the `closure`, which steps; closes a window that the end of an epoch left short."""
        output = closure()
        if self._window_from is not None:
            self._window_from = None
            flushed = self._job.flush()
            if flushed is not None and bool(flushed.skipped):
                raise NonFinite("a gradient is not finite, so that nothing was stepped; lower the learning rate")
        return output

    # --- state --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """The servers' newest parameters are in the module."""
        if self._last is not None and self._muster is not None:
            self._muster.run(lambda: None)

    def on_validation_start(self) -> None:
        """Validation sees the newest parameters."""
        self._read()

    def on_train_end(self) -> None:
        """Whatever follows sees the last ones."""
        self._read()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's, with the newest parameters."""
        self._read()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The servers'; the chief alone, which saves, asks for it."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}


_OF_TRAINER = {
    "accumulate": "accumulate_grad_batches=...",
    "clip_norm": "gradient_clip_val=...",
    "clip_value": "gradient_clip_val=..., gradient_clip_algorithm='value'",
    "precision": "precision=...",
    "loss_scale": "precision=...",
    "staleness": "strategy=muster.lightning.ParameterServerStrategy(staleness)",
}


def _options_of(trainer: pl.Trainer) -> dict[str, Any]:
    by_value = str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() == "value"
    clip = trainer.gradient_clip_val or None
    return {"accumulate": trainer.accumulate_grad_batches, "clip_value" if by_value else "clip_norm": clip}


def _optimizers_over(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Those that have parameters of `module`: where there is none Lightning makes one of a tensor of its own."""
    own = set(module.parameters())
    return [o for o in optimizers if any(not own.isdisjoint(group["params"]) for group in o.param_groups)]


def _check_hooks(trainer: pl.Trainer) -> None:
    """Raises InvalidArgument where something wants to see gradients, which are on servers."""
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
    is_normalised = any(isinstance(part, _BatchNorm) for part in trainer.lightning_module.modules())
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise InvalidArgument(
                "GradientAccumulationScheduler changes what servers were told; use accumulate_grad_batches, or "
                "strategy='muster_ddp'"
            )
        for kind, what in _TRAIN_OTHERWISE.items():
            if isinstance(callback, kind) and (kind is not StochasticWeightAveraging or is_normalised):
                raise InvalidArgument(
                    f"{type(callback).__name__} {what}, which servers do not know; take it out, or use "
                    "strategy='muster_ddp'"
                )
    for owner, parent in [(trainer.lightning_module, pl.LightningModule), *((c, pl.Callback) for c in callbacks)]:
        for name in _SEE_GRADIENTS:
            if hasattr(parent, name) and is_overridden(name, owner, parent):
                raise InvalidArgument(
                    f"{type(owner).__name__}.{name} would run where no gradients are: with muster_ps servers clip and "
                    "step; take it out, or use strategy='muster_ddp'"
                )
