"""FlatLayout on real parameters: every slot holds its parameter as it lies in memory. Details: flat_layout_test.cpp."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import muster
from muster._C import _FlatLayout


def layout_of(
    parameters: list[tuple[str, torch.Tensor]], order: list[int] | None = None, bucket_bytes: int = 1 << 20
) -> _FlatLayout:
    return _FlatLayout(parameters, order or [], bucket_bytes, bucket_bytes)


def sample() -> list[tuple[str, torch.Tensor]]:
    net = nn.Sequential(nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.Linear(7, 9)).to(memory_format=torch.channels_last)
    extra = {
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
        "transposed": torch.randn(4, 6).t(),
        "expanded": torch.randn(6).expand(4, 6),
        "double": torch.randn(5, dtype=torch.float64),
        "half": torch.randn(5, dtype=torch.bfloat16),
    }
    return [*net.named_parameters(), *extra.items()]


@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_slots_hold_their_parameters(bucket_bytes: int) -> None:
    parameters = sample()
    layout = layout_of(parameters, bucket_bytes=bucket_bytes)
    buckets = [torch.zeros(numel, dtype=dtype) for dtype, numel, _ in layout.buckets]
    views = []
    for (_, parameter), (bucket, offset, numel, strides) in zip(parameters, layout.slots, strict=True):
        assert numel == parameter.numel()
        view = buckets[bucket].as_strided(parameter.shape, strides, offset)
        view.copy_(parameter)
        views.append(view)
    for (name, parameter), view in zip(parameters, views, strict=True):
        assert torch.equal(view, parameter.to(view.dtype)), name
        if name != "expanded":
            assert view.stride() == parameter.stride(), name
    assert sum(len(members) for _, _, members in layout.buckets) == len(parameters)


def test_the_digest_agrees_and_differences_are_named() -> None:
    here, there = sample(), sample()
    assert layout_of(here).digest == layout_of(there).digest
    assert _FlatLayout.describe_difference(layout_of(here), layout_of(there)) == ""
    there[0] = ("0.weight", torch.zeros(8, 3, 3, 3))
    assert layout_of(here).digest != layout_of(there).digest
    difference = _FlatLayout.describe_difference(layout_of(here), layout_of(there))
    assert difference == "parameter '0.weight' has shape [8, 3, 5, 5] here and [8, 3, 3, 3] there"


def test_the_order_counts() -> None:
    parameters = [("a", torch.zeros(3)), ("b", torch.zeros(3))]
    assert layout_of(parameters).order == [1, 0]
    assert layout_of(parameters, [0, 1]).order == [0, 1]
    with pytest.raises(muster.InvalidArgument, match="order"):
        layout_of(parameters, [0, 0])


def test_integers_are_refused_by_name() -> None:
    with pytest.raises(muster.InvalidArgument, match="'steps'"):
        layout_of([("steps", torch.zeros(3, dtype=torch.int64))])
