"""muster.DistributedDataParallel keeps torch's promises: what torch's own does in these programs, ours does, too.

Each body runs in two processes, on torch's class and on Muster's; the processes stay for all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import io
import itertools
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.utils.checkpoint import checkpoint

import muster
from muster import group_strategy
from support.jobs import WorkerPool

Body = Callable[[Any], None]
TORCH = torch.nn.parallel.DistributedDataParallel
IMPLEMENTATIONS = {"torch": TORCH, "muster": muster.DistributedDataParallel}
WIDE = 192
"""Features, of which a square weight has so many elements that ranks average it where it is."""
BODIES: dict[str, Body] = {}
OURS: dict[str, Body] = {}


def promise(body: Body) -> Body:
    """Both implementations keep it."""
    BODIES[body.__name__] = body
    return body


def ours(body: Body) -> Body:
    """Muster's alone."""
    OURS[body.__name__] = body
    return body


# --- what bodies use --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A small and a large layer, two buffers, a part of each rank's own and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDE)
        self.norm = nn.BatchNorm1d(WIDE)
        self.wide = nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.wide(self.norm(self.first(x)))))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.of_rank = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.of_rank[branch](self.shared(x))


def rank() -> int:
    return dist.get_rank()


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def parts(seed: int = 1, rows: int = 8, width: int = 4) -> list[Tensor]:
    """Both ranks' batches."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=generator) for _ in range(2)]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def mean_gradients(module: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> list[Tensor | None]:
    """What two ranks should have: the mean of the gradients of copies of `module`, each with its rank's loss."""
    both = []
    for number in range(2):
        own = copy.deepcopy(module)
        own.zero_grad()
        loss_of(own, number).backward()
        both.append([p.grad for p in own.parameters()])
    return [
        None if a is None and b is None else ((0 if a is None else a) + (0 if b is None else b)) / 2
        for a, b in zip(*both, strict=True)
    ]


def assert_equal(actual: list[Tensor | None], expected: list[Tensor | None], **tolerance: float) -> None:
    assert [a is None for a in actual] == [e is None for e in expected]
    for a, e in zip(actual, expected, strict=True):
        if a is not None and e is not None:
            torch.testing.assert_close(a, e, **tolerance)


def assert_hidden_loss_is_averaged(ddp: Any) -> None:
    """A step whose loss `ddp.module` leaves in its attribute `loss`, where no output leads."""
    x, module = parts(), ddp.module
    module.loss = None
    expected = mean_gradients(module, lambda m, n: [m(x[n]), m.loss][1])
    ddp.zero_grad()
    ddp(x[rank()])
    module.loss.backward()
    assert_equal(gradients(module), expected)


def assert_same_everywhere(tensors: Any) -> None:
    for tensor in tensors:
        chief = tensor.detach().clone()
        dist.broadcast(chief, 0)
        assert torch.equal(chief, tensor.detach())


@contextlib.contextmanager
def raises_everywhere(kind: type[BaseException] | tuple[type[BaseException], ...], match: str) -> Iterator[None]:
    with pytest.raises(kind, match=match):
        yield
    dist.barrier()


# --- promises ---------------------------------------------------------------------------------------------------------


@promise
def all_start_from_rank_0(parallel: Any) -> None:
    module = built(Net, seed=rank())
    module.norm.running_mean.fill_(rank())
    ddp = parallel(module)
    assert ddp.module is module
    assert_same_everywhere([*module.parameters(), *module.buffers()])
    for own, chief in zip(module.parameters(), built(Net).parameters(), strict=True):
        assert torch.equal(own, chief)


@promise
def gradients_are_the_equal_mean(parallel: Any) -> None:
    x = parts()
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 1}):
        module = built(Net)
        ddp = parallel(module, **options)
        for _ in range(5):
            expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
            ddp.zero_grad()
            ddp(x[rank()]).square().mean().backward()
            assert_equal(gradients(module), expected)
            assert_same_everywhere(p.grad for p in module.parameters())


@promise
def arguments_that_tune_it_change_no_gradient(parallel: Any) -> None:
    x = parts()
    for argument, value in (
        ("dim", 1),
        ("batched_grad_copy", True),
        ("bucket_cap_mb_list", [0.05, 0.01]),
        ("check_reduction", True),
    ):
        if argument not in inspect.signature(TORCH).parameters:
            continue
        module = built(Net)
        is_deprecated = argument == "check_reduction"
        with pytest.warns(FutureWarning, match=argument) if is_deprecated else contextlib.nullcontext():
            ddp = parallel(module, **{argument: value})
        for _ in range(3):
            expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
            ddp.zero_grad()
            ddp(x[rank()]).square().mean().backward()
            assert_equal(gradients(module), expected)
        assert argument != "dim" or ddp.dim == 1


@promise
def what_all_ranks_leave_unused_may_be_skipped(parallel: Any) -> None:
    x = parts()
    module = built(Branches)
    ddp = parallel(module, find_unused_parameters=True, skip_all_reduce_unused_params=True)
    for _ in range(3):
        expected = mean_gradients(module, lambda m, n: m(x[n], 0).square().mean())
        ddp.zero_grad()
        ddp(x[rank()], 0).square().mean().backward()
        assert_equal(gradients(module), expected)
        assert module.of_rank[1].weight.grad is None and module.unused.weight.grad is None


@promise
def uneven_batches_count_by_rank(parallel: Any) -> None:
    x = [parts()[0][:2], parts()[1]]
    module = built(lambda: nn.Linear(4, 2))
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    ddp = parallel(module)
    ddp(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)


@promise
def optimizers_of_any_kind_step_from_grad(parallel: Any) -> None:
    x = parts()
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
    ):
        module, alone = (built(lambda: nn.Linear(4, 2)) for _ in range(2))
        ddp = parallel(module)
        optimizer, other = make(ddp.parameters()), make(alone.parameters())

        def closure(ddp: Any = ddp, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = ddp(x[rank()]).square().mean()
            loss.backward()
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            return shared / 2

        def whole(alone: Any = alone, other: Any = other) -> Tensor:
            other.zero_grad()
            loss = alone(torch.cat(x)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            other.step(whole)
        for a, b in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert_same_everywhere(module.parameters())


@promise
def no_sync_accumulates_locally(parallel: Any) -> None:
    x, y = parts(1), parts(2)
    module = built(Net).eval()
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean() + m(y[n]).square().mean())
    local = copy.deepcopy(module)
    local(x[rank()]).square().mean().backward()
    ddp = parallel(module)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), gradients(local))
        ddp(y[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@promise
def accumulating_without_no_sync_adds_means(parallel: Any) -> None:
    x, y = parts(1), parts(2)
    module = built(Net).eval()
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean() + m(y[n]).square().mean())
    ddp = parallel(module)
    ddp(x[rank()]).square().mean().backward()
    ddp(y[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)
    ddp.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    ddp(x[rank()]).square().mean().backward()
    ddp(y[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)


@promise
def several_forwards_have_one_backward(parallel: Any) -> None:
    x, y = parts(1), parts(2)
    module = built(Net).eval()
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean() + m(y[n]).square().mean())
    ddp = parallel(module)
    for _ in range(2):
        ddp.zero_grad()
        (ddp(x[rank()]).square().mean() + ddp(y[rank()]).square().mean()).backward()
        assert_equal(gradients(module), expected)


@promise
def parameters_may_be_unused(parallel: Any) -> None:
    x = parts()
    module = built(Branches)
    ddp = parallel(module, find_unused_parameters=True)
    for branch in ((0, 1), (0, 0), (1, 1)):
        expected = mean_gradients(module, lambda m, n, branch=branch: m(x[n], branch[n]).square().mean())
        ddp.zero_grad()
        ddp(x[rank()], branch[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)
        assert module.unused.weight.grad is None


@promise
def frozen_parameters_stay_alone(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    module.wide.requires_grad_(False)
    ddp = parallel(module)
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    ddp(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)
    assert module.wide.weight.grad is None


@promise
def parameters_may_be_frozen_for_a_while(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    ddp = parallel(module, find_unused_parameters=True)
    halves = [[module.first, module.norm], [module.wide, module.last]]
    for turn in range(10):
        trained, frozen = halves[turn % 2], halves[1 - turn % 2]
        for part, is_trained in ((p, p in trained) for p in [*trained, *frozen]):
            part.requires_grad_(is_trained)
        ddp.zero_grad()
        expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)
        assert all((p.grad is None) == (not p.requires_grad) for p in module.parameters())


@promise
def shared_parameters_are_averaged_once(parallel: Any) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    x = parts()
    module = built(tied)
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    ddp = parallel(module)
    assert len(list(ddp.parameters())) == 3
    ddp(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return self.last(x)


@promise
def activations_may_be_recomputed(parallel: Any) -> None:
    x = parts()
    for use_reentrant in (False, True):
        module = built(lambda use_reentrant=use_reentrant: Checkpointed(use_reentrant))
        ddp = parallel(module, static_graph=use_reentrant)
        for _ in range(5):
            expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
            ddp.zero_grad()
            ddp(x[rank()]).square().mean().backward()
            assert_equal(gradients(module), expected)


@promise
def rank_0_gives_its_buffers_before_a_forward(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    ddp = parallel(module)
    ddp(x[rank()])
    mine = module.norm.running_mean.clone()
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert not torch.equal(both[0], both[1])
    ddp.eval()
    ddp(x[rank()])
    assert torch.equal(module.norm.running_mean, both[0])


@promise
def buffers_may_be_each_ranks_own(parallel: Any) -> None:
    with (
        pytest.warns(FutureWarning)
        if "forward_sync_buffers" in inspect.signature(TORCH).parameters
        else (contextlib.nullcontext())
    ):
        ddp = parallel(built(Net), broadcast_buffers=False)
    ddp.module.norm.running_mean.fill_(rank())
    ddp.eval()
    ddp(parts()[rank()])
    assert (ddp.module.norm.running_mean == rank()).all()


@promise
def a_buffer_hook_takes_the_place_of_rank_0(parallel: Any) -> None:
    ddp = parallel(built(Net))
    seen = []

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        seen.append((state, sorted(buffers)))

    ddp._register_buffer_comm_hook("state", hook)
    ddp(parts()[rank()]).sum().backward()
    assert seen == [("state", ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"])]


@promise
def what_is_ignored_stays_local(parallel: Any) -> None:
    x = parts()
    module = built(Net, seed=rank())
    parallel._set_params_and_buffers_to_ignore_for_model(module, ["last.bias", "norm.running_mean"])
    own = module.last.bias.detach().clone()
    module.norm.running_mean.fill_(rank())
    ddp = parallel(module)
    assert torch.equal(module.last.bias, own)
    ddp.eval()
    ddp(x[rank()]).sum().backward()
    assert (module.norm.running_mean == rank()).all()
    assert_same_everywhere([module.last.weight.grad])
    assert module.last.bias.grad.tolist() == [8.0, 8.0]


@promise
def state_dicts_have_a_prefix_and_fit_torchs(parallel: Any) -> None:
    ddp, other = parallel(built(Net, seed=1)), TORCH(built(Net, seed=2))
    state = ddp.state_dict()
    assert list(state) == [f"module.{name}" for name in ddp.module.state_dict()]
    other.load_state_dict(state)
    other.module.first.weight.data.add_(1)
    ddp.load_state_dict(other.state_dict())
    for a, b in zip(ddp.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    ddp(parts()[rank()]).sum().backward()
    assert_same_everywhere(p.grad for p in ddp.parameters())


@promise
def it_is_a_module_like_others(parallel: Any) -> None:
    ddp = parallel(built(Net))
    calls = []
    handles = [
        ddp.register_forward_hook(lambda module, args, output: calls.append("after")),
        ddp.register_forward_pre_hook(lambda module, args: calls.append("before")),
        ddp.module.register_forward_hook(lambda module, args, output: calls.append("inner")),
    ]
    ddp(parts()[rank()])
    assert calls == ["before", "inner", "after"]
    for handle in handles:
        handle.remove()
    assert ddp.eval() is ddp
    assert not ddp.module.training
    assert ddp.train() is ddp
    assert ddp.module.norm.training
    assert [name for name, _ in ddp.named_children()] == ["module"]
    assert (ddp.device, ddp.device_ids, ddp.output_device, ddp.dim) == (torch.device("cpu"), None, None, 0)
    assert ddp.require_backward_grad_sync
    with pytest.raises(AttributeError):
        _ = ddp.first


@promise
def copies_and_pickles_train_on(parallel: Any) -> None:
    x = parts()
    ddp = parallel(built(Net))
    ddp(x[rank()]).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    for other in (copy.deepcopy(ddp), torch.load(file, weights_only=False)):
        assert type(other) is type(ddp)
        assert other.module is not ddp.module
        other.zero_grad()
        expected = mean_gradients(other.module, lambda m, n: m(x[n]).square().mean())
        other(x[rank()]).square().mean().backward()
        assert_equal(gradients(other.module), expected)


@promise
def one_rank_alone_may_copy(parallel: Any) -> None:
    ddp = parallel(built(Net))
    if rank() == 0:
        average = copy.deepcopy(ddp)
        with torch.no_grad():
            average.module(parts()[0])
    ddp(parts()[rank()]).sum().backward()
    assert_same_everywhere(p.grad for p in ddp.parameters())


@promise
def pickling_needs_the_default_group(parallel: Any) -> None:
    ddp = parallel(built(Net), process_group=dist.new_group([0, 1]))
    with raises_everywhere(RuntimeError, "only supported when using DDP with the default process group"):
        torch.save(ddp, io.BytesIO())


@promise
def it_says_what_it_is(parallel: Any) -> None:
    ddp = parallel(built(Net), find_unused_parameters=False, bucket_cap_mb=3)
    ddp(parts()[rank()]).sum().backward()
    data = ddp._get_ddp_logging_data()
    expected = {
        "world_size": 2, "rank": rank(), "module_name": "Net", "num_parameter_tensors": 8, "backend_name": "gloo",
        "total_parameter_size_bytes": 4 * sum(p.numel() for p in ddp.parameters()), "bucket_cap_bytes": 3 << 20,
        "broadcast_buffers": 1, "find_unused_parameters": 0, "gradient_as_bucket_view": 0, "has_sync_bn": 0,
        "output_device": -1, "device_ids": "", "is_multi_device_module": 0,
    }  # fmt: skip
    assert {name: data[name] for name in expected} == expected


@promise
def norms_are_clipped_after_the_mean(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    expected = mean_gradients(module, lambda m, n: 100 * m(x[n]).square().mean())
    norm = torch.stack([g.norm() for g in expected if g is not None]).norm()
    ddp = parallel(module)
    (100 * ddp(x[rank()]).square().mean()).backward()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(ddp.parameters(), 0.5), norm)
    assert_equal(gradients(module), [None if g is None else g * (0.5 / (norm + 1e-6)) for g in expected])


@promise
def scaled_losses_and_autocast_work(parallel: Any) -> None:
    x = parts()
    ddp = parallel(built(Net))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for infinite in (False, True, False):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(x[rank()]).float().square().mean()
        # One rank's overflow is everybody's.
        scaler.scale(loss * (torch.inf if infinite and rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert changed is not infinite
    assert scales == [1024.0, 512.0, 512.0]
    assert_same_everywhere(ddp.parameters())


@promise
def two_models_train_against_each_other(parallel: Any) -> None:
    torch.manual_seed(0)
    real, noise = parts(1), parts(2)
    # The penalty's gradient does not reach a bias behind the last activation, which torch would wait for.
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n, bias=False)) for n in (4, 1)]
    alone = copy.deepcopy(models)

    def steps(generator: Any, critic: Any, x: Tensor, z: Tensor) -> Iterator[list[Tensor | None]]:
        for _ in range(5):
            critic.zero_grad()
            (critic(generator(z).detach()).mean() - critic(x).mean()).backward()
            middle = ((x + z) / 2).requires_grad_()
            (slope,) = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)
            (slope.norm(dim=1) - 1).square().mean().backward()
            yield gradients(critic)
            generator.zero_grad()
            (-critic(generator(z)).mean()).backward()
            yield gradients(generator)

    together = steps(parallel(models[0]), parallel(models[1]), real[rank()], noise[rank()])
    for ours, whole in zip(together, steps(alone[0], alone[1], torch.cat(real), torch.cat(noise)), strict=True):
        assert_equal(ours, whole, rtol=1e-4, atol=1e-6)


@promise
def ranks_may_run_out_of_inputs(parallel: Any) -> None:
    for by_initial in (True, False):
        module = built(lambda: nn.Linear(1, 1, bias=False))
        ddp = parallel(module)
        seen = []
        with ddp.join(divide_by_initial_world_size=by_initial):
            for number in range(2 + 2 * rank()):
                ddp.zero_grad()
                ddp(torch.full((1, 1), 1.0 + number + rank())).sum().backward()
                seen.append(float(module.weight.grad))
                with torch.no_grad():
                    module.weight -= 0.1 * module.weight.grad
        assert_same_everywhere(module.parameters())
        alone = [2.0, 2.5] if by_initial else [4.0, 5.0]
        assert seen == [1.5, 2.5, *(alone if rank() == 1 else [])]


@promise
def running_out_of_inputs_may_be_an_error(parallel: Any) -> None:
    ddp = parallel(built(lambda: nn.Linear(4, 1)))
    with raises_everywhere(RuntimeError, "exhausted"), ddp.join(throw_on_early_termination=True):
        for _ in range(2 + rank()):
            ddp(parts()[rank()]).sum().backward()


@promise
def buffers_follow_those_who_have_inputs(parallel: Any) -> None:
    ddp = parallel(built(Net))
    with ddp.join():
        for number in range(2 + rank()):
            ddp(parts(number)[rank()]).sum().backward()
    assert_same_everywhere([*ddp.module.buffers(), *ddp.module.parameters()])
    assert int(ddp.module.norm.num_batches_tracked) == 3


@promise
def hooks_of_torch_run_unchanged(parallel: Any) -> None:
    x = parts()
    for hook, tolerance in (
        (default_hooks.allreduce_hook, 1e-6),
        (default_hooks.fp16_compress_hook, 2e-3),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2e-3),
    ):
        module = built(Net)
        ddp = parallel(module, bucket_cap_mb=0.05)
        ddp.register_comm_hook(None, hook)
        for _ in range(3):
            expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
            ddp.zero_grad()
            ddp(x[rank()]).square().mean().backward()
            assert_equal(gradients(module), expected, rtol=tolerance, atol=tolerance)


@promise
def hooks_of_torch_may_leave_gradients_to_ranks(parallel: Any) -> None:
    x = parts()
    own_group = [dist.new_group([number]) for number in range(2)][rank()]
    for hook, state, averaged in (
        (debugging_hooks.noop_hook, None, 0),
        (post_localSGD_hook.post_localSGD_hook, post_localSGD_hook.PostLocalSGDState(None, own_group, 2), 2),
        (post_localSGD_hook.post_localSGD_hook, post_localSGD_hook.PostLocalSGDState(None, None, 1, False), 1),
    ):
        module = built(Net)
        ddp = parallel(module, bucket_cap_mb=0.05)
        ddp.register_comm_hook(state, hook)
        for number in range(4):
            local = copy.deepcopy(module)
            local.zero_grad()
            local(x[rank()]).square().mean().backward()
            expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
            ddp.zero_grad()
            ddp(x[rank()]).square().mean().backward()
            assert_equal(gradients(module), expected if number < averaged else gradients(local))


@promise
def groups_that_are_gone_leave_nothing_behind(parallel: Any) -> None:
    held = []
    for _ in range(4):
        group = dist.new_group([0, 1])
        ddp = parallel(built(lambda: nn.Linear(4, 2)), process_group=group)
        ddp(torch.ones(1, 4)).sum().backward()
        del ddp
        gc.collect()
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        held.append(tuple(len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")))
    assert held[1] == held[2] == held[3]


@promise
def a_hook_leaves_what_nobody_used_alone(parallel: Any) -> None:
    """As gradients of None, which an optimizer passes by, also where the one of an earlier backward is there."""
    x = parts()
    module = built(Branches)
    ddp = parallel(module, find_unused_parameters=True)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    for branch in ((0, 1), (0, 0), (1, 1), (0, 0)):
        before = [parameter.detach().clone() for parameter in module.of_rank[1 - branch[0]].parameters()]
        expected = mean_gradients(module, lambda m, n, branch=branch: m(x[n], branch[n]).square().mean())
        optimizer.zero_grad()
        ddp(x[rank()], branch[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)
        optimizer.step()
        if branch[0] == branch[1]:
            assert_equal(list(module.of_rank[1 - branch[0]].parameters()), before)
        assert module.unused.weight.grad is None


@promise
def a_backward_is_announced_by_hand(parallel: Any) -> None:
    """As by Accelerate's trigger_sync_in_backward and Lightning's manual optimization."""
    x = parts()
    module = built(Net)
    ddp = parallel(module)
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    with ddp.no_sync():
        loss = ddp(x[rank()]).square().mean()
    ddp.reducer.prepare_for_backward([])
    loss.backward()
    assert_equal(gradients(module), expected)


@promise
def an_output_is_saved_without_a_word(parallel: Any) -> None:
    output = parallel(built(Net))(parts()[rank()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(output, io.BytesIO())


@promise
def power_sgd_compresses(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    ddp = parallel(module)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = ddp(x[rank()]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert state.compression_stats()[0] > 1
    assert_same_everywhere(module.parameters())


@promise
def a_hook_sees_all_gradients_in_buckets(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    local = copy.deepcopy(module)
    local(x[rank()]).square().mean().backward()
    ddp = parallel(module, bucket_cap_mb=0.05)
    seen: list[Any] = []

    def doubled(state, bucket):
        assert bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        seen.append((state, bucket.index(), bucket.is_last(), bucket.parameters()))
        bucket.set_buffer(bucket.buffer() * 2)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook("state", doubled)
    ddp(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), [None if g is None else 2 * g for g in gradients(local)])
    assert {state for state, *_ in seen} == {"state"}
    assert [index for _, index, _, _ in seen] == list(range(len(seen)))
    assert [last for _, _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
    assert {id(p) for *_, ps in seen for p in ps} == {id(p) for p in module.parameters()}
    with raises_everywhere(RuntimeError, "can only be called once"):
        ddp.register_comm_hook(None, doubled)


@promise
def what_is_no_hook_is_refused(parallel: Any) -> None:
    ddp = parallel(built(Net))
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, 1)

    def takes_a_number(state: Any, bucket: int) -> torch.futures.Future[Tensor]:
        raise NotImplementedError

    takes_a_number.__annotations__["bucket"] = int
    with pytest.raises(ValueError, match="bucket annotation"):
        ddp.register_comm_hook(None, takes_a_number)


@promise
def builtin_hooks_can_be_registered(parallel: Any) -> None:
    x = parts()
    for kind, tolerance in ((dist.BuiltinCommHookType.ALLREDUCE, 1e-6), (dist.BuiltinCommHookType.FP16_COMPRESS, 2e-3)):
        module = built(Net)
        ddp = parallel(module)
        ddp._register_builtin_comm_hook(kind)
        expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected, rtol=tolerance, atol=tolerance)


@promise
def models_that_cannot_be_trained_are_errors(parallel: Any) -> None:
    with raises_everywhere(RuntimeError, "doesn't have any parameter that requires a gradient"):
        parallel(nn.ReLU())
    with raises_everywhere(RuntimeError, "doesn't have any parameter that requires a gradient"):
        parallel(nn.Linear(2, 2).requires_grad_(False))
    with raises_everywhere(RuntimeError, "uninitialized parameters"):
        parallel(nn.LazyLinear(2))
    with raises_everywhere(ValueError, "device_ids and output_device arguments only work with"):
        parallel(nn.Linear(2, 2), device_ids=[0])
    with raises_everywhere(ValueError, "device_ids can only be None or contain a single element"):
        parallel(nn.Linear(2, 2), device_ids=[0, 1])
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with raises_everywhere(ValueError, "must be on the same type of devices"):
        parallel(mixed)
    with raises_everywhere(ValueError, "SyncBatchNorm layers only work with GPU modules"):
        parallel(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


@promise
def groups_may_be_given(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Linear(4, 2))
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    ddp = parallel(module, process_group=dist.new_group([0, 1]))
    ddp(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)
    own = [dist.new_group([number]) for number in range(2)][rank()]
    alone = built(lambda: nn.Linear(4, 2), seed=rank())
    ddp = parallel(alone, process_group=own)
    ddp(x[rank()]).sum().backward()
    assert torch.equal(alone.weight, built(lambda: nn.Linear(4, 2), seed=rank()).weight)
    torch.testing.assert_close(alone.weight.grad[0], x[rank()].sum(0))


@promise
def a_device_mesh_may_be_given(parallel: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    module = built(lambda: nn.Linear(4, 2))
    expected = mean_gradients(module, lambda m, n: m(parts()[n]).square().mean())
    ddp = parallel(module, device_mesh=mesh)
    ddp(parts()[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)
    with raises_everywhere(RuntimeError, "Cannot specify both"):
        parallel(module, device_mesh=mesh, process_group=dist.group.WORLD)


@dataclasses.dataclass
class Output:
    kept: Tensor
    used: list[Tensor]


class Structured(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.a(x), self.b(x))


@promise
def outputs_may_have_any_structure(parallel: Any) -> None:
    x = parts()
    for wrap, loss in (
        (lambda a, b: (a, [b, "text"]), lambda o: (o[0] + o[1][0]).square().mean()),
        (lambda a, b: {"a": a, "rest": {"b": b, "n": 3}}, lambda o: (o["a"] + o["rest"]["b"]).square().mean()),
        (lambda a, b: Output(a, [b]), lambda o: (o.kept + o.used[0]).square().mean()),
    ):
        module = built(lambda wrap=wrap: Structured(wrap))
        ddp = parallel(module)
        for _ in range(5):
            expected = mean_gradients(module, lambda m, n, loss=loss: loss(m(x[n])))
            ddp.zero_grad()
            loss(ddp(x[rank()])).backward()
            assert_equal(gradients(module), expected)


class Hiding(nn.Module):
    """Leaves its loss where no output leads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.other = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor | None:
        self.loss = (self.layer(x) + self.other(x)).square().mean()
        return None if self.training else self.layer(x) * 0


@promise
def losses_need_not_come_from_outputs(parallel: Any) -> None:
    module = built(Hiding)
    ddp = parallel(module)
    for number in range(6):
        ddp.train(number % 2 == 0)
        assert_hidden_loss_is_averaged(ddp)


@promise
def dtypes_may_be_mixed(parallel: Any) -> None:
    for features in (2, WIDE * WIDE // 4):
        average_mixed_dtypes(parallel, features)


def average_mixed_dtypes(parallel: Any, features: int) -> None:
    def mixed() -> nn.Module:
        layers = [nn.Linear(4, features, dtype=dtype) for dtype in (torch.double, torch.bfloat16, torch.float)]
        model = nn.ModuleList(layers)
        model.register_parameter("complex", nn.Parameter(torch.randn(features, 4, dtype=torch.complex64)))
        return model

    def loss_of(outer: nn.Module, x: Tensor) -> Tensor:
        model: Any = outer
        outputs = [layer(x.to(layer.weight.dtype)).float() for layer in model]
        return sum(outputs).square().mean() + (x[0] * model.complex).sum().abs()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = mixed()

        def forward(self, x: Tensor) -> Tensor:
            return loss_of(self.parts, x)

    x = parts()
    module = built(Whole)
    expected = mean_gradients(module, lambda m, n: m(x[n]))
    ddp = parallel(module)
    ddp(x[rank()]).backward()
    for a, e in zip(gradients(module), expected, strict=True):
        assert a is not None
        assert e is not None
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=2e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@promise
def sparse_gradients_stay_sparse(parallel: Any) -> None:
    def embedder() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))

    ids = [torch.tensor([1, 2, 2]), torch.tensor([2, 7, 9])]
    module = built(embedder)
    expected = mean_gradients(module, lambda m, n: m(ids[n]).square().mean())
    ddp = parallel(module)
    for _ in range(2):
        ddp.zero_grad()
        ddp(ids[rank()]).square().mean().backward()
        gradient = module[0].weight.grad
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.to_dense(), expected[0].to_dense())
        assert_equal(gradients(module)[1:], expected[1:])


@promise
def memory_layouts_are_kept(parallel: Any) -> None:
    for channels in (40, 640):
        module = built(lambda channels=channels: nn.Conv2d(8, channels, 3).to(memory_format=torch.channels_last))
        x = [part.view(2, 8, 5, 5) for part in parts(rows=2, width=200)]
        expected = mean_gradients(module, lambda m, n, x=x: m(x[n]).square().mean())
        ddp = parallel(module)
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@promise
def gradients_are_written_where_they_are(parallel: Any) -> None:
    module = built(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, WIDE), nn.Linear(WIDE, WIDE)))
    flat = torch.zeros(sum(p.numel() for p in module.parameters()))
    offset = 0
    for p in module.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    x = parts()
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    ddp = parallel(module)
    ddp(x[rank()]).square().mean().backward()
    torch.testing.assert_close(flat, torch.cat([g.flatten() for g in expected if g is not None]))


@promise
def gradients_that_a_loop_keeps_stay_as_they_are(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    ddp = parallel(module)
    kept, expected = [], []
    for _ in range(4):
        expected.append(mean_gradients(module, lambda m, n: m(x[n]).square().mean()))
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
        kept.append([p.grad for p in module.parameters()])
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad)
    for actual, wanted in zip(kept, expected, strict=True):
        assert_equal(actual, wanted, rtol=1e-4, atol=1e-5)


@promise
def a_rank_may_have_its_gradients_elsewhere(parallel: Any) -> None:
    """One has accumulated into memory of its own; then one has no gradient of what the other one uses."""
    x = parts()
    module = built(Net)
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    ddp = parallel(module)
    for owner in range(2):
        module.zero_grad()
        if rank() == owner:
            for p in module.parameters():
                p.grad = torch.zeros_like(p)
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)
    branches = parallel(
        built(lambda: nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))), find_unused_parameters=True
    )
    branches.module.forward = lambda x: branches.module[rank()](x)
    wide = parts(width=WIDE)
    expected = mean_gradients(branches.module, lambda m, n: m[n](wide[n]).square().mean())
    for _ in range(2):
        branches.zero_grad()
        branches(wide[rank()]).square().mean().backward()
        assert_equal(gradients(branches.module), expected)


@promise
def gradients_that_are_asked_for_are_ones_own(parallel: Any) -> None:
    x = parts()
    module = built(Net).eval()
    ddp = parallel(module)
    for _ in range(5):
        ddp.zero_grad()
        (slope,) = torch.autograd.grad(ddp(x[rank()]).sum(), module.first.weight)
        own = copy.deepcopy(module)
        own(x[rank()]).sum().backward()
        torch.testing.assert_close(slope, own.first.weight.grad)
        assert gradients(module) == [None] * 8
        expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@promise
def a_module_may_be_wrapped_again(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    for unfrozen in (False, True):
        module.wide.requires_grad_(unfrozen)
        ddp = parallel(module)
        expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@promise
def reductions_may_wait_for_a_parameter(parallel: Any) -> None:
    x = parts()
    module = built(Net)
    delayed = [(name, p) for name, p in module.named_parameters() if name.startswith(("wide.", "last."))]
    ddp = parallel(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first.weight)
    for _ in range(10):
        expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
        if parallel is TORCH:
            dist.barrier()  # torch does not wait for what was delayed
        assert_equal(gradients(module), expected)
    with raises_everywhere(ValueError, "need to be set at the same time"):
        parallel(built(Net), delay_all_reduce_named_params=delayed)


@promise
def compiled_code_is_synchronised(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    for ddp in (torch.compile(parallel(module), backend="eager"), parallel(torch.compile(module, backend="eager"))):
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@promise
def ranks_may_start_as_they_are(parallel: Any) -> None:
    module = built(lambda: nn.Linear(4, 2), seed=rank())
    ddp = parallel(module, init_sync=False)
    assert torch.equal(module.weight, built(lambda: nn.Linear(4, 2), seed=rank()).weight)
    ddp(parts()[rank()]).sum().backward()
    assert_same_everywhere(p.grad for p in module.parameters())


@promise
def a_backward_that_raises_leaves_it_usable(parallel: Any) -> None:
    x = parts()
    module = built(Net).eval()
    ddp = parallel(module)
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    output = ddp(x[rank()])
    handle = output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.square().mean().backward()
    handle.remove()
    ddp.zero_grad()
    ddp(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Odd(nn.Module):
    """Takes keywords, returns a named tuple with a part that needs no gradient, and has a layer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(4, 2), nn.Linear(4, 0)

    def forward(self, x: Tensor, *, scale: float) -> Pair:
        fresh = torch.ones(2, requires_grad=True)
        return Pair(self.layer(x) * scale * fresh + self.empty(x).sum(), x.detach())


@promise
def inputs_and_outputs_may_be_odd(parallel: Any) -> None:
    x = parts()
    module = built(Odd)
    ddp = parallel(module)
    for _ in range(4):
        expected = mean_gradients(module, lambda m, n: m(x[n], scale=2.0).a.square().mean())
        ddp.zero_grad()
        output = ddp(x[rank()], scale=2.0)
        assert type(output) is Pair
        assert not output.b.requires_grad
        output.a.square().mean().backward()
        assert_equal(gradients(module), expected)


@promise
def outputs_may_be_changed_in_place(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Linear(4, 2))
    ddp = parallel(module, find_unused_parameters=True)
    for _ in range(4):
        expected = mean_gradients(module, lambda m, n: (m(x[n]) * 3 + 1).square().mean())
        ddp.zero_grad()
        output = ddp(x[rank()])
        output *= 3
        output += 1
        output.square().mean().backward()
        assert_equal(gradients(module), expected)


@promise
def ranks_may_infer_on_their_own(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Linear(4, 2))
    ddp = parallel(module)
    ddp.eval()
    with torch.no_grad():
        for _ in range(1 + rank()):
            torch.testing.assert_close(ddp(x[0]), module(x[0]))
    ddp.train()
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    ddp(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), expected)


@promise
def the_module_itself_stays_local(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Linear(4, 2))
    local = copy.deepcopy(module)
    ddp = parallel(module)
    for _ in range(2):
        ddp(x[rank()]).sum().backward()
        ddp.zero_grad()
    module(x[rank()]).square().mean().backward()
    local(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), gradients(local))


@promise
def hooks_of_reduction_can_be_removed(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Linear(4, 2))
    ddp = parallel(module)
    for _ in range(4):
        ddp(x[rank()]).sum().backward()
    ddp._check_reducer_finalized()
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    ddp(x[rank()]).sum().backward()
    torch.testing.assert_close(module.weight.grad[0], x[rank()].sum(0))


# --- Muster's alone ---------------------------------------------------------------------------------------------------


@ours
def it_is_torchs_with_the_same_arguments(parallel: Any) -> None:
    assert isinstance(parallel(built(Net)), TORCH)
    assert inspect.signature(parallel) == inspect.signature(TORCH)


@ours
def shapes_that_differ_are_an_error_on_every_rank(parallel: Any) -> None:
    # With torch's rank 0 waits.
    with raises_everywhere(muster.LayoutMismatch, r"'weight' .*\[2, 2\].* rank 1 has .*\[3, 2\]"):
        parallel(nn.Linear(2, 2 + rank()))
    with raises_everywhere(muster.LayoutMismatch, "nothing"):
        parallel(nn.Linear(2, 2, bias=rank() == 0))


@ours
def a_forward_of_one_rank_alone_waits_for_nobody(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Linear(4, 2))
    ddp = parallel(module)
    for _ in range(5):
        if rank() == 0:
            torch.autograd.grad(ddp(x[0]).sum(), module.weight)
        expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@ours
def large_gradients_come_where_peers_read_them(parallel: Any) -> None:
    def is_shared(tensor: Tensor) -> bool:
        with open("/proc/self/maps") as maps:
            for line in maps:
                begin, end = (int(address, 16) for address in line.split()[0].split("-"))
                if begin <= tensor.data_ptr() < end:
                    return "memfd:" in line
        raise AssertionError("memory that the process has not")

    x = parts()
    module = built(Net)
    ddp = parallel(module)
    places = set()
    for _ in range(4):
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
        large = module.wide.weight
        assert is_shared(large.grad)
        assert large.grad._version == 1
        places.add(large.grad.data_ptr())
        assert not is_shared(torch.empty_like(large))
    assert len(places) <= 2


@ours
def parameters_may_have_one_gradient_together(parallel: Any) -> None:
    ddp = parallel(built(lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))))
    ddp(torch.ones(1, WIDE)).sum().backward()
    first, second = (layer.weight for layer in ddp.module)
    first.grad.fill_(rank() + 1)
    second.grad = first.grad
    ddp.reducer.average()
    assert torch.equal(second.grad, torch.full_like(second, 1.5))


@ours
def delayed_reductions_are_waited_for(parallel: Any) -> None:
    # torch leaves them under way, and an optimizer on the CPU may step before they end.
    module = built(lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1_000_000, bias=False)))
    late = module[1].weight
    ddp = parallel(
        module, delay_all_reduce_named_params=[("1.weight", late)], param_to_hook_all_reduce=module[0].weight
    )
    expected = mean_gradients(module, lambda m, n: m(parts()[n]).sum())[2]
    for _ in range(3):
        ddp.zero_grad()
        ddp(parts()[rank()]).sum().backward()
        seen = late.grad.clone()
        dist.barrier()
        assert_equal([seen], [expected])


@ours
def every_backward_is_averaged(parallel: Any) -> None:
    # torch averages the first one after a forward alone, and leaves the others as they are.
    x = parts()
    module = built(Net).eval()
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean() + m(x[n]).sum())
    ddp = parallel(module)
    for _ in range(5):
        ddp.zero_grad()
        output = ddp(x[rank()])
        output.square().mean().backward(retain_graph=True)
        output.sum().backward()
        assert_equal(gradients(module), expected)


@ours
def parameters_may_be_unused_without_a_word(parallel: Any) -> None:
    x = parts()
    module = built(Branches)
    ddp = parallel(module)
    for branch in ((0, 1), (0, 0), (0, 1), (0, 1), (1, 1), (0, 1)):
        expected = mean_gradients(module, lambda m, n, branch=branch: m(x[n], branch[n]).square().mean())
        ddp.zero_grad()
        ddp(x[rank()], branch[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@ours
def a_penalty_may_come_late(parallel: Any) -> None:
    # A penalty's gradients reach parameters by another way than outputs.
    x = parts()

    def deep() -> nn.Module:
        return nn.Sequential(*itertools.chain(*((nn.Linear(4, 4), nn.Tanh()) for _ in range(80))))

    module, alone = built(deep), built(deep)
    ddp = parallel(module)
    for number in range(6):
        for model, batch in ((ddp, x[rank()]), (alone, torch.cat(x))):
            model.zero_grad()
            loss = model(batch).square().mean()
            if number == 4:
                point = batch.clone().requires_grad_()
                (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
                loss = (slope.square().sum(1) - 1).square().mean()
            loss.backward()
        assert_equal(gradients(module), gradients(alone), rtol=1e-4, atol=1e-6)


class Sidelong(nn.Module):
    """Many layers, of which one has the loss, which no output leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1) for _ in range(80))
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.layers[2](x).square().mean()
        return self.layers[0](x)


@ours
def a_loss_of_few_parameters_may_come_sidelong(parallel: Any) -> None:
    module = built(Sidelong)
    ddp = parallel(module)
    for _ in range(5):
        assert_hidden_loss_is_averaged(ddp)


@ours
def a_loss_may_go_sidelong_late(parallel: Any) -> None:
    x = parts()
    module = built(Sidelong)
    ddp = parallel(module)
    for _ in range(4):
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
    for _ in range(3):
        assert_hidden_loss_is_averaged(ddp)


@ours
def the_module_itself_stays_local_where_outputs_tell_nothing(parallel: Any) -> None:
    x = parts()
    module = built(Sidelong)
    ddp = parallel(module)
    for _ in range(2):
        ddp(x[rank()])
        module.loss.backward()
    if rank() == 0:  # the other rank does not wait
        ddp.zero_grad()
        module(x[0])
        module.loss.backward()
        module.loss = None
        local = copy.deepcopy(module)
        local.zero_grad()
        local(x[0])
        local.loss.backward()
        assert_equal(gradients(module), gradients(local))


@ours
def it_may_be_cast_after_it_is_wrapped(parallel: Any) -> None:
    x = parts()
    module = built(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 300)))
    ddp = parallel(module)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ddp.to(dtype)
        ddp.zero_grad()
        expected = mean_gradients(module, lambda m, n: m(x[n].to(dtype)).square().mean())  # noqa: B023
        ddp.zero_grad()
        ddp(x[rank()].to(dtype)).square().mean().backward()
        assert_equal(gradients(module), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@ours
def gradients_may_have_dtypes_of_their_own(parallel: Any) -> None:
    module = built(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))
    module[0].weight.grad_dtype = torch.float64
    module[1].double().weight.grad_dtype = torch.float32
    ddp = parallel(module)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank(), dtype=parameter.grad_dtype)
    ddp.reducer.average()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.grad_dtype
        assert torch.equal(parameter.grad, torch.full_like(parameter.grad, 1.5))


class CheckpointedSidelong(Checkpointed):
    def forward(self, x: Tensor) -> None:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)
        self.loss = x.square().mean()


@ours
def a_recomputed_loss_may_come_sidelong(parallel: Any) -> None:
    # Gradients of the two checkpoints arrive in backwards of their own, before all others.
    module = built(lambda: CheckpointedSidelong(use_reentrant=True))
    ddp = parallel(module)
    for _ in range(5):
        assert_hidden_loss_is_averaged(ddp)


@ours
def what_it_cannot_do_names_what_to_do(parallel: Any) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    with pytest.raises(muster.InvalidArgument, match=r"torch\.autocast"):
        parallel(built(Net), mixed_precision=_MixedPrecision(param_dtype=torch.float16))
    ddp = parallel(built(Net))
    with pytest.raises(muster.InvalidArgument, match=r"optimizer\.step\(\)"):
        ddp._register_fused_optim(torch.optim.SGD, 0.1)
    with pytest.raises(muster.InvalidArgument, match="process_group="):
        ddp._update_process_group(dist.group.WORLD)
    with pytest.raises(muster.InvalidArgument, match="sparse gradients are summed whole"):
        ddp._set_sparse_metadata({})


@ours
def one_host_reduces_in_its_memory(parallel: Any) -> None:
    assert parallel(built(Net))._get_ddp_logging_data()["reduced_through"] == "memory of this host"


@ours
def several_hosts_reduce_over_the_group(parallel: Any) -> None:
    x = parts()
    true_host = group_strategy.host
    group_strategy.host = lambda: f"host {rank()}"
    try:
        module = built(Net)
        ddp = parallel(module, process_group=dist.new_group([0, 1]))
    finally:
        group_strategy.host = true_host
    assert ddp._get_ddp_logging_data()["reduced_through"] == "the process group (gloo)"
    for _ in range(4):
        expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
        ddp.zero_grad()
        ddp(x[rank()]).square().mean().backward()
        assert_equal(gradients(module), expected)


@ours
def nothing_stays_of_a_wrapper(parallel: Any) -> None:
    # Else it would go on averaging, on one rank and not on another.
    module = built(Net)
    ddp = parallel(module)
    ddp(parts()[rank()]).sum().backward()
    reducer = weakref.ref(ddp.reducer)
    gc.disable()
    del ddp
    assert reducer() is None
    gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


@ours
def a_wrapper_that_nothing_names_averages(parallel: Any) -> None:
    x = parts()

    def loss_of(model: nn.Module, number: int) -> Tensor:
        return model(x[number]).square().mean()  # type: ignore[no-any-return]

    for make in (lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, WIDE), nn.Linear(WIDE, WIDE))):
        module = built(make)
        expected = mean_gradients(module, loss_of)
        loss_of(parallel(module), rank()).backward()
        assert_equal(gradients(module), expected)


@ours
def a_wrapper_averages_each_backward_of_an_output_that_outlives_it(parallel: Any) -> None:
    x = parts()
    module = built(Net).eval()
    ddp = parallel(module)
    outputs = [ddp(x[rank()]).square().mean() for _ in range(2)]
    expected = mean_gradients(module, lambda m, n: m(x[n]).square().mean())
    reducer = weakref.ref(ddp.reducer)
    gc.disable()
    try:
        del ddp
        while outputs:
            module.zero_grad()
            outputs.pop().backward()
            assert_equal(gradients(module), expected)
        assert reducer() is None
    finally:
        gc.enable()


@ours
def an_output_that_is_kept_averages_no_other_backward(parallel: Any) -> None:
    # Else the rank that has kept it would wait for the other.
    x = parts()
    module = built(Net)
    output = parallel(module)(x[rank()])
    if rank() == 1:
        del output
    alone = copy.deepcopy(module)
    for each in (module, alone):
        each(x[rank()]).square().mean().backward()
    assert_equal(gradients(module), gradients(alone))
    dist.barrier()


@ours
def a_group_has_one_strategy(parallel: Any) -> None:
    first, second = parallel(built(Net)), parallel(built(Net, seed=1))
    assert first.reducer.meet() is second.reducer.meet()


class Rows(nn.Module):
    """Its gradient is sparse, and it does not look like an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(200, 100))  # more than what travels with others

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, self.weight, sparse=True)


@ours
def a_sparse_gradient_that_nobody_expects_is_averaged(parallel: Any) -> None:
    ddp = parallel(Rows())
    ddp(torch.tensor([dist.get_rank()])).sum().backward()
    gradient = ddp.module.weight.grad
    assert torch.equal(gradient.to_dense()[:3, 0], torch.tensor([0.5, 0.5, 0.0]))


@ours
def a_hook_that_waits_for_a_reducer_of_torchs_is_refused(parallel: Any) -> None:
    def hook(state: Any, bucket: Any) -> Any:
        raise AssertionError

    hook.__annotations__.clear()
    hook.__module__ = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
    with pytest.raises(muster.InvalidArgument, match="call its step\\(\\) after backward"):
        parallel(built(Net)).register_comm_hook(None, hook)


def run(implementation: str, name: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    (BODIES | OURS)[name](IMPLEMENTATIONS[implementation])
    dist.barrier()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[WorkerPool]:
    """Two processes that stay for all bodies, in one process group."""
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_both_keep_it(two_ranks: WorkerPool, implementation: str, name: str) -> None:
    two_ranks.call(run, implementation, name, timeout=60)


@pytest.mark.parametrize("name", OURS)
def test_ours_keeps_it(two_ranks: WorkerPool, name: str) -> None:
    two_ranks.call(run, "muster", name, timeout=60)


ENDS_BY_SIGTERM = """
import sys, torch, torch.distributed as dist, muster
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = muster.DistributedDataParallel(torch.nn.Linear(4, 1))
trains = sys.argv[1] == "trains"
for step in range(1_000_000_000):
    with torch.set_grad_enabled(trains):
        loss = model(torch.ones(2, 4)).sum()
    if trains:
        loss.backward()
    if step == 3:
        print("goes on", flush=True)
"""


@pytest.mark.parametrize("kind", ["trains", "evaluates"])
def test_sigterm_ends_a_script_as_with_torchs(kind: str) -> None:
    command = [sys.executable, "-c", ENDS_BY_SIGTERM, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "goes on\n"
            process.terminate()
            assert process.wait(30) == -signal.SIGTERM
            assert "SIGTERM" not in process.stderr.read()
        finally:
            process.kill()
