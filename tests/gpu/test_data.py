"""Batches of prepared loaders are copied to the GPU while it works, and are whole when a step reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from small_training import virtual
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import muster
from muster.copies import CopyStreams

ROWS, FEATURES, BATCHES = 64, 1 << 14, 24


class Fields(NamedTuple):
    """A structure whose kind must be kept."""

    values: Tensor
    name: str


class Numbered(Dataset[Any]):
    """Ready batches: all elements of batch i are i."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        return Fields(torch.full((ROWS, FEATURES), float(index)), str(index)), (torch.full((ROWS,), index),)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "pin_memory": True}], ids=str)
def test_batches_are_whole_behind_a_busy_device(device: torch.device, options: dict[str, Any], replicas: int) -> None:
    seen = []
    with muster.MirroredStrategy(virtual(device, replicas)) as strategy:
        for number, batch in enumerate(strategy.prepare_loader(DataLoader(Numbered(), None, **options))):
            parts = [batch] if replicas == 1 else list(zip(*batch, strict=True))
            for fields, (index,) in parts:
                assert type(fields) is Fields
                assert fields.name == str(number)
                assert fields.values.device.type == device.type
                if device.type == "cuda":
                    torch.cuda._sleep(2_000_000)  # copies get ahead of what reads them
                seen += [(fields.values - number).abs().sum(), (index - number).abs().sum()]
            del batch, parts, fields, index  # their memory may be given to a later batch now
    assert len(seen) == 2 * replicas * BATCHES
    assert all(float(each) == 0 for each in seen)


def test_what_is_enqueued_after_a_copy_does_not_wait_for_it(gpu: torch.device) -> None:
    streams = CopyStreams()
    values = torch.arange(1 << 20, dtype=torch.float32)
    (warm,), (arrival,) = streams.begin([gpu]), streams.begin([gpu])
    assert warm is not None
    assert arrival is not None
    warm.copy(values)
    warm.join()
    torch.cuda.synchronize()
    asleep, done, arrived = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(arrival.stream):  # which copies wait for
        torch.cuda._sleep(2_000_000_000)
        asleep.record()
    copied = arrival.copy(values)
    ones = torch.ones(10, device=gpu)
    done.record()
    done.synchronize()
    assert not asleep.query(), "the device's work waited for the copy"
    arrival.join()
    arrived.record()
    assert not arrived.query()
    assert torch.equal(copied.cpu(), values)
    assert float(ones.sum()) == 10


def test_a_host_that_runs_ahead_needs_no_more_memory(gpu: torch.device) -> None:
    peaks = []
    for sleeps in (False, True):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with muster.MirroredStrategy([str(gpu)]) as strategy:
            loader = strategy.prepare_loader(DataLoader(Numbered(), None))
            if sleeps:
                torch.cuda._sleep(1_000_000_000)
            for fields, _ in loader:
                fields.values.add_(1)
                if not sleeps:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_stats()["active_bytes.all.peak"])  # what waits for a stream is in use
    assert peaks[1] <= peaks[0] + 2 * ROWS * FEATURES * 4


def test_a_pass_that_was_left_early_does_not_disturb_the_next(gpu: torch.device) -> None:
    with muster.MirroredStrategy([str(gpu)]) as strategy:
        loader = strategy.prepare_loader(DataLoader(Numbered(), None, num_workers=1, persistent_workers=True))
        for last in (3, BATCHES - 1):
            for number, (fields, _) in enumerate(loader):
                torch.cuda._sleep(2_000_000)
                assert float((fields.values - number).abs().sum()) == 0
                if number == last:
                    break
