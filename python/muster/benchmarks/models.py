"""The models that benchmarks train, on random data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DIGITS", "MLP", "SMALL_TENSORS", "TINY", "TRANSFORMER", "Model", "mlp"]


@dataclass(frozen=True)
class Model:
    in_cpp: str
    """What benchmarks/cpp calls it."""
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    """Inputs and targets of so many samples."""
    loss: Callable[[Tensor, Tensor], Tensor]

    def fresh(self) -> nn.Module:
        """Equal parameters each time."""
        torch.manual_seed(0)
        return self.build()


class Transformer(nn.Module):
    """A causal language model over bytes."""

    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        logits: Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


def small_tensors(layers: int = 1000) -> nn.Module:
    return nn.Sequential(*itertools.chain.from_iterable((nn.Linear(16, 16), nn.Tanh()) for _ in range(layers)))


def mlp(width: int = 1024) -> nn.Module:
    wide = 4 * width
    return nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, width))


def digits() -> nn.Module:
    """That of examples/python/digits.py."""
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


SMALL_TENSORS = Model("small", small_tensors, lambda rows: (torch.randn(rows, 16), torch.randn(rows, 16)), F.mse_loss)
MLP = Model("mlp", mlp, lambda rows: (torch.randn(rows, 1024), torch.randn(rows, 1024)), F.mse_loss)
TRANSFORMER = Model(
    "transformer",
    Transformer,
    lambda rows: (torch.randint(256, (rows, 64)), torch.randint(256, (rows, 64))),
    cross_entropy,
)
DIGITS = Model("digits", digits, lambda rows: (torch.randn(rows, 1, 8, 8), torch.randint(10, (rows,))), cross_entropy)
TINY = Model("tiny", lambda: mlp(16), SMALL_TENSORS.batch, F.mse_loss)
"""To try a benchmark."""
