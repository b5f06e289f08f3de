"""`clip_norm` of every type and `clip_value`, under every strategy, against torch.nn.utils."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muster
from support.jobs import Launcher, WorkerPool, make_job, part_of
from support.servers import Servers, on_servers

INFINITY = float("inf")
CLIPPINGS: list[dict[str, float]] = [
    {"clip_norm": 0.2},
    {"clip_norm": 0.5, "clip_norm_type": 1.0},
    {"clip_norm": 0.1, "clip_norm_type": 3.5},
    {"clip_norm": 0.05, "clip_norm_type": INFINITY},
    {"clip_norm_type": INFINITY},
    {"clip_value": 0.01},
]
STEPS = 5


class Words(nn.Module):
    """Rows of an embedding, layers of other dtypes, and a bias without a gradient."""

    def __init__(self, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 6, sparse=sparse)
        self.wide = nn.Linear(6, 900)
        self.last = nn.Linear(900, 3)
        self.unused = nn.Parameter(torch.ones(4))
        self.to(dtype)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.wide(self.rows(words).mean(1)).tanh())


def made(optimizer: str, sparse: bool, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(8)
    module = Words(sparse, dtype)
    if optimizer == "SGD":
        return module, torch.optim.SGD(module.parameters(), lr=0.5, maximize=True)
    made: type[torch.optim.Optimizer] = getattr(torch.optim, optimizer)
    return module, made(module.parameters(), lr=0.01)  # type: ignore[call-arg]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    sizes = [12, 7, 12, 5, 9]
    return [
        (torch.randint(11, (n, 4), generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]


def trained(strategy: muster.Strategy, optimizer: str, sparse: bool, dtype: torch.dtype) -> tuple[Tensor, list[float]]:
    """All parameters, and the reported norms."""
    module, own = made(optimizer, sparse, dtype)
    model, _ = strategy.prepare(module, own)
    norms = []
    for batch in batches():
        result = strategy.step(lambda x, y: F.cross_entropy(model(x), y), *part_of(strategy, batch))
        assert result.stepped
        norms.append(float(result.grad_norm))
    return torch.cat([p.detach().flatten() for p in module.parameters()]), norms


def in_torch(
    optimizer: str, sparse: bool, dtype: torch.dtype, clipping: dict[str, float]
) -> tuple[np.ndarray, list[float]]:
    module, own = made(optimizer, sparse, dtype)
    norms = []
    for x, y in batches():
        own.zero_grad()
        F.cross_entropy(module(x), y).backward()
        dense = []
        for p in module.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
                dense.append(p.grad._values())
            elif p.grad is not None:
                dense.append(p.grad)
        norm_type = clipping.get("clip_norm_type", 2.0)
        norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in dense]), norm_type)))
        if "clip_norm" in clipping:
            for g in dense:
                g.mul_(min(1.0, clipping["clip_norm"] / (norms[-1] + 1e-6)))
        if "clip_value" in clipping:
            for g in dense:
                g.clamp_(-clipping["clip_value"], clipping["clip_value"])
        own.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy(), norms


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
@pytest.mark.parametrize(
    ("optimizer", "sparse", "options"),
    [
        ("Adagrad", True, {}),
        ("Adagrad", False, {"keep_gradients": False}),
        ("SGD", True, {"fuse": False}),
        ("SGD", False, {"keep_gradients": False}),
        ("AdamW", False, {"fuse": False, "keep_gradients": False}),
        ("RMSprop", False, {}),
    ],
)
def test_gradients_are_clipped_as_in_torch(
    job: Launcher, optimizer: str, sparse: bool, options: dict[str, Any], clipping: dict[str, float]
) -> None:
    expected, norms = in_torch(optimizer, sparse, torch.float64, clipping)
    for parameters, reported in job(trained, optimizer, sparse, torch.float64, **options, **clipping):
        np.testing.assert_allclose(reported, norms, rtol=1e-10)
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=2e-9)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"shard_optimizer": True}], ids=str)
def test_clipping_has_the_same_bits_in_processes(
    two_workers: WorkerPool, options: dict[str, Any], clipping: dict[str, float]
) -> None:
    def run(job: str, **options: Any) -> Any:
        return make_job(job, two_workers)(trained, "AdamW", False, torch.float32, **options, **clipping)

    (expected,) = run("mirrored-2")
    for parameters, norms in run("workers-2", **options):
        if not options.get("fuse", True):
            np.testing.assert_allclose(norms, expected[1], rtol=1e-6)
            np.testing.assert_allclose(parameters, expected[0], atol=1e-6)
            continue
        assert norms == expected[1]
        assert np.array_equal(parameters, expected[0])


def trained_on_servers(addresses: list[str], clipping: dict[str, float]) -> Any:
    with on_servers(addresses, seed=3, threads_per_replica=1, timeout=60.0, **clipping) as strategy:
        return trained(strategy, "AdamW", False, torch.float32)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
def test_clipping_has_the_same_bits_on_servers(two_workers: WorkerPool, clipping: dict[str, float]) -> None:
    servers = Servers(2)
    (expected,) = make_job("mirrored-2", two_workers)(trained, "AdamW", False, torch.float32, **clipping)
    for parameters, norms in two_workers.call(trained_on_servers, servers.addresses, clipping):
        assert norms == expected[1]
        assert np.array_equal(parameters, expected[0])


def test_elements_of_complex_gradients_are_bounded_by_their_parts() -> None:
    with muster.MirroredStrategy(["cpu:0"], clip_value=0.25) as strategy:
        weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        module = nn.ParameterList([weight])
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
        slope = torch.tensor([1 - 0.1j, 0.2 + 3j, -4j])
        strategy.step(lambda x: muster.Loss((model[0] * x).real.sum(), reduction="sum"), slope[None])
        torch.testing.assert_close(weight.detach(), -torch.tensor([0.25 + 0.1j, 0.2 - 0.25j, 0.25j]))


def test_norms_of_other_types_refuse_complex_parameters_by_name() -> None:
    with muster.MirroredStrategy(["cpu:0"], clip_norm_type=1.0) as strategy:
        module = nn.ParameterDict({"phase": torch.zeros(3, dtype=torch.complex64)})
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
        with pytest.raises(muster.InvalidArgument, match=r"'phase' is complex.* leave clip_norm_type at 2"):
            strategy.step(lambda x: (model["phase"] * x).real.sum(), torch.ones(1, 3))


@pytest.mark.parametrize("norm_type", [2.0, 8.0])
def test_a_norm_that_overflows_is_no_gradient_that_is_not_finite(job: Launcher, norm_type: float) -> None:
    for stepped, weights in job(overflowing, clip_norm=1.0, clip_norm_type=norm_type, keep_gradients=False):
        assert stepped
        np.testing.assert_array_equal(weights, 1)


def overflowing(strategy: muster.Strategy) -> tuple[bool, Tensor]:
    module = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(module.weight)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    x = torch.full((4, 3), 1e200, dtype=torch.float64)
    return strategy.step(lambda x: model(x).mean(), *part_of(strategy, (x,))).stepped, module.weight


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_norm_type": 0.0}, "clip_norm_type=0"),
        ({"clip_norm_type": float("nan")}, "clip_norm_type=nan"),
        ({"clip_norm_type": "inf"}, "clip_norm_type='inf': it must be a positive number"),
        ({"clip_value": -1.0}, "clip_value=-1"),
        ({"clip_value": True}, "clip_value=True: it must be a positive number"),
        ({"clip_value": 1.0, "clip_norm": 1.0}, "left out where clip_norm is given"),
    ],
)
def test_what_no_clipping_is_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(muster.InvalidArgument, match=text):
        muster.MirroredStrategy(["cpu:0"], **options)


def test_explain_tells_how_gradients_are_clipped() -> None:
    with muster.MirroredStrategy(["cpu:0"], clip_norm=2.0, clip_norm_type=INFINITY) as strategy:
        assert "gradient norm clipped to 2 (norm of type inf)" in strategy.explain()
    with muster.MirroredStrategy(["cpu:0"], clip_value=0.5) as strategy:
        assert "gradients clipped to magnitudes of 0.5" in strategy.explain()
