"""A model from the snapshots that parameter servers keep, where the job is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import muster
from muster.checkpoint import reading
from muster.checkpoint import servers as of_servers
from muster.cli import app
from support.servers import Servers

ROWS, DIM = 300, 8


class Clicks(nn.Module):
    """A table beside parameters of several shapes and layouts, one of which both servers have a part of."""

    def __init__(self, *, on_servers: bool) -> None:
        super().__init__()
        self.ids = muster.ShardedEmbedding(ROWS, DIM, mode="sum", seed=5, scale=0.1, on_servers=on_servers)
        torch.manual_seed(0)
        self.wide = nn.Linear(DIM, 20_000)
        self.scale = nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(20_000, 3).t())
        self.image = nn.Parameter(torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.linear(self.wide(self.ids(ids)).tanh(), self.turned)
        result: Tensor = (hidden * self.scale + self.image.sum((2, 3))).square().mean()
        return result


class Job:
    """One worker, and servers that keep snapshots."""

    def __init__(
        self,
        folder: Path,
        number: int = 2,
        *,
        on_servers: bool = True,
        lr: float = 0.01,
        servers: Servers | None = None,
        **options: Any,
    ) -> None:
        self.servers = servers or Servers(number, folder)
        self.folders = [folder / str(server) for server in range(number)]
        cluster = muster.Cluster(0, 1, "", 0, self.servers.addresses)
        self.strategy = muster.ParameterServerStrategy(cluster, seed=3, threads_per_replica=1, **options)
        self.module = Clicks(on_servers=on_servers)
        self.model, _ = self.strategy.prepare(self.module, optimizer_of(self.module, lr))

    def train(self, steps: int) -> dict[str, Tensor]:
        """Its parameters afterwards."""
        for _ in range(steps):
            ids = torch.randint(0, ROWS, (12, 2), generator=torch.Generator().manual_seed(self.strategy.steps))
            self.strategy.step(self.model, ids)
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def snapshot(self, *servers: int) -> None:
        for server in servers or range(len(self.folders)):
            self.servers.running[server].snapshot()

    def end(self) -> list[Path]:
        """The folders of what is left of it."""
        self.strategy.close()
        self.snapshot()
        self.servers.running.clear()
        return self.folders


def optimizer_of(module: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0)


def convert(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr."""
    done = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stderr


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("on_servers", [True, False])
def test_a_model_is_had_from_the_disks_of_servers(tmp_path: Path, on_servers: bool) -> None:
    job = Job(tmp_path / "kept", on_servers=on_servers)
    last = job.train(3)
    folders = job.end()
    code, error = convert(*reversed(folders), tmp_path / "runs")
    assert code == 0 and "optimizer's state is left out" in error and "buffers" in error
    found = dict(muster.checkpoint.model_state(tmp_path / "runs"))
    assert same(found, last)
    assert convert(*folders, tmp_path / "all.safetensors")[0] == 0
    assert same(load_file(tmp_path / "all.safetensors"), last)
    assert convert(*folders, tmp_path / "all.pt")[0] == 0
    assert same(torch.load(tmp_path / "all.pt", weights_only=True)["model"], last)
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        module = Clicks(on_servers=False)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        strategy.prepare(module, optimizer_of(module))
        assert strategy.load(tmp_path / "runs") == {}
        assert same(dict(module.state_dict()), last)


def test_another_job_with_servers_goes_on_with_it(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept", number=3)
    last = job.train(2)
    assert convert(*job.end(), tmp_path / "runs")[0] == 0
    other = Job(tmp_path / "others", number=1, lr=0.0)  # whose first step changes nothing
    other.strategy.load(tmp_path / "runs")
    assert same(other.train(1), last)
    other.strategy.close()


def test_the_newest_step_that_all_have_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path / "kept")
    earlier = job.train(2)
    job.snapshot()
    later = job.train(1)
    job.snapshot(0)
    left = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in job.folders]
    assert [reading.read(folder).metadata["step"] for folder in left] == [3, 2]
    assert same(state_in(left), earlier)
    whole = job.end()
    assert same(state_in(whole), later)
    shard = next(max(whole[1].glob("snapshot-*")).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert same(state_in(whole), earlier)
    assert any("is passed over" in line and shard.name in line for line in caplog.messages)


def state_in(folders: list[Path]) -> dict[str, Tensor]:
    parts, _ = of_servers.parts_of(folders)
    return reading.module_in(parts, 0, folders[0])


def test_what_is_not_of_all_servers_of_one_job_is_refused(tmp_path: Path) -> None:
    first, second = Job(tmp_path / "first"), Job(tmp_path / "second", number=1)
    for job in (first, second):
        job.train(1)
    (zero, one), (other,) = first.end(), second.end()
    for folders, words in (
        ((zero,), "the job had 2 servers, and folders of 0 are given; give that of each once"),
        ((zero, zero), "folders of 0, 0 are given"),
        ((zero, other), f"'{other}' is not of the job of '{zero}'"),
    ):
        code, error = convert(*folders, tmp_path / "runs")
        assert code == 1 and words in error
    assert not (tmp_path / "runs").exists()
    assert "and not for servers' snapshots" in convert(zero, one, tmp_path / "runs", "--optimizer", "AdamW")[1]
    for snapshot in one.glob("snapshot-*"):
        (snapshot / "manifest.json").write_text(
            '{"crc32": "00000000", "manifest": {"kind": "muster parameter server"}}'
        )
    code, error = convert(zero, one, tmp_path / "runs")
    assert code == 1 and f"'{one}' has no good snapshot of a step that the other servers have" in error


def test_servers_of_which_one_began_anew_are_refused(tmp_path: Path) -> None:
    """They have a step of the same number, with values of two jobs."""
    job = Job(tmp_path / "kept")
    job.train(1)
    job.strategy.save(tmp_path / "saved")
    job.train(1)
    job.snapshot()
    job.strategy.close()
    before = Path(shutil.copytree(job.folders[1], tmp_path / "before"))
    again = Job(tmp_path / "kept", servers=job.servers)
    again.strategy.load(tmp_path / "saved")
    again.train(2)
    zero, one = again.end()
    assert reading.read(before).metadata["step"] == reading.read(zero).metadata["step"] == 2
    code, error = convert(zero, before, tmp_path / "runs")
    assert code == 1 and f"'{zero}' and '{before}' hold values of two jobs" in error
    assert convert(zero, one, tmp_path / "runs")[0] == 0


def test_servers_that_step_alone_are_taken_as_they_are_and_that_is_said(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept", staleness=1)
    last = job.train(2)
    code, error = convert(*job.end(), tmp_path / "runs")
    assert code == 0 and "not of one step" in error
    assert same(muster.checkpoint.model_state(tmp_path / "runs"), last)


class Normed(nn.Module):
    """With buffers, which servers do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.read = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.read(self.norm(x))
        return result


def test_what_servers_do_not_hold_is_not_made_up(tmp_path: Path) -> None:
    modules = Normed(), nn.Linear(1, 1)
    servers = Servers(1, tmp_path / "kept")
    cluster = muster.Cluster(0, 1, "", 0, servers.addresses)
    with muster.ParameterServerStrategy(cluster, seed=3, threads_per_replica=1) as strategy:
        both = nn.ModuleList(modules).parameters()
        first, second, _ = strategy.prepare(*modules, torch.optim.SGD(both, lr=0.1))
        strategy.step(lambda x: second(first(x)).mean(), torch.rand(8, 4))
    servers.running[0].snapshot()
    assert convert(tmp_path / "kept" / "0", tmp_path / "all.safetensors")[0] == 0
    weights = load_file(tmp_path / "all.safetensors")
    names = [name for name, _ in modules[0].named_parameters()]
    assert weights.keys() == {*names, "1.weight", "1.bias"}
    assert all(torch.equal(weights[name], value) for name, value in modules[0].named_parameters())
    assert all(torch.equal(weights[f"1.{name}"], value) for name, value in modules[1].named_parameters())
    assert convert(tmp_path / "kept" / "0", tmp_path / "runs")[0] == 0
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as mirrored:
        mirrored.prepare(Normed())
        with pytest.raises(muster.LayoutMismatch, match=r"lacks 'norm\.running_mean' of module 0"):
            mirrored.load(tmp_path / "runs")
