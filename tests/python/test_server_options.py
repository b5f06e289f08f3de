"""What a worker of parameter servers is told about them, and tells them."""

from __future__ import annotations

import time
from typing import Any

import pytest

import muster
from muster import _C
from support.servers import Servers, on_servers


def test_a_server_that_does_not_answer_is_said() -> None:
    address = _C._server.free_address()
    begin = time.monotonic()
    with pytest.raises(muster.PeerLost, match=f"parameter server 0 .{address}. does not answer"):
        on_servers([address], patience=0.3)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("log_bytes", -1, "log_bytes=-1"),
        ("log_bytes", 1.5, "log_bytes=1.5"),
        ("patience", 0.0, "patience=0"),
        ("heartbeat", -1.0, "heartbeat=-1"),
        ("heartbeat", 0.005, "from 0.01 up to 86400"),
        ("staleness", -1, "staleness=-1"),
        ("staleness", "none", "staleness='none': it must be an int >= 0, or None"),
        ("patience", "long", "patience='long': it must be a number of seconds from 0.01 to 86400"),
        ("heartbeat", None, "heartbeat=None: it must be a number of seconds from 0.01 to 86400"),
        ("takeover", 1, "takeover=1: it must be True or False"),
    ],
)
def test_options_that_make_no_sense_are_refused(option: str, value: Any, error: str) -> None:
    servers = Servers(1)
    with pytest.raises(muster.InvalidArgument, match=error):
        on_servers(servers.addresses, **{option: value})


def test_the_launcher_names_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUSTER_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert muster.Cluster.from_env().job == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's where it was given none
    assert muster.Cluster.from_env().job == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert muster.Cluster.from_env().job == "run"
    monkeypatch.setenv("MUSTER_JOB", "mine")
    assert muster.Cluster.from_env().job == "mine"
