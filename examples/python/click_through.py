"""Learns which ads are clicked on; the training step knows nothing of how it is spread.

Two logical replicas in one process:  python examples/python/click_through.py
Two worker processes:                 torchrun --nproc-per-node 2 examples/python/click_through.py --multi-worker
Two workers, two parameter servers:
    muster run --workers 2 --servers 2 examples/python/click_through.py --parameter-server

All end with the same parameters, bit for bit. With --staleness the workers of parameter servers step on their own, and
no two runs are alike.

An impression shows an ad to a user on a page. Users, ads and pages are rows of one sparse table: of its rows a batch
reads, sums over replicas and steps only those that it shows.

Impressions are generated, each from (seed, its number) alone, so nothing is stored and any worker can make any of them.
The log-odds of a click are a bias, the effects of the three rows, and those of a few dense features. All of these are
known, and what was learnt is compared with them: log loss and AUC on unseen impressions with those of the true
log-odds, which nothing can beat, and of a constant guess; and the learnt effects of rows that were shown often with the
true ones. The program fails if it did not learn.

examples/cpp/click_through.cpp makes the same impressions and ends with the same parameters, bit for bit.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import muster

Words = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]
Sample = tuple[Tensor, Tensor, Tensor]

BIAS = -1.5
FEATURE_EFFECTS = (1.2, -0.9, 0.6, -0.3)
ROW_EFFECT = 0.7  # standard deviation of users', ads' and pages'
OFTEN = 100  # times that a row is shown, from which on one may ask what was learnt of it
GAMMA = 0x9E3779B97F4A7C15


def mixed(words: Words) -> Words:
    """SplitMix64's output function."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def drawn(seed: int, numbers: Words) -> Words:
    """What SplitMix64 seeded with `seed` gives as its draws of these numbers."""
    return mixed((numbers + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(seed % 2**64))


@dataclass(frozen=True)
class Field:
    """Rows of one kind: `rows` of the table from `first` on."""

    name: str
    first: int
    rows: int

    def octaves(self) -> int:
        """The first row is shown as often as the next two together, or the next four, ..., or all that are left over:
        a row's share falls as one over its place."""
        return (self.rows + 1).bit_length() - 1

    def rows_of(self, words: Words) -> Words:
        """By draw, a row of the table."""
        octave = (words >> np.uint64(32)) % np.uint64(self.octaves())
        first = (np.uint64(1) << octave) - np.uint64(1)
        last_octave = octave == self.octaves() - 1
        size = np.where(last_octave, np.uint64(self.rows) - first, first + np.uint64(1))
        return np.uint64(self.first) + first + (words & np.uint64(0xFFFFFFFF)) % size

    def often(self, impressions: int, times: int) -> npt.NDArray[np.int64]:
        """The rows of whole octaves that so many impressions show this often or more, in the mean."""
        octaves = (impressions // (times * self.octaves())).bit_length()
        return self.first + np.arange(2 ** min(octaves, self.octaves() - 1) - 1)


class World:
    """Who clicks on what: all of it follows from `seed`."""

    def __init__(self, rows: int, seed: int) -> None:
        ads, pages = rows // 8, rows // 64
        users = rows - ads - pages
        self.rows = rows
        self.fields = [Field("users", 0, users), Field("ads", users, ads), Field("pages", users + ads, pages)]
        self.impressions_seed, self.effects_seed = (int(word) for word in drawn(seed, np.arange(2, dtype=np.uint64)))

    def row_effects(self, rows: Words) -> Doubles:
        """What rows add to the log-odds: near a normal distribution, as sums of four uniform numbers are."""
        words = drawn(self.effects_seed, rows)
        quarters = [(words >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
        return (sum(quarters).astype(np.float64) / 65536 - 2) * (ROW_EFFECT * math.sqrt(3))

    def log_odds(self, ids: Words, features: npt.NDArray[np.float32]) -> Doubles:
        """Of a click on impressions with these ids ``[n, 3]`` and features ``[n, 4]``."""
        return BIAS + self.row_effects(ids).sum(1) + (features.astype(np.float64) * FEATURE_EFFECTS).sum(1)

    def impressions(self, numbers: Words) -> tuple[Words, npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Ids ``[n, 3]``, features ``[n, 4]`` in -1..1, and clicks ``[n]``."""
        draws = len(self.fields) + len(FEATURE_EFFECTS) + 1
        words = drawn(self.impressions_seed, numbers[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64))
        ids = np.stack([field.rows_of(words[:, i]) for i, field in enumerate(self.fields)], 1)
        features = ((words[:, len(self.fields) : -1] >> np.uint64(40)).astype(np.float32) / 2**23 - 1).astype(
            np.float32
        )
        uniform = (words[:, -1] >> np.uint64(11)).astype(np.float64) / 2**53
        return ids, features, uniform < 1 / (1 + np.exp(-self.log_odds(ids, features)))


class Impressions(Dataset[Sample]):
    """Those of a world with the numbers ``first``, ``first + 1``, ...; a batch is made at once."""

    def __init__(self, world: World, first: int, size: int) -> None:
        self.world = world
        self.first = first
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        ids, features, clicks = self.__getitems__([index])
        return ids[0], features[0], clicks[0]

    def __getitems__(self, indices: Sequence[int]) -> Sample:
        ids, features, clicks = self.world.impressions(np.asarray(indices, np.uint64) + np.uint64(self.first))
        return (
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(features),
            torch.from_numpy(clicks.astype(np.float32)),
        )


def as_it_is(batch: Sample) -> Sample:
    """A batch that was made at once is collated."""
    return batch


class ClickModel(nn.Module):
    """A vector for each row, summed over an impression's and read, with its features, by one linear layer."""

    def __init__(self, rows: int, dim: int, seed: int) -> None:
        super().__init__()
        self.table = muster.ShardedEmbedding(rows, dim, mode="sum", scale=0.01, seed=seed)
        self.read = nn.Linear(dim + len(FEATURE_EFFECTS), 1)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        """Log-odds of a click."""
        return self.read(torch.cat([self.table(ids), features], 1)).squeeze(1)


class Score:
    """How good log-odds of clicks are. Those of several sets of impressions add up."""

    BINS = 4096  # of probabilities, to count the AUC by

    def __init__(self, sums: Tensor) -> None:
        """`sums` as `of` gives them."""
        others, clicked = sums[:-1].view(2, self.BINS)
        seen, clicks = float(sums[:-1].sum()), float(clicked.sum())
        self.log_loss = float(sums[-1]) / seen
        """The mean over impressions."""
        self.auc = float((clicked * (others.cumsum(0) - others / 2)).sum()) / (clicks * (seen - clicks))
        """The chance that of two impressions the one that is clicked on has the greater log-odds."""
        self.rate = clicks / seen
        """Of clicks."""

    @classmethod
    def of(cls, log_odds: Tensor, clicks: Tensor) -> Tensor:
        """float64 ``[2 * BINS + 1]``: by bin, impressions that are not clicked on, then those that are; the loss."""
        bins = (log_odds.double().sigmoid() * cls.BINS).long().clamp(max=cls.BINS - 1) + cls.BINS * clicks.long()
        loss = F.binary_cross_entropy_with_logits(log_odds.double(), clicks.double(), reduction="sum")
        return torch.cat([torch.bincount(bins, minlength=2 * cls.BINS).double(), loss.view(1)])


def entropy(rate: float) -> float:
    """The log loss of the best constant guess, for clicks at this rate."""
    return -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


def digest(model: nn.Module) -> str:
    """Of all parameters: each value's bits mixed with its place, and added up."""
    total = place = 0
    for parameter in model.state_dict().values():  # rows on servers are not in model.parameters()
        bits = parameter.numpy().ravel().view(np.uint32)
        places = np.arange(place, place + len(bits), dtype=np.uint64)
        total += int(mixed(drawn(0, places) ^ bits).sum())
        place += len(bits)
    return f"{total % 2**64:016x}"


def print_correlations(world: World, often: Sequence[npt.NDArray[np.int64]], learnt: Tensor) -> None:
    """Of effects of rows that were shown often, by field."""
    true = torch.from_numpy(world.row_effects(np.concatenate(often).astype(np.uint64)))
    sizes = [len(ids) for ids in often]
    for field, pair in zip(world.fields, torch.stack([learnt.double(), true]).split_with_sizes(sizes, 1), strict=True):
        near = float(torch.corrcoef(pair)[0, 1])
        print(f"{field.name}: correlation with true effects {near:.3f} ({pair.size(1)} shown {OFTEN} times or more)")


def make_strategy(
    devices: list[str] | None, multi_worker: bool, parameter_server: bool, staleness: str
) -> muster.Strategy:
    """The one that the options name."""
    if multi_worker and parameter_server:
        raise typer.BadParameter("--multi-worker and --parameter-server are two strategies; choose one")
    if multi_worker:
        return muster.MultiWorkerMirroredStrategy.from_env(devices)
    if staleness != "none" and not staleness.isdecimal():
        raise typer.BadParameter(f"--staleness {staleness}: it must be a number of steps, or none")
    if parameter_server:
        return muster.ParameterServerStrategy.from_env(
            devices, staleness=None if staleness == "none" else int(staleness)
        )
    return muster.MirroredStrategy(devices or ["cpu:0", "cpu:1"])


def main(
    devices: Annotated[str, typer.Option(help="Of a process's replicas, separated by commas.")] = "",
    multi_worker: Annotated[bool, typer.Option("--multi-worker", help="One worker of several, of torchrun.")] = False,
    parameter_server: Annotated[
        bool, typer.Option("--parameter-server", help="One worker of several with parameter servers, of muster run.")
    ] = False,
    staleness: Annotated[
        str, typer.Option(help="Steps that a worker of servers may be ahead of the slowest; 'none': any number.")
    ] = "0",
    rows: Annotated[int, typer.Option(min=1000, help="Of the table: users, ads and pages together.")] = 1_000_000,
    impressions: Annotated[
        int, typer.Option(min=10_000, help="Of an epoch; a tenth as many are tested on.")
    ] = 1_000_000,
    epochs: Annotated[int, typer.Option(min=1, help="Each of other impressions.")] = 2,
    dim: Annotated[int, typer.Option(min=1, help="Of a row's vector.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Of all replicas together.")] = 2048,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    least: Annotated[float, typer.Option(help="Of what can be known: where less is learnt, the exit code is 1.")] = 0.8,
) -> None:
    """Trains and prints how near the learnt log-odds came to the true ones."""
    torch.manual_seed(seed)
    strategy = make_strategy(devices.split(",") if devices else None, multi_worker, parameter_server, staleness)
    world = World(rows, seed)
    module = ClickModel(rows, dim, seed)
    optimizer = torch.optim.Adagrad(
        [{"params": module.table.parameters(), "lr": 0.05}, {"params": module.read.parameters(), "lr": 0.1}]
    )

    def prepared_loader(first: int, size: int) -> muster.Loader[Sample]:
        data = Impressions(world, first, size)
        return strategy.prepare_loader(DataLoader(data, batch_size=batch_size, collate_fn=as_it_is))

    model, optimizer = strategy.prepare(module, optimizer)
    loaders = [prepared_loader(epoch * impressions, impressions) for epoch in range(epochs)]
    test_loader = prepared_loader(epochs * impressions, impressions // 10)

    def train_step(ids: Tensor, features: Tensor, clicks: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(ids, features), clicks)

    def measure(ids: Tensor, features: Tensor, clicks: Tensor) -> Tensor:
        true = torch.from_numpy(world.log_odds(ids.numpy().astype(np.uint64), features.numpy()))
        return torch.stack([Score.of(model(ids, features), clicks), Score.of(true, clicks)])

    def effects(ids: Tensor) -> Tensor:
        return model.table(ids[:, None]) @ model.read.weight[0, :dim]

    def test() -> list[Score]:
        sums = torch.zeros(2, 2 * Score.BINS + 1, dtype=torch.float64)
        for batch in test_loader:
            for part in strategy.run(measure, *batch):
                if part is not None:
                    sums += part
        # Workers that step on their own have different numbers of batches, and reduce once, when they are through.
        return [Score(of_one) for of_one in strategy.reduce(sums, "sum")]

    seconds = 0.0
    for epoch, loader in enumerate(loaders):
        started = time.perf_counter()
        for batch in loader:
            strategy.step(train_step, *batch)
            if strategy.stopping:
                return
        seconds += time.perf_counter() - started
        learnt, true = test()
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: log loss {learnt.log_loss:.4f}, AUC {learnt.auc:.4f}")

    constant = entropy(true.rate)
    known = (constant - learnt.log_loss) / (constant - true.log_loss)
    often = [field.often(epochs * impressions, OFTEN) for field in world.fields]
    of_rows = torch.cat(tuple(strategy.run(effects, torch.from_numpy(np.concatenate(often)))))
    if strategy.is_chief:
        print(f"trained in {seconds:.1f} s on {strategy.num_replicas} replicas of {strategy.num_workers} process(es)")
        print(f"table: {rows} rows of {dim}, {epochs * impressions} impressions")
        print(f"parameters: {digest(module)}")
        print_correlations(world, often, of_rows)
        of_features = " ".join(f"{effect:.2f}" for effect in module.read.weight[0, dim:].tolist())
        print(f"features: effects {of_features} (true {' '.join(map(str, FEATURE_EFFECTS))})")
        print(
            f"log loss: {learnt.log_loss:.4f} (a constant guess {constant:.4f}, the true log-odds {true.log_loss:.4f})"
        )
        print(f"AUC: {learnt.auc:.4f} (a constant guess 0.5, the true log-odds {true.auc:.4f})")
        print(f"of what can be known: {known:.3f}")
    strategy.close()
    if known < least:
        sys.exit(f"click_through: it learnt less than {least} of what can be known; give it more impressions")


if __name__ == "__main__":
    typer.run(main)
