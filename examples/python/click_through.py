"""Learns which ads are clicked on; the training step knows nothing of how it is spread.

Two logical replicas in one process:  python examples/python/click_through.py
Two worker processes:                 torchrun --nproc-per-node 2 examples/python/click_through.py --multi-worker

An impression shows an ad to a user on a page. Users, ads and pages are rows of one sparse table: of its rows a batch
reads, sums over replicas and steps only those that it shows. The impressions are generated: each row has a true score,
and the log-odds of a click are a bias plus the three scores. So what was learnt can be compared with the truth: the
program prints how the learnt scores of rows that were shown often correlate with the true ones, and how much of the way
from a constant guess to the true probabilities the log loss on unseen impressions went.
"""

from __future__ import annotations

import hashlib
import time
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster

FIELDS = ("users", "ads", "pages")
BIAS = -1.0


class World:
    """True scores of all rows, and impressions drawn by them."""

    def __init__(self, rows_a_field: int, seed: int) -> None:
        self.rows_a_field = rows_a_field
        self.generator = torch.Generator().manual_seed(seed)
        self.scores = 0.8 * torch.randn(len(FIELDS) * rows_a_field, generator=self.generator)

    def draw(self, impressions: int) -> TensorDataset:
        """Ids ``[impressions, fields]``, of which few are shown often and most seldom, and clicks."""
        uniform = torch.rand(impressions, len(FIELDS), generator=self.generator, dtype=torch.float64)
        places = (self.rows_a_field**uniform - 1).long()
        ids = places + self.rows_a_field * torch.arange(len(FIELDS))
        clicks = torch.bernoulli(self.probability(ids), generator=self.generator)
        return TensorDataset(ids, clicks)

    def probability(self, ids: Tensor) -> Tensor:
        """Of a click."""
        return torch.sigmoid(BIAS + self.scores[ids].sum(1))


class ClickModel(nn.Module):
    """Vectors of the rows, read by one linear layer: the sum over fields of a learnt score, and a bias."""

    def __init__(self, rows: int, dim: int, seed: int) -> None:
        super().__init__()
        self.table = muster.ShardedEmbedding(rows, dim, mode="sum", scale=0.01, seed=seed)
        self.read = nn.Linear(dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Log-odds of a click."""
        return self.read(self.table(ids)).squeeze(1)


def digest(model: nn.Module) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of all parameters."""
    together = hashlib.sha256()
    for parameter in model.parameters():
        together.update(parameter.detach().numpy().tobytes())
    return together.hexdigest()[:16]


def correlation(learnt: Tensor, true: Tensor) -> float:
    """Pearson's."""
    return float(torch.corrcoef(torch.stack([learnt, true]))[0, 1])


def main(
    multi_worker: Annotated[bool, typer.Option(help="One worker of several, started by torchrun.")] = False,
    rows: Annotated[int, typer.Option(min=2, help="Of users, of ads and of pages, each.")] = 200_000,
    impressions: Annotated[int, typer.Option(min=1, help="To train on; the test has a tenth as many.")] = 600_000,
    dim: Annotated[int, typer.Option(min=1)] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Of all replicas together.")] = 2048,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    seed: int = 0,
) -> None:
    """Trains and prints how near the learnt scores came to the true ones."""
    torch.manual_seed(seed)
    if multi_worker:
        strategy: muster.Strategy = muster.MultiWorkerMirroredStrategy.from_env()
    else:
        strategy = muster.MirroredStrategy(["cpu:0", "cpu:1"])

    world = World(rows, seed)
    train_data, test_data = world.draw(impressions), world.draw(impressions // 10)
    module = ClickModel(len(FIELDS) * rows, dim, seed)
    optimizer = torch.optim.Adagrad(
        [{"params": module.table.parameters(), "lr": 0.1}, {"params": module.read.parameters(), "lr": 0.02}]
    )
    model, optimizer, loader, test_loader = strategy.prepare(
        module,
        optimizer,
        DataLoader(train_data, batch_size=batch_size, shuffle=True),
        DataLoader(test_data, batch_size=8192),
    )

    def train_step(ids: Tensor, clicks: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(ids), clicks)

    def measure(ids: Tensor, clicks: Tensor) -> dict[str, Tensor | int]:
        losses = {
            "learnt": F.binary_cross_entropy_with_logits(model(ids), clicks, reduction="sum"),
            "true": F.binary_cross_entropy(world.probability(ids), clicks, reduction="sum"),
            "clicks": clicks.sum(),
        }
        return {**losses, "seen": len(clicks)}

    started = time.perf_counter()
    model.train()
    for _ in range(epochs):
        for ids, clicks in loader:
            strategy.step(train_step, ids, clicks)
    seconds = time.perf_counter() - started

    model.eval()
    totals = dict.fromkeys(("learnt", "true", "clicks", "seen"), 0.0)
    for ids, clicks in test_loader:
        for name, value in strategy.reduce(strategy.run(measure, ids, clicks), "sum").items():
            totals[name] += float(value)

    if strategy.is_chief:
        learnt, true, rate = (totals[name] / totals["seen"] for name in ("learnt", "true", "clicks"))
        constant = float(F.binary_cross_entropy(torch.tensor(rate), torch.tensor(rate)))
        print(f"trained in {seconds:.1f} s on {strategy.num_replicas} replicas of {strategy.num_workers} process(es)")
        print(f"table: {module.table.num_embeddings:,} rows of {dim}, {impressions:,} impressions")
        print(f"parameters: {digest(module)} (sha256)")
        shown = torch.bincount(train_data.tensors[0].flatten(), minlength=len(FIELDS) * rows)
        scores = (module.table.weight @ module.read.weight[0]).detach()
        for least in (100, 1000):
            known = shown >= least
            near = correlation(scores[known], world.scores[known])
            print(f"correlation with true scores, {int(known.sum())} rows shown {least} times or more: {near:.3f}")
        gained = (constant - learnt) / (constant - true)
        print(f"log loss: {learnt:.4f} (a constant guess {constant:.4f}, the true probabilities {true:.4f})")
        print(f"of what can be known: {gained:.3f}")
        if not multi_worker:
            print(
                "\nOn two workers, with the same parameters bit for bit, after one change:\n"
                '-   strategy = muster.MirroredStrategy(["cpu:0", "cpu:1"])\n'
                "+   strategy = muster.MultiWorkerMirroredStrategy.from_env()\n"
                "which --multi-worker makes here"
            )
    strategy.close()


if __name__ == "__main__":
    typer.run(main)
