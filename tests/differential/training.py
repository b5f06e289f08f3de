"""A training under way: what events act on, and the record that is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler

import muster


class Planned(Exception):
    """What a program raises on purpose."""


def make_optimizer(
    net: nn.Module, kind: str, *, groups: int = 1, share: tuple[int, int] = (0, 1), left_out: int = 0, **options: Any
) -> torch.optim.Optimizer:
    """Of every share[1]-th parameter from share[0] on, but for the last `left_out`, dealt over groups with learning
    rates of their own."""
    parameters = list(net.parameters())[share[0] :: share[1]]
    parameters = parameters[: max(len(parameters) - left_out, 1)]
    groups = min(groups, len(parameters))
    dealt = [{"params": parameters[g::groups], "lr": options["lr"] * 0.5**g} for g in range(groups)]
    return getattr(torch.optim, kind)(dealt, **options)  # type: ignore[no-any-return]


def make_schedule(optimizer: torch.optim.Optimizer, kind: str) -> Any:
    """A learning rate schedule whose turns come within a few steps."""
    s = lr_scheduler
    if kind == "OneCycleLR":
        cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
        return s.OneCycleLR(optimizer, max_lr=optimizer.defaults["lr"], total_steps=40, cycle_momentum=cycles)
    if kind == "SequentialLR":
        return s.SequentialLR(
            optimizer, [s.LinearLR(optimizer, 0.5, total_iters=2), s.ExponentialLR(optimizer, 0.9)], [2]
        )
    makers: dict[str, Callable[[], Any]] = {
        "StepLR": lambda: s.StepLR(optimizer, 2, 0.5),
        "CosineAnnealingWarmRestarts": lambda: s.CosineAnnealingWarmRestarts(optimizer, 2),
        "LambdaLR": lambda: s.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        "ReduceLROnPlateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0),
        "MultiplicativeLR": lambda: s.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    }
    return makers[kind]()


class Training:
    """A network, optimizers and schedules in a job, and what was seen of them."""

    def __init__(
        self,
        make_job: Callable[[], Any],
        net: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[tuple[int, str]] = (),
        *,
        loss: str = "mse",
        seed: int = 0,
        noise: float = 0.0,
        autocast: bool = False,
        early: Sequence[Callable[[Training], None]] = (),
    ) -> None:
        self.record: list[tuple[str, Any]] = []
        self.texts: list[str] = []
        self._make_job = make_job
        self.job = make_job()
        self.net = net
        self.optimizers = list(optimizers)
        self.seed = seed
        self.loss_kind = loss
        self.noise = noise
        self.autocast = autocast
        self.calls = 0
        self.saved: tuple[Any, Any] | None = None
        self.averages: dict[str, Tensor] = {}
        self.averaged: Any = None
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.handles: list[Any] = []
        self.model: nn.Module = net
        for event in early:
            event(self)
        self.model = self.job.prepare(net, self.optimizers)
        self.schedules = [make_schedule(self.optimizers[number], kind) for number, kind in schedules]

    def restart(self) -> None:
        """Goes on under another job of the same kind."""
        divided = [o.state_dict() for o in self.optimizers] if self.job.divides_state else []
        self.job.close()
        for optimizer, state in zip(self.optimizers, divided, strict=False):
            optimizer.load_state_dict(state)
        self.job = self._make_job()
        self.model = self.job.prepare(self.net, self.optimizers)

    def note(self, label: str, value: Any) -> None:
        """Adds to what is compared."""
        self.record.append((f"{len(self.record)} {label}", value))

    def note_error(self, error: Exception) -> None:
        """Adds a planned exception, or that something was refused; the text is for people."""
        kind = getattr(error, "type", "") or type(error).__name__
        self.texts.append(f"{type(error).__name__}: {error}")
        self.note("raised", "Planned" if kind == "Planned" else "refused")

    def parameters(self) -> list[Tensor]:
        """The network's, of replica 0."""
        return list(self.net.parameters())

    def parameter(self, number: int) -> Tensor:
        """One of the network's, counted round."""
        every = self.parameters()
        return every[number % len(every)]

    def block(self, number: int) -> nn.Module:
        """One of the blocks of the network, as user code reaches it."""
        blocks: Any = self.model.blocks
        return blocks[number % len(blocks)]  # type: ignore[no-any-return]

    def can_be_copied(self) -> bool:
        """Whether deepcopy takes the network. It refuses one that holds a computed tensor, which pruning leaves of a
        forward pass with gradients: on a worker whose last part was empty, of an earlier call than on the others."""
        return not prune.is_pruned(self.net)

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features, ids, targets and row numbers of the next call."""
        self.calls += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + self.calls)
        x = torch.randn(rows, 8, generator=generator, dtype=torch.float64) * (1 + self.noise)
        ids = torch.randint(0, 6, (rows, 4), generator=generator)
        y = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
        dtype = torch.get_default_dtype()
        return x.to(dtype), ids, y.to(dtype), torch.arange(rows)

    def loss(self, forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, ids: Tensor, y: Tensor) -> Any:
        """The loss of a part, such that that of the whole batch is their mean by weight, or their sum."""
        kind = self.loss_kind
        if kind == "penalty":
            x = x.detach().clone().requires_grad_(True)
            out = forward(x, ids)
            (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            return F.mse_loss(out, y) + 0.1 * gradient.square().sum(1).mean()
        out = forward(x, ids)
        if kind == "mse":
            return F.mse_loss(out, y)
        if kind == "cross_entropy":
            return F.cross_entropy(out, ids[:, 0])
        if kind == "sum":
            return muster.Loss(F.mse_loss(out, y, reduction="sum") / 64, reduction="sum")
        if kind == "weighted":
            weight = (ids[:, 0] + 1).to(y.dtype)
            value = ((out - y).square().mean(1) * weight).sum() / weight.sum()
            return muster.Loss(value, weight=weight.sum())
        if kind == "metrics":
            return muster.Loss(F.mse_loss(out, y), metrics={"size": out.abs().mean(), "one": 1.0})
        if kind == "regularised":
            trained = [p for p in self.model.parameters() if p.requires_grad]
            return F.mse_loss(out, y) + 0.01 * torch.stack([p.abs().double().square().sum() for p in trained]).sum()
        if kind == "twice":
            return F.mse_loss(out, y) + F.mse_loss(forward(x.flip(1), ids), out.detach())
        if kind == "distilled":
            with torch.no_grad():
                target = self.teacher(x)
            return F.mse_loss(out, target)
        if kind == "contrast":
            everyones = self.job.gather(out)
            return (out @ everyones.t()).logsumexp(1).mean()
        assert kind == "moment", kind
        # Each replica has the loss of the whole, so that the mean of them is that.
        count = self.job.reduce(torch.tensor(float(len(out))))
        return (self.job.reduce(out.sum(0)) / count).square().sum() + F.mse_loss(out, y)

    def look(self, what: str) -> None:
        """Notes parameters and buffers."""
        for kind, named in (("parameter", self.net.named_parameters()), ("buffer", self.net.named_buffers())):
            for name, tensor in named:
                self.note(f"{what} {kind} {name}", tensor.detach().clone())

    def finish(self) -> None:
        """Notes all that a training leaves."""
        self.look("final")
        for number, optimizer in enumerate(self.optimizers):
            packed = copy.deepcopy(optimizer.state_dict())
            for position, values in sorted(packed["state"].items()):
                for name, value in sorted(values.items()):
                    if value is not None and name != "master":
                        self.note(f"optimizer {number} state {position} {name}", torch.as_tensor(value))
            for place, group in enumerate(packed["param_groups"]):
                self.note(f"optimizer {number} lr {place}", float(group["lr"]))
        self.job.close()
