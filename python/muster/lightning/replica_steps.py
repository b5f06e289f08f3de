"""A training_step of Lightning's as a step of a strategy: on each replica's part of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from muster.attributes import SHARED_TYPES
from muster.batch import agreeing_rows, is_column, is_sequence, members, rows
from muster.errors import InvalidArgument, NonFinite
from muster.lightning.replica_writes import ReplicaWrites, refuse_what_one_replica_keeps
from muster.per_replica import PerReplica
from muster.step import Loss, StepResult
from muster.strategy import Strategy

__all__ = ["ReplicaSteps", "check_module"]

SHARED_TYPES.append(pl.Trainer)

_LOG = inspect.signature(pl.LightningModule.log)
_NAMES_OF_FUNCTIONS = {
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
    has_skipped: bool = False
    """Whether training_step returned None: ``output`` is None also where it was given up."""

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

    def __init__(
        self, strategy: Strategy, module: pl.LightningModule, precision: Precision, buffers: str = "mean"
    ) -> None:
        """`module` is prepared by `strategy`, whose option `buffers` is, and steps are of `precision`."""
        self._strategy = strategy
        self._module = module
        self._prepared = strategy.prepare(module)
        self._prepared.trainer = module.trainer  # copies of a LightningModule have none
        is_autocast = isinstance(precision, MixedPrecision)
        # Autocast is each thread's own; default dtypes are the process's, and set once.
        self._in_replica = precision.train_step_context if is_autocast else nullcontext
        self._around_step = nullcontext if is_autocast else precision.train_step_context
        self._buffers = buffers
        self._writes: dict[int, ReplicaWrites] = {}
        self._warned: set[str] = set()

    @property
    def _is_divided(self) -> bool:
        return len(self._strategy.devices) > 1

    def check(self, batch: Any) -> None:
        """Raises InvalidArgument for a `batch` of the Trainer's loaders of which parts would not be of its samples."""
        if self._is_divided:
            trainer = self._module.trainer
            _check_batch(batch, trainer.train_dataloader, is_last=trainer.is_last_batch)

    def step(self, batch: Any, rest: Sequence[Any], scale: float = 1.0, weight: float | None = None) -> Outcome | None:
        """One call of ``training_step(part, *rest)`` on each replica's part of `batch`. Losses are multiplied by
        `scale`; parts count as their samples, or as `weight`. None where training_step returned None.

        Raises InvalidArgument for what would be of one replica alone, and NonFinite for gradients that are not.
        """
        parts: dict[int, _Part] = {}

        def call(part: Any) -> Loss:
            own = parts[self._strategy.replica] = _Part(rows(part) or 1)
            self._prepared.log = own.log
            try:
                with self._in_replica(), self._watched():
                    own.output = self._prepared.training_step(part, *rest)
            finally:
                del self._prepared.log
            own.has_skipped = own.output is None
            return Loss(_loss_of(own.output) * scale, weight=weight)

        try:
            with self._around_step():
                result = self._strategy.step(call, batch)
        except _NoLoss:
            if not all(part.has_skipped for part in parts.values()):
                raise InvalidArgument(
                    "training_step returned None on some replicas and a loss on others; skip a batch for all of its "
                    "parts, or return a loss that is 0 (of 0 * output, say)"
                ) from None
            result = None
        except InvalidArgument:
            self._check_writes(sorted(parts))  # whose words are Lightning's
            raise
        self._check_writes(sorted(parts))
        if result is None:
            return None
        if bool(result.skipped):
            raise NonFinite(
                "a gradient is not finite, so that nothing was stepped; lower the learning rate, or find where it "
                "comes from with Trainer(detect_anomaly=True) and strategy='muster_ddp'"
            )
        own = [parts[number] for number in sorted(parts)]
        for logged in _merged(own, _usual_rows(self._module.trainer.train_dataloader)):
            self._module.log(**logged)
        outputs = [part.output for part in own]
        loss = result.loss if self._is_divided else _loss_of(outputs[0]).detach()
        return Outcome(result, loss, _joined(outputs, loss))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes what the current replica writes meanwhile, where there are several."""
        if not self._is_divided:
            yield
            return
        number = self._strategy.replica
        if number not in self._writes:
            self._writes[number] = ReplicaWrites(next(self._prepared.modules()))
        self._writes[number].begin()
        yield
        self._writes[number].end()

    def _check_writes(self, numbers: Sequence[int]) -> None:
        if not self._is_divided:
            return
        had_part = [self._writes[number] for number in numbers]
        for message in refuse_what_one_replica_keeps(had_part, [*self._writes.values()], self._buffers):
            if message not in self._warned:
                self._warned.add(message)
                rank_zero_warn(message)


def check_module(module: pl.LightningModule, precision: Precision, name: str, num_replicas: int) -> None:
    """Raises InvalidArgument for a module that cannot be trained by steps over replicas of strategy `name`,
    `num_replicas` in a process, and for a precision that they do not have."""
    if not module.automatic_optimization:
        raise InvalidArgument(
            f"automatic_optimization=False calls backward within training_step, and with {name} one step is forward, "
            "backward and update together; use strategy='muster_ddp', whose manual optimization is Lightning's"
        )
    if getattr(module, "_compiler_ctx", None) is not None and num_replicas > 1:
        raise InvalidArgument(
            "torch.compile(module) compiled training_step of one module, and each replica has its own; compile what it "
            "calls (self.net.compile(), in the module's __init__), or use strategy='muster_ddp'"
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


def _usual_rows(loader: Any) -> int | None:
    """Samples of a full batch of a DataLoader; None where it does not say."""
    if not isinstance(loader, DataLoader):
        return None
    size = getattr(loader, "batch_size", None) or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return None
    return min(size, len(loader.dataset)) if isinstance(loader.dataset, Sized) else size


def _check_batch(batch: Any, loaders: Any, *, is_last: bool) -> None:
    several = members(loaders)
    if several is None:
        num_rows = _usual_rows(loaders)
        if num_rows is None:
            return
        may_be_short = is_last and not (isinstance(loaders.dataset, Sized) and len(loaders) == 1)
        if not may_be_short:
            _refuse_samples(batch, num_rows, "the batch")
        return
    of_each = [agreeing_rows(member) for _, member in members(batch) or ()]
    if len(of_each) == len(several) and len(set(of_each)) > 1 and None not in of_each:
        raise InvalidArgument(
            f"the batches of {len(several)} loaders have {of_each} samples, and a step divides them alike; give all "
            "loaders one batch_size and drop_last=True, or use strategy='muster_ddp'"
        )


def _refuse_samples(node: Any, num_rows: int, path: str) -> None:
    if is_sequence(node) and len(node) == num_rows > 1 and not is_column(node):
        rows_of_items = {agreeing_rows(item) for item in node}
        if num_rows not in rows_of_items and not _are_fields(node):
            raise InvalidArgument(
                f"{path} is a {type(node).__name__} of {num_rows} items, one for each sample it seems, and a step "
                "divides tensors, along their first dimension; stack or pad them in the loader's collate_fn, or use "
                "strategy='muster_ddp'"
            )
    for step, member in members(node) or ():
        _refuse_samples(member, num_rows, path + step)


def _are_fields(items: Sequence[Any]) -> bool:
    """Whether they are the tensors of a batch that has as many of them as its loader's batches usually have samples:
    all have the same rows, and they differ in what a row is, as those of samples seldom do."""
    if not all(isinstance(item, Tensor) and item.dim() > 0 for item in items):
        return False
    return len({len(item) for item in items}) == 1 and len({(item.dtype, item.shape[1:]) for item in items}) > 1


_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if output is None:
        raise _NoLoss("training_step returned None, to skip the batch")
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


def _merged(parts: Sequence[_Part], usual_rows: int | None) -> list[dict[str, Any]]:
    """What to log for what all replicas logged. `usual_rows`: samples of a batch of the loader's."""
    if len(parts) == 1:
        return parts[0].logged
    first, *others = ([call["name"] for call in part.logged] for part in parts)
    for names in others:
        if names != first:
            raise InvalidArgument(
                f"replicas logged other names in one training_step: {first}, and {names}; log the same names for every "
                "part of a batch"
            )
    return [_merged_call(calls, parts, usual_rows) for calls in zip(*(part.logged for part in parts), strict=True)]


def _merged_call(calls: Sequence[dict[str, Any]], parts: Sequence[_Part], usual_rows: int | None) -> dict[str, Any]:
    name, given = calls[0]["name"], calls[0].get("reduce_fx", "mean")
    reduction = _NAMES_OF_FUNCTIONS.get(given, given if isinstance(given, str) else None)
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
    of_parts = [torch.as_tensor(call["value"], dtype=torch.get_default_dtype()) for call in calls]
    if any(value.numel() != 1 for value in of_parts):
        return calls[0]  # which Lightning refuses
    values = torch.stack([value.reshape(()) for value in of_parts])
    num_rows, given_sizes = [part.num_rows for part in parts], [call.get("batch_size") for call in calls]
    # One number for all parts is of the whole batch where that has, or usually has, as many samples; 1 counts batches.
    of_batch = {1, sum(num_rows), usual_rows}
    is_one = given_sizes[0] is not None and len(set(given_sizes)) == 1
    is_of_batch = is_one and given_sizes[0] in of_batch and given_sizes != num_rows
    sizes = [
        size if is_of_batch or not given_size else given_size
        for size, given_size in zip(num_rows, given_sizes, strict=True)
    ]
    merged = {**calls[0], "value": _OVER_REPLICAS[reduction](values, values.new_tensor(sizes))}
    if given_sizes[0] is not None and not is_of_batch:
        merged["batch_size"] = sum(sizes)
    return merged


_OVER_REPLICAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, sizes: (values * sizes).sum() / sizes.sum(),
    "sum": lambda values, _: values.sum(),
    "min": lambda values, _: values.min(),
    "max": lambda values, _: values.max(),
}
