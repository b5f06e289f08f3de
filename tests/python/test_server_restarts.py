"""Jobs that begin where servers come back from different days."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import muster
from support.servers import Servers, on_servers


class Counting(nn.Module):
    """Two parameters, one on each of two servers, which lose 1 in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(8192))
        self.second = nn.Parameter(torch.zeros(8192))

    def forward(self) -> Tensor:
        return self.first.sum() + self.second.sum()


def begin(
    addresses: list[str], takeover: bool = False
) -> tuple[muster.ParameterServerStrategy, Counting, muster.Replicated]:
    strategy = on_servers(addresses, takeover=takeover)
    module = Counting()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    return strategy, module, model


def test_a_job_is_newer_than_that_of_every_server(tmp_path: Path) -> None:
    servers = Servers(2, tmp_path)
    strategy, _, model = begin(servers.addresses)
    strategy.step(model)
    strategy.close()
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    # Server 0 forgets this job, server 1 does not.
    second, _, model = begin(servers.addresses)
    for _ in range(2):
        second.step(model)
    servers.running[0] = None
    shutil.rmtree(tmp_path / "0")
    shutil.move(tmp_path / "copy", tmp_path / "0")
    servers.restart(0)

    third, module, model = begin(servers.addresses, takeover=True)
    third.step(model)
    assert module.first.unique().tolist() == [-2.0]
    assert module.second.unique().tolist() == [-2.0]
    third.close()
    second.close()


def test_folders_of_two_jobs_are_not_mixed(tmp_path: Path) -> None:
    for name in ("one", "other"):
        servers = Servers(2, tmp_path / name)
        strategy, _, model = begin(servers.addresses)
        strategy.step(model)
        strategy.close()
        for server in servers.running:
            server.snapshot()
        del servers
    shutil.copytree(tmp_path / "one" / "0", tmp_path / "mixed" / "0")
    shutil.copytree(tmp_path / "other" / "1", tmp_path / "mixed" / "1")
    servers = Servers(2, tmp_path / "mixed")
    strategy, _, model = begin(servers.addresses)
    with strategy, pytest.raises(muster.CheckpointError, match="different jobs"):
        strategy.step(model)


def test_short_lives_leave_few_snapshots(tmp_path: Path) -> None:
    for life in range(6):
        servers = Servers(2, tmp_path)
        strategy, module, model = begin(servers.addresses)
        for _ in range(3):
            strategy.step(model)
        assert module.second.unique().tolist() == [-3.0 * (life + 1)]
        strategy.close()
        for server in servers.running:
            server.snapshot()
        del servers, server
    for folder in tmp_path.iterdir():
        assert len(list(folder.glob("snapshot-*"))) <= 5, sorted(folder.iterdir())


@pytest.mark.parametrize("staleness", [0, None])
def test_a_disk_that_takes_no_snapshots_is_named_in_the_step(tmp_path: Path, staleness: int | None) -> None:
    servers = Servers(1, tmp_path / "servers")
    strategy = on_servers(servers.addresses, staleness=staleness, log_bytes=6 * 4 * 2 * 8192)
    module = Counting()
    model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    strategy.step(model)
    (tmp_path / "servers").rename(tmp_path / "away")

    def train() -> None:
        for _ in range(40):
            strategy.step(model)

    with pytest.raises(muster.CheckpointError, match=r"parameter server 0 .*cannot write its snapshots"):
        train()
    (tmp_path / "away").rename(tmp_path / "servers")
    strategy.close()
