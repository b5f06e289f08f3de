"""A script for examples/ray/train.py: digits on workers alone, then another training with parameter servers.

ray_job.py FOLDER DIGITS ARGUMENT...: in FOLDER each worker leaves "half.RANK" in the middle of the second training, and
waits there for "go".
"""

from __future__ import annotations

import contextlib
import hashlib
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster

STEPS = 16


def train(make: Callable[[], muster.Strategy], folder: Path | None = None) -> str:
    """A digest of the parameters at the end."""
    torch.manual_seed(0)
    strategy = make()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(8 * STEPS, 8), torch.randint(4, (8 * STEPS,)))
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    for x, y in loader:
        result = strategy.step(train_step, x, y)
        if result.step == STEPS // 2 and folder is not None:
            (folder / f"half.{strategy.rank}").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)
    together = hashlib.sha256()
    for parameter in model.parameters():
        together.update(parameter.detach().numpy().tobytes())
    strategy.close()
    return together.hexdigest()[:16]


if __name__ == "__main__":
    _, folder, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    with contextlib.suppress(SystemExit):  # of typer
        runpy.run_path(script, run_name="__main__")
    digest = train(lambda: muster.ParameterServerStrategy.from_env(patience=120.0), Path(folder))
    print("on servers:", digest, flush=True)
