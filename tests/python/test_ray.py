"""examples/ray/train.py on a Ray cluster of this host: its workers, and a parameter server whose actor is killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import muster
from support import ray_job
from support.commands import Processes, wait_until

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "python" / "digits.py"
PAGE = (ROOT / "docs" / "launching.md").read_text()
[COMMAND] = re.findall(r"^python (examples/ray/train\.py --workers 2) train\.py$", PAGE, re.MULTILINE)
EPOCHS = ["--epochs", "2"]


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install -r requirements-dev.txt brings Ray")
def test_workers_and_a_server_that_is_started_again_have_the_same_bits(tmp_path: Path) -> None:
    mirrored = [sys.executable, str(DIGITS), *EPOCHS]
    alone = subprocess.run(mirrored, capture_output=True, text=True, timeout=120, check=True).stdout
    on_servers = ray_job.train(lambda: muster.MirroredStrategy(["cpu:0", "cpu:1"]))
    snapshots = tmp_path / "snapshots"
    options = ["--servers", 1, "--snapshots", snapshots, "--storage", tmp_path / "results"]
    command = [
        sys.executable,
        *COMMAND.split(),
        *options,
        ray_job.__file__,
        tmp_path,
        DIGITS,
        *EPOCHS,
        "--multi-worker",
    ]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # Unix sockets need a short name
        variables = {
            "HOME": folder,
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # other tests keep the cores busy
            "PYTHONPATH": os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with Processes(command, ROOT, **variables) as job:
            half = [tmp_path / f"half.{rank}" for rank in (0, 1)]
            wait_until(
                lambda: all(file.exists() for file in half) or job.process.poll() is not None,
                "both are half through",
                200,
            )
            assert job.process.poll() is None, job.end()
            [server] = job.processes("muster serve")
            os.kill(parent(server), signal.SIGKILL)
            wait_until(lambda: server not in job.processes("muster serve"), "the server ends with its actor")
            (tmp_path / "go").touch()
            returncode, out, err = job.end(200)
            assert job.processes("muster serve") == []
    assert returncode == 0, out + err
    [expected] = re.findall(r"parameters: (\w+)", alone)
    assert set(re.findall(r"parameters: (\w+)", out + err)) == {expected}
    assert set(re.findall(r"on servers: (\w+)", out + err)) == {on_servers}
