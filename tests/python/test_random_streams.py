"""Inside a replica, torch's random functions on the CPU use the replica's stream and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from muster import _random
from muster._C import _current_replica, _ReplicaScope, replica_generator, stream_seed

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(64),
    "randn": lambda: torch.randn(64),
    "randint": lambda: torch.randint(1000, (64,)),
    "randperm": lambda: torch.randperm(64),
    "rand_like": lambda: torch.rand_like(torch.zeros(64)),
    "normal": lambda: torch.normal(torch.zeros(64), 1.0),
    "normal_": lambda: torch.empty(64).normal_(),
    "uniform_": lambda: torch.empty(64).uniform_(),
    "random_": lambda: torch.empty(64).random_(),
    "exponential_": lambda: torch.empty(64).exponential_(),
    "geometric_": lambda: torch.empty(64).geometric_(0.1),
    "cauchy_": lambda: torch.empty(64).cauchy_(),
    "log_normal_": lambda: torch.empty(64).log_normal_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "bernoulli_": lambda: torch.empty(64).bernoulli_(),
    "multinomial": lambda: torch.multinomial(torch.ones(64), 32),
    "poisson": lambda: torch.poisson(torch.full((64,), 50.0)),
    "binomial": lambda: torch.binomial(torch.full((64,), 50.0), torch.full((64,), 0.5)),
    "standard_gamma": lambda: torch._standard_gamma(torch.ones(64)),
    "dirichlet": lambda: torch._sample_dirichlet(torch.ones(64)),
    "distributions": lambda: torch.distributions.Beta(2.0, 3.0).sample((64,)),
    "dropout": lambda: F.dropout(torch.ones(64)),
    "dropout_": lambda: F.dropout(torch.ones(64), inplace=True),
    "dropout2d": lambda: F.dropout2d(torch.ones(4, 64, 2, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(64), training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(4, 64, 2, 2), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(64), 0.1, 0.9, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(64)),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 8)] * 3, dropout_p=0.5),
    "fractional_max_pool": lambda: F.fractional_max_pool2d(torch.rand(1, 8, 16, 16), 2, output_size=5),
    "sparse": lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 1.0], (2,)).coalesce().values().normal_(),
    "xavier_uniform_": lambda: nn.init.xavier_uniform_(torch.empty(8, 8)),
    "kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(8, 8)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(8, 8)),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(8, 8)),
    "linear": lambda: nn.Linear(8, 8).weight.detach(),
    "lstm": lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5)(torch.ones(3, 2, 4))[0].detach(),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16)(torch.ones(3, 2, 8)).detach(),
}


@pytest.fixture(autouse=True)
def ambient_is_untouched() -> Iterator[None]:
    """Whatever a test draws inside replicas, torch's own generator must not notice."""
    before = torch._C.default_generator.get_state()
    yield
    assert torch.equal(before, torch._C.default_generator.get_state())


def in_threads(work: Callable[[int], Tensor], count: int = 2) -> list[Tensor]:
    """Runs `work(i)` in a thread each, starting together."""
    results: list[Tensor | None] = [None] * count
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            start.wait(30)
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]


@pytest.mark.parametrize("name", DRAWS)
def test_draws_come_from_the_replica(name: str) -> None:
    draw = DRAWS[name]
    with _ReplicaScope(7):
        first, second = draw(), draw()
    with _ReplicaScope(7):
        again = draw()
    with _ReplicaScope(8):
        other = draw()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_every_aten_operator_with_a_generator_is_routed() -> None:
    with _ReplicaScope(7):
        pass
    routed = set(torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect"))
    dispatched = set(torch._C._dispatch_get_all_op_names())
    random = {
        schema.name + ("." + schema.overload_name if schema.overload_name else "")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(str(a.type) == "Optional[Generator]" for a in schema.arguments)
    }
    random &= dispatched  # a few exist in TorchScript alone and call the others
    assert len(random) > 50
    assert random <= routed


def test_replica_generator() -> None:
    assert replica_generator(torch.device("cpu")) is None
    assert _current_replica() is None
    with _ReplicaScope(7, replica=3):
        generator = replica_generator(torch.device("cpu"))
        assert generator is not None
        assert generator.initial_seed() == 7
        assert _current_replica() == 3
        with _ReplicaScope(8, replica=4):
            assert _current_replica() == 4
        assert _current_replica() == 3
    assert _current_replica() is None


def test_stream_seeds_are_fixed() -> None:
    assert stream_seed(1234, 3, 17) == 0x7BAC0114FEBECBB0


def test_threads_draw_what_they_draw_alone() -> None:
    def masks(index: int) -> Tensor:
        with _ReplicaScope(index):
            return torch.stack([F.dropout(torch.ones(257)) for _ in range(100)])

    alone = [masks(0), masks(1)]
    for _ in range(3):
        together = in_threads(masks)
        assert torch.equal(alone[0], together[0])
        assert torch.equal(alone[1], together[1])


def test_state_functions_act_on_the_replica() -> None:
    with _ReplicaScope(7):
        assert torch.initial_seed() == 7
        state = torch.get_rng_state()
        first = torch.rand(4)
        torch.set_rng_state(state)
        assert torch.equal(first, torch.rand(4))
        with torch.random.fork_rng(devices=[]):
            forked = torch.rand(4)
        assert torch.equal(forked, torch.rand(4))
        torch.manual_seed(5)
        seeded = torch.rand(4)
        assert torch.initial_seed() == 5
        torch.seed()
        assert torch.initial_seed() != 5
    assert torch.equal(seeded, torch.rand(4, generator=torch.Generator().manual_seed(5)))


def test_state_functions_act_on_torch_outside() -> None:
    before = torch.get_rng_state()
    try:
        assert torch.manual_seed(5) is not None
        assert torch.initial_seed() == torch._C.default_generator.initial_seed() == 5
        first = torch.rand(4)
        torch.manual_seed(5)
        assert torch.equal(first, torch.rand(4, generator=torch.random.default_generator))
        assert torch.equal(torch.get_rng_state(), torch._C.default_generator.get_state())
        torch.seed()
        assert torch.initial_seed() == torch._C.default_generator.initial_seed() != 5
    finally:
        torch.set_rng_state(before)


def test_install_is_idempotent() -> None:
    replacement = torch.random.default_generator
    assert isinstance(replacement, torch.Generator)
    assert replacement.device == torch.device("cpu")
    _random.install()
    assert torch.random.default_generator is replacement


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(x)))


def gradients(blocks: nn.Sequential, reentrant: bool | None) -> Tensor:
    """Of a chain of blocks with dropout, with the given kind of activation checkpointing or none."""
    x = torch.ones(4, 32, dtype=torch.float64, requires_grad=True)
    y: Tensor = x
    for block in blocks:
        y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
    wanted = [x, *blocks.parameters()]
    for tensor in wanted:
        tensor.grad = None
    y.sum().backward()
    return torch.cat([tensor.grad.flatten() for tensor in wanted if tensor.grad is not None])


@pytest.fixture
def blocks() -> list[nn.Sequential]:
    with _ReplicaScope(1):
        return [nn.Sequential(*[Block() for _ in range(6)]) for _ in range(2)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_masks_again(blocks: list[nn.Sequential], reentrant: bool) -> None:
    def run(index: int, kind: bool | None) -> Tensor:
        with _ReplicaScope(10 + index, index):
            return torch.cat([gradients(blocks[index], kind) for _ in range(10)])

    plain = [run(0, None), run(1, None)]
    for _ in range(3):
        together = in_threads(lambda index: run(index, reentrant))
        assert torch.equal(plain[0], together[0])
        assert torch.equal(plain[1], together[1])


def nested(x: Tensor, depth: int) -> Tensor:
    """Reentrant checkpoints inside each other, with a dropout at the bottom of each."""
    if depth == 0:
        return F.dropout(x)
    return F.dropout(checkpoint(nested, x, depth - 1, use_reentrant=True), 0.01)


def test_deep_recomputation_on_another_thread_finds_the_replica() -> None:
    depth = 64  # from 60 on autograd moves to another thread
    seen: list[tuple[int, int | None]] = []

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            seen.append((threading.get_ident(), _current_replica()))
            return gradient

    def plain(x: Tensor, levels: int) -> Tensor:
        x = F.dropout(x)
        for _ in range(levels):
            x = F.dropout(x, 0.01)
        return x

    def run(index: int) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        with _ReplicaScope(20 + index, index):
            nested(Witness.apply(x), depth).sum().backward()
        assert x.grad is not None
        return x.grad

    def expected(index: int) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        with _ReplicaScope(20 + index, index):
            plain(x, depth).sum().backward()
        assert x.grad is not None
        return x.grad

    def witness(x: Tensor, levels: int) -> Tensor:
        return Witness.apply(x) if levels == 0 else checkpoint(witness, x, levels - 1, use_reentrant=True)

    wanted = [expected(0), expected(1)]
    got = in_threads(run)
    assert torch.equal(wanted[0], got[0])
    assert torch.equal(wanted[1], got[1])

    seen.clear()
    with _ReplicaScope(1, 9):
        witness(torch.ones(2, requires_grad=True), depth).sum().backward()
    assert {replica for _, replica in seen} == {9}
    assert threading.get_ident() not in {thread for thread, _ in seen}


def test_gradients_of_routed_operators() -> None:
    with _ReplicaScope(7):
        x = torch.ones(64, requires_grad=True)
        y = F.dropout(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y.detach())
        with torch.no_grad():
            assert not F.dropout(x).requires_grad
        with torch.inference_mode():
            assert F.dropout(x).is_inference()


def test_autocast() -> None:
    with _ReplicaScope(7), torch.autocast("cpu", torch.bfloat16):
        first = F.dropout(torch.ones(64, 8) @ torch.ones(8, 8))
    with _ReplicaScope(7), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(first, F.dropout(torch.ones(64, 8) @ torch.ones(8, 8)))
    assert first.dtype == torch.bfloat16


def test_func_transforms() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.dropout(x).sum()

    with _ReplicaScope(7):
        gradient = torch.func.grad(loss)(torch.ones(64))
        different = torch.vmap(lambda x: F.dropout(x), randomness="different")(torch.ones(4, 64))
        same = torch.vmap(lambda x: F.dropout(x), randomness="same")(torch.ones(4, 64))
    with _ReplicaScope(7):
        assert torch.equal(gradient, F.dropout(torch.ones(64)))
        assert torch.equal(different, F.dropout(torch.ones(4, 64)))
        assert torch.equal(same[0], F.dropout(torch.ones(64)))
    assert torch.equal(same[0], same[3])
    assert not torch.equal(different[0], different[3])


def test_fake_tensors_and_meta() -> None:
    with _ReplicaScope(7):
        before = torch.get_rng_state()
        with FakeTensorMode() as mode:
            fake = F.dropout(torch.empty(4, 4).normal_())
            assert torch.randperm(4).shape == (4,)
        assert fake.shape == (4, 4)
        assert F.dropout(mode.from_tensor(torch.ones(3))).device == torch.device("cpu")
        assert torch.empty(4, device="meta").normal_().is_meta
        assert torch.rand(4, device="meta").is_meta
        assert torch.equal(before, torch.get_rng_state())


def test_other_modes_see_what_they_see_without_a_replica() -> None:
    class Record(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, bool]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            given = [*args, *(kwargs or {}).values()]
            self.seen.append((str(func), any(isinstance(value, torch.Generator) for value in given)))
            return func(*args, **(kwargs or {}))

    with _ReplicaScope(7), Record() as record:
        drawn = F.dropout(torch.ones(64))
    with _ReplicaScope(7):
        assert torch.equal(drawn, F.dropout(torch.ones(64)))
    assert any("bernoulli" in name for name, _ in record.seen)
    assert not any(has_generator for _, has_generator in record.seen)


def test_make_fx_and_export() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    for mode in ("real", "fake", "symbolic"):
        with _ReplicaScope(7):
            graph = make_fx(lambda x: F.dropout(x) * 2, tracing_mode=mode)(torch.ones(64))
            before = torch.get_rng_state()
            traced = graph(torch.ones(64))
            torch.set_rng_state(before)
            assert torch.equal(traced, F.dropout(torch.ones(64)) * 2)
    with _ReplicaScope(7):
        program = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), (torch.ones(2, 4),))
        assert program.module()(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace() -> None:
    with _ReplicaScope(7):
        before = torch._C.default_generator.get_state()
        traced = torch.jit.trace(lambda x: F.dropout(x), torch.ones(64), check_trace=False)
        torch._C.default_generator.set_state(before)
        state = torch.get_rng_state()
        first = traced(torch.ones(64))
        torch.set_rng_state(state)
        assert torch.equal(first, F.dropout(torch.ones(64)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_modules(backend: str) -> None:
    torch._dynamo.reset()
    with _ReplicaScope(1):
        module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 1))
    compiled = torch.compile(module, backend=backend)

    def run(seed: int) -> list[Tensor]:
        with _ReplicaScope(seed):
            results = []
            for _ in range(3):
                module.zero_grad()
                out = compiled(torch.ones(8, 16))
                out.sum().backward()
                results += [out.detach(), *[p.grad.clone() for p in module.parameters() if p.grad is not None]]
            return results

    run(7)
    first, again, other = run(7), run(7), run(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[5])


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_checkpoint(reentrant: bool) -> None:
    torch._dynamo.reset()
    with _ReplicaScope(1):
        block = Block()
    compiled = torch.compile(lambda x: checkpoint(block, x, use_reentrant=reentrant).sum(), backend="aot_eager")

    def run(seed: int) -> Tensor:
        with _ReplicaScope(seed):
            x = torch.ones(4, 32, dtype=torch.float64, requires_grad=True)
            compiled(x).backward()
            assert x.grad is not None
            return x.grad

    run(7)
    assert torch.equal(run(7), run(7))
    assert not torch.equal(run(7), run(8))
