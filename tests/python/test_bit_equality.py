"""Switching strategy changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.ranks import run_ranks
from support.training import Config, train_mirrored, train_worker

CONFIGS = [
    Config(),
    Config(accumulate=3, optimizer="adagrad", checkpointing="reentrant", bucket_bytes=4096),
    Config(optimizer="adamw", clip_norm=0.5, checkpointing="non-reentrant"),
    Config(accumulate=3, norm=True, clip_norm=0.05),
    Config(model="text", optimizer="sgd", batch_size=37, clip_norm=1.0),
    Config(model="text", optimizer="adamw", batch_size=37, accumulate=3, checkpointing="reentrant"),
    Config(model="text", optimizer="adagrad", batch_size=37, checkpointing="non-reentrant"),
]


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_mirrored_replicas_and_worker_processes_give_the_same_bits(workers: int, replicas: int) -> None:
    mirrored = train_mirrored(workers * replicas, CONFIGS)
    for rank, results in enumerate(run_ranks(workers, train_worker, replicas, CONFIGS)):
        for config, expected, actual in zip(CONFIGS, mirrored, results, strict=True):
            where = f"rank {rank}, {config}"
            assert np.array_equal(actual.parameters, expected.parameters), where
            assert np.array_equal(actual.buffers, expected.buffers), where
            if config.accumulate == 1:
                assert actual.losses == expected.losses, where
            assert np.isfinite(actual.parameters).all()


def test_training_twice_gives_the_same_bits_and_another_seed_others() -> None:
    config = Config(steps=10)
    first, second = train_mirrored(2, [config, config])
    assert np.array_equal(first.parameters, second.parameters)
    assert len(set(first.losses)) == len(first.losses)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_replicas_follow_one_process_on_the_whole_batch(replicas: int, accumulate: int) -> None:
    digits = Config(dropout=0.0, accumulate=accumulate)
    text = Config(model="text", dropout=0.0, batch_size=37, optimizer="adamw", accumulate=accumulate, steps=30)
    double = Config(**{**vars(text), "dtype": torch.float64})
    one = train_mirrored(1, [digits, text, double])
    many = train_mirrored(replicas, [digits, text, double])
    assert distance(many[0].parameters, one[0].parameters) < 1e-5
    assert distance(many[2].parameters, one[2].parameters) < 1e-9
    assert max(abs(a - b) for a, b in zip(many[1].losses, one[1].losses, strict=True)) < 1e-3
