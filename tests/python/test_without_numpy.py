"""Muster without NumPy, which is no dependency of it."""

from __future__ import annotations

import os
import subprocess
import sys

from support.ranks import environment, free_port

PROGRAM = """
import os, sys
sys.modules["numpy"] = None
import torch, muster
import muster.horovod as hvd

with muster.MultiWorkerMirroredStrategy.from_env(["cpu"], timeout=60.0) as strategy:
    module = torch.nn.Linear(4, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert strategy.step(lambda x: model(x).square().mean(), torch.ones(3, 4) * (strategy.rank + 1)).stepped

for variables in ({}, {"HOROVOD_HOSTNAME": os.environ["RANK"]}):  # in memory, and over a process group
    os.environ.update(variables)
    hvd.init()
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": 0}, {"rank": 1}]
    assert hvd.broadcast_object("x" * 2000 if hvd.rank() == 0 else None) == "x" * 2000
    hvd.shutdown()
"""


def test_workers_step_and_exchange_objects() -> None:
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **environment(rank, 2, port)}, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
