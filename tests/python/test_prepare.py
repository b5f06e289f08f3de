"""prepare: what it refuses, what it keeps, and what a prepared module still does."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, TensorDataset

import muster
from muster import Replicated
from support.jobs import Launcher, WorkerPool, part_of
from support.ranks import environment


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def sgd(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


X = torch.linspace(-1, 1, 32).view(8, 4)


# --- what is refused --------------------------------------------------------------------------------------------------
class Scaled(nn.Module):
    """Forward may put its buffer elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(()))
        self.moves = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale.detach()
        if self.moves:
            self.scale = torch.ones((), device="meta")
        return x


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_buffer_that_is_put_on_another_device_is_named(replicas: int) -> None:
    module = Scaled()
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        model, _ = strategy.prepare(module, sgd(module))
        strategy.step(lambda x: loss_of(model, x), X)
        model.moves = True
        for _ in range(2):
            with pytest.raises(muster.InvalidArgument, match=r"buffer 'scale' is on meta since prepare.*on cpu"):
                strategy.step(lambda x: loss_of(model, x), X)


@pytest.mark.parametrize("replicas", [1, 2])
def test_modules_of_inference_tensors_are_refused_by_name(replicas: int) -> None:
    with torch.inference_mode():
        made = build()
    with_buffer = build()
    with torch.inference_mode():
        with_buffer[1].running_mean = torch.zeros(5)
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        with pytest.raises(muster.InvalidArgument, match=r"'0\.weight' of the module was made in inference mode"):
            strategy.prepare(made)
        with pytest.raises(muster.InvalidArgument, match=r"'1\.running_mean' of the module was made in inference mode"):
            strategy.prepare(with_buffer)
        module = build()
        with torch.inference_mode():
            model = strategy.prepare(module)
        assert strategy.run(model, X)[0].shape[1] == 2


def differing_models(strategy: muster.Strategy) -> list[str]:
    messages = []
    rank = strategy.rank
    for module in (
        nn.Sequential(nn.Linear(4, 5 + rank)),
        nn.ModuleDict({f"layer{rank}": nn.Linear(4, 4)}),
        nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]),
        nn.Linear(2, 2, dtype=[torch.float32, torch.float64][rank]),
        nn.BatchNorm1d(3, track_running_stats=rank == 0),
    ):
        with pytest.raises(muster.LayoutMismatch) as caught:
            strategy.prepare(module)
        messages.append(str(caught.value))
    strategy.prepare(build())
    return messages


def test_models_that_differ_between_ranks_are_refused_by_name(worker_job: Launcher) -> None:
    for messages in worker_job(differing_models):
        shapes, names, counts, dtypes, buffers = messages
        assert "parameter '0.weight' [5, 4]" in shapes and "'0.weight' [6, 4]" in shapes
        assert "layer0.weight" in names and "layer1.weight" in names
        assert "rank 0 has nothing" in counts and "'1.weight'" in counts
        assert "Float" in dtypes and "Double" in dtypes
        assert "running_mean" in buffers


def test_modules_may_have_names_like_those_of_one_another() -> None:
    """The first one has a parameter "1.weight", which would be the name of one of the second."""
    first, second = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1)
    before = second.weight.detach().clone()
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        one, other, *_ = strategy.prepare(
            first, second, torch.optim.AdamW(first.parameters()), torch.optim.AdamW(second.parameters())
        )
        assert strategy.step(lambda x: other(one(x)).square().mean(), torch.ones(4, 4)).stepped
    assert not torch.equal(before, second.weight)


def differing_optimizers_and_loaders(strategy: muster.Strategy) -> list[str]:
    module = build()
    strategy.prepare(module)
    optimizer = [torch.optim.AdamW, torch.optim.SGD][strategy.rank]
    data = TensorDataset(torch.zeros(20 + strategy.rank))
    messages = []
    shuffled = DataLoader(TensorDataset(torch.zeros(20)), batch_size=4, shuffle=strategy.rank == 1)
    for given in (optimizer(module.parameters(), lr=0.1), DataLoader(data, batch_size=4), shuffled):
        with pytest.raises(muster.LayoutMismatch) as caught:
            strategy.prepare(given)
        messages.append(str(caught.value))
    return messages


def test_optimizers_and_loaders_that_differ_between_ranks_are_refused(worker_job: Launcher) -> None:
    for optimizers, loaders, orders in worker_job(differing_optimizers_and_loaders):
        assert "rank 0 has AdamW, rank 1 SGD" in optimizers
        assert "20 samples in 5 batches" in loaders and "21 samples in 6 batches" in loaders
        assert "rank 1 20 samples in 5 batches, in the order of a RandomSampler" in orders


def corrected(strategy: muster.Strategy, chiefs: str, others: str) -> None:
    """Rank 0 keeps its optimizer, which the others then have, too."""
    module = build()
    model = strategy.prepare(module)

    def make(name: str) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(module.parameters(), lr=0.01)  # type: ignore[no-any-return]

    optimizer = make(others if strategy.rank else chiefs)
    with pytest.raises(muster.LayoutMismatch, match=f"rank 0 has {chiefs}, rank 1 {others}"):
        strategy.prepare(optimizer)
    optimizer = make(chiefs) if strategy.rank else optimizer
    strategy.prepare(optimizer)
    for _ in range(2):
        assert strategy.step(lambda x: loss_of(model, x), part_of(strategy, X)).stepped
    loss_of(model, X).backward()
    optimizer.step()


@pytest.mark.parametrize("chiefs", ["RMSprop", "AdamW"])
def test_an_optimizer_that_was_refused_is_prepared_once_ranks_agree(worker_job: Launcher, chiefs: str) -> None:
    worker_job(corrected, chiefs, "SGD")


def chiefs_values(strategy: muster.Strategy) -> Any:
    torch.manual_seed(strategy.rank)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).to(torch.bfloat16))
    module[1].running_mean.fill_(strategy.rank + 3)
    module[0].weight.data = module[0].weight.data.t().contiguous().t()  # dense, in another order
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 / (strategy.rank + 1))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, strategy.rank + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    strategy.prepare(optimizer, module)
    state = optimizer.state_dict()
    tensors = [*module.parameters(), *module.buffers(), *(t for s in state["state"].values() for t in s.values())]
    return [t.double() for t in tensors], optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]


def test_the_chiefs_values_and_optimizer_state_go_to_every_rank(worker_job: Launcher) -> None:
    (first, lr, betas), (second, other_lr, other_betas) = worker_job(chiefs_values)
    assert lr == other_lr == 0.1 and tuple(betas) == tuple(other_betas)
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b)


def test_bad_objects_are_refused_before_any_work() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy, muster.MirroredStrategy(["cpu"]) as other:
        module = build()
        with pytest.raises(muster.InvalidArgument, match="a int"):
            strategy.prepare(module, 3)
        with pytest.raises(muster.InvalidArgument, match=r"RecursiveScriptModule cannot be prepared.*made from"):
            strategy.prepare(torch.jit.script(build()))
        with pytest.raises(muster.InvalidArgument, match=r"'1' of this Sequential, a RecursiveScriptModule, cannot be"):
            strategy.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.jit.script(build())))
        with pytest.raises(muster.InvalidArgument, match=r"a RecursiveScriptModule cannot be prepared"):
            strategy.prepare(lambda: torch.jit.script(build()))
        with pytest.raises(muster.InvalidArgument, match="factory returned a int"):
            strategy.prepare(lambda: 3)
        with pytest.raises(muster.InvalidArgument, match="factory returned one module twice"):
            strategy.prepare(lambda: module)
        with pytest.raises(muster.InvalidArgument, match="no parameters"):
            optimizer = sgd(build())
            optimizer.param_groups[0]["params"] = []
            strategy.prepare(optimizer)

        model = strategy.prepare(module)
        with pytest.raises(muster.InvalidArgument, match="another open strategy"):
            other.prepare(module)
        with pytest.raises(muster.InvalidArgument, match="another open strategy"):
            other.prepare(model)
        with pytest.raises(muster.InvalidArgument, match=r"parameter '0\.weight'.*another open strategy"):
            other.prepare(nn.Sequential(*module))
        optimizer = strategy.prepare(sgd(build()))
        with pytest.raises(muster.InvalidArgument, match="another open strategy"):
            other.prepare(optimizer)
        with pytest.raises(muster.InvalidArgument, match=r"parameter 0 \(shape \(5, 4\)\) of SGD is in no prepared"):
            strategy.step(lambda x: loss_of(model, x), X)
    with pytest.raises(muster.InvalidArgument, match="closed"):
        strategy.prepare(module)
    with muster.MirroredStrategy(["cpu"]) as third:
        third.prepare(module)


def test_a_step_without_a_module_or_with_everything_frozen_is_refused() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        with pytest.raises(muster.InvalidArgument, match="no module is prepared"):
            strategy.step(lambda x: x.sum(), X)
        module = build().requires_grad_(False)
        model, _ = strategy.prepare(module, sgd(module))
        with pytest.raises(muster.InvalidArgument, match="requires_grad"):
            strategy.step(lambda x: loss_of(model, x), X)
        model.requires_grad_(True)
        assert strategy.step(lambda x: loss_of(model, x), X).stepped
    for call in (lambda: strategy.step(lambda x: loss_of(model, x), X), strategy.flush, strategy.barrier):
        with pytest.raises(muster.InvalidArgument, match="closed"):
            call()
    strategy.close()
    with pytest.raises(muster.InvalidArgument, match="closed"):  # though no module is prepared either
        other = muster.MirroredStrategy(["cpu"])
        other.close()
        other.step(lambda x: x.sum(), X)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("holds a lock")


class HoldsMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.memory = memoryview(b"of C")  # which nothing copies

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_module_that_cannot_be_copied_comes_from_a_factory() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        for module in (Uncopyable(4, 1), HoldsMemory()):
            with pytest.raises(muster.InvalidArgument, match=f"{type(module).__name__} cannot be copied.*factory"):
                strategy.prepare(module)
        model = strategy.prepare(HoldsMemory)
        optimizer = strategy.prepare(sgd(model))
        before = model.inner.weight.detach().clone()
        assert strategy.step(lambda x: loss_of(model, x), X, optimizers=optimizer).stepped
        assert not torch.equal(before, model.module.inner.weight)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        strategy.prepare(Uncopyable(4, 1))


def test_locks_and_files_are_one_for_all_replicas(tmp_path: Path) -> None:
    module = nn.Linear(4, 1)
    with open(tmp_path / "file", "w") as file, muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module.lock, module.held = threading.Lock(), {"file": file, "events": [threading.Event()]}  # type: ignore[assignment]
        model = strategy.prepare(module)
        strategy.prepare(sgd(model))
        seen: list[Any] = []

        def step(x: Tensor) -> Tensor:
            seen.append((model.lock, model.held["file"], model.held["events"][0], model.held))
            return loss_of(model, x)

        strategy.step(step, X)
        (first, other) = seen
        assert [one is two for one, two in zip(first, other, strict=True)] == [True, True, True, False]


def test_factories_that_build_different_modules_are_refused() -> None:
    widths = iter([3, 4])
    with muster.MirroredStrategy(["cpu"] * 2) as strategy, pytest.raises(muster.InvalidArgument, match="equal modules"):
        strategy.prepare(lambda: nn.Linear(2, next(widths)))


def test_a_lazy_module_is_refused_with_a_remedy() -> None:
    refused = pytest.raises(muster.InvalidArgument, match=r"'weight'.*forward")
    with muster.MirroredStrategy(["cpu"]) as strategy, refused:
        strategy.prepare(nn.LazyLinear(3))


def test_preparing_again_is_a_no_op() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = build()
        optimizer = sgd(module)
        loader = DataLoader(TensorDataset(X), batch_size=4)
        first = strategy.prepare(module, optimizer, loader)
        assert isinstance(first[0], Replicated) and first[1] is optimizer
        assert isinstance(first[0], nn.Sequential)
        for again in (strategy.prepare(*first), strategy.prepare(module, optimizer, loader)):
            assert all(a is b for a, b in zip(first, again, strict=True))
        swapped = strategy.prepare(loader, module)
        assert swapped[0] is first[2] and swapped[1] is first[0]
        assert strategy.prepare(optimizer) is optimizer


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.25, 0.75]))
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) * self.weights


def with_teacher(strategy: muster.Strategy) -> Any:
    torch.manual_seed(strategy.rank + 1)
    module, teacher, criterion = nn.Linear(4, 2), Teacher(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.8]))
    model, teacher, criterion, _ = strategy.prepare(module, teacher, criterion, sgd(module))
    strategy.step(lambda x: criterion(model(x), teacher(x).argmax(1)), part_of(strategy, X))
    return module.weight, teacher.frozen.weight, teacher.weights, criterion.weight


def test_modules_without_parameters_to_train_are_prepared_like_any_other(job: Launcher) -> None:
    results = job(with_teacher)
    for result in results:
        for a, b in zip(result, results[0], strict=True):
            assert np.array_equal(a, b)
        np.testing.assert_array_equal(result[2], np.float32([0.25, 0.75]))
        np.testing.assert_array_equal(result[3], np.float32([0.2, 0.8]))


# --- options and clusters ---------------------------------------------------------------------------------------------
def test_options_are_checked() -> None:
    for options, match in [
        ({"acumulate": 2}, "unknown option 'acumulate'.*accumulate"),
        ({"precision": "fp8"}, "precision='fp8'.*fp16"),
        ({"shard_optimizer": True, "fuse": False}, "shard_optimizer"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": -1.0}, "clip_norm=-1"),
        ({"buffers": "sum"}, "buffers='sum'"),
        ({"threads_per_replica": 0}, "threads_per_replica=0"),
        ({"bucket_bytes": 10}, "bucket_bytes=10"),
        ({"wire": "fp16"}, "wire='fp16'"),
        ({"max_skipped": 0}, "max_skipped=0"),
        ({"timeout": 0.0}, "timeout"),
        ({"precision": torch.bfloat16}, r"precision=torch\.bfloat16: it must be 'fp32', 'bf16' or 'fp16'"),
        ({"accumulate": 2.5}, r"accumulate=2\.5: it must be an int"),
        ({"accumulate": True}, "accumulate=True"),
        ({"seed": -1}, "seed=-1: it must be an int from 0"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"clip_norm": "1"}, "clip_norm='1': it must be a positive number"),
        ({"fuse": "no"}, "fuse='no': it must be True or False"),
        ({"drop_incomplete": None}, "drop_incomplete=None"),
        ({"threads_per_replica": "2"}, "threads_per_replica='2'"),
        ({"bucket_bytes": 4096.0}, r"bucket_bytes=4096\.0"),
        ({"max_skipped": None}, "max_skipped=None"),
        ({"timeout": "3"}, "timeout='3'"),
    ]:
        with pytest.raises(muster.InvalidArgument, match=match):
            muster.MirroredStrategy(["cpu"], **options)
    with pytest.raises(muster.InvalidArgument, match="'gpu zero' is not a device"):
        muster.MirroredStrategy(["gpu zero"])
    for devices, match in [("cpu:0", r'as \["cpu:0"\]'), (2, "devices=2: it must be a list")]:
        with pytest.raises(muster.InvalidArgument, match=match):
            muster.MirroredStrategy(devices)  # type: ignore[arg-type]
    with pytest.raises(muster.NotBuilt, match="cuda:0"):
        muster.MirroredStrategy(["cuda:0"])


def _different_options() -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(muster.InvalidArgument) as caught:
        muster.MultiWorkerMirroredStrategy.from_env(accumulate=1 + rank, timeout=20.0)
    return str(caught.value)


def _different_world() -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(muster.Error) as caught:
        cluster = muster.Cluster(rank, 2 + rank, f"127.0.0.1:{os.environ['MASTER_PORT']}")
        muster.MultiWorkerMirroredStrategy(cluster, timeout=5.0)
    return str(caught.value)


def _replicas_differ() -> tuple[int, int, int]:
    rank = int(os.environ["RANK"])
    with muster.MultiWorkerMirroredStrategy.from_env(["cpu"] * (1 + rank), timeout=20.0) as strategy:
        module = build()
        model, _ = strategy.prepare(module, sgd(module))
        assert strategy.step(lambda x: loss_of(model, x), part_of(strategy, X)).weight == 8
        return strategy.num_replicas, strategy.first_replica, len(strategy.devices)


def test_ranks_agree_on_options_and_world(two_workers: WorkerPool) -> None:
    for message in two_workers.call(_different_options):
        assert "accumulate=1" in message and "accumulate=2" in message and "rank 1" in message
    for message in two_workers.call(_different_world):
        assert "2" in message and "3" in message
    assert two_workers.call(_replicas_differ) == [(3, 0, 1), (3, 1, 2)]


def test_without_a_launcher_the_world_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment(0, 1, 1):
        monkeypatch.delenv(name, raising=False)
    with muster.MultiWorkerMirroredStrategy.from_env() as strategy:
        assert (strategy.num_workers, strategy.num_replicas, strategy.rank, strategy.is_chief) == (1, 1, 0, True)
        module = build()
        model, _ = strategy.prepare(module, sgd(module))
        assert strategy.step(lambda x: loss_of(model, x), X).stepped
        assert "1 replica" in strategy.explain()


# --- after prepare ----------------------------------------------------------------------------------------------------
def after_changes(strategy: muster.Strategy) -> Any:
    module = build()
    model, optimizer = strategy.prepare(module, sgd(module, momentum=0.9))
    x = part_of(strategy, X)
    strategy.step(lambda x: loss_of(model, x), x)
    kept = copy.deepcopy(model.state_dict())
    strategy.step(lambda x: loss_of(model, x), x)
    model.load_state_dict(kept)
    strategy.step(lambda x: loss_of(model, x), x)
    first = [p.detach().clone() for p in module.parameters()]
    model.to(torch.float64)
    optimizer.state.clear()
    result = strategy.step(lambda x: loss_of(model, x.double()), x)
    assert result.grad_norm > 0
    double = [p.detach().clone() for p in module.parameters()]
    model.to(torch.bfloat16)
    before = [p.detach().float().clone() for p in module.parameters()]
    strategy.step(lambda x: loss_of(model, x.bfloat16()).float(), x)
    moved = [not torch.equal(a, b.float()) for a, b in zip(before, module.parameters(), strict=True)]
    return first, double, moved, [p.grad.float() for p in module.parameters()]


def test_state_may_be_loaded_and_the_dtype_changed_after_prepare(job: Launcher) -> None:
    results = job(after_changes)
    for first, double, moved, gradients in results:
        assert all(a.dtype == np.float32 and np.isfinite(a).all() for a in first)
        assert all(a.dtype == np.float64 for a in double)
        assert moved[0] and moved[-1]
        assert any((g != 0).any() for g in gradients)
        for a, b in zip([*first, *double], [*results[0][0], *results[0][1]], strict=True):
            assert np.array_equal(a, b)


def test_parameters_that_were_replaced_are_refused_by_name() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = build()
        model, _ = strategy.prepare(module, sgd(module))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        original = module[2]
        strategy.step(lambda x: loss_of(model, x), X)
        module[2] = nn.Linear(5, 2)
        with pytest.raises(muster.InvalidArgument, match="submodule '2' was replaced"):
            strategy.step(lambda x: loss_of(model, x), X)
        module[2] = original
        assert strategy.step(lambda x: loss_of(model, x), X).stepped
        model.load_state_dict(state, assign=True)
        with pytest.raises(muster.InvalidArgument, match=r"parameter '0\.weight' was replaced.*assign=True"):
            strategy.step(lambda x: loss_of(model, x), X)


def test_other_replicas_follow_what_users_do_to_the_first() -> None:
    with muster.MirroredStrategy(["cpu"] * 3) as strategy:
        module = build()
        model, _ = strategy.prepare(module, sgd(module, lr=0.0))
        model[1].eval()
        model[1].running_mean.fill_(7.0)
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        strategy.step(lambda x: loss_of(model, x), X)
        assert model[1].num_batches_tracked == 0
        seen = strategy.run(
            lambda x: (
                model[1].training,
                float(model[1].running_mean[0]),
                float(model[0].weight[0, 0]),
                model.training,
            ),
            X,
        )
        assert list(seen) == [(False, 7.0, 0.5, True)] * 3
        model[1].train()
        strategy.step(lambda x: loss_of(model, x), X)
        assert model[1].num_batches_tracked == 1
        model.zero_grad()
        assert all(p.grad is None for p in module.parameters())
        model.scale = 3
        assert list(strategy.run(lambda x: model.scale, X)) == [3, 3, 3]


def test_a_prepared_module_is_a_module_of_its_class() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = build()
        model = strategy.prepare(module)
        assert isinstance(model, nn.Sequential) and len(model) == 3 and model[0].module is module[0]
        assert model.module is module
        assert list(model.state_dict()) == list(build().state_dict())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in build().named_parameters()]
        assert model.eval() is model and not module.training and model.train() is model
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build().parameters())
        assert "Linear" in repr(model)
        assert model(X).shape == (8, 2)


def test_copies_and_pickles_belong_to_no_strategy(tmp_path: Path) -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = nn.Sequential(nn.Linear(256, 256), nn.SyncBatchNorm(256))
        model, _ = strategy.prepare(module, sgd(module))
        x = torch.randn(8, 256)
        strategy.step(lambda x: loss_of(model, x), x)

        for saved in (model.state_dict(), model[0].weight.detach()):
            file = io.BytesIO()
            torch.save(saved, file)
            tensors = list(saved.values()) if isinstance(saved, dict) else [saved]
            assert file.tell() < sum(t.nbytes for t in tensors) + 8192, (
                "a file must not hold what it shares memory with"
            )

        average = torch.optim.swa_utils.AveragedModel(model.module)
        duplicate = copy.deepcopy(model)
        assert type(duplicate) is nn.Sequential and type(duplicate[1]) is nn.SyncBatchNorm
        duplicate.eval()
        strategy.step(lambda x: loss_of(model, x) + duplicate(x).sum() * 0, x)  # in another replica's step, too
        average.update_parameters(model.module)
        assert torch.equal(average.module[0].weight, module[0].weight)
        assert not torch.equal(duplicate[0].weight, module[0].weight)

        restored = pickle.loads(pickle.dumps(model))
        torch.save(model.module, tmp_path / "whole.pt")
        for again in (restored, torch.load(tmp_path / "whole.pt", weights_only=False)):
            assert type(again) is nn.Sequential
            again.eval()
            model.eval()
            assert torch.equal(again(x), model(x))


def test_a_strategy_that_is_forgotten_ends_its_threads() -> None:
    before = threading.active_count()
    strategy = muster.MirroredStrategy(["cpu"] * 2)
    model = strategy.prepare(build())
    reference = weakref.ref(strategy)
    assert threading.active_count() == before + 2
    del strategy
    assert reference() is None
    assert threading.active_count() == before
    assert model(X).shape == (8, 2)


class Squares(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index**2)] * 4)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_start_beside_live_replica_threads(method: str) -> None:
    with muster.MirroredStrategy(["cpu"] * 2, seed=1) as strategy:
        module = nn.Linear(4, 1)
        model, _ = strategy.prepare(module, sgd(module, lr=1e-6))
        strategy.step(lambda x: loss_of(model, x), X)
        loader = strategy.prepare(DataLoader(Squares(), batch_size=5, num_workers=2, multiprocessing_context=method))
        seen = []
        for x in loader:
            assert strategy.step(lambda x: loss_of(model, x), x).stepped
            seen += [float(value) for part in x for value in part[:, 0]]
        assert seen == [float(i**2) for i in range(12)]
        assert strategy.step(lambda x: loss_of(model, x), X).stepped


def pruned_training(strategy: muster.Strategy) -> Any:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    prune.l1_unstructured(module[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.5))
    x = torch.randn(12, 4)
    for _ in range(3):
        strategy.step(lambda x: model(x).square().mean(), part_of(strategy, x))
    return dict(module.named_parameters()), module[0].weight_mask


def test_a_module_that_holds_a_computed_tensor_has_copies(job: Launcher) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    prune.l1_unstructured(module[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    x = torch.randn(12, 4)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    for parameters, mask in job(pruned_training):
        assert mask.sum() == 8
        for name, expected in module.named_parameters():
            np.testing.assert_allclose(parameters[name], expected.detach().numpy(), rtol=1e-5, atol=1e-6)


class Calibrated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.register_buffer("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(1))  # each replica's own, where it runs first
        shifts = [shift for shift in (self.shift, getattr(self, "scale", None)) if shift is not None]
        return self.layer(x) + self.late + sum(shifts)


@pytest.mark.parametrize("name", ["shift", "scale"])
def test_a_buffer_of_the_first_replica_alone_is_refused(name: str) -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        module = Calibrated()
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.ones(4, 5)
        for rows in (1, 4, 4):  # at first the second replica has no part
            strategy.step(lambda x: model(x).square().mean(), x[:rows])
        module.register_buffer(name, torch.tensor(2.0))
        for call in (strategy.step, strategy.run):
            with pytest.raises(muster.InvalidArgument, match=rf"buffer '{name}' was added since prepare\(\)"):
                call(lambda x: model(x).square().mean(), x)
        if name == "scale":
            del module.scale
        else:
            module.shift = None
        assert strategy.step(lambda x: model(x).square().mean(), x).stepped
        del module.late
        with pytest.raises(muster.InvalidArgument, match=r"buffer 'late' was removed since prepare\(\)"):
            strategy.step(lambda x: model(x).square().mean(), x)


def test_prepare_names_what_was_added_to_a_prepared_module() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        inner = strategy.prepare(nn.Sequential(nn.Linear(2, 2)))
        inner.module.append(nn.Linear(2, 2))
        with pytest.raises(muster.InvalidArgument, match=r"submodule '1' was added since prepare\(\)"):
            strategy.prepare(nn.Sequential(inner.module, nn.ReLU()))


def test_a_program_that_prepares_anew_all_the_time_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        for _ in range(150):
            strategy.prepare(DataLoader(TensorDataset(torch.ones(2, 1))))
    (told,) = (record.message for record in caplog.records if "have been prepared" in record.message)
    assert told.startswith("100 loaders")


def test_a_strategy_is_neither_copied_nor_pickled() -> None:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(muster.InvalidArgument, match="make one in each process"):
                copied(strategy)
