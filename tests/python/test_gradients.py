"""Gradients of every kind of graph: each is compared with autograd's own on the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import muster
from muster import Loss
from support.jobs import Launcher, part_of

ROWS = 7
STEPS = 4


class Branches(nn.Module):
    """Parameters that are used rarely, sometimes, several times, never, and in other places by replica."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.by_row = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.always(torch.tanh(self.always(x)))  # used twice
        # Which layer a row goes through depends on the row, so that replicas use different layers.
        chosen = x.detach().sum(1) > 0
        parts = [self.by_row[int(c)](x[i]) for i, c in enumerate(chosen)]
        x = torch.stack(parts) if parts else x
        if step % 2:
            x = self.sometimes(x)
        return (x * self.scale).square().mean() + self.empty.sum()


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, step: int) -> Tensor:
        rows = (x[:, 0].abs() * 3).long() % 6
        return nn.functional.cross_entropy(self.head(self.embedding(rows)), (rows + step) % 6)


class Checkpointed(nn.Module):
    """One layer in several reentrant or other segments, one inside the other down to `depth`."""

    def __init__(self, reentrant: bool, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.reentrant = reentrant
        self.depth = depth

    def nested(self, x: Tensor, depth: int) -> Tensor:
        x = torch.tanh(self.shared(x))
        if depth > 0:
            x = checkpoint(self.nested, x, depth - 1, use_reentrant=self.reentrant)
        return x

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.nested, x, self.depth, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=self.reentrant)
        return x.square().mean()


class InnerGradient(nn.Module):
    """A gradient penalty: autograd.grad inside the step, keeping the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.layers(x)
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(y.sum(), list(self.layers.parameters()), retain_graph=True)
        return y.square().mean() + inner.square().sum(1).mean()


class Convolutions(nn.Module):
    """Weights in channels_last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 1))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, step: int) -> Tensor:
        images = x[:, None, None, :].expand(-1, 2, 3, -1).contiguous(memory_format=torch.channels_last)
        return self.layers(images).square().mean()


class Mixed(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.fp64 = nn.Linear(4, 4).double()
        self.fp32 = nn.Linear(4, 4).float()
        self.bf16 = nn.Linear(4, 4).bfloat16()

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.fp64(x).float()
        y = self.fp32(y).bfloat16()
        return self.bf16(y).double().square().mean()


class Scaled(torch.autograd.Function):
    """A custom function whose backward makes a gradient of another memory order than its parameter's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient * 2).t().contiguous().t()


class Transposed(nn.Module):
    """Gradients of another memory order, expanded gradients, and views of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4) / 10)
        self.row = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return (x @ Scaled.apply(self.weight).t()).square().mean() + self.row.sum() * x.mean() + self.weight[0].sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "branches": Branches,
    "tied": Tied,
    "reentrant": lambda: Checkpointed(True, 2),
    "non-reentrant": lambda: Checkpointed(False, 2),
    "deep-reentrant": lambda: Checkpointed(True, 70),
    "inner-gradient": InnerGradient,
    "channels-last": Convolutions,
    "mixed": Mixed,
    "transposed": Transposed,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(8)
    model = MODELS[name]()
    return model if name == "mixed" else model.double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(ROWS, 4, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(strategy: muster.Strategy, names: list[str]) -> Any:
    results = {}
    for name in names:
        module = build(name)
        model, optimizer = strategy.prepare(module, optimizer_of(module))
        for number, batch in enumerate(batches()):
            part = part_of(strategy, batch)
            strategy.step(lambda x, m=model, n=number: m(x, n), part, optimizers=optimizer)
        results[name] = [(p.detach().double(), p.grad is None) for p in module.parameters()]
    return results


def alone(name: str) -> list[tuple[np.ndarray, bool]]:
    model = build(name)
    optimizer = optimizer_of(model)
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        model(batch, number).backward()
        optimizer.step()
    return [(p.detach().double().numpy(), p.grad is None) for p in model.parameters()]


@pytest.mark.parametrize("bucket_bytes", [None, 1024])
def test_gradients_are_those_of_the_whole_batch(job: Launcher, bucket_bytes: int | None) -> None:
    expected = {name: alone(name) for name in MODELS}
    for trained in job(train, list(MODELS), bucket_bytes=bucket_bytes):
        for name, parameters in trained.items():
            tolerance = 2e-2 if name == "mixed" else 1e-9
            for (value, unused), (whole, whole_unused) in zip(parameters, expected[name], strict=True):
                np.testing.assert_allclose(value, whole, rtol=tolerance, atol=tolerance, err_msg=name)
                assert unused == whole_unused, name


# --- sparse -----------------------------------------------------------------------------------------------------------
class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(10, 3, sparse=sparse, dtype=torch.float64)
        self.rarely = nn.Embedding(4, 3, sparse=sparse, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        some = words[words < 4]
        return x.square().mean() + (self.rarely(some).sum() / words.numel() if len(some) else 0.0)


# Rows seen by every replica, by one replica, and, in the second batch, no word of the second table at all.
SENTENCES = [
    [[1, 1], [5, 6], [1, 7], [7, 5], [2, 2], [9, 9], [0, 3]],
    [[8, 8], [5, 6], [4, 7], [7, 5], [8, 8], [9, 9], [8, 8]],
    [[1, 2], [5, 6], [4, 7], [7, 5], [8, 8], [9, 9], [8, 8]],
    [[8, 8], [8, 8], [4, 7], [7, 5], [8, 8], [9, 9], [1, 2]],
]


def sparse_optimizers(name: str, model: Words) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    if name == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=0.5)
    return torch.optim.SparseAdam(model.parameters(), lr=0.1)


def train_words(strategy: muster.Strategy, optimizer: str, sparse: bool) -> Any:
    module = Words(sparse)
    model, _ = strategy.prepare(module, sparse_optimizers(optimizer, module))
    results = []
    for _ in range(2):
        for sentences in SENTENCES:
            words = part_of(strategy, torch.tensor(sentences))
            results.append(float(strategy.step(lambda w: model(w), words).grad_norm))
    kinds = [p.grad is not None and p.grad.is_sparse for p in module.parameters()]
    return [p.detach() for p in module.parameters()], results, kinds


def words_alone(optimizer: str, sparse: bool, clip_norm: float | None) -> tuple[list[np.ndarray], list[float]]:
    """One process; clipped by a dense twin's norm, as torch does not clip sparse gradients."""
    model = Words(sparse)
    stepper = sparse_optimizers(optimizer, model)
    norms = []
    for _ in range(2):
        for sentences in SENTENCES:
            stepper.zero_grad()
            model(torch.tensor(sentences)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([g.to_dense().norm() for g in gradients]).norm().item()
            norms.append(norm)
            if clip_norm is not None and norm > clip_norm:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad = (parameter.grad * (clip_norm / (norm + 1e-6))).coalesce()
            stepper.step()
    return [p.detach().numpy() for p in model.parameters()], norms


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse-adam"])
@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (1, 0.3), (4, None)])
def test_sparse_rows_are_summed_then_updated_once(
    job: Launcher, optimizer: str, accumulate: int, clip_norm: float | None
) -> None:
    options = {"accumulate": 1, "clip_norm": clip_norm}
    if accumulate == 1:
        expected, expected_norms = words_alone(optimizer, True, clip_norm)
        for parameters, norms, kinds in job(train_words, optimizer, True, **options):
            assert norms == pytest.approx(expected_norms, rel=1e-9)
            assert all(kinds)
            for a, b in zip(parameters, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    else:
        for parameters in job(train_words_accumulating, optimizer, accumulate=accumulate):
            for a, b in zip(parameters, train_words_whole(optimizer), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def train_words_accumulating(strategy: muster.Strategy, optimizer: str) -> Any:
    module = Words(True)
    model, _ = strategy.prepare(module, sparse_optimizers(optimizer, module))
    for _ in range(2):
        for sentences in SENTENCES:
            strategy.step(lambda w: model(w), part_of(strategy, torch.tensor(sentences)))
    assert strategy.steps == 2
    return [p.detach() for p in module.parameters()]


def train_words_whole(optimizer: str) -> list[np.ndarray]:
    model = Words(True)
    stepper = sparse_optimizers(optimizer, model)
    for _ in range(2):
        stepper.zero_grad()
        model(torch.tensor([row for sentences in SENTENCES for row in sentences])).backward()
        stepper.step()
    return [p.detach().numpy() for p in model.parameters()]


def test_sparse_equals_dense(job: Launcher) -> None:
    dense, _ = words_alone("sgd", False, None)
    for parameters, _, _ in job(train_words, "sgd", True):
        for a, b in zip(parameters, dense, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


class MixedUse(nn.Module):
    """A sparse embedding whose weight also gets dense gradients, on some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)

    def forward(self, words: Tensor, dense: bool) -> Tensor:
        loss = self.embedding(words).square().mean()
        return loss + self.embedding.weight.square().sum() if dense else loss


def train_mixed_use(strategy: muster.Strategy) -> Any:
    module = MixedUse()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for number, sentences in enumerate(SENTENCES):
        words = part_of(strategy, torch.tensor(sentences))
        strategy.step(lambda w, n=number: model(w, n == 2), words)
    return module.embedding.weight.detach()


def test_a_weight_may_get_sparse_and_dense_gradients(job: Launcher) -> None:
    model = MixedUse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, sentences in enumerate(SENTENCES):
        optimizer.zero_grad()
        model(torch.tensor(sentences), number == 2).backward()
        optimizer.step()
    for weight in job(train_mixed_use):
        np.testing.assert_allclose(weight, model.embedding.weight.detach().numpy(), rtol=1e-9)


class Gathered(nn.Module):
    """Gradients with two sparse dimensions, of a part of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))

    def forward(self, places: Tensor) -> Tensor:
        return torch.gather(self.table, 0, places, sparse_grad=True).square().sum(1).mean()


PLACES = [[[0, 1, 2], [0, 5, 2], [3, 3, 3]], [[1, 1, 4], [0, 0, 0]], [[5, 4, 3]]]


def train_gathered(strategy: muster.Strategy, kind: Any, by_hand: bool) -> Any:
    module = Gathered()
    model, optimizer = strategy.prepare(module, kind(module.parameters(), lr=0.1))
    for places in PLACES:
        if by_hand:
            optimizer.zero_grad()
            model(torch.tensor(places)).backward()
            optimizer.step()
        else:
            strategy.step(model, part_of(strategy, torch.tensor(places)))
    return module.table.detach()


def gathered_alone(kind: Any) -> np.ndarray:
    model = Gathered()
    optimizer = kind(model.parameters(), lr=0.1)
    for places in PLACES:
        optimizer.zero_grad()
        model(torch.tensor(places)).backward()
        optimizer.step()
    return model.table.detach().numpy()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_gradients_of_several_sparse_dimensions(job: Launcher, kind: Any) -> None:
    for table in job(train_gathered, kind, False):
        np.testing.assert_allclose(table, gathered_alone(kind), rtol=1e-9)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_such_gradients_are_stepped_by_hand(kind: Any) -> None:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        np.testing.assert_array_equal(train_gathered(strategy, kind, True).numpy(), gathered_alone(kind))


# --- compiled ---------------------------------------------------------------------------------------------------------
def train_compiled(strategy: muster.Strategy, backend: str, in_place: bool) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(8)
    raw = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    if in_place:
        raw.compile(backend=backend)
        model, _ = strategy.prepare(raw, optimizer)
    else:
        model, _ = strategy.prepare(torch.compile(raw, backend=backend), optimizer)
    losses = []
    for _ in range(2):
        for batch in batches():
            losses.append(float(strategy.step(lambda x: model(x).square().mean(), part_of(strategy, batch)).loss))
    return [p.detach() for p in raw.parameters()], losses


@pytest.mark.parametrize(
    ("backend", "in_place"),
    [
        ("eager", False),
        ("eager", True),
        ("aot_eager", False),
        pytest.param("inductor", False, marks=pytest.mark.long),
    ],
)
def test_compiled_modules_train(wide_job: Launcher, backend: str, in_place: bool) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in batches():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for parameters, losses in wide_job(train_compiled, backend, in_place):
        assert losses[-1] < losses[0]
        for a, b in zip(parameters, model.parameters(), strict=True):
            np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-9, atol=1e-12)


class ComplexProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(*x.chunk(2, 1)) @ self.weight).flatten(1)


def train_compiled_complex(strategy: muster.Strategy) -> Any:
    torch._dynamo.reset()
    raw = ComplexProduct()
    raw.compile(backend="eager")
    model, _ = strategy.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for rows in (6, 6, 4, 8):  # sizes that compile again, for any size, when there are gradients
        x = torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).view(rows, 4)
        strategy.step(lambda x: model(x).square().mean(), part_of(strategy, x))
    return torch.view_as_real(raw.weight.detach())


def test_compiled_modules_train_complex_parameters(wide_job: Launcher) -> None:
    model = ComplexProduct()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (6, 6, 4, 8):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).view(rows, 4)).square().mean().backward()
        optimizer.step()
    for weight in wide_job(train_compiled_complex):
        np.testing.assert_allclose(weight, torch.view_as_real(model.weight.detach()).numpy(), rtol=1e-9)


# --- a gradient that comes too late -----------------------------------------------------------------------------------
class Late(nn.Module):
    """`twice` is used once per step until a reentrant segment uses it again, after its bucket left."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(64, 64)
        self.after = nn.Linear(64, 64)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            # Backward of this segment ends before the outer one's: the first use of `twice` comes last.
            x = checkpoint(self.twice, x, use_reentrant=True)
            x = checkpoint(lambda y: self.after(self.after(y)), x, use_reentrant=True)
            return checkpoint(self.twice, x, use_reentrant=True).square().mean()
        return self.twice(self.after(x)).square().mean()


def late_gradient(strategy: muster.Strategy) -> Any:
    torch.manual_seed(8)
    module = Late()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    x = part_of(strategy, torch.randn(8, 64).requires_grad_())
    message = ""
    for again in (False, False, True, True, True):
        model.again = again
        try:
            assert strategy.step(lambda x: Loss(model(x), weight=len(x)), x).stepped
        except (muster.LayoutMismatch, muster.RemoteError) as error:
            message += str(error)
    return message, [p.detach() for p in module.parameters()], strategy.steps


def test_a_gradient_after_its_bucket_left_is_an_error_naming_the_parameter(wide_job: Launcher) -> None:
    for message, parameters, steps in wide_job(late_gradient, bucket_bytes=1024):
        assert "parameter 'twice.weight'" in message or "parameter 'twice.bias'" in message
        assert steps == 4, "one window was dropped, and the next waits"
        assert all(np.isfinite(p).all() for p in parameters)


class CalledTwice(nn.Module):
    """A reentrant segment that is used twice, after a layer whose gradients come last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.segment = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(2):
            y = checkpoint(self.segment, y, use_reentrant=True)
        return y.square().mean()


def called_twice(strategy: muster.Strategy) -> Any:
    torch.manual_seed(8)
    module = CalledTwice()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.randn(7, 32)
    for rows in (1, 7, 2, 7):
        assert strategy.step(lambda x: Loss(model(x), weight=len(x)), part_of(strategy, x[:rows])).stepped
    return [p.detach() for p in module.parameters()]


def test_a_replica_counts_a_parameters_gradients_in_its_own_first_part(wide_job: Launcher) -> None:
    torch.manual_seed(8)
    module = CalledTwice()
    x = torch.randn(7, 32)
    for rows in (1, 7, 2, 7):
        module.zero_grad()
        module(x[:rows]).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    for parameters in wide_job(called_twice, bucket_bytes=1024, keep_gradients=False):
        for actual, expected in zip(parameters, module.parameters(), strict=True):
            np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_requires_grad_that_differs_between_workers_is_refused(worker_job: Launcher) -> None:
    for message in worker_job(frozen_on_one_rank):
        assert "requires_grad" in message or "differ" in message


def frozen_on_one_rank(strategy: muster.Strategy) -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    if not strategy.is_chief:
        model[0].requires_grad_(False)
    with pytest.raises(muster.LayoutMismatch) as caught:
        strategy.step(lambda x: model(x).square().mean(), torch.ones(3, 4))
    return str(caught.value)


def unfrozen_in_a_window(strategy: muster.Strategy) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = part_of(strategy, torch.ones(4, 3))

    def step() -> muster.StepResult:
        return strategy.step(lambda x: model(x).square().mean(), x)

    assert not step().stepped
    model[0].requires_grad_(True)
    with pytest.raises(muster.InvalidArgument, match=r"'0\.weight' was unfrozen within a window"):
        step()
    model[0].requires_grad_(False)
    assert step().stepped
    model[0].requires_grad_(True)
    before = module[0].weight.detach().clone()
    assert not step().stepped
    assert step().stepped
    return bool((module[0].weight != before).any())


def test_a_parameter_that_is_unfrozen_in_a_window_is_refused(wide_job: Launcher) -> None:
    assert all(wide_job(unfrozen_in_a_window, accumulate=2))


@pytest.mark.parametrize("replicas", [1, 2])
def test_compiled_autograd_is_refused_in_words(replicas: int) -> None:
    module = nn.Linear(2, 2)
    with muster.MirroredStrategy(["cpu"] * replicas, threads_per_replica=1) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert strategy.step(lambda x: model(x).sum(), torch.ones(4, 2)).stepped
        with (
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(
                muster.InvalidArgument, match=r"compiled autograd cannot run the hooks .*compiled_autograd off"
            ),
        ):
            strategy.step(lambda x: model(x).sum(), torch.ones(4, 2))
        assert strategy.step(lambda x: model(x).sum(), torch.ones(4, 2)).stepped


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_gradient_that_a_frozen_parameter_was_left_with_moves_nothing(replicas: int, fuse: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    frozen = module[0].weight.requires_grad_(False)
    with muster.MirroredStrategy(["cpu"] * replicas, fuse=fuse) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 2))
        before = frozen.detach().clone()
        frozen.requires_grad_(True)
        module(torch.ones(1, 2)).sum().backward()
        frozen.requires_grad_(False)
        for _ in range(2):
            strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 2))
        assert torch.equal(frozen, before)
        assert frozen.grad is None
