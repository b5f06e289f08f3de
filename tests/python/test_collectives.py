"""reduce, gather, broadcast, barrier and run outside a step, and what cannot travel inside one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import muster
from muster import PerReplica
from support.jobs import Launcher, part_of


def own(strategy: muster.Strategy, make: Any) -> PerReplica[Any]:
    return PerReplica([make(strategy.first_replica + i) for i in range(len(strategy.devices))])


def reduced(strategy: muster.Strategy) -> Any:
    value = own(
        strategy,
        lambda r: {
            "t": torch.full((2, 3), float(r)),
            "int": r,
            "list": [float(r), (r > 0, None)],
            "empty": torch.zeros(0),
        },
    )
    return {op: strategy.reduce(value, op) for op in ("sum", "mean", "min", "max")}


def test_structures_are_reduced_leaf_by_leaf(job: Launcher) -> None:
    replicas = np.arange(job.replicas)
    for results in job(reduced):
        for op, fn in (("sum", np.sum), ("mean", np.mean), ("min", np.min), ("max", np.max)):
            result = results[op]
            expected = fn(replicas)
            np.testing.assert_array_equal(result["t"], np.full((2, 3), expected, dtype=np.float32))
            assert result["int"] == expected
            assert result["list"][0] == expected
            assert result["list"][1][0] == fn(replicas > 0)
            assert result["list"][1][1] is None
            assert result["empty"].shape == (0,)
            assert type(result["int"]) is (float if op == "mean" else int)
            assert type(result["list"][1][0]) is {"sum": int, "mean": float, "min": bool, "max": bool}[op]


def means_of_low_precision(strategy: muster.Strategy, dtype: torch.dtype) -> list[Any]:
    def mean(value: float) -> Tensor:
        value = torch.full((3,), value, dtype=dtype, requires_grad=True)  # type: ignore[assignment]
        result = cast(Tensor, strategy.reduce(value, "mean", weight=64))
        assert result.dtype == dtype
        return result.detach().float()

    inside = strategy.run(lambda: mean(50000.0))
    return [*inside, mean(50000.0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_low_precision_fits_whatever_its_weights_are(job: Launcher, dtype: torch.dtype) -> None:
    expected = torch.full((3,), 50000.0, dtype=dtype).float().numpy()
    for means in job(means_of_low_precision, dtype):
        for mean in means:
            np.testing.assert_array_equal(mean, expected)


def of_workers(strategy: muster.Strategy) -> Any:
    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16) * (strategy.rank + 1)
    return (
        strategy.reduce(strategy.rank + 1, "sum"),
        strategy.reduce(float(strategy.rank), "mean", weight=strategy.rank + 1),
        strategy.reduce(half, "sum").float(),
        strategy.reduce(torch.tensor([2**40 + strategy.rank]), "sum"),
        strategy.gather(strategy.rank),
        strategy.gather(torch.arange(strategy.rank + 1)),
        strategy.gather({"int": 1.5, "bool": True}),
    )


def test_a_plain_value_is_this_workers(job: Launcher) -> None:
    ranks = np.arange(max(job.workers, 1))
    for total, mean, half, large, gathered, ragged, named in job(of_workers):
        assert total == (ranks + 1).sum()
        assert mean == pytest.approx(float((ranks * (ranks + 1)).sum() / (ranks + 1).sum()))
        np.testing.assert_array_equal(half, np.array([1.0, 2.0]) * (ranks + 1).sum())
        assert large[0] == len(ranks) * 2**40 + ranks.sum()
        assert gathered.tolist() == ranks.tolist()
        assert ragged.tolist() == [i for rank in ranks for i in range(rank + 1)]
        assert named["int"].tolist() == [1.5] * len(ranks)
        assert named["bool"].tolist() == [True] * len(ranks)


def evaluated(strategy: muster.Strategy, rows: int) -> Any:
    x = part_of(strategy, torch.arange(rows, dtype=torch.float64))
    result = strategy.run(lambda x: {"mean": x.mean(), "x": x, "n": len(x)}, x)
    means = PerReplica([None if part is None else part["mean"] for part in result])
    return (
        [part is None for part in result],
        strategy.reduce(result, "sum")["n"] if rows % strategy.num_replicas == 0 else rows,
        strategy.reduce(strategy.run(lambda x: x.mean(), x)),
        strategy.reduce(means, weight=PerReplica([0 if p is None else p["n"] for p in result])),
        strategy.gather(strategy.run(lambda x: x * 2, x)),
        strategy.gather(strategy.run(lambda x: x.sum(), x)),
    )


@pytest.mark.parametrize("rows", [12, 11, 2, 1])
def test_what_run_returns_is_weighed_by_the_parts_sizes(job: Launcher, rows: int) -> None:
    sizes = [len(part) for part in np.array_split(np.arange(rows), job.replicas)]
    results = job(evaluated, rows)
    assert [empty for result in results for empty in result[0]] == [size == 0 for size in sizes]
    for _, count, mean, given, gathered, sums in results:
        assert count == rows
        assert mean == pytest.approx((rows - 1) / 2, rel=1e-12)
        assert given == pytest.approx((rows - 1) / 2, rel=1e-12)
        assert gathered.tolist() == [2.0 * i for i in range(rows)]
        assert len(sums) == sum(size > 0 for size in sizes) and sums.sum() == rows * (rows - 1) / 2


def broadcasting(strategy: muster.Strategy, source: int) -> Any:
    value = {
        "t": torch.full((strategy.rank + 1,), float(strategy.rank)),
        "text": f"rank {strategy.rank}",
        "numbers": [strategy.rank, 0.5, True, None],
    }
    sent = strategy.broadcast(value, source)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = strategy.prepare(module)
    with torch.no_grad():
        for tensor in [*module.parameters(), module[1].running_mean]:
            tensor.fill_(strategy.rank + 10)
    assert strategy.broadcast(model, source) is model
    in_replicas = strategy.run(
        lambda x: [float(model[0].weight[0, 0]), float(model[1].running_mean[0])],
        own(strategy, lambda r: torch.zeros(1)),
    )
    return sent, list(in_replicas)


def sending(strategy: muster.Strategy) -> Any:
    value = {"name": "chief", "turned": torch.arange(6.0).view(2, 3).t()} if strategy.rank == 0 else None
    sent = strategy._collectives.send(value)
    assert strategy._collectives.send(None) is None
    return None if sent is None else {"name": sent["name"], "turned": sent["turned"].tolist()}


def test_what_the_chief_sends_comes_to_the_others(job: Launcher) -> None:
    chiefs, *others = job(sending)
    assert chiefs is None
    assert all(sent == {"name": "chief", "turned": [[0, 3], [1, 4], [2, 5]]} for sent in others)


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_gives_every_rank_the_sources_value(job: Launcher, source: int) -> None:
    if source >= max(job.workers, 1):
        pytest.skip("no such rank")
    for sent, in_replicas in job(broadcasting, source):
        assert sent["t"].tolist() == [float(source)] * (source + 1)
        assert sent["text"] == f"rank {source}"
        assert sent["numbers"] == [source, 0.5, True, None]
        assert in_replicas == [[source + 10.0] * 2] * job.local_replicas


def inside(strategy: muster.Strategy) -> Any:
    x = part_of(strategy, torch.arange(2 * strategy.num_replicas))

    def fn(x: Tensor) -> Any:
        r = strategy.replica
        last = strategy.num_replicas - 1
        strategy.barrier()
        return (
            strategy.broadcast({"text": f"replica {r}" * (r + 1), "n": r, "t": torch.tensor([r])}, last),
            strategy.gather({"int": r, "t": torch.full((r % 3,), r)}),
            strategy.reduce((r, float(r), r > 0), "max"),
            strategy.reduce({"n": r}, "sum"),
        )

    return list(strategy.run(fn, x))


def test_inside_a_step_they_act_between_replicas(job: Launcher) -> None:
    n = job.replicas
    for results in job(inside):
        for sent, gathered, highest, total in results:
            assert sent["text"] == f"replica {n - 1}" * n and sent["n"] == n - 1 and sent["t"].tolist() == [n - 1]
            assert gathered["int"].tolist() == list(range(n))
            assert gathered["t"].tolist() == [r for r in range(n) for _ in range(r % 3)]
            assert highest == (n - 1, float(n - 1), n > 1)
            assert total == {"n": sum(range(n))}


def of_modules(strategy: muster.Strategy, source: int) -> Any:
    model = strategy.prepare(nn.BatchNorm1d(2))

    def fn(x: Tensor) -> tuple[float, float]:
        model.running_mean.fill_(10.0 + strategy.replica)
        strategy.barrier()
        assert strategy.broadcast(model, source) is model
        return float(model.running_mean[0]), float(model.weight[0])

    return list(strategy.run(fn, own(strategy, lambda r: torch.zeros(1))))


@pytest.mark.parametrize("source", [0, 1])
def test_inside_a_step_each_replicas_module_takes_the_sources_values(job: Launcher, source: int) -> None:
    if source >= job.replicas:
        pytest.skip("no such replica")
    for in_replicas in job(of_modules, source):
        assert in_replicas == [(10.0 + source, 1.0)] * job.local_replicas


def of_the_source_alone(strategy: muster.Strategy) -> Any:
    values = ("x" * 300, 7, -0.5, True, {"a": ("b", [1, None])}, {"text": 1, 2: "tensor"})

    def fn(x: Tensor) -> Any:
        return [strategy.broadcast(value if strategy.replica == 0 else None, 0) for value in values] + [
            strategy.broadcast((1, "one") if strategy.replica == 0 else 1.0, 0)
        ]

    return values, list(strategy.run(fn, own(strategy, lambda r: torch.zeros(1))))


def test_inside_a_step_the_source_alone_says_what_a_value_without_tensors_is(job: Launcher) -> None:
    for values, in_replicas in job(of_the_source_alone):
        for sent in in_replicas:
            assert sent == [*values, (1, "one")] and [type(v) for v in sent[:4]] == [str, int, float, bool]


def refused(strategy: muster.Strategy) -> None:
    with pytest.raises(muster.InvalidArgument, match=r"value\['a'\]\[1\].*set cannot travel"):
        strategy.reduce({"a": [1, {2}]})
    with pytest.raises(muster.InvalidArgument, match="op="):
        strategy.reduce(1, "product")  # type: ignore[arg-type]
    with pytest.raises(muster.InvalidArgument, match="source=9"):
        strategy.broadcast(1, 9)
    with pytest.raises(muster.InvalidArgument, match="every part was empty"):
        strategy.reduce(PerReplica([None] * len(strategy.devices)))
    with pytest.raises(muster.InvalidArgument, match="no step"):
        strategy._core.barrier_in_step()
    if strategy.num_workers > 1:
        for value in (
            torch.zeros(2 + strategy.rank),
            torch.zeros(2, dtype=[torch.float32, torch.int64][strategy.rank]),
        ):
            with pytest.raises(muster.LayoutMismatch, match=r"rank 0 has.*rank 1 has"):
                strategy.reduce(value)
        for structure in ([{"a": 1}, {"b": 1}][strategy.rank], [1, 1.0][strategy.rank]):
            with pytest.raises(muster.LayoutMismatch, match="differ in structure"):
                strategy.reduce(structure)
        with pytest.raises(muster.LayoutMismatch):
            strategy.gather(torch.zeros(2, 2 + strategy.rank))
        ops: list[tuple[Any, Any]] = [("min", "max"), ("sum", "mean")]
        calls: list[Callable[[], object]] = [
            *(lambda both=both: strategy.reduce(torch.tensor(1.0), both[strategy.rank]) for both in ops),  # type: ignore[misc]
            lambda: strategy.broadcast(torch.ones(1), 1 - strategy.rank),
            lambda: strategy.reduce(1.0, "sum") if strategy.rank else strategy.gather(torch.ones(1)),
            lambda: strategy.reduce(1.0, "sum") if strategy.rank else strategy.broadcast(torch.ones(1), 0),
        ]
        for call in calls:
            with pytest.raises(muster.LayoutMismatch, match=r"ranks disagree: rank \d called .*, rank \d "):
                call()
    assert strategy.reduce(1, "sum") == strategy.num_workers
    strategy.barrier()


def test_what_cannot_be_reduced_is_refused_on_every_rank(job: Launcher) -> None:
    job(refused)


def ragged_tails(strategy: muster.Strategy) -> Any:
    """Evaluation over a loader: every sample once, in order."""
    data = torch.utils.data.TensorDataset(torch.arange(13))
    loader = strategy.prepare(torch.utils.data.DataLoader(data, batch_size=4))
    seen = []
    for (x,) in loader:
        seen += strategy.gather(strategy.run(lambda x: x, x)).tolist()
    return seen


def test_gather_after_run_keeps_the_loaders_order(job: Launcher) -> None:
    for seen in job(ragged_tails):
        assert seen == list(range(13))
