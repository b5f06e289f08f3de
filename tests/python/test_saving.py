"""strategy.save and strategy.load: what comes back, under which strategy, and what is said where it cannot."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import muster
from muster.checkpoint import reading
from support.ranks import run_ranks
from support.saving import DATA, NAMES, Job, build, mirrored, same, saved_twice
from support.servers import Servers, alone, on_servers


# --- what comes back --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, muster.optim.Adagrad])
def test_a_job_goes_on_bit_by_bit_whatever_its_seed_and_values_were(kind: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    with mirrored() as strategy:
        job = Job(strategy, kind)
        drawn = []

        def after_step() -> None:
            if strategy.steps == 7:
                strategy.save(tmp_path, schedule=job.schedule)
                drawn.append(torch.rand(3))

        expected = job.train(13, after_step).values()
        rate = job.schedule.get_last_lr()
    torch.manual_seed(4)
    with mirrored() as strategy:
        job = Job(strategy, kind)
        assert strategy.load(tmp_path, schedule=job.schedule) == {}
        assert strategy.steps == 7 and torch.equal(torch.rand(3), drawn[0])
        assert same(job.train(13).values(), expected) and job.schedule.get_last_lr() == rate


def test_named_values_and_objects_come_back(tmp_path: Path) -> None:
    average = build()
    value = {
        "none": None, "texts": ["a/b", "é"], "pair": (1, -2.5), "rates": [math.inf, -math.inf], "yes": True,
        "tensors": {"x": torch.arange(3), "y/z": torch.tensor(2.0, dtype=torch.bfloat16)}, "numbers": {3: "c", -1: {}},
        "counts": Counter({5: 2}), "empty": [], "large": 2**80,
    }  # fmt: skip
    with mirrored() as strategy:
        assert strategy.load(tmp_path) is None
        strategy.save(tmp_path, average=average, value=value, text="t", nan=math.nan)
        for parameter in average.parameters():
            parameter.data.zero_()
        found = strategy.load(tmp_path, average=average)
        assert found is not None and all(parameter.any() for parameter in average.parameters() if parameter.dim() == 2)
        tensors = found["value"].pop("tensors")
        assert (
            torch.equal(tensors["x"], torch.arange(3))
            and tensors["y/z"] == 2
            and tensors["y/z"].dtype == torch.bfloat16
        )
        value.pop("tensors")
        assert found["value"] == value and type(found["value"]["counts"]) is Counter
        assert found["text"] == "t" and math.isnan(found["nan"]) and "average" not in found


class Stateless:
    given: object = "nothing"

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: object) -> None:
        self.given = state


def test_an_object_without_state_comes_back_to_none(tmp_path: Path) -> None:
    thing = Stateless()
    with mirrored() as strategy:
        strategy.save(tmp_path, thing=thing, value=None)
        assert strategy.load(tmp_path, thing=thing) == {"value": None}
        assert thing.given is None
        with pytest.raises(muster.LayoutMismatch, match="holds no state of an object value="):
            strategy.load(tmp_path, value=thing)


def test_two_modules_two_optimizers_and_the_scales_of_their_sets(tmp_path: Path) -> None:
    def job(strategy: muster.Strategy) -> tuple[Any, ...]:
        one, two = nn.Linear(8, 3), nn.Linear(8, 3)
        groups = [{"params": [one.weight], "lr": 0.1}, {"params": [one.bias], "lr": 0.2}]
        optimizers = torch.optim.Adam(groups), torch.optim.SGD(two.parameters(), lr=0.3, momentum=0.9)
        return strategy.prepare(one, two, *optimizers)

    def step(strategy: muster.Strategy, module: Any, optimizer: Any) -> None:
        strategy.step(lambda x, y: nn.functional.cross_entropy(module(x), y), *DATA[:8], optimizers=optimizer)

    with mirrored(precision="fp16", loss_scale=muster.LossScale(init=2.0**10, interval=2)) as strategy:
        one, two, adam, sgd = job(strategy)
        for _ in range(2):
            step(strategy, one, adam)
        step(strategy, two, sgd)
        adam.param_groups[1]["lr"] = 0.05
        strategy.save(tmp_path)
        scales = [float(strategy.loss_scaler(each).state_dict()["scale"]) for each in (adam, sgd)]
        expected = [*one.state_dict().values(), *two.state_dict().values()]
    assert scales == [2.0**11, 2.0**10]
    with mirrored(precision="fp16", loss_scale=muster.LossScale(init=2.0**10, interval=2)) as strategy:
        one, two, adam, sgd = job(strategy)
        strategy.load(tmp_path)
        assert same([*one.state_dict().values(), *two.state_dict().values()], expected)
        assert [group["lr"] for group in adam.param_groups] == [0.1, 0.05]
        assert [float(strategy.loss_scaler(each).state_dict()["scale"]) for each in (adam, sgd)] == scales


def test_parameters_are_found_by_their_names(tmp_path: Path) -> None:
    def job(strategy: muster.Strategy, *, turned: bool) -> tuple[Any, Any]:
        module = build()
        parameters = list(module.parameters())
        optimizer = torch.optim.Adam(reversed(parameters) if turned else parameters, lr=0.01)
        module, optimizer = strategy.prepare(module, optimizer)
        return module, optimizer

    def moments(module: Any, optimizer: Any) -> list[Tensor]:
        return [optimizer.state[parameter]["exp_avg"].clone() for parameter in module.module.parameters()]

    with mirrored() as strategy:
        module, optimizer = job(strategy, turned=False)
        strategy.step(lambda x, y: nn.functional.cross_entropy(module(x), y), *DATA[:8])
        strategy.save(tmp_path)
        expected = moments(module, optimizer)
    with mirrored() as strategy:
        module, optimizer = job(strategy, turned=True)
        strategy.load(tmp_path)
        assert same(moments(module, optimizer), expected)


def test_the_safetensors_library_reads_what_a_checkpoint_holds(tmp_path: Path) -> None:
    _, newest = saved_twice(tmp_path)
    (shard,) = (tmp_path / NAMES["newest"]).glob("*.safetensors")
    assert torch.equal(load_file(shard)["modules/0/0.weight"], newest[0])
    manifest = json.loads((tmp_path / NAMES["newest"] / "manifest.json").read_text())["manifest"]
    assert json.loads(manifest["strings"]["content"])["dict"]["strategy"]["dict"]["steps"] == 2


# --- under any strategy -----------------------------------------------------------------------------------------------
class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = muster.ShardedEmbedding(30, 4, mode="sum")
        self.tower = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.table(ids)).square().mean()


def click_steps(strategy: muster.Strategy, folder: str, first: int, last: int, kind: str) -> list[Any]:
    """Steps from the checkpoint in the folder, if there is one, to `last`, where another is made; the final values."""
    torch.manual_seed(strategy.rank if first == 0 else 100 + strategy.rank)
    options = {"shard_optimizer": True} if kind == "sharded" else {}
    assert options == {} or strategy.num_workers == 2
    module = Clicks()
    optimizer = muster.optim.Adam(module.parameters(), lr=0.05)
    model, optimizer = strategy.prepare(module, optimizer)
    strategy.load(folder)
    assert strategy.steps == first
    ids = torch.arange(96).view(8, 12)[:, :4] % 30
    part = ids.tensor_split(strategy.num_workers)[strategy.rank]
    for _ in range(first, last):
        strategy.step(model, part)
    strategy.save(folder)
    state = optimizer.state_dict()["state"]
    values = [*model.state_dict().values(), *(state[n][name] for n in sorted(state) for name in sorted(state[n]))]
    result = [value.detach().float().numpy().copy() for value in values]
    strategy.close()
    return result


def click_ranks(kind: str, folder: str, first: int, last: int, addresses: list[str] | None = None) -> list[Any]:
    options: dict[str, Any] = {"seed": 3, "threads_per_replica": 1, "timeout": 60.0}
    if kind == "servers":
        return click_steps(on_servers(addresses or [], **options), folder, first, last, kind)
    sharded = {"shard_optimizer": True} if kind == "sharded" else {}
    strategy = muster.MultiWorkerMirroredStrategy.from_env(**options, **sharded)
    return click_steps(strategy, folder, first, last, kind)


def click_job(kind: str, folder: Path, first: int, last: int) -> list[Any]:
    if kind == "mirrored":
        return click_steps(mirrored(seed=3), str(folder), first, last, kind)
    servers = Servers(2) if kind == "servers" else None
    values, others = run_ranks(2, click_ranks, kind, str(folder), first, last, servers and servers.addresses)
    assert all((a == b).all() for a, b in zip(values, others, strict=True))
    return values


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return click_job("mirrored", tmp_path_factory.mktemp("undisturbed"), 0, 6)


@pytest.mark.parametrize(
    "kinds",
    [("mirrored", "servers", "sharded"), ("sharded", "mirrored", "servers"), ("servers", "sharded", "servers")],
)
def test_each_strategy_goes_on_from_the_checkpoint_of_each(
    kinds: tuple[str, ...], undisturbed: list[Any], tmp_path: Path
) -> None:
    for position, kind in enumerate(kinds):
        values = click_job(kind, tmp_path, 2 * position, 2 * position + 2)
    assert len(values) == len(undisturbed)
    assert all((a == b).all() for a, b in zip(values, undisturbed, strict=True))


# --- what is said where it cannot be ----------------------------------------------------------------------------------
def wider(strategy: muster.Strategy) -> None:
    strategy.prepare(module := build(17), torch.optim.AdamW(module.parameters()), DataLoader(DATA, batch_size=8))


def deeper(strategy: muster.Strategy) -> None:
    module = nn.Sequential(*build().children(), nn.Linear(3, 3))
    strategy.prepare(module, torch.optim.AdamW(module.parameters()), DataLoader(DATA, batch_size=8))


def another_optimizer(strategy: muster.Strategy) -> None:
    strategy.prepare(module := build(), torch.optim.Adam(module.parameters()), DataLoader(DATA, batch_size=8))


def fewer_parameters(strategy: muster.Strategy) -> None:
    strategy.prepare(
        module := build(), torch.optim.AdamW(list(module.parameters())[1:]), DataLoader(DATA, batch_size=8)
    )


def no_optimizer(strategy: muster.Strategy) -> None:
    strategy.prepare(build(), DataLoader(DATA, batch_size=8))


def with_generator(strategy: muster.Strategy) -> None:
    loader = DataLoader(DATA, batch_size=8, shuffle=True, generator=torch.Generator())
    strategy.prepare(module := build(), torch.optim.AdamW(module.parameters()), loader)


def other_batches(strategy: muster.Strategy) -> None:
    strategy.prepare(module := build(), torch.optim.AdamW(module.parameters()), DataLoader(DATA, batch_size=4))


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (other_batches, "loader 0: the state is of the middle of an epoch with batches of 8, and now 4"),
        (wider, r"'0.weight' of module 0 has shape \(17, 8\), and in the checkpoint \(16, 8\)"),
        (deeper, "lacks '5.weight' of module 0"),
        (another_optimizer, "optimizer 0 is Adam, and in the checkpoint AdamW"),
        (fewer_parameters, "has '0.weight' in group 0 of optimizer 0"),
        (no_optimizer, "1 optimizers, and 0 are prepared"),
        (with_generator, "loader 0 has 1 generators of its own, and the checkpoint states of 0"),
    ],
)
def test_a_checkpoint_of_other_objects_is_refused_and_nothing_loaded(
    prepare: Callable[[muster.Strategy], None], words: str, tmp_path: Path
) -> None:
    saved_twice(tmp_path)
    with mirrored() as strategy:
        prepare(strategy)
        before = [value.clone() for value in strategy._preparation.modules[0].state_dict().values()]
        with pytest.raises(muster.LayoutMismatch, match=words):
            strategy.load(tmp_path)
        assert same([*strategy._preparation.modules[0].state_dict().values()], before) and strategy.steps == 0


class History(nn.Module):
    """Has extra state of a shape that changes."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.losses = torch.zeros(0)
        self.raises = raises

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def get_extra_state(self) -> Tensor:
        return self.losses

    def set_extra_state(self, state: Tensor) -> None:
        if self.raises and len(state) == 3:
            raise ValueError("not these")
        self.losses = state


def histories(strategy: muster.Strategy, *, raises: bool = False) -> tuple[History, History, nn.Linear, Any]:
    modules = History(), History(raises), nn.Linear(8, 3)
    optimizer = torch.optim.AdamW([parameter for module in modules for parameter in module.parameters()], lr=0.1)
    first, second, third, _ = strategy.prepare(*modules, optimizer)
    strategy.step(lambda x, y: (first(x) + second(x) + third(x) + y[:, None]).sum(), *DATA[:8])
    return (*modules, optimizer)


def test_extra_state_of_another_shape_is_loaded(tmp_path: Path) -> None:
    with mirrored() as strategy:
        first, *_ = histories(strategy)
        first.losses = torch.arange(3.0)
        strategy.save(tmp_path)
    with mirrored() as strategy:
        first, *_ = histories(strategy)
        strategy.load(tmp_path)
        assert torch.equal(first.losses, torch.arange(3.0))


def test_extra_state_that_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with mirrored() as strategy:
        first, second, *_ = histories(strategy)
        first.losses, second.losses = torch.arange(3.0), torch.arange(3.0)
        strategy.save(tmp_path)
    torch.manual_seed(8)
    with mirrored() as strategy:
        *modules, optimizer = histories(strategy, raises=True)

        def values() -> list[Tensor]:
            replicas = [module for each in strategy._preparation.modules for module in each._modules_]
            state = [tensor for each in optimizer.state.values() for tensor in each.values()]
            return [value.clone() for module in replicas for value in module.state_dict().values()] + state

        before = values()
        with pytest.raises(ValueError, match="not these") as raised:
            strategy.load(tmp_path)
        assert raised.value.__notes__ == [f"while '{tmp_path / NAMES['older']}' was loaded"]
        assert same(values(), before) and strategy.steps == 1 and len(modules[0].losses) == 0


def test_what_cannot_be_saved_or_loaded_is_refused_by_name(tmp_path: Path) -> None:
    with mirrored(accumulate=2) as strategy:
        job = Job(strategy)
        with pytest.raises(muster.InvalidArgument, match=r"'state/f/value/0' is a function"):
            strategy.save(tmp_path, f=[lambda: None])
        with pytest.raises(muster.InvalidArgument, match=r"key \(1, 2\)"):
            strategy.save(tmp_path, f={(1, 2): 3})
        with pytest.raises(muster.InvalidArgument, match="sparse"):
            strategy.save(tmp_path, f=torch.eye(2).to_sparse())
        with pytest.raises(muster.InvalidArgument, match="keep=0"):
            strategy.save(tmp_path, keep=0)
        assert not list(tmp_path.iterdir())
        strategy.step(lambda x, y: job.model(x).sum(), *DATA[:8])
        for call in (strategy.save, strategy.load):
            with pytest.raises(muster.InvalidArgument, match=r"flush\(\)"):
                call(tmp_path)
        strategy.flush()
        strategy.save(tmp_path, epoch=3)
        with pytest.raises(muster.InvalidArgument, match=r"epoch= is a int"):
            strategy.load(tmp_path, epoch=0)
        with pytest.raises(muster.LayoutMismatch, match=r"no state of an object schedule=; it has epoch"):
            strategy.load(tmp_path, schedule=job.schedule)
    with pytest.raises(muster.InvalidArgument, match="closed"):
        strategy.save(tmp_path)


class Spectrum(nn.Module):
    """A complex parameter and buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=dtype))
        self.register_buffer("shift", torch.randn(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight + self.shift).abs()


def test_complex_parameters_go_on_bit_by_bit(tmp_path: Path) -> None:
    batches = torch.randn(6, 8, 4)

    def train(first: int, last: int, dtype: torch.dtype = torch.complex64) -> list[Tensor]:
        module = Spectrum(dtype)
        with mirrored() as strategy:
            model, _ = strategy.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
            if first > 0:
                strategy.load(tmp_path)
            for batch in batches[first:last]:
                strategy.step(lambda x: model(x).square().mean(), batch)
            if last < 6:
                strategy.save(tmp_path)
        return [module.weight.detach(), module.shift]

    torch.manual_seed(1)
    whole = train(0, 6)
    torch.manual_seed(1)
    train(0, 3)
    for expected, found in zip(whole, train(3, 6), strict=True):
        assert torch.equal(expected, found)
    with pytest.raises(muster.InvalidArgument, match=r"of real dtypes or complex64"):
        train(0, 3, torch.complex128)


def test_a_step_function_cannot_save(tmp_path: Path) -> None:
    with mirrored() as strategy:
        job = Job(strategy)

        def inside(x: Tensor, y: Tensor) -> Tensor:
            strategy.save(tmp_path)
            return job.model(x).sum()

        with pytest.raises(muster.InvalidArgument, match="inside a step"):
            strategy.step(inside, *DATA[:8])


def test_what_servers_have_stepped_is_not_loaded_over(tmp_path: Path) -> None:
    with alone() as strategy:
        job = Job(strategy)
        strategy.step(lambda x, y: job.model(x).sum(), *DATA[:8])
        strategy.save(tmp_path)
        with pytest.raises(muster.InvalidArgument, match="hold values and state from the first step on"):
            strategy.load(tmp_path)


def test_parameters_that_come_in_another_order_keep_their_state(tmp_path: Path) -> None:
    def build(*, turned: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        parameters = list(model.named_parameters())
        return model, torch.optim.AdamW(parameters[::-1] if turned else parameters)

    with mirrored() as strategy:
        model, optimizer = strategy.prepare(*build(turned=False))
        strategy.step(lambda x: model(x).square().sum(), torch.rand(4, 3))
        expected = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        strategy.save(tmp_path)
    with mirrored() as strategy:
        model, optimizer = strategy.prepare(*build(turned=True))
        strategy.load(tmp_path)
        assert optimizer.param_groups[0]["param_names"] == ["bias", "weight"]
        for name, parameter in model.named_parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], expected[name])


def _goes_on_from_a_written_parameter(folder: Path, way: str, is_sharded: bool) -> bool:
    """Of low precision: whether a job that loads a checkpoint steps it as the one that has saved it."""

    def job() -> tuple[muster.Strategy, Any, Any]:
        torch.manual_seed(0)
        strategy = muster.MultiWorkerMirroredStrategy.from_env(
            ["cpu"], threads_per_replica=1, shard_optimizer=is_sharded
        )
        model = nn.Linear(8, 6).to(torch.bfloat16)
        return strategy, *strategy.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(strategy: muster.Strategy, model: Any) -> None:
        strategy.step(lambda x: model(x).float().square().sum(), DATA.tensors[0][:8].bfloat16())

    strategy, model, optimizer = job()
    with strategy:
        step(strategy, model)
        with torch.no_grad():
            model.weight.fill_(0.3)
        strategy.save(folder)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        assert saved[1]["state"][0]["master"].equal(model.weight.float())
        step(strategy, model)
        expected = model.weight.detach().clone()
    strategy, model, optimizer = job()
    with strategy:
        if way == "save":
            strategy.load(folder)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        assert optimizer.state_dict()["state"][0]["master"].equal(model.weight.float())
        step(strategy, model)
        return torch.equal(model.weight, expected)


@pytest.mark.parametrize("way", ["save", "state_dict"])
@pytest.mark.parametrize(("workers", "is_sharded"), [(1, False), (2, False), (2, True)])
def test_a_parameter_of_low_precision_that_was_written_is_saved_as_it_is(
    workers: int, is_sharded: bool, way: str, tmp_path: Path
) -> None:
    assert run_ranks(workers, _goes_on_from_a_written_parameter, tmp_path, way, is_sharded) == [True] * workers


LOW = (torch.bfloat16, torch.float16)


class Precise:
    """A job of one replica in a dtype."""

    def __init__(self, dtype: torch.dtype, kind: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.strategy = muster.MirroredStrategy(["cpu"])
        self.dtype = dtype
        module = nn.Linear(8, 6).to(dtype)
        optimizer = {
            "AdamW": lambda: torch.optim.AdamW(module.parameters(), lr=0.01),
            "SGD": lambda: torch.optim.SGD(module.parameters(), lr=0.01),
            "momentum": lambda: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, dampening=0.1),
        }[kind]()
        self.model, self.optimizer = self.strategy.prepare(module, optimizer)

    def step(self, **options: Any) -> None:
        self.optimizer.param_groups[0].update(options)
        self.strategy.step(lambda x: self.model(x).float().square().sum(), DATA.tensors[0][:8].to(self.dtype))

    def widest(self) -> Tensor:
        """The weight, with what its master copy has beyond it."""
        master = self.optimizer.state_dict()["state"].get(0, {}).get("master")
        assert (master is not None) == (self.dtype in LOW)
        return cast(Tensor, self.model.weight.detach() if master is None else master).clone()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "momentum"])
@pytest.mark.parametrize("loaded", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
def test_a_change_of_dtype_takes_no_bits_away(
    saved: torch.dtype, loaded: torch.dtype, kind: str, tmp_path: Path
) -> None:
    first = Precise(saved, kind)
    with first.strategy:
        for _ in range(3):
            first.step()
        first.strategy.save(tmp_path)
        expected = first.widest().to(torch.float64 if loaded == torch.float64 else torch.float32)
    second = Precise(loaded, kind)
    with second.strategy:
        second.strategy.load(tmp_path)
        assert torch.equal(second.widest(), expected)
        second.step(lr=0.0)
        assert torch.equal(second.widest(), expected)
        assert torch.equal(second.model.weight, expected.to(loaded))


@pytest.mark.parametrize("loaded", [torch.float32, torch.float16, torch.bfloat16])
def test_what_was_written_before_the_first_step_after_a_load_is_saved(loaded: torch.dtype, tmp_path: Path) -> None:
    first = Precise(torch.bfloat16)
    with first.strategy:
        first.step()
        first.strategy.save(tmp_path)
    second = Precise(torch.bfloat16)
    with second.strategy:
        second.strategy.load(tmp_path)
        second.model.weight.data.fill_(0.5)
        second.strategy.save(tmp_path)
    third = Precise(loaded)
    with third.strategy:
        third.strategy.load(tmp_path)
        assert torch.equal(third.widest(), torch.full((6, 8), 0.5))
        assert torch.equal(third.model.weight, torch.full((6, 8), 0.5, dtype=loaded))


def test_a_parameter_that_is_of_low_precision_no_more_has_no_master_copy(tmp_path: Path) -> None:
    job = Precise(torch.bfloat16)
    with job.strategy:
        job.step()
        job.model.float()
        job.dtype = torch.float32
        assert torch.equal(job.widest(), job.model.weight)
        job.strategy.save(tmp_path)
        job.step()
        assert torch.equal(job.widest(), job.model.weight)
    low, wide = Precise(torch.bfloat16), Precise(torch.float32)
    with low.strategy, wide.strategy:
        low.step()
        wide.optimizer.load_state_dict(low.optimizer.state_dict())
        wide.step()
        assert torch.equal(wide.widest(), wide.model.weight)


def test_a_job_saves_and_loads_in_inference_mode_and_outside(tmp_path: Path) -> None:
    job, other = Precise(torch.bfloat16), Precise(torch.bfloat16)
    with job.strategy, other.strategy:
        for _ in range(2):
            job.step()
            with torch.inference_mode():
                job.strategy.save(tmp_path / "inside")
            job.step()
            job.strategy.save(tmp_path / "outside")
        expected = job.widest()
        job.strategy.close()
        with torch.inference_mode():
            other.strategy.load(tmp_path / "outside")
        assert torch.equal(other.widest(), expected)
        other.step()
        copy.deepcopy(other.optimizer.state_dict()["state"][0]["exp_avg"]).add_(1)  # no inference tensor


def test_two_optimizers_of_a_parameter_follow_its_dtype(tmp_path: Path) -> None:
    def job(dtype: torch.dtype) -> tuple[muster.Strategy, Any, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        strategy = muster.MirroredStrategy(["cpu"])
        module = nn.Linear(8, 6).to(dtype)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=lr) for lr in (0.01, 0.001)]
        model, *prepared = strategy.prepare(module, *optimizers)
        return strategy, model, prepared

    def step(strategy: muster.Strategy, model: Any, optimizer: torch.optim.Optimizer) -> None:
        data = DATA.tensors[0][:8].to(model.weight.dtype)
        strategy.step(lambda x: model(x).float().square().sum(), data, optimizers=[optimizer])

    strategy, model, optimizers = job(torch.bfloat16)
    with strategy:
        for optimizer in optimizers:
            step(strategy, model, optimizer)
        strategy.save(tmp_path)
        rounded = model.weight.detach().clone()
    strategy, model, optimizers = job(torch.float32)
    with strategy:
        strategy.load(tmp_path)
        assert torch.equal(model.weight.bfloat16(), rounded)
        for optimizer in optimizers:
            step(strategy, model, optimizer)
            assert "master" not in optimizer.state_dict()["state"][0]


class Keeping(nn.Linear):
    """Keeps a tensor beside its parameters."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept: Tensor = torch.arange(300)

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.kept = state["kept"]


def _count_maps(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.parametrize("fuse", [True, False])
def test_a_load_leaves_nothing_mapped(fuse: bool, tmp_path: Path) -> None:
    """What is kept of a checkpoint is in memory of its own, whatever becomes of its files."""
    average, keeping = build(), Keeping()
    with mirrored(fuse=fuse) as strategy:
        job = Job(strategy, torch.optim.AdamW)
        strategy.prepare(keeping)
        job.train(3)
        strategy.save(tmp_path, average=average, value=torch.arange(1000))
        assert strategy.load(tmp_path, average=average) is not None  # once the optimizer has stepped
        assert _count_maps(tmp_path) == 0
        expected = job.train(6).values()
    keeping = Keeping()
    keeping.kept = torch.arange(2)
    with mirrored(fuse=fuse) as strategy:
        job = Job(strategy, torch.optim.AdamW)
        strategy.prepare(keeping)
        found = strategy.load(tmp_path, average=average)
        assert _count_maps(tmp_path) == 0
        assert found is not None and torch.equal(found["value"], torch.arange(1000))
        assert torch.equal(keeping.kept, torch.arange(300))
        assert same(job.train(6).values(), expected)
    kept = muster.checkpoint.model_state(tmp_path), muster.checkpoint.optimizer_state(tmp_path)
    assert _count_maps(tmp_path) == 0 and all(kept)


def test_what_is_signed_is_not_read_where_others_may_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not muster._C.has_sha256():
        pytest.skip("this build cannot sign")
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of this test")
    monkeypatch.setenv("MUSTER_SECRET_FILE", str(secret))
    with mirrored() as strategy:
        Job(strategy)
        strategy.save(tmp_path / "runs")
    snapshot = next((tmp_path / "runs").glob("snapshot-*"))
    tensors, _ = muster._C._checkpoint.read_snapshot(snapshot)
    assert tensors and _count_maps(snapshot) == 0


def test_one_checkpoint_is_loaded_by_its_path_or_its_number(tmp_path: Path) -> None:
    values = saved_twice(tmp_path)
    for load in (
        lambda job: job.strategy.load(tmp_path / NAMES["older"], schedule=job.schedule),
        lambda job: job.strategy.load(f"{tmp_path}/{NAMES['older']}/", schedule=job.schedule),
        lambda job: muster.Checkpoints(job.strategy, tmp_path, schedule=job.schedule).load(1),
    ):
        with mirrored(seed=2) as strategy:
            job = Job(strategy)
            assert load(job) == {} and strategy.steps == 1 and same(job.values(), values[0])
    with mirrored(seed=2) as strategy:  # what is saved then is the newest
        job = Job(strategy)
        strategy.load(tmp_path / NAMES["older"], schedule=job.schedule)
        job.train(2)
        strategy.save(tmp_path)
    assert [reading.number_of(path) for path in reading.folders_in(tmp_path)] == [1, 2, 3]


def test_one_checkpoint_that_is_not_there_or_damaged_is_an_error(tmp_path: Path) -> None:
    saved_twice(tmp_path)
    with mirrored() as strategy:
        checkpoints = muster.Checkpoints(strategy, tmp_path)
        Job(strategy)
        with pytest.raises(muster.CheckpointError, match=rf"no checkpoint.*{reading.numbered(7)}.*{NAMES['newest']}"):
            checkpoints.load(7)
        with pytest.raises(muster.CheckpointError, match="there is none at all"):
            strategy.load(tmp_path / "elsewhere" / NAMES["older"])
        for wrong in (0, True, "1"):
            with pytest.raises(muster.InvalidArgument, match="number="):
                checkpoints.load(wrong)  # type: ignore[arg-type]
        with pytest.raises(muster.LayoutMismatch, match=rf"{NAMES['newest']}': "):
            strategy.load(tmp_path / NAMES["newest"], other=build())
        file = next((tmp_path / NAMES["newest"]).glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(muster.CheckpointError, match=rf"{NAMES['newest']}.*{file.name}"):
            strategy.load(tmp_path / NAMES["newest"])


def test_paths_that_are_neither_a_folder_nor_a_checkpoint_are_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.save(tmp_path / "runs")
        for short in ("1", "snapshot-1"):
            with pytest.raises(muster.InvalidArgument, match=rf"short names.*{NAMES['older']}"):
                strategy.load(tmp_path / "runs" / short)
        with pytest.raises(muster.InvalidArgument, match="is called as one checkpoint"):
            muster.Checkpoints(strategy, tmp_path / "runs" / NAMES["older"])
        assert strategy.load(tmp_path / "runs" / "2") is None
        (tmp_path / "runs" / NAMES["older"]).rename(tmp_path / "good")
        with pytest.raises(muster.InvalidArgument, match="is one checkpoint, and not called as one"):
            strategy.load(tmp_path / "good")
        with pytest.raises(muster.InvalidArgument, match=r"is called as one checkpoint.*runs"):
            strategy.save(tmp_path / "runs" / NAMES["newest"])
        for path in ("", "s3://bucket/runs", None):
            with pytest.raises(muster.InvalidArgument):
                strategy.save(path)  # type: ignore[arg-type]
            with pytest.raises(muster.InvalidArgument):
                strategy.load(path)  # type: ignore[arg-type]
            if path is not None:
                with pytest.raises(muster.InvalidArgument):
                    muster.Checkpoints(strategy, path)


def test_values_that_no_file_holds_are_named(tmp_path: Path) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    deep: list[Any] = []
    for _ in range(250):
        deep = [deep]
    with mirrored() as strategy:
        with pytest.raises(muster.InvalidArgument, match=r"'state/ring/value/1/1/.*in itself"):
            strategy.save(tmp_path, ring=ring)
        with pytest.raises(muster.InvalidArgument, match=r"'state/deep/value/0/.*at most 200"):
            strategy.save(tmp_path, deep=deep)
        with pytest.raises(muster.InvalidArgument, match="'state/x/value/w' is a tensor on the device meta"):
            strategy.save(tmp_path, x={"w": torch.empty(2, device="meta")})
        for name in (b"\xff".decode(errors="surrogateescape"), {b"\xff".decode(errors="surrogateescape"): 1}):
            with pytest.raises(muster.InvalidArgument, match=r"'state/name/value' is .*no UTF-8"):
                strategy.save(tmp_path, name=name)
        with pytest.raises(muster.InvalidArgument, match="'state/large/value' is an integer of 20001 bits"):
            strategy.save(tmp_path, large=2**20_000)
        for _ in range(60):
            deep = deep[0]
        strategy.save(tmp_path, deep=deep)
        assert strategy.load(tmp_path) == {"deep": deep}
