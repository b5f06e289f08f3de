"""What a batch's way to the GPU costs a window: batches of a prepared loader, against one that is there already.

Batches of `mb` megabytes lie in pinned memory. `window_ms` is the time of a window, by the device, for
- `resident`: each step takes the same batch, on the device;
- `loader`: the batches of a prepared loader, which are copied while the device works;
- `in order`: each batch is copied by `to(non_blocking=True)` before its step, as in a loop of plain torch.
`peak_mb` is the most of the device's memory that tensors took meanwhile.

    python benchmarks/gpu_data.py                  prints JSON
    python benchmarks/gpu_data.py --dry            small, on the CPU, where nothing is copied: shows that it runs
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import muster

DRY = "--dry" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda:0")
ROWS, FEATURES, WIDTH = (8, 64, 16) if DRY else (4096, 8192, 4096)
WINDOWS, ROUNDS = (3, 2) if DRY else (60, 5)  # a round's first batch has nothing to be copied behind


class Batches(Dataset[Tensor]):
    """Ready batches, as many as a round has windows."""

    def __init__(self) -> None:
        values = torch.randn(2, ROWS, FEATURES)
        self.values = values if DRY else values.pin_memory()

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index % 2]


def wait() -> None:
    if not DRY:
        torch.cuda.synchronize()


def main() -> None:
    layers = [nn.Linear(FEATURES, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4))]
    module = nn.Sequential(*layers).to(DEVICE)
    data = Batches()
    resident = data[0].to(DEVICE)
    with muster.MirroredStrategy([str(DEVICE)], precision="bf16") as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-6))
        loader = strategy.prepare_loader(DataLoader(data, batch_size=None))

        def in_order() -> Iterator[Tensor]:
            return (values.to(DEVICE, non_blocking=True) for values in (data[i] for i in range(WINDOWS)))

        ways: dict[str, Iterable[Tensor]] = {"resident": [resident] * WINDOWS, "loader": loader, "in order": ()}
        found: dict[str, list[float]] = {way: [] for way in ways}
        peaks: dict[str, float] = {}
        for number in range(ROUNDS + 1):
            for way, batches in ways.items():
                wait()
                if not DRY:
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                for batch in batches or in_order():
                    strategy.step(lambda x: model(x).square().mean(), batch)
                wait()
                peaks[way] = 0.0 if DRY else torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**20
                if number > 0:  # the first one warms up
                    found[way].append(1e3 * (time.perf_counter() - began) / WINDOWS)
    quartiles = {way: [round(q, 4) for q in statistics.quantiles(times, n=4)] for way, times in found.items()}
    mb = resident.nbytes / 2**20
    print(json.dumps({"mb": mb, "windows": WINDOWS, "window_ms": quartiles, "peak_mb": peaks}))


if __name__ == "__main__":
    main()
