"""muster.horovod's DistributedOptimizer: the steps of one process over the whole batch, on every rank."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_horovod import job, raised
from torch import Tensor, nn

import muster.horovod as hvd
from support.jobs import WorkerPool

ROWS = 24


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def part(rank: int | None = None, size: int | None = None) -> slice:
    rank, size = hvd.rank() if rank is None else rank, hvd.size() if size is None else size
    return slice(rank * ROWS // size, (rank + 1) * ROWS // size)


def loss_of(model: nn.Module, rows: slice) -> Tensor:
    x, y = data()
    return F.cross_entropy(model(x[rows].double()), y[rows])


def alone(make: Any, steps: int = 3, clip: float | None = None) -> nn.Module:
    """The model of one process that steps with whole batches."""
    model = net()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, slice(None)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_equal(model: nn.Module, expected: nn.Module, rtol: float = 1e-9) -> None:
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def trained(make: Any, steps: int = 3, **options: Any) -> nn.Module:
    model = net(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    assert type(optimizer).__name__ == type(make(model.parameters())).__name__
    assert isinstance(optimizer, type(make(model.parameters())))
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, part()).backward()
        optimizer.step()
    return model


def equal_steps() -> None:
    for make in (sgd, adam):
        expected = alone(make)
        for options in [{}, {"groups": 2}, {"groups": 100}, {"gradient_predivide_factor": 2.0}]:
            assert_equal(trained(make, **options), expected)
    by_list = net()
    first = next(iter(by_list.parameters()))
    optimizer = hvd.DistributedOptimizer(sgd(by_list.parameters()), groups=[[first, by_list[2].bias], []])
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(by_list, part()).backward()
        optimizer.step()
    assert_equal(by_list, alone(sgd))
    assert_equal(trained(sgd, compression=hvd.Compression.fp16), alone(sgd), rtol=1e-3)
    doubled = trained(lambda p: torch.optim.SGD(p, lr=0.05), op=hvd.Sum)
    assert_equal(doubled, alone(lambda p: torch.optim.SGD(p, lr=0.1)))
    with pytest.warns(DeprecationWarning, match="groups="):
        assert_equal(trained(sgd, num_groups=2), alone(sgd))


def test_steps_are_those_of_the_whole_batch(two_workers: WorkerPool) -> None:
    two_workers.call(job, equal_steps)


def while_backward_runs() -> bool:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    begun: list[str] = []

    def look(*_: Any) -> None:
        if hvd.rank() == 0:
            begun.append(raised(optimizer.zero_grad))
            begun.append(raised(hvd.allreduce_async, torch.zeros(3), name="2.bias"))
            hvd.barrier()

    model[0].register_full_backward_hook(look)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    loss = model(x).sum()
    if hvd.rank() == 1:
        hvd.barrier()
    loss.backward()
    optimizer.step()
    return hvd.rank() == 1 or ("zero_grad()" in begun[0] and "under way" in begun[1])


def test_gradients_are_reduced_while_backward_runs(two_workers: WorkerPool) -> None:
    assert two_workers.call(job, while_backward_runs) == [True, True]


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def interrupted() -> nn.Module:
    model = net(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()), model.named_parameters())
    if hvd.rank() == 1:
        time.sleep(3)
    loss_of(model, part()).backward()
    if hvd.rank() == 0:
        begun = time.monotonic()
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert time.monotonic() - begun < 2
        assert all(p.grad is None for p in model.parameters())
    else:
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    optimizer.zero_grad()
    loss_of(model, part()).backward()
    optimizer.step()
    return model


def test_an_interrupt_does_not_wait_for_peers_and_training_can_go_on(two_workers: WorkerPool) -> None:
    expected = alone(plain_sgd, steps=2)
    for model in two_workers.call(job, interrupted):
        assert_equal(model, expected)


def accumulated() -> list[str]:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=2)
    mine = part()
    middle = (mine.start + mine.stop) // 2
    texts = []
    for _ in range(3):
        optimizer.zero_grad()
        for rows in (slice(mine.start, middle), slice(middle, mine.stop)):
            (loss_of(model, rows) / 2).backward()
            texts.append(raised(optimizer.zero_grad))
        texts.append(raised(loss_of(model, mine).backward))
        optimizer.load_state_dict(optimizer.state_dict())  # forgets the passes, and leaves .grad
        for p in model.parameters():
            p.grad = None
        for rows in (slice(mine.start, middle), slice(middle, mine.stop)):
            (loss_of(model, rows) / 2).backward()
        optimizer.step()
    assert_equal(model, alone(sgd))
    # A step before all passes reduces what there is.
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=7)
    optimizer.set_backward_passes_per_step(5)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, mine).backward()
        optimizer.step()
    assert_equal(model, alone(sgd))
    return texts


def test_passes_are_counted(two_workers: WorkerPool) -> None:
    for texts in two_workers.call(job, accumulated):
        assert ["zero_grad()" in text for text in texts] == [True, True, False] * 3
        assert all("backward_passes_per_step=2" in text for text in texts[2::3])


def clipped() -> None:
    model = net()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, part()).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
    assert_equal(model, alone(sgd, clip=0.1))
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, part()).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def test_synchronize_and_skip_synchronize(two_workers: WorkerPool) -> None:
    two_workers.call(job, clipped)


class Branches(nn.Module):
    """A rank uses one of two layers; a third is used by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(2, 1) for _ in range(3)])
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)


def unused() -> None:
    for groups in (None, 1):
        model = Branches()
        before = [layer.weight.detach().clone() for layer in model.layers]
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)
        model.layers[hvd.rank()](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for layer, start, change in zip(model.layers, before, (0.5, 0.5, 0.0), strict=True):
            assert torch.allclose(layer.weight, start - change)


def test_parameters_that_some_ranks_leave_out(two_workers: WorkerPool) -> None:
    two_workers.call(job, unused)


def sparse_gradients() -> None:
    for options in ({}, {"sparse_as_dense": True}, {"op": hvd.Sum}):
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=True)
        start = table.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), **options)
        table(torch.tensor([hvd.rank(), 2])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        factor = 2.0 if "op" in options else 1.0
        change = factor * torch.tensor([0.5, 0.5, 1.0, 0.0, 0.0]).view(-1, 1)
        assert torch.allclose(table.weight, start - change)


def test_sparse_gradients(two_workers: WorkerPool) -> None:
    two_workers.call(job, sparse_gradients)


def by_adasum() -> None:
    model = net()
    start = [p.detach().clone() for p in model.parameters()]
    deltas = []
    for rank in range(2):
        other = net()
        optimizer = sgd(other.parameters())
        loss_of(other, part(rank, 2)).backward()
        optimizer.step()
        deltas.append([p.detach() - s for p, s in zip(other.parameters(), start, strict=True)])
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.SGD)
    optimizer.zero_grad()
    loss_of(model, part()).backward()
    optimizer.step()
    for p, s, a, b in zip(model.parameters(), start, *deltas, strict=True):
        common = (a * b).sum()
        expected = s + (1 - common / a.square().sum() / 2) * a + (1 - common / b.square().sum() / 2) * b
        torch.testing.assert_close(p.detach(), expected)
    assert "clip gradients before" in raised(optimizer.skip_synchronize)  # type: ignore[attr-defined]


def test_adasum_combines_what_steps_changed(two_workers: WorkerPool) -> None:
    two_workers.call(job, by_adasum)


def refused() -> None:
    model = net()
    names = list(model.named_parameters())
    make = sgd(model.parameters())
    assert "more than once: x" in raised(hvd.DistributedOptimizer, make, [("x", p) for _, p in names])
    assert "leaves 1 of" in raised(hvd.DistributedOptimizer, make, names[1:])
    assert "named_parameters=" in raised(hvd.DistributedOptimizer, make, model.parameters())
    assert "1 or more" in raised(hvd.DistributedOptimizer, make, backward_passes_per_step=0)
    assert "op=Average" in raised(hvd.DistributedOptimizer, make, op=hvd.Sum, gradient_predivide_factor=2.0)
    assert "1 or more" in raised(hvd.DistributedOptimizer, make, groups=-1)
    assert "lists of parameters" in raised(hvd.DistributedOptimizer, make, groups=[["x"]])
    assert "twice" in raised(hvd.DistributedOptimizer, make, groups=[[names[0][1]], [names[0][1]]])


def test_what_cannot_be_is_refused(two_workers: WorkerPool) -> None:
    two_workers.call(job, refused)


def kept() -> None:
    model = net()
    optimizer = adam([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(model, slice(None)).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert [group["lr"] for group in wrapped.param_groups] == [0.005, 0.25]
    assert int(wrapped.state[model[0].weight]["step"]) == 1
    loss_of(model, part()).backward()
    wrapped.step()
    schedule.step()
    assert [group["lr"] for group in wrapped.param_groups] == [0.0025, 0.125]
    assert int(wrapped.state_dict()["state"][0]["step"]) == 2
    everyones = hvd.allgather(model[0].weight.detach().view(1, -1))
    assert torch.equal(everyones[0], everyones[1])
    seen = []
    wrapped.register_step_pre_hook(lambda *_: seen.append(hvd.allgather(model[0].weight.grad.view(1, -1))))
    loss_of(model, part()).backward()
    wrapped.step()
    assert len(seen) == 1 and torch.equal(seen[0][0], seen[0][1])  # reduced by then
    later = torch.optim.lr_scheduler.StepLR(wrapped, 1, gamma=0.5)
    wrapped.zero_grad()
    loss_of(model, part()).backward()
    wrapped.step()
    later.step()


def test_groups_state_schedules_and_hooks_stay(two_workers: WorkerPool) -> None:
    two_workers.call(job, kept)


def in_a_set() -> list[float]:
    pair, third = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
    hvd.init(process_sets=[pair, third])
    try:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=pair)
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        return weight.tolist()
    finally:
        hvd.shutdown()


def test_a_process_set(three_workers: WorkerPool) -> None:
    assert three_workers.call(in_a_set) == [[-2.0], [-2.0], [-2.0]]


def state_of_the_root() -> None:
    r = hvd.rank()
    model = net(r)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (r + 1))
    if r == 0:
        loss_of(model, slice(None)).backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    expected = alone(lambda p: torch.optim.Adam(p, lr=0.1), steps=1)
    assert_equal(model, expected)
    moment = hvd.allgather(optimizer.state[model[0].weight]["exp_avg"].view(1, -1))
    assert torch.equal(moment[0], moment[1]) and moment.abs().sum() > 0
    fresh = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    hvd.broadcast_optimizer_state(fresh, root_rank=0)
    assert_equal(model, expected)  # as it was: nothing was stepped
    assert not fresh.state
    hvd.broadcast_parameters(list(model.parameters()), 0)
    hvd.broadcast_parameters({"a": torch.zeros(1), "none": None}, 0)
    assert "state_dict()" in raised(hvd.broadcast_parameters, 3, 0)
    assert "not a tensor" in raised(hvd.broadcast_parameters, {"a": 3}, 0)
    assert "LBFGS" in raised(hvd.broadcast_optimizer_state, torch.optim.LBFGS(model.parameters()), 0)


def test_broadcast_of_parameters_and_optimizer_state(two_workers: WorkerPool) -> None:
    two_workers.call(job, state_of_the_root)


def norms(shape: tuple[int, ...], momentum: float | None) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 3, *shape, generator=generator, dtype=torch.float64) + 100
    w = torch.randn(7, 3, *shape, generator=generator, dtype=torch.float64)
    rows = slice(0, 5) if hvd.rank() == 0 else slice(5, 7)
    whole: nn.Module = (nn.BatchNorm2d if shape else nn.BatchNorm1d)(3, momentum=momentum, dtype=torch.float64)
    ours = hvd.SyncBatchNorm(3, momentum=momentum, dtype=torch.float64)
    for _ in range(2):
        a, b = x.clone().requires_grad_(), x[rows].clone().requires_grad_()
        expected, y = whole(a), ours(b)
        torch.testing.assert_close(y, expected[rows])
        (expected * w).sum().backward()
        (y * w[rows]).sum().backward()
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad, a.grad[rows])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    assert ours.weight.grad is not None and whole.weight.grad is not None
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), whole.weight.grad)
    ours.eval(), whole.eval()
    torch.testing.assert_close(ours(x), whole(x))
    assert "2D" in raised(ours, x[:, 0] if not shape else x[0, 0, 0])


def all_norms() -> None:
    for shape in ((), (2, 2)):
        for momentum in (0.1, None):
            norms(shape, momentum)


def test_sync_batch_norm_is_that_of_the_whole_batch(two_workers: WorkerPool) -> None:
    two_workers.call(job, all_norms)


def converted() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm2d(3, affine=False)]))
    whole = model[1][0]
    weight = whole.weight
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(norm) for norm in model[1]] == [hvd.SyncBatchNorm] * 2
    assert model[1][0].weight is weight and model[1][1].weight is None
    x = torch.full((4, 3), float(hvd.rank())) + torch.arange(4.0).view(-1, 1)
    torch.testing.assert_close(model[1][0](x), whole(hvd.allgather(x))[4 * hvd.rank() :][:4])
    assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))) is hvd.SyncBatchNorm
    assert "all ranks" in raised(hvd.SyncBatchNorm.convert_sync_batchnorm, model, object())


def test_batch_norms_of_a_module_are_converted(two_workers: WorkerPool) -> None:
    two_workers.call(job, converted)
