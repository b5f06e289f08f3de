"""A worker that dies at any point: the others learn which within seconds, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from support.ranks import Ranks

DEADLINE_S = 5.0
WORKERS = 3


def _leftovers(folder: Path) -> list[Path]:
    return [*folder.glob("*muster*"), *Path("/dev/shm").glob("*muster*")]


def _die(how: str) -> None:
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _work(victim: int, how: str, seed: int, place: str, barrier: Any) -> tuple[str, int, float] | None:
    """Trains until the victim dies; for the others: the error, whom it names, and when it came."""
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        strategy = stack.enter_context(muster.MultiWorkerMirroredStrategy.from_env(timeout=60.0, bucket_bytes=4096))
        module = nn.Sequential(nn.Linear(64, 64), nn.SyncBatchNorm(64), nn.Linear(64, 8))
        if place == "prepare":
            return _lost_in_prepare(strategy, module, victim, how)
        model, _ = strategy.prepare(module, torch.optim.Adam(module.parameters(), lr=1e-3))
        x = torch.randn(12, 64)
        last_call = 3 + chance.randrange(6)
        if strategy.rank == victim and place == "anywhere":
            # The steps below take a few milliseconds each.
            threading.Timer(chance.random() * 0.2, _die, [how]).start()

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            if place == "step" and strategy.rank == victim and strategy.steps == last_call:
                _die(how)
            return loss + strategy.reduce(loss, "mean")

        died = None
        try:
            while True:
                died = time.monotonic()
                strategy.step(step, x)
                if place == "barrier" and strategy.rank == victim and strategy.steps == last_call:
                    _die(how)
                died = time.monotonic()
                strategy.barrier()
                if place == "run" and strategy.rank == victim and strategy.steps == last_call:
                    _die(how)
                died = time.monotonic()
                strategy.run(lambda x: strategy.gather(model(x)), x)
        except muster.PeerLost as error:
            lost = type(error).__name__, error.rank, time.monotonic() - died
        # Later calls say so, too, at once.
        started = time.monotonic()
        with pytest.raises(muster.CommError):
            strategy.step(step, x)
        assert time.monotonic() - started < DEADLINE_S
        return lost


def _lost_in_prepare(
    strategy: muster.Strategy, module: nn.Module, victim: int, how: str
) -> tuple[str, int, float] | None:
    strategy.barrier()
    if strategy.rank == victim:
        _die(how)
    started = time.monotonic()
    with pytest.raises(muster.PeerLost) as caught:
        strategy.prepare(module)
    return "PeerLost", caught.value.rank, time.monotonic() - started


CASES = [
    ("prepare", "kill"),
    ("step", "kill"),
    ("barrier", "exit"),
    ("run", "kill"),
    ("anywhere", "kill"),
]
MANY = [("anywhere", "exit" if seed % 2 else "kill") for seed in range(20)]


@pytest.mark.parametrize(
    ("seed", "place", "how"),
    [
        *((seed, place, how) for seed, (place, how) in enumerate(CASES)),
        *(pytest.param(100 + seed, place, how, marks=pytest.mark.long) for seed, (place, how) in enumerate(MANY)),
    ],
)
def test_the_others_raise_peer_lost_naming_it(
    seed: int, place: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    victim = seed % WORKERS
    ranks = Ranks(WORKERS, _work, victim, how, seed, place, None)
    results = ranks.results(timeout=100)
    for rank, result in enumerate(results):
        if rank == victim:
            assert result is None
            continue
        assert result is not None
        name, lost, seconds = result
        assert (name, lost) == ("PeerLost", victim)
        assert seconds < DEADLINE_S
    assert _leftovers(tmp_path) == []
