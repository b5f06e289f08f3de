"""run and reduce outside a step: evaluation over a prepared loader."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_a_mean_leaves_out_what_has_weight_0(strategy: muster.MirroredStrategy) -> None:
    def mean_of_positive(x: Tensor) -> tuple[Tensor, int]:
        positive = x[x > 0]
        return positive.mean(), len(positive)

    values = torch.tensor([1.0, 5.0, -1.0, 2.0])  # the second part has none
    ((x,),) = loader_over(values, 4, strategy)
    means = strategy.run(lambda x: mean_of_positive(x)[0], x)
    counts = strategy.run(lambda x: mean_of_positive(x)[1], x)
    assert float(strategy.reduce(means, "mean", weight=counts)) == pytest.approx(8 / 3)

    def inside(x: Tensor) -> Tensor:
        mean, count = mean_of_positive(x)
        return strategy.reduce(mean, "mean", weight=float(count))

    assert [float(mean) for mean in strategy.run(inside, x)] == pytest.approx([8 / 3] * 3)


IN_GERMAN = """
import locale
import torch
import muster
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
with muster.MirroredStrategy(["cpu", "cpu"]) as strategy:
    module = torch.nn.Linear(2, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.arange(10.0).view(5, 2)
    result = strategy.step(lambda x: muster.Loss(model(x).mean(), metrics={"acc": x.mean()}), x)
    assert {name: float(value) for name, value in result.metrics.items()} == {"acc": 4.5}, result.metrics
    assert float(strategy.reduce(strategy.run(torch.mean, x), "mean")) == 4.5
"""


def test_numbers_are_the_same_in_any_locale(tmp_path: Path) -> None:
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    if shutil.which("localedef") is None or subprocess.run(made, check=False).returncode != 0:
        pytest.skip("no locales can be made here: apt-get install locales")
    environment = {**os.environ, "LOCPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", IN_GERMAN], env=environment, check=True)


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
