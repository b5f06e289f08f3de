"""A training_step of Lightning's as a step of a strategy: on each replica's part of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from muster.attributes import SHARED_TYPES
from muster.batch import rows
from muster.errors import InvalidArgument, NonFinite
from muster.per_replica import PerReplica
from muster.step import Loss, StepResult
from muster.strategy import Strategy

__all__ = ["Outcome", "ReplicaSteps", "check_module"]

SHARED_TYPES.append(pl.Trainer)

_LOG = inspect.signature(pl.LightningModule.log)
_ALSO_NAMED = {
    "avg": "mean", torch.mean: "mean", torch.sum: "sum", sum: "sum", torch.max: "max", max: "max", torch.min: "min",
    min: "min",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one step over replicas gave."""

    result: StepResult
    loss: Tensor
    """This process's: the mean over its replicas."""
    output: Any
    """What Lightning takes for training_step's: the loss, or a dict with it."""

    def with_loss(self, loss: Tensor) -> Any:
        """The output, with another tensor for its loss."""
        return {**self.output, "loss": loss} if isinstance(self.output, dict) else loss


@dataclass
class _Part:
    """One replica's part of a step."""

    num_rows: int
    logged: list[dict[str, Any]] = field(default_factory=list)
    output: Any = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of ``LightningModule.log``, which keeps what replicas would overwrite for one another."""
        call = dict(_LOG.bind(None, name, value, *args, **kwargs).arguments)
        del call["self"]
        call["value"] = value.detach().clone() if isinstance(value, Tensor) else value
        self.logged.append(call)


class _NoLoss(Exception):
    """training_step returned None."""


class ReplicaSteps:
    """Runs ``training_step`` of a prepared LightningModule. What it logs is put together, and logged, when all replicas
    are done. Owned by the thread that trains."""

    def __init__(self, strategy: Strategy, module: pl.LightningModule, precision: Precision) -> None:
        """`module` is prepared by `strategy`."""
        self._strategy = strategy
        self._module = module
        self._prepared = strategy.prepare(module)
        self._prepared.trainer = module.trainer  # copies of a LightningModule have none
        self._autocast = precision.train_step_context if isinstance(precision, MixedPrecision) else nullcontext
        self._outside = nullcontext if isinstance(precision, MixedPrecision) else precision.train_step_context
        self._metrics = {name: m for name, m in module.named_modules() if isinstance(m, Metric)}
        self._has_warned = False

    @property
    def _is_divided(self) -> bool:
        return len(self._strategy.devices) > 1

    def step(self, batch: Any, rest: Sequence[Any], scale: float = 1.0, weight: float | None = None) -> Outcome | None:
        """One call of ``training_step(part, *rest)`` on each replica's part of `batch`. Losses are multiplied by
        `scale`; parts count as their samples, or as `weight`. None where training_step returned None.

        Raises InvalidArgument for what would be of one replica alone, and NonFinite for gradients that are not.
        """
        parts: dict[int, _Part] = {}
        before = self._written() if self._is_divided else {}
        counts = {name: metric.update_count for name, metric in self._metrics.items()}

        def call(part: Any) -> Loss:
            own = parts[self._strategy.replica] = _Part(rows(part) or 1)
            self._prepared.log = own.log
            try:
                with self._autocast():
                    own.output = self._prepared.training_step(part, *rest)
            finally:
                del self._prepared.log
            return Loss(_loss_of(own.output) * scale, weight=weight)

        try:
            with self._outside():
                result = self._strategy.step(call, batch)
        except _NoLoss:
            if any(part.output is not None for part in parts.values()):
                raise InvalidArgument(
                    "training_step returned None on some replicas and a loss on others; skip a batch for all of its "
                    "parts, or return a loss that is 0 (of 0 * output, say)"
                ) from None
            return None
        if self._is_divided:
            self._refuse_what_one_replica_keeps(before, counts)
        if bool(result.skipped):
            raise NonFinite(
                "a gradient is not finite, so that nothing was stepped; lower the learning rate, or find where it "
                "comes from with Trainer(detect_anomaly=True) and strategy='muster_ddp'"
            )
        own = [parts[number] for number in sorted(parts)]
        for logged in _merged(own):
            self._module.log(**logged)
        outputs = [part.output for part in own]
        loss = result.loss if self._is_divided else _loss_of(outputs[0]).detach()
        return Outcome(result, loss, _joined(outputs, loss))

    def _written(self) -> dict[str, tuple[Any, int]]:
        """Attributes that the module's code may write, as they are: the object, and how many items it holds."""
        own = {name: value for name, value in vars(self._module).items() if not name.startswith("_")}
        return {
            name: (value, len(value) if isinstance(value, (list, dict, set)) else -1) for name, value in own.items()
        }

    def _refuse_what_one_replica_keeps(self, before: Mapping[str, tuple[Any, int]], counts: Mapping[str, int]) -> None:
        for name, metric in self._metrics.items():
            if metric.update_count != counts[name]:
                raise InvalidArgument(
                    f"training_step updated the metric '{name}', of which each of {len(self._strategy.devices)} "
                    "replicas has its own, with its part of the batch; log a tensor instead, update the metric in "
                    "on_train_batch_end, or use strategy='muster_ddp'"
                )
        for name, (value, length) in self._written().items():
            old, old_length = before.get(name, (None, -1))
            if value is old and length != old_length:
                raise InvalidArgument(
                    f"training_step wrote to self.{name}, of which each of {len(self._strategy.devices)} replicas has "
                    "its own, with its part of the batch; return it in training_step's dict, and collect what "
                    "on_train_batch_end gets, or use strategy='muster_ddp'"
                )
            if value is not old and not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"training_step wrote self.{name}: each replica has its own, and outside of the step it is that of "
                    "replica 0, of its part of the batch"
                )


def check_module(module: pl.LightningModule, precision: Precision, name: str) -> None:
    """Raises InvalidArgument for a module that cannot be trained by steps over replicas of strategy `name`, and for a
    precision that they do not have."""
    if not module.automatic_optimization:
        raise InvalidArgument(
            f"automatic_optimization=False calls backward within training_step, and with {name} one step is forward, "
            "backward and update together; use strategy='muster_ddp', whose manual optimization is Lightning's"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise InvalidArgument(
            f"training_step(dataloader_iter) reads batches itself, and {name} divides them before; take (batch, "
            "batch_idx), or use strategy='muster_ddp'"
        )
    if getattr(precision, "scaler", None) is not None or type(precision) not in _PRECISIONS:
        raise InvalidArgument(
            f"precision '{precision.precision}' scales losses, or replaces modules, after replicas are made, which "
            f"{name} does not have; use 'bf16-mixed', '32-true', 'bf16-true' or '64-true', or strategy='muster_ddp'"
        )


_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if output is None:
        raise _NoLoss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InvalidArgument(
            f"training_step returned {type(output).__name__}; return the loss as a tensor of one element, a dict that "
            "has it as 'loss', or None to skip the batch"
        )
    return loss.reshape(())


def _joined(outputs: Sequence[Any], loss: Tensor) -> Any:
    """One output of training_step: `loss`, and of each other value of a dict all replicas'."""
    if not isinstance(outputs[0], Mapping):
        return loss
    others = [name for name in outputs[0] if name != "loss"]
    if len(outputs) == 1:
        return {"loss": loss, **{name: outputs[0][name] for name in others}}
    return {"loss": loss, **{name: PerReplica([output[name] for output in outputs]) for name in others}}


def _merged(parts: Sequence[_Part]) -> list[dict[str, Any]]:
    """What to log for what all replicas logged."""
    if len(parts) == 1:
        return parts[0].logged
    first, *others = ([call["name"] for call in part.logged] for part in parts)
    for names in others:
        if names != first:
            raise InvalidArgument(
                f"replicas logged other names in one training_step: {first}, and {names}; log the same names for every "
                "part of a batch"
            )
    return [_merged_call(calls, parts) for calls in zip(*(part.logged for part in parts), strict=True)]


def _merged_call(calls: Sequence[dict[str, Any]], parts: Sequence[_Part]) -> dict[str, Any]:
    name, given = calls[0]["name"], calls[0].get("reduce_fx", "mean")
    reduction = given if isinstance(given, str) and given not in _ALSO_NAMED else _ALSO_NAMED.get(given)
    if reduction not in ("mean", "sum", "min", "max"):
        raise InvalidArgument(
            f"self.log('{name}', reduce_fx={given!r}): there is no way to put the values of several replicas together; "
            "use 'mean', 'sum', 'min' or 'max', or strategy='muster_ddp'"
        )
    if any(isinstance(call["value"], Metric) for call in calls):
        raise InvalidArgument(
            f"self.log('{name}', metric): each replica has a metric of its own, with its part of the batch; log a "
            "tensor instead, update the metric in on_train_batch_end, or use strategy='muster_ddp'"
        )
    values = torch.stack([torch.as_tensor(call["value"], dtype=torch.get_default_dtype()) for call in calls])
    sizes = [call.get("batch_size") or part.num_rows for call, part in zip(calls, parts, strict=True)]
    merged = {**calls[0], "value": _REDUCED[reduction](values, values.new_tensor(sizes))}
    if "batch_size" in merged and merged["batch_size"] is not None:
        merged["batch_size"] = sum(sizes)
    return merged


_REDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, sizes: (values * sizes).sum() / sizes.sum(),
    "sum": lambda values, _: values.sum(),
    "min": lambda values, _: values.min(),
    "max": lambda values, _: values.max(),
}
