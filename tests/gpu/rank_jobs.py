"""What a rank's process does first in tests whose ranks share a device."""

from __future__ import annotations

import os
from typing import Any

import torch
from gpu_nccl import host_of_its_own

import muster


def take_the_gpu() -> None:
    """NCCL refuses two ranks on one GPU of one host: each is on a host of its own."""
    host_of_its_own(int(os.environ["RANK"]))
    torch.cuda.set_device(0)


def job(device: str = "cuda:0", **options: Any) -> muster.MultiWorkerMirroredStrategy:
    """The strategy of a rank whose device is the only GPU, or of one replica on the CPU."""
    if device.startswith("cuda"):
        take_the_gpu()
    else:
        torch.set_num_threads(1)
    return muster.MultiWorkerMirroredStrategy.from_env([device], timeout=60.0, seed=1, **options)
