"""Two ranks that share a device train as two replicas of the CPU in one process do, in ways beyond plain steps: with
collectives inside a step, synchronised and plain batch norm, sparse gradients and options of the gradients' way.

On a GPU they communicate over NCCL, as test_nccl.py says; on the CPU the same runs over the memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_jobs import job
from small_training import OPTIMIZERS, batches, net, virtual
from torch import Tensor, nn

import muster
from support.ranks import run_ranks

STEPS = 8
CPU = torch.device("cpu")
Learnt = dict[str, list[Tensor]]


class Words(nn.Module):
    """Rows of a table, by the features as numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, sparse=True)
        self.down = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.table((10 * x[:, :6]).abs().long() % 50).mean(1))


def words() -> nn.Module:
    torch.manual_seed(3)
    return Words()


def synchronised() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(net("batch norm"))


def plain_loss(strategy: muster.Strategy, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    return F.cross_entropy(model(x), y), []


def reducing_loss(strategy: muster.Strategy, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Pulls the mean of the whole batch's outputs, through which gradients flow, towards 0. Some reductions of what has
    no gradient beside it, started in the middle of a pass."""
    outputs = model(x)
    mean = strategy.reduce(outputs.mean(0), "mean")
    total, most, least = (strategy.reduce(x.sum(0), op) for op in ("sum", "max", "min"))
    seen = [mean.detach(), total, most, least, strategy.gather(y), strategy.broadcast(x.mean(0), 1)]
    return F.cross_entropy(outputs, y) + mean.square().sum(), seen


@dataclass
class Case:
    """How a job trains."""

    build: Callable[[], nn.Module] = net
    loss: Callable[[muster.Strategy, nn.Module, Tensor, Tensor], tuple[Tensor, list[Tensor]]] = plain_loss
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    tolerance: float = 1e-4


CASES = {
    "reduce inside a step": Case(loss=reducing_loss),
    "reduce inside a step, bf16": Case(loss=reducing_loss, options={"precision": "bf16"}, tolerance=3e-2),
    "synchronised batch norm": Case(synchronised),
    "batch norm": Case(lambda: net("batch norm")),
    "sparse rows": Case(words),
    "sparse rows, clipped": Case(words, options={"clip_norm": 1.0, "accumulate": 2}),
    # A value that rounds the other way is another by 1 in 256.
    "bf16 on the wire": Case(options={"wire": "bf16"}, tolerance=1e-3),
    "kept gradients": Case(options={"keep_gradients": True, "clip_norm": 0.1}),
    "an optimizer of torch": Case(options={"fuse": False}, optimizer="adamw"),
    "an optimizer of torch, kept and clipped": Case(
        options={"fuse": False, "keep_gradients": True, "clip_norm": 0.1}, optimizer="adagrad"
    ),
}


def learn(strategy: muster.Strategy, device: torch.device, case: Case, data: list[tuple[Tensor, Tensor]]) -> Learnt:
    """What a rank or a process of replicas has after every batch."""
    module = case.build().to(device)
    model, _ = strategy.prepare(module, OPTIMIZERS[case.optimizer](module.parameters()))
    seen: list[Tensor] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value, seen[:] = case.loss(strategy, model, x, y)  # the same of every replica
        return value

    losses = [strategy.step(loss, x, y).loss for x, y in data]
    kept = [p.grad for p in module.parameters() if p.grad is not None]
    found = {
        "parameters": [p.detach() for p in module.parameters()],
        "buffers": list(module.buffers()),
        "losses": losses[case.options.get("accumulate", 1) - 1 :: case.options.get("accumulate", 1)],
        "gradients": kept if case.options.get("keep_gradients") else [],
        "seen": seen,
    }
    return {what: [t.detach().double().cpu() for t in tensors] for what, tensors in found.items()}


def _learn_in_a_rank(name: str, device: str) -> dict[str, list[Any]]:
    with job(device, **CASES[name].options) as strategy:
        assert ("NCCL" in strategy.explain()) == device.startswith("cuda")
        data = [(x.tensor_split(2)[strategy.rank], y.tensor_split(2)[strategy.rank]) for x, y in batches(STEPS, device)]
        learnt = learn(strategy, strategy.device, CASES[name], data)
    return {what: [t.tolist() for t in tensors] for what, tensors in learnt.items()}


def learn_on_two_cpus(case: Case) -> Learnt:
    with muster.MirroredStrategy(virtual(CPU, 2), seed=1, threads_per_replica=1, **case.options) as strategy:
        return learn(strategy, CPU, case, batches(STEPS, CPU))


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_learn_as_two_replicas_of_the_cpu(device: torch.device, name: str) -> None:
    case = CASES[name]
    first, second = run_ranks(2, _learn_in_a_rank, name, "cpu:0" if device == CPU else str(device), timeout=100)
    assert first == second
    expected = learn_on_two_cpus(case)
    for what, tensors in expected.items():
        found = [torch.tensor(values, dtype=torch.float64) for values in first[what]]
        torch.testing.assert_close(
            found, tensors, rtol=case.tolerance, atol=case.tolerance, msg=lambda text, what=what: f"{what}: {text}"
        )
    pairs = zip(expected["parameters"], case.build().parameters(), strict=True)
    assert max(float((p - before.detach()).abs().max()) for p, before in pairs) > 5 * case.tolerance
    assert bool(expected["seen"]) == (case.loss is reducing_loss)
    assert bool(expected["gradients"]) == ("keep_gradients" in case.options)


def test_synchronised_statistics_are_those_of_the_whole_batch() -> None:
    """What the ranks are compared with above is right: one replica whose batch norm sees all."""
    found = learn_on_two_cpus(Case(synchronised))
    with muster.MirroredStrategy(virtual(CPU, 1), seed=1, threads_per_replica=1) as strategy:
        expected = learn(strategy, CPU, Case(lambda: net("batch norm")), batches(STEPS, CPU))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
