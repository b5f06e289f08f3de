"""ShardedEmbedding is torch's sparse embedding on every strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from support.jobs import Launcher, WorkerPool, make_job, part_of

ROWS, DIM = 60, 7


def first_weight(seed: int = 5) -> Tensor:
    return muster.ShardedEmbedding(ROWS, DIM, seed=seed).weight.detach().clone()


def gradient_of(module: nn.Module, *args: Any) -> tuple[Tensor, Tensor]:
    output = module(*args)
    weights = torch.arange(output.numel(), dtype=torch.float32).view(output.shape)
    (output * weights).sum().backward()
    return output.detach(), module.get_parameter("weight").grad


def ids_of(*shape: int) -> Tensor:
    return torch.randint(ROWS, shape, generator=torch.Generator().manual_seed(1))


# Mode, and what the module is called with.
CALLS: list[tuple[str | None, tuple[Tensor | None, ...]]] = [
    (None, (ids_of(9),)),
    (None, (ids_of(2, 3, 4).int(),)),
    (None, (ids_of(0),)),
    (None, (ids_of(1)[0],)),
    ("sum", (ids_of(4, 5),)),
    ("mean", (ids_of(4, 5),)),
    ("sum", (ids_of(9), torch.tensor([0, 3, 3, 8]))),
    ("mean", (ids_of(9), torch.tensor([0, 3, 3, 8]))),
    ("sum", (ids_of(9), torch.tensor([0, 3, 3, 8]), torch.rand(9))),
    ("sum", (ids_of(4, 5), None, torch.rand(4, 5))),
]


@pytest.mark.parametrize(("mode", "args"), CALLS)
def test_it_computes_what_torch_computes(mode: Any, args: tuple[Any, ...]) -> None:
    ours = muster.ShardedEmbedding(ROWS, DIM, mode=mode)
    if mode is None:
        theirs: nn.Module = nn.Embedding(ROWS, DIM, sparse=True, _weight=ours.weight.detach().clone())
    else:
        theirs = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True, _weight=ours.weight.detach().clone())
    output, gradient = gradient_of(ours, *args)
    expected, expected_gradient = gradient_of(theirs, *args)
    assert torch.equal(output, expected)
    assert gradient.is_sparse and expected_gradient.is_sparse
    assert torch.equal(gradient.to_dense(), expected_gradient.to_dense())


@pytest.mark.parametrize("mode", [None, "sum"])
@pytest.mark.parametrize("bad", [ROWS, -1, 2**40])
def test_an_id_outside_the_table_is_named(mode: Any, bad: int) -> None:
    embedding = muster.ShardedEmbedding(ROWS, DIM, mode=mode)
    ids = ids_of(4, 3)
    ids[2, 1] = bad
    with pytest.raises(muster.InvalidArgument, match=rf"id {bad} is not in \[0, {ROWS}\)"):
        embedding(ids)


def test_what_it_cannot_be_is_refused() -> None:
    for sizes in ((0, 3), (3, 0), (-1, 3)):
        with pytest.raises(muster.InvalidArgument):
            muster.ShardedEmbedding(*sizes)
    wrong: list[dict[str, Any]] = [
        {"mode": "max"}, {"init": "zeros"}, {"scale": -1.0}, {"scale": float("inf")}, {"seed": -1}, {"seed": 2**64},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(muster.InvalidArgument, match=next(iter(options))):
            muster.ShardedEmbedding(3, 3, **options)
    plain = muster.ShardedEmbedding(3, 3)
    with pytest.raises(muster.InvalidArgument, match="int64 or int32, not float32"):
        plain(torch.tensor([1.5, 2.5]))
    with pytest.raises(muster.InvalidArgument, match="bags"):
        plain(torch.tensor([0, 1]), torch.tensor([0]))
    with pytest.raises(muster.InvalidArgument, match="bags"):
        plain(torch.tensor([0, 1]), per_sample_weights=torch.rand(2))


def test_first_values_follow_from_seed_and_row() -> None:
    small, large = muster.ShardedEmbedding(10, 4, seed=3), muster.ShardedEmbedding(1000, 4, seed=3)
    assert torch.equal(small.weight, large.weight[:10])
    assert not torch.equal(small.weight, muster.ShardedEmbedding(10, 4, seed=4).weight)
    torch.manual_seed(1)
    drawn = [muster.ShardedEmbedding(10, 4).weight for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(1)
    assert torch.equal(muster.ShardedEmbedding(10, 4).weight, drawn[0])
    with torch.no_grad():
        small.weight.zero_()
    small.reset_parameters()
    assert torch.equal(small.weight, large.weight[:10])

    normal = muster.ShardedEmbedding(1000, 100, scale=0.5, seed=0).weight
    assert normal.mean().abs() < 0.01 and (normal.std() - 0.5).abs() < 0.01
    uniform = muster.ShardedEmbedding(1000, 100, init="uniform", scale=0.5, seed=0).weight
    assert uniform.abs().max() <= 0.5 and (uniform.std() - 0.5 / 3**0.5).abs() < 0.01


class Model(nn.Module):
    """A sparse table of either kind, a bag of it, and a dense layer."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.dense = nn.Linear(2 * DIM, 3)
        rows, bags = first_weight(5), first_weight(6)
        if ours:
            self.rows: nn.Module = muster.ShardedEmbedding(ROWS, DIM, seed=5)
            self.bags: nn.Module = muster.ShardedEmbedding(ROWS, DIM, mode="mean", seed=6)
        else:
            self.rows = nn.Embedding(ROWS, DIM, sparse=True, _weight=rows)
            self.bags = nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=True, _weight=bags)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(torch.cat([self.rows(ids[:, 0]), self.bags(ids)], 1))


def make_optimizer(name: str, model: Model) -> torch.optim.Optimizer:
    groups = [
        {"params": [model.rows.weight, model.bags.weight], "lr": 0.5},
        {"params": model.dense.parameters(), "lr": 0.1},
    ]
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    return kinds[name](groups)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randint(ROWS, (13, 4), generator=generator), torch.randint(3, (13,), generator=generator))
        for _ in range(steps)
    ]


def train(strategy: muster.Strategy, name: str, ours: bool) -> Any:
    module = Model(ours)
    model, _ = strategy.prepare(module, make_optimizer(name, module))
    for ids, labels in batches(12):
        strategy.step(lambda i, y: F.cross_entropy(model(i), y), *part_of(strategy, (ids, labels)))
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_strategy_gives_the_bits_of_torchs_embedding(name: str, accumulate: int, two_workers: WorkerPool) -> None:
    for replicas, jobs in {2: ["mirrored-2", "workers-2"], 4: ["mirrored-4", "workers-2x2"]}.items():
        reference, *_ = make_job(f"mirrored-{replicas}", two_workers)(train, name, False, accumulate=accumulate)
        for job in jobs:
            for rank, values in enumerate(make_job(job, two_workers)(train, name, True, accumulate=accumulate)):
                for expected, value in zip(reference, values, strict=True):
                    assert np.array_equal(value, expected), f"{job}, rank {rank}"


def test_one_replica_is_torch_alone() -> None:
    """SGD of the sums that torch's embedding gives; rows that were not used stay."""
    theirs = Model(ours=False)
    stepper = make_optimizer("sgd", theirs)
    used = set()
    for ids, labels in batches(2):
        stepper.zero_grad()
        F.cross_entropy(theirs(ids), labels).backward()
        stepper.step()
        used |= set(ids.flatten().tolist())
    with muster.MirroredStrategy(["cpu"]) as strategy:
        module = Model(ours=True)
        model, _ = strategy.prepare(module, make_optimizer("sgd", module))
        for ids, labels in batches(2):
            strategy.step(lambda i, y: F.cross_entropy(model(i), y), ids, labels)
    for ours, expected in zip(module.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    unused = [row for row in range(ROWS) if row not in used]
    assert unused and torch.equal(module.bags.get_parameter("weight")[unused], first_weight(6)[unused])


def row_wise_alone(module: Model, steps: int) -> list[Tensor]:
    """The definition, in fp64: weights and accumulators after `steps` of row-wise Adagrad with lr=0.5."""
    weights = [module.rows.weight.detach().double(), module.bags.weight.detach().double()]
    sums = [torch.zeros(ROWS, 1, dtype=torch.double) for _ in weights]
    for ids, labels in batches(steps):
        leaves = [weight.clone().requires_grad_() for weight in weights]
        rows, bags = leaves
        features = torch.cat([rows[ids[:, 0]], bags[ids].mean(1)], 1)
        F.cross_entropy(F.linear(features, module.dense.weight.double(), module.dense.bias.double()), labels).backward()
        for weight, total, leaf in zip(weights, sums, leaves, strict=True):
            gradient = leaf.grad
            assert gradient is not None
            total += gradient.square().mean(1, keepdim=True)
            weight -= torch.where(total > 0, 0.5 / (total.sqrt() + 1e-10) * gradient, 0)
    return [*weights, *sums]


def row_wise(module: Model) -> torch.optim.Optimizer:
    for embedding in (module.rows, module.bags):
        embedding.row_wise_adagrad = True
    module.dense.requires_grad_(False)
    return torch.optim.Adagrad([module.rows.weight, module.bags.weight], lr=0.5)


def train_row_wise(strategy: muster.Strategy) -> Any:
    module = Model(ours=True)
    model, optimizer = strategy.prepare(module, row_wise(module))
    for ids, labels in batches(12):
        strategy.step(lambda i, y: F.cross_entropy(model(i), y), *part_of(strategy, (ids, labels)))
    sums = [optimizer.state_dict()["state"][position]["sum"] for position in range(2)]
    return [module.rows.weight.detach(), module.bags.weight.detach(), *sums]


def test_row_wise_adagrad_is_its_definition_on_every_strategy(two_workers: WorkerPool) -> None:
    expected = row_wise_alone(Model(ours=True), 12)
    (alone,) = make_job("mirrored-1", two_workers)(train_row_wise)
    for value, wanted in zip(alone, expected, strict=True):
        assert value.shape == wanted.shape
        np.testing.assert_allclose(value, wanted.float().numpy(), rtol=1e-5, atol=1e-6)
    for replicas, jobs in {2: ["workers-2"], 4: ["workers-2x2"]}.items():
        reference, *_ = make_job(f"mirrored-{replicas}", two_workers)(train_row_wise)
        for job in jobs:
            for values in make_job(job, two_workers)(train_row_wise):
                for value, wanted in zip(values, reference, strict=True):
                    assert np.array_equal(value, wanted), job


def test_row_wise_adagrad_takes_over_a_state_of_the_weights_shape() -> None:
    module = Model(ours=True)
    optimizer = row_wise(module)
    whole = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    optimizer.state[module.rows.weight]["sum"] = whole
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model, optimizer = strategy.prepare(module, optimizer)
        used, labels = batches(1)[0]
        strategy.step(lambda i, y: F.cross_entropy(model(i), y), used, labels)
        unused = [row for row in range(ROWS) if row not in used[:, 0].tolist()]
        taken = optimizer.state[module.rows.weight]["sum"]
        torch.testing.assert_close(taken[unused], whole.mean(1, keepdim=True)[unused])


def test_row_wise_adagrad_refuses_a_dense_gradient() -> None:
    module = muster.ShardedEmbedding(4, 2, row_wise_adagrad=True)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        strategy.prepare(module, torch.optim.Adagrad(module.parameters(), lr=0.1))
        with pytest.raises(muster.InvalidArgument, match="dense gradient"):
            strategy.step(lambda _: module.weight.sum(), torch.tensor([1]))


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({}, lambda weights: torch.optim.SGD(weights, lr=0.1)),
        ({}, lambda weights: torch.optim.Adagrad(weights, lr=0.1, weight_decay=0.1)),
        ({}, lambda weights: torch.optim.SparseAdam(weights, lr=0.1)),
        ({"fuse": False}, lambda weights: torch.optim.Adagrad(weights, lr=0.1)),
    ],
)
def test_row_wise_adagrad_needs_a_flat_adagrad(options: dict[str, Any], optimizer: Any) -> None:
    module = muster.ShardedEmbedding(4, 2, row_wise_adagrad=True)
    with muster.MirroredStrategy(["cpu"], **options) as strategy:
        model, _ = strategy.prepare(module, optimizer([module.weight]))
        with pytest.raises(muster.InvalidArgument, match=r"row_wise_adagrad.* needs .*Adagrad"):
            strategy.step(lambda ids: model(ids).sum(), torch.tensor([1]))


def write_first(strategy: muster.Strategy) -> Any:
    module = muster.ShardedEmbedding(4, 2, seed=0)
    with torch.no_grad():
        module.weight.copy_(torch.arange(8.0).view(4, 2) + 100 * strategy.rank)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    (ids,) = part_of(strategy, (torch.tensor([1, 3, 3, 1]),))
    strategy.step(lambda i: muster.Loss(model(i).sum(), reduction="sum"), ids)
    return module.weight.detach()


def test_the_chiefs_weight_may_be_written_before_prepare(wide_job: Launcher) -> None:
    expected = np.arange(8.0).reshape(4, 2)
    expected[[1, 3]] -= 2
    for weight in wide_job(write_first):
        assert np.array_equal(weight, expected)


def fail_in_a_step(strategy: muster.Strategy) -> Any:
    module = muster.ShardedEmbedding(4, 2, seed=0)
    before = module.weight.detach().clone()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    first, second = part_of(strategy, (torch.tensor([0, 1, 2, 4]),)), part_of(strategy, (torch.tensor([0, 1, 2, 3]),))
    try:
        strategy.step(lambda i: model(i).sum(), *first)
        outcome = "nothing"
    except (muster.InvalidArgument, muster.RemoteError) as error:
        outcome = str(error)
    unchanged = torch.equal(module.weight, before)
    return outcome, unchanged, strategy.step(lambda i: model(i).sum(), *second).stepped


def test_a_bad_id_in_a_step_drops_the_window_and_training_goes_on(wide_job: Launcher) -> None:
    outcomes = wide_job(fail_in_a_step)
    assert all("id 4 is not in [0, 4)" in outcome for outcome, _, _ in outcomes)
    assert all(unchanged and stepped for _, unchanged, stepped in outcomes)


def test_partitioners() -> None:
    assert muster.FixedShards(4)((10,), torch.float32) == [3, 3, 2, 2]
    assert muster.FixedShards(4)((2, 100), torch.float32) == [1, 1]
    assert muster.MinSize(4, 2)((6, 1), torch.float32) == [3, 3]
    assert muster.MinSize(min_shard_bytes=4, max_shards=10)((6, 1), torch.float32) == [1] * 6
    assert muster.MinSize()(torch.Size([1000, 1000]), torch.float32) == [1000]
    assert muster.MaxSize(4)((6, 1), torch.float32) == [1] * 6
    assert muster.MaxSize(4, max_shards=2)((6, 1), torch.float32) == [3, 3]
    assert muster.MaxSize(1024)((6, 1), torch.float32) == [6]
    for wrong in (lambda: muster.FixedShards(0), lambda: muster.MinSize(0), lambda: muster.MaxSize(1, 0)):
        with pytest.raises(muster.InvalidArgument):
            wrong()
    with pytest.raises(muster.InvalidArgument):
        muster.FixedShards(2)((), torch.float32)
