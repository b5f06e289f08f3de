"""A small transformer that learns to write Python, character by character, from the standard library's source.

Two logical replicas in one process:  python examples/python/char_lm.py
Two worker processes:                 torchrun --nproc-per-node 2 examples/python/char_lm.py --multi-worker

A sample is a piece of one file. The last piece of a file is shorter, so parts of a batch hold different numbers of
characters: the step returns that number as the loss's weight, and every character counts once in the mean.
"""

from __future__ import annotations

import enum
import math
import sysconfig
import time
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import muster

VOCABULARY = 128  # ASCII; any other character is read as "?"
PADDING = -100  # the target that cross_entropy ignores


class Recompute(enum.StrEnum):
    """Activation checkpointing: which kind, if any."""

    none = "none"
    non_reentrant = "non-reentrant"
    reentrant = "reentrant"


def read_source(megabytes: float) -> list[Tensor]:
    """The standard library's top-level modules in alphabetical order, one vector of characters each."""
    texts: list[Tensor] = []
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8").encode("ascii", errors="replace")
        if len(text) > 1:
            texts.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            total += len(text)
        if total >= megabytes * 1e6:
            break
    return texts


def pieces_of(texts: list[Tensor], context: int) -> list[Tensor]:
    """Pieces of up to `context` + 1 characters; each starts with the last character of the one before."""
    return [text[at : at + context + 1] for text in texts for at in range(0, len(text) - 1, context)]


def collate(pieces: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Characters and the characters that follow them, padded to the longest piece: two (pieces, characters) tensors."""
    longest = max(len(piece) for piece in pieces) - 1
    inputs = torch.zeros(len(pieces), longest, dtype=torch.int64)
    targets = torch.full((len(pieces), longest), PADDING)
    for row, piece in enumerate(pieces):
        inputs[row, : len(piece) - 1] = piece[:-1]
        targets[row, : len(piece) - 1] = piece[1:]
    return inputs, targets


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each normalised before and added after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.mlp(x)


class CharacterModel(nn.Module):
    """Logits of the next character at every position."""

    def __init__(self, width: int, layers: int, context: int, dropout: float, recompute: Recompute) -> None:
        super().__init__()
        self.context = context
        self.recompute = recompute
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 32), dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.dropout(self.characters(inputs) + self.positions(torch.arange(inputs.size(1))))
        for block in self.blocks:
            if self.training and self.recompute is not Recompute.none:
                x = checkpoint(block, x, use_reentrant=self.recompute is Recompute.reentrant)
            else:
                x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def write(model: CharacterModel, beginning: str, length: int, seed: int) -> str:
    """`beginning`, continued by `length` characters that the model draws."""
    generator = torch.Generator().manual_seed(seed)
    text = list(beginning.encode("ascii"))
    for _ in range(length):
        logits = model(torch.tensor([text[-model.context :]]))[0, -1]
        text.append(int(torch.multinomial(F.softmax(logits / 0.7, 0), 1, generator=generator)))
    return bytes(text).decode("ascii")


def main(
    multi_worker: Annotated[bool, typer.Option(help="One worker of several, started by torchrun.")] = False,
    steps: Annotated[int, typer.Option(min=1)] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Pieces, of all replicas together.")] = 32,
    context: Annotated[int, typer.Option(min=1, help="Characters in a piece.")] = 128,
    width: Annotated[int, typer.Option(min=32, help="A multiple of 32.")] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.1,
    lr: Annotated[float, typer.Option(min=0)] = 3e-3,
    recompute: Annotated[Recompute, typer.Option(help="Kind of activation checkpointing.")] = Recompute.none,
    megabytes: Annotated[float, typer.Option(min=0, help="How much source to read.")] = 4.0,
    seed: int = 0,
) -> None:
    """Trains, prints the loss on files it has not seen, and writes a few lines."""
    torch.manual_seed(seed)
    if multi_worker:
        strategy: muster.Strategy = muster.MultiWorkerMirroredStrategy.from_env(clip_norm=1.0)
    else:
        strategy = muster.MirroredStrategy(["cpu:0", "cpu:1"], clip_norm=1.0)

    texts = read_source(megabytes)
    unseen = pieces_of(texts[::20], context)[: 8 * batch_size]
    seen = pieces_of([text for number, text in enumerate(texts) if number % 20], context)
    model = CharacterModel(width, layers, context, dropout, recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * min(1, step / steps)))
    )
    model, optimizer, loader, unseen_loader = strategy.prepare(
        model,
        optimizer,
        DataLoader(seen, batch_size=batch_size, shuffle=True, collate_fn=collate),
        DataLoader(unseen, batch_size=batch_size, collate_fn=collate),
    )

    def train_step(inputs: Tensor, targets: Tensor) -> muster.Loss:
        logits = model(inputs)
        counted = targets != PADDING
        characters = counted.sum()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        accuracy = ((logits.argmax(2) == targets) & counted).sum() / characters
        return muster.Loss(loss, weight=characters, metrics={"accuracy": accuracy})

    def evaluate(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
        return {"loss": loss.double(), "characters": (targets != PADDING).sum()}

    progress = Progress(
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  accuracy {task.fields[accuracy]:.3f}"),
        TimeElapsedColumn(),
        disable=not strategy.is_chief,
    )
    started = time.perf_counter()
    model.train()
    with progress:
        bar = progress.add_task("", total=steps, loss=math.log(VOCABULARY), accuracy=0.0)
        while strategy.steps < steps and not strategy.stopping:
            for inputs, targets in islice(loader, steps - strategy.steps):
                result = strategy.step(train_step, inputs, targets)
                schedule.step()
                accuracy = float(result.metrics["accuracy"])
                progress.update(bar, advance=1, loss=float(result.loss), accuracy=accuracy)
                if strategy.stopping:
                    break
    seconds = time.perf_counter() - started

    model.eval()
    total, characters = 0.0, 0
    for inputs, targets in unseen_loader:
        sums = strategy.reduce(strategy.run(evaluate, inputs, targets), "sum")
        total += float(sums["loss"])
        characters += int(sums["characters"])

    if strategy.is_chief:
        print(f"trained in {seconds:.1f} s on {strategy.num_replicas} replicas of {strategy.num_workers} process(es)")
        print(f"loss on unseen files: {total / characters:.4f} nats a character ({characters} characters)\n")
        print(write(model.module, "def ", 200, seed))
    strategy.close()


if __name__ == "__main__":
    typer.run(main)
