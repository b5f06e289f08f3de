"""Cluster: reading the launcher's variables, explicit arguments, and what is refused. Details: cluster_test.cpp."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import muster
from muster import Cluster
from muster._C import _cluster_from_environment

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_")
LAUNCHER_VARIABLES = (*LAUNCHERS, "MUSTER_SERVERS")


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}


def test_explicit_arguments() -> None:
    cluster = Cluster(rank=1, num_workers=2, address="node1:29500", local_rank=1)
    assert (cluster.rank, cluster.num_workers, cluster.address, cluster.local_rank) == (1, 2, "node1:29500", 1)
    assert not cluster.insecure
    assert not cluster.store_is_hosted
    assert cluster.launcher == "arguments"
    assert Cluster(1, 2, "node1:29500", 1) == cluster
    assert Cluster(0, 2, "node1:29500", 1) != cluster
    assert cluster != "node1:29500"
    assert Cluster(0, 1, "").address == ""


def test_repr_can_be_evaluated() -> None:
    for cluster in (
        Cluster(1, 2, "node1:29500", 1),
        Cluster(0, 2, "[::1]:1", insecure=True),
        Cluster(0, 1, "", servers=["localhost:1", "localhost:2"]),
    ):
        assert eval(repr(cluster), {"Cluster": Cluster}) == cluster


def test_it_is_a_value() -> None:
    with pytest.raises(AttributeError):
        Cluster(0, 1, "").rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "arguments",
    [
        (2, 2, "a:1"),
        (-1, 2, "a:1"),
        (0, 0, ""),
        (0, 2, ""),
        (0, 2, "a"),
        (0, 2, "::1:5"),
        (0, 2, "a:0"),
        (0, 2, "a:1", -1),
    ],
)
def test_bad_arguments(arguments: tuple[int, int, str]) -> None:
    with pytest.raises(muster.InvalidArgument):
        Cluster(*arguments)


def test_servers() -> None:
    cluster = Cluster(0, 2, "node1:29500", 0, ["localhost:1", "[::1]:2"])
    assert cluster.servers == ("localhost:1", "[::1]:2")
    assert cluster != Cluster(0, 2, "node1:29500")
    assert Cluster(0, 2, "node1:29500").servers == ()
    for servers in (["localhost"], ["localhost:1", "localhost:1"]):
        with pytest.raises(muster.InvalidArgument, match="MUSTER_SERVERS"):
            Cluster(0, 1, "", servers=servers)


def test_servers_of_the_environment() -> None:
    assert _cluster_from_environment({"MUSTER_SERVERS": "localhost:1,localhost:2"}).servers == (
        "localhost:1",
        "localhost:2",
    )
    with pytest.raises(ValueError, match="twice"):
        _cluster_from_environment({"MUSTER_SERVERS": "localhost:1,localhost:1"})


def test_brackets_and_blanks_of_the_environment() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "[::1]", "MASTER_PORT": "29501"}
    assert _cluster_from_environment(variables).address == "[::1]:29501"
    assert _cluster_from_environment({"MUSTER_SERVERS": " localhost:1, localhost:2 "}).servers == (
        "localhost:1",
        "localhost:2",
    )


def test_torchrun() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "29501"}
    cluster = _cluster_from_environment(variables)
    assert (cluster.rank, cluster.num_workers, cluster.local_rank) == (1, 4, 1)
    assert cluster.address == "[::1]:29501"
    assert cluster.launcher == "torchrun"
    assert _cluster_from_environment(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).store_is_hosted


def test_contradictions_are_value_errors() -> None:
    with pytest.raises(ValueError, match="RANK=5 and WORLD_SIZE=4"):
        _cluster_from_environment({"RANK": "5", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_from_env_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(LAUNCHER_VARIABLES):
            monkeypatch.delenv(name)
    assert Cluster.from_env().num_workers == 1
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert Cluster.from_env().rank == 1


def test_a_world_of_one_is_said_in_one_line() -> None:
    code = "import logging, muster; logging.basicConfig(level='INFO'); print(muster.Cluster.from_env().num_workers)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain_environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "1"
    lines = [line for line in done.stderr.splitlines() if line.startswith("INFO:muster:")]
    assert len(lines) == 1
    assert "world of one" in lines[0]


def test_torchrun_itself() -> None:
    code = (
        "import os, muster; c = muster.Cluster.from_env();"
        "os.write(1, f'{c.rank} {c.num_workers} {c.local_rank} {c.launcher} {c.store_is_hosted}\\n'.encode())"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run(
        [*launcher, sys.executable, "-c", code],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 torchrun True", "1 2 1 torchrun True"]
