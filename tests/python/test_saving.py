"""strategy.save and strategy.load: what comes back, under which strategy, and what is said where it cannot."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from muster.writing import Writing
from support.ranks import run_ranks
from support.servers import Servers, alone, on_servers

DATA = TensorDataset(torch.arange(320.0).view(40, 8) / 320, torch.arange(40) % 3)
NAMES = {"newest": "snapshot-0000000002", "older": "snapshot-0000000001"}


def mirrored(**options: Any) -> muster.Strategy:
    return muster.MirroredStrategy(["cpu:0", "cpu:1"], threads_per_replica=1, **options)


def build(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))


class Job:
    """A model, its optimizer and a loader, prepared."""

    def __init__(self, strategy: muster.Strategy, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        self.strategy = strategy
        module = build()
        self.user = optimizer(module.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.user, [3, 6])
        prepared = strategy.prepare(module, self.user, DataLoader(DATA, batch_size=8, shuffle=True))
        self.model, self.optimizer, self.loader = prepared

    def train(self, until: int, after_step: Callable[[], None] = lambda: None) -> Job:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.model(x), y)

        while self.strategy.steps < until:
            for x, y in self.loader:
                self.strategy.step(loss, x, y)
                self.schedule.step()
                after_step()
                if self.strategy.steps == until:
                    break
        return self

    def values(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = [state[number][name] for number in sorted(state) for name in sorted(state[number])]
        return [tensor.detach().clone() for tensor in (*self.model.state_dict().values(), *moments)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def saved_twice(folder: Path) -> list[list[Tensor]]:
    """A folder of two checkpoints, after steps 1 and 2; the values of each."""
    values = []
    with mirrored(seed=1) as strategy:
        job = Job(strategy)
        for steps in (1, 2):
            values.append(job.train(steps).values())
            strategy.save(folder, schedule=job.schedule)
    return values


def loaded(folder: Path) -> tuple[int, list[Tensor]]:
    with mirrored(seed=2) as strategy:
        job = Job(strategy)
        strategy.load(folder, schedule=job.schedule)
        return strategy.steps, job.values()


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


def no_loader(strategy: muster.Strategy) -> None:
    strategy.prepare(module := build(), torch.optim.AdamW(module.parameters()))


def with_generator(strategy: muster.Strategy) -> None:
    loader = DataLoader(DATA, batch_size=8, shuffle=True, generator=torch.Generator())
    strategy.prepare(module := build(), torch.optim.AdamW(module.parameters()), loader)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (wider, r"'0.weight' of module 0 has shape \(17, 8\), and in the checkpoint \(16, 8\)"),
        (deeper, "lacks '5.weight' of module 0"),
        (another_optimizer, "optimizer 0 is Adam, and in the checkpoint AdamW"),
        (fewer_parameters, "has '0.weight' in group 0 of optimizer 0"),
        (no_loader, "1 loaders, and 0 are prepared"),
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


def test_a_step_function_cannot_save(tmp_path: Path) -> None:
    with mirrored() as strategy:
        job = Job(strategy)

        def inside(x: Tensor, y: Tensor) -> Tensor:
            strategy.save(tmp_path)
            return job.model(x).sum()

        with pytest.raises(muster.InvalidArgument, match="inside a step"):
            strategy.step(inside, *DATA[:8])


def test_a_table_on_servers_alone_is_refused(tmp_path: Path) -> None:
    with alone() as strategy:
        table = muster.ShardedEmbedding(30, 4, mode="sum", on_servers=True)
        strategy.prepare(nn.Sequential(table, nn.Linear(4, 1)))
        with pytest.raises(muster.InvalidArgument, match="rows of '0' are on parameter servers alone"):
            strategy.save(tmp_path)


@contextmanager
def small_files() -> Iterator[None]:
    """No file grows beyond 4 KB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("how", ["save", "load", "close"])
def test_what_went_wrong_with_the_last_checkpoint_is_said_at_the_next_call_once(how: str, tmp_path: Path) -> None:
    strategy = mirrored()
    Job(strategy)
    big = {"big": torch.zeros(10_000)}
    strategy.save(tmp_path, number=1)
    strategy.load(tmp_path)
    with small_files():
        strategy.save(tmp_path, number=2, **big)
        with pytest.raises(muster.CheckpointError, match=r"shard-00000"):
            {"save": lambda: strategy.save(tmp_path), "load": lambda: strategy.load(tmp_path), "close": strategy.close}[
                how
            ]()
    if how != "close":
        found = strategy.load(tmp_path)
        assert found is not None and found["number"] == 1
        strategy.save(tmp_path, number=3, **big)
    strategy.close()
    with mirrored() as strategy:
        Job(strategy)
        found = strategy.load(tmp_path)
        assert found is not None and found["number"] == (1 if how == "close" else 3)


def test_one_job_writes_to_a_folder_and_another_once_it_is_closed(tmp_path: Path) -> None:
    with mirrored() as first:
        first.save(tmp_path)
        first.save(tmp_path, keep=1)
        with mirrored() as second, pytest.raises(muster.CheckpointError, match="another process uses the folder"):
            second.save(tmp_path)
        first.save(tmp_path / "other")
        first.load(tmp_path)
    with mirrored() as third:
        third.save(tmp_path)


def chiefs_errors(folder: str) -> list[str]:
    texts = []
    with muster.MultiWorkerMirroredStrategy.from_env(threads_per_replica=1, timeout=60.0) as strategy:
        Job(strategy)
        file = Path(folder) / "file"
        file.touch()
        for call in (strategy.save, strategy.load):
            try:
                call(file)
            except muster.CheckpointError as error:
                texts.append(str(error))
        strategy.save(folder)  # and the job goes on
        assert strategy.load(folder) == {}
    return texts


def test_what_fails_at_the_chief_is_raised_on_every_rank(tmp_path: Path) -> None:
    chiefs, others = run_ranks(2, chiefs_errors, str(tmp_path))
    assert len(chiefs) == 2 and all("file" in text for text in chiefs)
    assert others == [f"{what}() failed on rank 0: {text}" for what, text in zip(("save", "load"), chiefs, strict=True)]


def test_a_fork_of_the_process_neither_waits_nor_writes(tmp_path: Path) -> None:
    def child() -> None:
        strategy._saving.writing.end()
        strategy._saving.writing = Writing()
        gc.collect()

    with mirrored() as strategy:
        Job(strategy)
        strategy.save(tmp_path, big=torch.zeros(20_000_000))
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(20)
        assert process.exitcode == 0
        assert set(strategy.load(tmp_path) or {}) == {"big"}


# --- damage -----------------------------------------------------------------------------------------------------------
def flip(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])


def remove(path: Path, _dice: random.Random) -> None:
    path.unlink()


def lengthen(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randrange(1, 9)))


def begin_absurdly(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes((1 << dice.randrange(30, 63)).to_bytes(8, "little") + content[8:])


def swap(path: Path, _dice: random.Random) -> None:
    shutil.copy(path.parents[1] / NAMES["older"] / path.name, path)


def check_damage(folder: Path, number: int) -> None:
    older, _ = saved_twice(folder / "good")
    with mirrored(seed=5) as strategy:
        job = Job(strategy)
        for seed in range(number):
            dice = random.Random(seed)
            shutil.rmtree(folder / "bad", ignore_errors=True)
            shutil.copytree(folder / "good", folder / "bad")
            path = dice.choice(sorted((folder / "bad" / NAMES["newest"]).iterdir()))
            damage = dice.choice([flip, flip, truncate, remove, lengthen, begin_absurdly, swap])
            damage(path, dice)
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.fill_(seed)
            assert strategy.load(folder / "bad") is not None, (seed, damage)
            assert strategy.steps == 1 and same(job.values(), older), (seed, damage)


def test_the_checkpoint_before_a_damaged_one_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_damage(tmp_path, 60)
    assert "passed over" in caplog.text and NAMES["newest"] in caplog.text


@pytest.mark.long
def test_the_checkpoint_before_a_damaged_one_is_loaded_a_thousand_times(tmp_path: Path) -> None:
    check_damage(tmp_path, 1000)


def test_where_all_are_damaged_nothing_is_loaded(tmp_path: Path) -> None:
    saved_twice(tmp_path)
    for name in NAMES.values():
        flip(tmp_path / name / "shard-00000.safetensors", random.Random(1))
    with pytest.raises(muster.CheckpointError, match="no snapshot in"):
        loaded(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    muster._C._checkpoint.write_snapshot(tmp_path, {}, {})
    with pytest.raises(muster.CheckpointError, match="no checkpoints of a strategy"):
        loaded(tmp_path)


# --- kills ------------------------------------------------------------------------------------------------------------
KILLED = """
import sys
from pathlib import Path
from test_saving import Job, mirrored
import torch
folder, result = map(Path, sys.argv[1:])
torch.manual_seed(0)
with mirrored(seed=1) as strategy:
    job = Job(strategy)
    strategy.load(folder, schedule=job.schedule)
    def after_step():
        if strategy.steps % 5 == 0:
            strategy.save(folder, keep=2, schedule=job.schedule)
    print("trains", flush=True)
    job.train(400, after_step)
    torch.save(job.values(), result)
"""


def run_with_kills(folder: Path, result: Path, kills: int, dice: random.Random) -> int:
    """Runs the program again and again until it has ended; the first runs are killed. How many were."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    killed = 0
    while not result.exists():
        command = [sys.executable, "-c", KILLED, str(folder), str(result)]
        with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"trains\n"
            if killed < kills:
                time.sleep(dice.uniform(0.0, 0.4))
                process.kill()
                killed += 1
            else:
                assert process.wait(60) == 0
    return killed


def check_kills(tmp_path: Path, kills: int) -> None:
    assert run_with_kills(tmp_path / "calm", tmp_path / "calm.pt", 0, random.Random(0)) == 0
    assert run_with_kills(tmp_path / "wild", tmp_path / "wild.pt", kills, random.Random(1)) > 0
    assert same(torch.load(tmp_path / "wild.pt"), torch.load(tmp_path / "calm.pt"))


def test_a_job_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    check_kills(tmp_path, 3)


@pytest.mark.long
def test_a_job_that_is_killed_fifty_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    check_kills(tmp_path, 50)
