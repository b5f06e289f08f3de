"""run and reduce outside a step: evaluation over a prepared loader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import muster


@pytest.fixture
def strategy() -> Iterator[muster.MirroredStrategy]:
    with muster.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], timeout=60.0) as made:
        yield made


def loader_over(values: Tensor, batch_size: int, strategy: muster.Strategy) -> muster.Loader[list[Tensor]]:
    return strategy.prepare_loader(DataLoader(TensorDataset(values), batch_size=batch_size))


def test_every_sample_counts_once(strategy: muster.Strategy) -> None:
    values = torch.arange(10.0, dtype=torch.float64)
    total, seen = 0.0, 0
    for (x,) in loader_over(values, 4, strategy):
        sums = strategy.reduce(strategy.run(lambda x: {"total": x.sum(), "seen": len(x)}, x), "sum")
        total += float(sums["total"])
        seen += sums["seen"]
    assert (total, seen) == (45.0, 10)


def test_a_mean_weighs_each_part_by_its_size(strategy: muster.Strategy) -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])  # parts of 2, 1 and 1 samples
    ((x,),) = loader_over(values, 4, strategy)
    assert float(strategy.reduce(strategy.run(torch.mean, x))) == pytest.approx(4.0)


def test_an_empty_part_gives_none_and_contributes_nothing(strategy: muster.Strategy) -> None:
    ((x,),) = loader_over(torch.tensor([5.0, 7.0]), 2, strategy)
    results = strategy.run(torch.mean, x)
    assert results[2] is None
    assert float(strategy.reduce(results)) == 6.0
    assert strategy.gather(results).tolist() == [5.0, 7.0]


def test_a_sum_needs_no_part_sizes_and_a_mean_does(strategy: muster.Strategy) -> None:
    results = strategy.run(lambda: torch.ones(()))
    assert float(strategy.reduce(results, "sum")) == 3.0
    with pytest.raises(muster.InvalidArgument, match="weight="):
        strategy.reduce(results, "mean")
    weights = muster.PerReplica([1.0, 1.0, 2.0])
    assert float(strategy.reduce(results, "mean", weight=weights)) == 1.0


def test_backward_in_run_is_refused_there(strategy: muster.Strategy) -> None:
    module = torch.nn.Linear(2, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.ones(6, 2)
    strategy.step(lambda x: model(x).mean(), x)

    def saliency(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            model(x).mean().backward()
        return x.grad

    with pytest.raises(muster.InvalidArgument, match=r"backward\(\) was called inside run\(\) .*autograd\.grad"):
        strategy.run(saliency, x)
    assert strategy.step(lambda x: model(x).mean(), x).stepped
