"""Lightning's strategies of a process a rank, whose gradients Muster averages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.pytorch.strategies.ddp import DDPStrategy as TrainerDDP
from torch import Tensor, nn

from muster.distributed_data_parallel import DistributedDataParallel

__all__ = ["DDPStrategy", "FabricDDPStrategy"]


class DDPStrategy(TrainerDDP):
    """Lightning's ``DDPStrategy``, with the same arguments, over `muster.DistributedDataParallel`, which says what the
    arguments of torch's class mean here. For the Trainer."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        with _own_stream(device_ids):
            # Written out here, so that LightningCLI finds the arguments that a config file may give.
            return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """As Lightning's. A step of manual optimization calls backward within forward, so that its losses stand for the
        outputs, from which Muster's reducer knows that gradients are to be averaged."""
        model, module = self.model, self.lightning_module
        if not isinstance(model, DistributedDataParallel) or module is None or module.automatic_optimization:
            return
        model.require_forward_param_sync = model.require_backward_grad_sync
        if model.require_backward_grad_sync:
            model.reducer.watch(closure_loss)
        else:
            model.reducer.rest()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing to do: with a static graph gradients are averaged in the first backward, too."""


class FabricDDPStrategy(FabricDDP):
    """As `DDPStrategy`, for Fabric."""

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """As Lightning's; `module` is wrapped."""
        device_ids = self._determine_ddp_device_ids()
        with _own_stream(device_ids):
            return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)


def _own_stream(device_ids: list[int] | None) -> AbstractContextManager[Any]:
    """In which a module is wrapped, as Lightning does, so that CUDA graphs can be captured."""
    if device_ids is None:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
