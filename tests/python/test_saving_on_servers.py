"""Checkpoints that parameter servers write with the chief."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from muster import _C, checkpoint
from support.commands import Processes, wait_until
from support.ranks import run_ranks
from support.servers import Servers, alone, on_servers

ROWS, DIM = 20_000, 16


class Mixed(nn.Module):
    """What servers write in pieces, what they cannot write, and what they do not have."""

    def __init__(self, *, rows_on_servers: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = muster.ShardedEmbedding(ROWS, DIM, mode="sum", seed=5, scale=0.1, on_servers=rows_on_servers)
        self.wide = nn.Linear(DIM, 3000)  # of several chunks
        self.low = nn.Parameter(torch.randn(3000).bfloat16())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.pointwise = nn.Conv2d(4, 2, 1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3000)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(9))
        self.alias = self.wide

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        hidden = self.norm(self.wide(self.table(ids))) * self.low.float()
        result: Tensor = hidden.mean(1) + self.pointwise(self.conv(images)).mean((1, 2, 3)) + self.frozen.sum()
        return result


class Job:
    """The model and its optimizer, prepared."""

    def __init__(
        self,
        strategy: muster.Strategy,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        rows_on_servers: bool = True,
    ) -> None:
        self.strategy = strategy
        self.module = Mixed(rows_on_servers=rows_on_servers)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        given = {"lr": 0.001, "weight_decay": 0.0}
        self.model, self.optimizer = strategy.prepare(self.module, optimizer(trained, **given))

    def train(self, steps: range) -> Job:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, ROWS, (64, 20), generator=generator)
            images = torch.randn(64, 3, 4, 4, generator=generator)
            wanted = torch.randn(64, generator=generator)
            mine = [part.chunk(self.strategy.num_workers)[self.strategy.rank] for part in (ids, images, wanted)]
            self.strategy.step(lambda i, x, y: F.mse_loss(self.model(i, x), y), *mine)
        return self

    def values(self) -> dict[str, Tensor]:
        """Copies of parameters, buffers and state."""
        values = dict(self.module.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            values |= {f"{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        return {name: value.detach().clone().float() for name, value in values.items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


def files_of(folder: Path) -> list[str]:
    (newest,) = sorted(folder.glob("snapshot-*"))[-1:]
    return sorted(file.name for file in newest.iterdir())


@pytest.mark.parametrize(
    ("optimizer", "staleness"), [(torch.optim.AdamW, 0), (torch.optim.Adagrad, 2), (torch.optim.SGD, 0)]
)
def test_what_servers_write_and_what_the_chief_does(
    optimizer: type[torch.optim.Optimizer], staleness: int, tmp_path: Path
) -> None:
    with alone(staleness=staleness) as strategy:
        job = Job(strategy, optimizer).train(range(3))
        expected = job.values()
        strategy.save(tmp_path, extra=torch.arange(3))
        assert "being written" in strategy.explain() or "was written" in strategy.explain()
        job.train(range(3, 5))
        model, state = job.module.state_dict(), job.optimizer.state_dict()
        strategy.save(tmp_path)
        assert "checkpoints: the last one" in strategy.explain() or "being written" in strategy.explain()
    assert {name.split("-")[0] for name in files_of(tmp_path)} == {"chief", "manifest.json", "server"}
    # The second name of what several have.
    assert sum(file.stat().st_size for file in tmp_path.glob("snapshot-*2/chief-*")) < 300_000
    assert_same(dict(checkpoint.model_state(tmp_path)), dict(model))
    saved = checkpoint.optimizer_state(tmp_path)["state"]
    assert saved.keys() == state["state"].keys()
    for number, values in state["state"].items():
        assert_same(dict(saved[number]), dict(values))
    (tmp_path / "snapshot-0000000002" / "manifest.json").unlink()
    assert_same(_mirrored(tmp_path, optimizer), expected)


def _save(servers: list[str], folder: str) -> list[dict[str, Any]]:
    with on_servers(servers, seed=3, threads_per_replica=1, timeout=60.0) as strategy:
        job = Job(strategy).train(range(3))
        now = job.values() if strategy.rank == 0 else {}
        strategy.barrier()
        strategy.save(folder)
        after = job.train(range(3, 6)).values()  # while servers write
        return [{name: value.numpy() for name, value in values.items()} for values in (now, after)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_steps_go_on_while_servers_write(number: int, tmp_path: Path) -> None:
    servers = Servers(number)
    now, after = run_ranks(2, _save, servers.addresses, str(tmp_path))[0]
    assert any((now[name] != after[name]).any() for name in now)
    others = Servers(4 - number)
    with on_servers(others.addresses, seed=3, threads_per_replica=1) as strategy:
        job = Job(strategy)
        assert strategy.load(tmp_path) == {}
        strategy.step(lambda i, x: job.model(i, x).sum() * 0, torch.tensor([[0], [1]]), torch.zeros(2, 3, 4, 4))
        there = job.module.table(torch.arange(ROWS)[:, None])
        assert torch.equal(there, torch.as_tensor(now["table.weight"]))
    assert_same(_mirrored(tmp_path), now)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_checkpoint_takes_the_place_of_what_servers_hold(staleness: int, tmp_path: Path) -> None:
    servers = Servers(2, tmp_path / "snapshots")
    options: dict[str, Any] = {
        "seed": 3, "threads_per_replica": 1, "timeout": 60.0, "staleness": staleness
    }  # fmt: skip
    with on_servers(servers.addresses, **options) as strategy:
        job = Job(strategy).train(range(2))
        strategy.save(tmp_path / "checkpoints")
        expected = job.train(range(2, 4)).values()
        held = job.train(range(4, 5)).values()
    for _ in range(2):
        with on_servers(servers.addresses, **options) as strategy:
            job = Job(strategy)
            strategy.load(tmp_path / "checkpoints")
            values = job.train(range(2, 4)).values()
            assert strategy.steps == 4
            assert_same(values, expected)
            held = job.train(range(4, 5)).values()
    with on_servers(servers.addresses, **options) as strategy:
        job = Job(strategy)
        assert strategy.load(tmp_path / "none") is None
        strategy.step(lambda i, x: job.model(i, x).sum() * 0, torch.tensor([[0], [1]]), torch.zeros(2, 3, 4, 4))
        assert (job.values()["wide.weight"] - held["wide.weight"]).abs().max() < 0.01  # a step of AdamW's moments


def _mirrored(folder: Path, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> dict[str, Tensor]:
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        job = Job(strategy, optimizer, rows_on_servers=False)
        strategy.load(folder)
        return job.values()


# A server that a write beyond its limit of a file's size kills once it got SIGUSR1; it fails before.
SERVE = """
import signal
import subprocess
from muster.cli import app
signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGXFSZ, signal.SIG_DFL))
app()
"""


def _limit(server: int, size: int) -> None:
    resource.prlimit(server, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _ignores(process: int, number: int) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_values_that_were_written_since_the_last_step_are_saved(tmp_path: Path) -> None:
    """As averaged weights at the end of training, in place or by `.data`."""
    with alone() as strategy:
        job = Job(strategy).train(range(3))
        with torch.no_grad():
            job.module.wide.weight.mul_(0.5)
        job.module.unused.data = job.module.unused.data + 1
        expected = dict(job.module.state_dict())
        strategy.save(tmp_path)
        strategy.close()
    assert_same(dict(checkpoint.model_state(tmp_path)), expected)


class Stored(nn.Linear):
    """Its weight is turned where it is stored."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().t()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_what_a_module_makes_of_its_values_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(Stored(4, 3), nn.Linear(3, 4))
    with alone() as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
        strategy.save(tmp_path)
        expected = [each.detach().clone() for each in module.parameters()]
    other = nn.Sequential(Stored(4, 3), nn.Linear(3, 4))
    with muster.MirroredStrategy(["cpu"]) as strategy:
        strategy.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
        strategy.load(tmp_path)
        assert all(map(torch.equal, other.parameters(), expected))


class Halved(muster.optim.AdamW):
    """Stores its averages as bf16."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        for values in packed["state"].values():
            values["exp_avg"] = values["exp_avg"].bfloat16()
        return packed


def test_an_optimizer_with_a_form_of_its_own_is_saved_as_it_says(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)
    with alone() as strategy:
        model, optimizer = strategy.prepare(module, Halved(module.parameters(), lr=0.1))
        strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
        strategy.save(tmp_path)
        expected = optimizer.state_dict()["state"]
    for number, values in checkpoint.optimizer_state(tmp_path)["state"].items():
        assert values["exp_avg"].dtype == torch.bfloat16
        assert_same(dict(values), expected[number])


def test_a_save_during_which_another_thread_ends_the_strategy(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        strategy = alone()
        module = nn.Linear(4, 3)
        ends: list[Future[None]] = []

        class Ends(nn.Module):
            def get_extra_state(self) -> dict[str, int]:
                if not ends:
                    ends.append(threads.submit(strategy.close))
                    time.sleep(0.3)
                return {}

            def set_extra_state(self, state: Any) -> None:
                pass

            def forward(self, x: Tensor) -> Tensor:
                return x

        whole = nn.Sequential(module, Ends())
        model, _ = strategy.prepare(whole, torch.optim.AdamW(whole.parameters(), lr=0.1))
        strategy.step(lambda x: model(x).sum(), torch.ones(2, 4))
        with pytest.raises(muster.InvalidArgument, match="the strategy is closed"):
            strategy.save(tmp_path)
        ends[0].result(60)
        assert whole[0].weight.device.type == "cpu"
    assert not list(tmp_path.glob("*snapshot*"))


def _save_in_two_tries(strategy: muster.Strategy, folder: Path) -> str | None:
    """Why the save before was not written."""
    try:
        strategy.save(folder)
    except muster.CheckpointError as error:
        strategy.save(folder)
        return str(error)
    return None


def test_a_server_that_cannot_write_or_dies_fails_the_save_alone(tmp_path: Path) -> None:
    address, runs = _C._server.free_address(), tmp_path / "runs"
    command = [sys.executable, "-c", SERVE, "serve", "--address", address, "--snapshots", tmp_path / "server"]
    own = Servers(1)
    with Processes(command) as first:
        assert first.line() == address
        server = first.process.pid
        with on_servers([*own.addresses, address], seed=3, threads_per_replica=1, patience=20.0) as strategy:
            job = Job(strategy).train(range(2))
            _limit(server, 10_000)
            strategy.save(runs)
            job.train(range(2, 3))
            with pytest.raises(
                muster.CheckpointError, match=r"server-1-\d+ could not write its part: .*File too large"
            ):
                strategy.save(runs)
            assert "could not be written: of the parameter servers, server-" in strategy.explain()
            _limit(server, resource.RLIM_INFINITY)
            strategy.save(runs)
            job.train(range(3, 4))
            strategy.save(runs)  # raises where the last one was not written
            wait_until(lambda: "being written" not in strategy.explain(), "it is on the disk")

            first.process.send_signal(signal.SIGUSR1)
            wait_until(lambda: not _ignores(server, signal.SIGXFSZ), "the signal is heard")
            resource.prlimit(server, resource.RLIMIT_CORE, (0, 0))
            with ExitStack() as running:

                def start_anew() -> str:
                    assert first.process.wait(timeout=60) == -signal.SIGXFSZ
                    return running.enter_context(Processes(command)).line()

                with ThreadPoolExecutor() as threads:
                    begun = threads.submit(start_anew)
                    _limit(server, 10_000)
                    strategy.save(runs)  # waits for the server where it died before it had answered all
                    assert begun.result() == address
                job.train(range(4, 5))
                why_not = _save_in_two_tries(strategy, runs)
                # But for a server that died before it had begun.
                assert why_not is None or re.search(r"server-1-\d+ died before it had written its part", why_not)
                expected = job.values()
                job.train(range(5, 6))
                strategy.close()
    assert all(folder.name.startswith("snapshot-") for folder in runs.iterdir() if folder.is_dir())
    assert_same(_mirrored(runs), expected)


def test_servers_are_asked_one_after_the_other(tmp_path: Path) -> None:
    """One that hears of a checkpoint late is no dead one."""
    addresses = [_C._server.free_address() for _ in range(2)]
    command = [sys.executable, "-m", "muster", "serve", "--address"]
    with Processes([*command, addresses[0]]) as first, Processes([*command, addresses[1]]) as second:
        assert [first.line(), second.line()] == addresses
        late = second.process
        with on_servers(addresses, seed=3, threads_per_replica=1) as strategy:
            job = Job(strategy).train(range(2))
            expected = job.values()
            late.send_signal(signal.SIGSTOP)
            with ThreadPoolExecutor() as threads:
                threads.submit(lambda: (time.sleep(0.5), late.send_signal(signal.SIGCONT)))
                strategy.save(tmp_path)
            job.train(range(2, 3))
    assert_same(_mirrored(tmp_path), expected)


def _can_hide_folders() -> bool:
    """Whether this user can give a process a view of folders of its own."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def test_the_chief_writes_alone_where_a_server_does_not_see_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not _can_hide_folders():
        pytest.skip("needs the right to mount")
    addresses, runs = [_C._server.free_address() for _ in range(2)], tmp_path / "runs"
    runs.mkdir()
    serve = [sys.executable, "-m", "muster", "serve", "--address"]
    hides = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{runs}" && exec "$@"', "sh"]
    with Processes([*serve, addresses[0]]) as first, Processes([*hides, *serve, addresses[1]]) as second:
        assert [first.line(), second.line()] == addresses
        with on_servers(addresses, seed=3, threads_per_replica=1) as strategy:
            job = Job(strategy).train(range(2))
            for steps in (range(2, 3), range(3, 4)):
                expected = job.values()
                strategy.save(runs)
                job.train(steps)
    assert [file.split("-")[0] for file in files_of(runs)] == ["manifest.json", "shard"]
    (told,) = [record.message for record in caplog.records if "the chief alone writes" in record.message]
    assert "parameter server 1: " in told
    assert "is not seen there" in told
    assert not list(runs.glob(".partial*"))
    assert_same(_mirrored(runs), expected)


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_with_a_generator_of_its_own_goes_on_with_the_orders_of_later_epochs(
    staleness: int | None, workers: int, tmp_path: Path
) -> None:
    def orders(stop: int | None, load: bool = False) -> list[list[int]]:
        module, data = nn.Linear(1, 1), TensorDataset(torch.arange(12.0).view(-1, 1))
        own = DataLoader(data, 3, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5))
        seen: list[list[int]] = []
        with alone(staleness=staleness) as strategy:
            model, _, loader = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), own)
            if load:
                strategy.load(tmp_path)
            while loader.epoch < 3:
                for (x,) in loader:
                    strategy.step(lambda x: model(x).mean(), x)
                    seen.append(x.flatten().int().tolist())
                    if strategy.steps == stop:
                        strategy.save(tmp_path)
                        return seen
        return seen

    whole = orders(None)
    assert orders(2) + orders(None, load=True) == whole
