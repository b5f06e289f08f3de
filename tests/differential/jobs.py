"""What a program trains under: plain torch, or a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import muster
from muster.batch import part_sizes, split


@dataclass(frozen=True)
class Stepped:
    """What a step tells; loss, metrics and norm are those of a closed window."""

    stepped: bool
    skipped: bool
    loss: Tensor | None
    norm: Tensor | None
    metrics: dict[str, Tensor]


class TorchJob:
    """A loop without a strategy, over whole batches: what steps, windows, clipping and skipping mean in torch."""

    num_replicas = 1
    divides_state = False

    def __init__(
        self, accumulate: int = 1, clip_norm: float | None = None, precision: str = "fp32", **others: Any
    ) -> None:
        self._accumulate = accumulate
        self._clip_norm = clip_norm
        self._bf16 = precision == "bf16"
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parameters: list[Tensor] = []
        self._open_window()

    def prepare(self, net: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """The network itself."""
        self._parameters = list(net.parameters())
        self._optimizers = list(optimizers)
        return net

    def step(
        self, fn: Callable[..., Any], *batch: Tensor, optimizers: Sequence[torch.optim.Optimizer] | None = None
    ) -> Stepped:
        """One micro-batch, and at a window's end the update. A window in which one fails ends without an update."""
        chosen = self._optimizers if optimizers is None else list(optimizers)
        self._calls += 1
        last = self._calls == self._accumulate
        try:
            with torch.autocast("cpu", torch.bfloat16) if self._bf16 else contextlib.nullcontext():
                returned = fn(*batch)
            loss = muster.Loss(returned) if isinstance(returned, Tensor) else returned
            is_sum = loss.reduction == "sum"
            weight = torch.as_tensor(float(len(batch[0])) if loss.weight is None else loss.weight).double()
            seed = loss.value if is_sum or self._accumulate == 1 else loss.value * weight.to(loss.value.dtype)
            seed.backward()
        except BaseException:
            self._failed = True
            if last:
                self._drop()
            raise
        if self._failed:
            if last:
                self._drop()
            return Stepped(False, False, None, None, {})
        self._weight += weight
        self._loss += loss.value.detach().double() * (1.0 if is_sum else weight)
        for name, value in loss.metrics.items():
            self._metrics[name] = self._metrics.get(name, torch.zeros(())) + torch.as_tensor(value).double() * weight
        if not last:
            return Stepped(False, False, None, None, {})
        try:
            return self._close(chosen, is_sum)
        finally:
            self._drop()

    def _close(self, chosen: list[torch.optim.Optimizer], is_sum: bool) -> Stepped:
        mine = [p for optimizer in chosen for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in mine if p.grad is not None]
        if self._accumulate > 1 and not is_sum:
            for gradient in gradients:
                gradient.div_(self._weight.to(gradient.device))
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        norm = torch.stack([torch.zeros((), dtype=torch.float64), *(g.abs().double().norm() for g in dense)]).norm()
        skipped = not bool(norm.isfinite())
        if not skipped:
            if self._clip_norm is not None:
                for gradient in gradients:
                    gradient.mul_((self._clip_norm / (norm + 1e-6)).clamp(max=1.0).to(gradient.real.dtype))
            for optimizer in chosen:
                optimizer.step()
        return Stepped(
            True,
            skipped,
            self._loss if is_sum else self._loss / self._weight,
            norm,
            {name: value / self._weight for name, value in self._metrics.items()},
        )

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._open_window()

    def _open_window(self) -> None:
        self._calls = 0
        self._failed = False
        self._weight = torch.zeros((), dtype=torch.float64)
        self._loss = torch.zeros((), dtype=torch.float64)
        self._metrics: dict[str, Tensor] = {}

    def run(self, fn: Callable[..., Any], *batch: Tensor) -> Tensor:
        """`fn` of the batch, without gradients."""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if self._bf16 else contextlib.nullcontext():
            return fn(*batch)  # type: ignore[no-any-return]

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all replicas, in a step."""
        return rows

    def reduce(self, value: Tensor) -> Tensor:
        """The sum over all replicas, in a step."""
        return value

    def close(self) -> None:
        """Ends the job."""


class StrategyJob:
    """The same under a strategy, of which every worker gets whole batches and takes its part of."""

    def __init__(self, strategy: muster.Strategy, divides_state: bool = False) -> None:
        self.strategy = strategy
        self.divides_state = divides_state
        self.num_replicas = strategy.num_replicas
        self.gather = strategy.gather

    def prepare(self, net: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """What the strategy makes of the network."""
        return self.strategy.prepare(net, *optimizers)[0]  # type: ignore[no-any-return]

    def _parts(self, batch: Sequence[Tensor]) -> list[Any]:
        strategy = self.strategy
        parts = split(batch, strategy.num_replicas, part_sizes(len(batch[0]), strategy.num_replicas))
        mine = parts[strategy.first_replica : strategy.first_replica + len(strategy.devices)]
        return [muster.PerReplica(column) for column in zip(*mine, strict=True)]

    def step(
        self, fn: Callable[..., Any], *batch: Tensor, optimizers: Sequence[torch.optim.Optimizer] | None = None
    ) -> Stepped:
        """One micro-batch, divided over the replicas."""
        result = self.strategy.step(fn, *self._parts(batch), optimizers=optimizers)
        if not result.stepped:
            return Stepped(False, False, None, None, {})
        return Stepped(True, bool(result.skipped), result.loss, result.grad_norm, dict(result.metrics))

    def run(self, fn: Callable[..., Any], *batch: Tensor) -> Tensor:
        """`fn` of the batch, without gradients; the rows of all replicas."""
        return self.strategy.gather(self.strategy.run(fn, *self._parts(batch)))  # type: ignore[no-any-return]

    def reduce(self, value: Tensor) -> Tensor:
        """The sum over all replicas, in a step."""
        return self.strategy.reduce(value, "sum")  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the job."""
        self.strategy.close()


Job = TorchJob | StrategyJob


def make_job(name: str, servers: Sequence[str] = (), **options: Any) -> Job:
    """torch, mirrored-REPLICAS, workers-WORKERS or servers-WORKERSxSERVERS, with -unfused or -sharded behind it. All
    but the first two take rank and number of workers from torchrun's variables."""
    kind, *rest = name.split("-")
    if kind == "torch":
        return TorchJob(**options)
    options = {"seed": 3, "threads_per_replica": 1, "timeout": 15.0, **options}
    if "unfused" in rest:
        options["fuse"] = False
    if "sharded" in rest:
        options["shard_optimizer"] = True
    if kind == "mirrored":
        return StrategyJob(muster.MirroredStrategy(["cpu"] * int(rest[0]), **options))
    if kind == "workers":
        strategy = muster.MultiWorkerMirroredStrategy.from_env(["cpu"], **options)
        return StrategyJob(strategy, divides_state="sharded" in rest)
    here = muster.Cluster.from_env()
    cluster = muster.Cluster(here.rank, here.num_workers, here.address, here.local_rank, list(servers))
    return StrategyJob(muster.ParameterServerStrategy(cluster, **options))
