"""What hooks see of gradients, whatever parts weigh; gradients that are lazy or complex."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import muster
from muster import Loss
from support.jobs import Launcher, WorkerPool, make_job, part_of


# --- hooks ------------------------------------------------------------------------------------------------------------
def samples(n: int) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def watched(strategy: muster.Strategy, sizes: list[int], weights: list[float]) -> Any:
    """Per step: what hooks saw here, and the gradient that was left."""
    module = nn.Linear(3, 1, bias=False).double()
    nn.init.constant_(module.weight, 0.5)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    found = []
    for size, weight in zip(sizes, weights, strict=True):
        seen: dict[int, Tensor] = {}

        def step(x: Tensor, seen: dict[int, Tensor] = seen, weight: float = weight) -> Loss:
            y = model(x)
            y.register_hook(lambda g, x=x: seen.__setitem__(len(x), g.clone()))
            return Loss(y.square().mean(), weight=weight * len(x))

        result = strategy.step(step, part_of(strategy, samples(size)))
        assert result.stepped
        found.append((dict(seen), module.weight.grad.clone(), float(result.grad_norm)))
    return found


@pytest.mark.parametrize("sizes", [[12, 12, 6, 12], [7, 5, 12, 3]])
@pytest.mark.parametrize("weights", [[1.0] * 4, [0.25, 7.0, 1000.0, 1.0]])
def test_hooks_see_the_gradient_of_their_parts_own_loss(job: Launcher, sizes: list[int], weights: list[float]) -> None:
    for found in job(watched, sizes, weights, fuse=False):
        for size, (seen, gradient, norm) in zip(sizes, found, strict=True):
            weight = torch.full((1, 3), 0.5, dtype=torch.float64, requires_grad=True)
            (samples(size) @ weight.t()).square().mean().backward()
            np.testing.assert_allclose(gradient, weight.grad, rtol=1e-12)
            assert norm == pytest.approx(float(weight.grad.norm()), rel=1e-12)
            assert seen
            for rows, hooked in seen.items():
                parts = [part for part in np.array_split(samples(size).numpy(), job.replicas) if len(part) == rows]
                exact = [2 * (part @ np.full((3, 1), 0.5)) / rows for part in parts]
                assert any(np.allclose(hooked, each, rtol=1e-14, atol=0) for each in exact)


def clamped() -> tuple[nn.Linear, torch.optim.Optimizer]:
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    module.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return module, torch.optim.SGD(module.parameters(), lr=1.0)


def test_a_clamping_hook_clamps_as_in_torch() -> None:
    x, y = torch.ones(48, 3), torch.ones(48, 1)
    plain, optimizer = clamped()
    (plain(x) - y).square().mean().backward()
    optimizer.step()
    module, optimizer = clamped()
    with muster.MirroredStrategy(["cpu:0"]) as strategy:
        model, optimizer = strategy.prepare(module, optimizer)
        strategy.step(lambda x, y: (model(x) - y).square().mean(), x, y)
    assert torch.equal(module.weight, plain.weight)


def test_a_clamping_hook_clamps_as_in_torch_where_one_replica_reduces() -> None:
    plain, plain_optimizer = clamped()
    module, optimizer = clamped()
    with muster.MirroredStrategy(["cpu:0"]) as strategy:
        model, optimizer = strategy.prepare(module, optimizer)
        for size in (48, 6, 48):
            plain_optimizer.zero_grad()
            (plain(torch.ones(size, 3)).sum(0) / size - 1).square().sum().backward()
            plain_optimizer.step()
            x = torch.ones(size, 3)
            strategy.step(lambda x: (strategy.reduce(model(x).sum(0), "sum") / len(x) - 1).square().sum(), x)
            assert torch.equal(module.weight, plain.weight)


def test_one_replica_has_torchs_bits_whatever_the_batch_size() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    ours = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    ours.load_state_dict(plain.state_dict())
    one = torch.optim.SGD(plain.parameters(), lr=0.1)
    two = torch.optim.SGD(ours.parameters(), lr=0.1)
    with muster.MirroredStrategy(["cpu:0"], fuse=False) as strategy:
        model, two = strategy.prepare(ours, two)
        for _ in range(3):
            x = torch.randn(48, 8)
            one.zero_grad()
            plain(x).square().mean().backward()
            one.step()
            strategy.step(lambda x: model(x).square().mean(), x)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_loss_scale_is_all_that_hooks_see_of_fp16() -> None:
    seeds = []
    with muster.MirroredStrategy(["cpu:0"], precision="fp16", loss_scale=muster.LossScale(init=8.0)) as strategy:
        module = nn.Linear(2, 1, bias=False)
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))

        def step(x: Tensor) -> Tensor:
            loss = model(x).float().sum()
            loss.register_hook(lambda g: seeds.append(float(g)))
            return loss * 1.0

        for size in (6, 6, 5):
            strategy.step(step, torch.ones(size, 2))
    assert seeds == [8.0] * 3


def lent(strategy: muster.Strategy, weights: list[float]) -> Any:
    """Gradients above 4 MB stay where autograd left them, whatever their part weighs."""
    torch.manual_seed(1)
    module = nn.Linear(1024, 1100, bias=True)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.randn(6, 1024, generator=torch.Generator().manual_seed(2))
    norms = []
    for weight in weights:

        def step(x: Tensor, weight: float = weight) -> Loss:
            return Loss(model(x).square().mean(), weight=weight * (1 + float(x[0, 0] > 0)))

        norms.append(float(strategy.step(step, part_of(strategy, x)).grad_norm))
    return norms, module.weight.detach()[::100].clone(), module.bias.detach().clone()


def test_large_gradients_weigh_what_small_ones_do(wide_job: Launcher) -> None:
    weights = [6.0, 5.0, 900.0, 5.0]
    expected = wide_job(lent, weights, fuse=False)[0]
    for norms, weight, bias in wide_job(lent, weights, keep_gradients=False):
        assert norms == pytest.approx(expected[0], rel=1e-6)
        np.testing.assert_allclose(weight, expected[1], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(bias, expected[2], rtol=1e-6, atol=1e-7)


def mixed_windows(strategy: muster.Strategy) -> Any:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(1024, 1100), nn.Tanh(), nn.Linear(1100, 2))
    model, _ = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    for step in range(4):
        x = torch.randn(6, 1024, generator=torch.Generator().manual_seed(step))
        x = part_of(strategy, x)
        strategy.step(lambda x, k=step: Loss(model(x).square().mean(), weight=float(x[0, 0] > 0) + k + 0.3), x)
    strategy.flush()
    return [parameter.detach()[::50].clone() for parameter in module.parameters()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_uneven_weights_give_the_same_bits_in_every_strategy(two_workers: WorkerPool, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate": accumulate}
    alone, kept = (
        make_job("mirrored-2", two_workers)(mixed_windows, keep_gradients=k, **options) for k in (False, True)
    )
    workers = make_job("workers-2", two_workers)(mixed_windows, keep_gradients=False, **options)
    for other in (*kept, *workers):
        for a, b in zip(alone[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


# --- lazy gradients ---------------------------------------------------------------------------------------------------
class Phase(nn.Module):
    """One complex number in two real parameters: the gradient of the second is a lazy negation."""

    def __init__(self) -> None:
        super().__init__()
        self.re = nn.Parameter(torch.tensor(0.7))
        self.im = nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.complex(self.re, self.im).conj()).real


def turn(strategy: muster.Strategy | None, steps: int = 20) -> tuple[float, bool]:
    module: Any = Phase()
    z = torch.view_as_complex(torch.randn(12, 2, generator=torch.Generator().manual_seed(0)))
    y = (z * torch.complex(torch.tensor(0.1), torch.tensor(0.9)).conj()).real
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    negative = False

    def note(g: Tensor) -> None:
        nonlocal negative
        negative |= g.is_neg()

    module.im.register_hook(note)
    loss = torch.zeros(())
    model = module if strategy is None else strategy.prepare(module, optimizer)[0]
    for _ in range(steps):
        if strategy is None:
            optimizer.zero_grad()
            loss = (model(z) - y).square().mean()
            loss.backward()
            optimizer.step()
        else:
            loss = strategy.step(lambda z, y: (model(z) - y).square().mean(), *part_of(strategy, (z, y))).loss
    return float(loss), negative


@pytest.mark.parametrize(
    "options", [{}, {"fuse": False}, {"keep_gradients": False}, {"wire": "bf16"}, {"accumulate": 2}]
)
def test_negated_gradients_have_their_sign(job: Launcher, options: dict[str, Any]) -> None:
    expected, _ = turn(None, 10 if "accumulate" in options else 20)
    for loss, _ in job(turn, **options):
        assert loss == pytest.approx(expected, rel=0.05, abs=1e-4)


def test_autograd_hands_negated_gradients_over() -> None:
    assert turn(None)[1]


def negated_state(strategy: muster.Strategy) -> Any:
    """Buffers and an optimizer's state that are lazy."""
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, float(strategy.rank))
    z = torch.view_as_complex(torch.tensor([[1.0, 2.0 + strategy.rank], [3.0, 4.0]]))
    module.register_buffer("negative", z.conj().imag)
    module.register_buffer("conjugate", z.conj())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)
    model, optimizer = strategy.prepare(module, optimizer)
    strategy.step(lambda x: model(x).mean(), part_of(strategy, torch.ones(4, 2)))
    momentum = torch.view_as_complex(torch.arange(8.0).view(2, 2, 2)).conj().imag
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = momentum
    optimizer.load_state_dict(state)
    strategy.step(lambda x: model(x).mean() * 0, part_of(strategy, torch.ones(4, 2)))
    return (
        module.get_buffer("negative").resolve_neg(),
        module.get_buffer("conjugate").resolve_conj(),
        optimizer.state_dict()["state"][0]["momentum_buffer"].resolve_neg(),
    )


def test_lazy_buffers_and_optimizer_state_keep_their_values(job: Launcher) -> None:
    for negative, conjugate, momentum in job(negated_state):
        np.testing.assert_array_equal(negative, [-2, -4])
        np.testing.assert_array_equal(conjugate, [1 - 2j, 3 - 4j])
        np.testing.assert_allclose(momentum, [[-0.9, -2.7], [-4.5, -6.3]], rtol=1e-6)


def test_a_parameter_that_is_a_negation_is_refused() -> None:
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(torch.ones(2, dtype=torch.complex64).conj().imag))
    with muster.MirroredStrategy(["cpu:0"]) as strategy, pytest.raises(muster.InvalidArgument, match="'p'"):
        strategy.prepare(module)


# --- complex values ---------------------------------------------------------------------------------------------------
class Rotary(nn.Module):
    """A complex layer beside a real one, and complex buffers that the step writes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.transposed = nn.Parameter(torch.randn(4, 4, dtype=dtype).t())
        self.head = nn.Linear(4, 1, dtype=self.weight.real.dtype)
        self.register_buffer("freqs", torch.polar(torch.ones(4), torch.arange(4.0)).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.freqs.mul_(1j)
        z = (x.to(self.weight.dtype) @ self.weight) @ self.transposed * self.freqs
        return self.head(z.abs() + z.conj().imag).squeeze(1)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def complex_training(strategy: muster.Strategy | None, kind: str, dtype: torch.dtype, clip: float | None) -> Any:
    torch.manual_seed(5)
    module = Rotary(dtype)
    optimizer = OPTIMIZERS[kind](list(module.parameters()))
    model = module if strategy is None else strategy.prepare(module, optimizer)[0]
    norms = []
    for step in range(4):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        x = x.to(module.head.weight.dtype)
        if strategy is None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))))
            optimizer.step()
        else:
            norms.append(float(strategy.step(lambda x: model(x).square().mean(), part_of(strategy, x)).grad_norm))
    if strategy is not None:
        for parameter in module.parameters():
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
    return norms, [p.detach().clone() for p in module.parameters()], module.get_buffer("freqs").clone()


@pytest.mark.parametrize(
    ("kind", "dtype", "clip", "options"),
    [
        ("sgd", torch.complex128, None, {}),
        ("adamw", torch.complex64, 0.5, {}),
        ("adam", torch.complex128, 0.5, {"fuse": False}),
        ("adagrad", torch.complex64, None, {"buffers": "chief"}),
    ],
)
def test_complex_parameters_and_buffers_train_as_in_torch(
    job: Launcher, kind: str, dtype: torch.dtype, clip: float | None, options: dict[str, Any]
) -> None:
    expected = complex_training(None, kind, dtype, clip)
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.complex64 else {"rtol": 1e-9, "atol": 1e-12}
    for norms, parameters, freqs in job(complex_training, kind, dtype, clip, clip_norm=clip, **options):
        np.testing.assert_allclose(norms, expected[0], rtol=tolerance["rtol"])
        for a, b in zip(parameters, expected[1], strict=True):
            np.testing.assert_allclose(a, b.numpy(), **tolerance)
        np.testing.assert_allclose(freqs, expected[2].numpy(), rtol=1e-6, atol=1e-6)


def complex_by_hand(strategy: muster.Strategy) -> Any:
    torch.manual_seed(5)
    module = Rotary(torch.complex128)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = strategy.prepare(module, optimizer)
    (x,) = part_of(strategy, torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    model(x).square().mean().backward()
    return [p.grad.clone() for p in module.parameters()]


def test_complex_gradients_are_averaged_by_hand(worker_job: Launcher) -> None:
    torch.manual_seed(5)
    module = Rotary(torch.complex128)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module(x).square().mean().backward()
    for gradients in worker_job(complex_by_hand):
        for a, p in zip(gradients, module.parameters(), strict=True):
            np.testing.assert_allclose(a, p.grad.numpy(), rtol=1e-10)


def test_parameter_servers_refuse_complex_parameters_by_name() -> None:
    module = Rotary(torch.complex64)
    with muster.ParameterServerStrategy.from_env() as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(muster.InvalidArgument, match="'weight' is complex"):
            strategy.step(lambda x: model(x).mean(), torch.ones(4, 3))


def test_buffers_that_nobody_can_agree_on_are_refused_by_name() -> None:
    module = nn.Linear(1, 1)
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    module.register_buffer("quantised", quantised)
    with muster.MirroredStrategy(["cpu:0"]) as strategy, pytest.raises(muster.InvalidArgument, match="'quantised'"):
        strategy.prepare(module)


# --- windows ----------------------------------------------------------------------------------------------------------
def reported(strategy: muster.Strategy) -> Any:
    """The first replica reports one metric, the others another; everybody a third."""
    module = nn.Linear(1, 1)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    x = torch.arange(12.0).view(12, 1)

    def step(x: Tensor) -> Loss:
        is_first = float(x[0]) == 0
        metrics = {"everywhere": x.mean(), "first" if is_first else "others": float(x.mean())}
        return Loss(model(x).mean(), weight=len(x) * (1.0 if is_first else 3.0), metrics=metrics)

    open_metrics = dict(strategy.step(step, part_of(strategy, x)).metrics)
    closed = strategy.step(step, part_of(strategy, x[:-1]))
    assert closed.stepped
    return {name: float(value) for name, value in closed.metrics.items()}, set(open_metrics)


def test_a_metric_is_the_mean_over_the_losses_that_bring_it(wide_job: Launcher) -> None:
    sums: dict[str, list[float]] = {}
    for n in (12, 11):
        for index, part in enumerate(np.array_split(np.arange(float(n)), wide_job.replicas)):
            weight = len(part) * (1.0 if index == 0 else 3.0)
            for name in ("everywhere", "others" if index else "first"):
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += weight * part.mean()
                total[1] += weight
    for metrics, open_names in wide_job(reported, accumulate=2):
        assert metrics == pytest.approx({name: total / weight for name, (total, weight) in sums.items()}, rel=1e-6)
        assert open_names <= set(sums)


def test_flush_has_nothing_to_say_of_a_window_that_failed() -> None:
    module = nn.Linear(1, 1)
    with muster.MirroredStrategy(["cpu:0", "cpu:1"], accumulate=4) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.ones(2, 1)

        def broken(x: Tensor) -> Tensor:
            raise KeyError("no such column")

        strategy.step(lambda x: model(x).mean(), x)
        with pytest.raises(KeyError):
            strategy.step(broken, x)
        assert strategy.flush() is None
        assert strategy.flush() is None
        assert not strategy.step(lambda x: model(x).mean(), x).stepped
        result = strategy.flush()
        assert result is not None
        assert result.stepped
        assert torch.isfinite(result.loss)


def go_on(strategy: muster.Strategy, state: list[Tensor] | None, first: int) -> Any:
    """Steps from batch `first` of an epoch with a short last one, then another epoch."""
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(2)
    module = nn.Linear(4, 3)
    if state is not None:
        for parameter, value in zip(module.parameters(), state, strict=True):
            parameter.data.copy_(torch.as_tensor(value))
    data = TensorDataset(torch.randn(28, 4, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = strategy.prepare(module, optimizer, DataLoader(data, batch_size=12))
    states = []
    for epoch in range(2):
        for number, (x,) in enumerate(loader):
            if epoch == 0 and number < first:
                continue
            strategy.step(lambda x: model(x).square().mean(), x)
            states.append([p.detach().clone() for p in module.parameters()])
    return states


@pytest.mark.parametrize("first", [1, 2])
def test_a_job_goes_on_with_the_same_bits_wherever_it_stopped(first: int) -> None:
    with muster.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        expected = go_on(strategy, None, 0)
    with muster.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        found = go_on(strategy, expected[first - 1], first)
    for a, b in zip(found, expected[first:], strict=True):
        assert all(map(torch.equal, a, b))
