"""Jobs that begin where servers come back from different days."""

from __future__ import annotations

import shutil
from pathlib import Path

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
