"""muster run: what workers and servers are told, how a job ends, and that nothing outlives it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from muster._C import _server
from support.commands import Command, wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parameter_servers.md"
STEPS = """
import os, sys
from pathlib import Path
from muster import Cluster
from muster._C import _server

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
cluster = Cluster.from_env()
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
names = [_server.channel_name(address) for address in cluster.servers]
probe = _server.Probe(names, 100_000, cluster.rank, cluster.num_workers, staleness=0, patience=60.0)
(folder / f"{cluster.rank}.{life}").write_text(f"{probe.steps} {sys.argv[3:]} {len(cluster.servers)}")
for step in range(steps):
    probe.step()
    if step == steps // 2:
        (folder / f"{cluster.rank}.half").touch()
        if "wait" in sys.argv:
            while not (folder / "go").exists():
                pass
        if "fail" in sys.argv and life == 0:
            os._exit(9)
probe.leave()
"""

# No torch: quick to start. What it does at its end needs a server for longer than a server takes to end.
SLEEP = """
import os, signal, socket, sys, time
from pathlib import Path

def finish(*_):
    if "MUSTER_SERVERS" not in os.environ:
        sys.exit()
    (folder / f"{rank}.ends").touch()
    time.sleep(1)
    for _ in range(200 if "late" in sys.argv else 1):
        with socket.socket(socket.AF_UNIX) as server:
            if server.connect_ex("\\0muster-server-" + os.environ["MUSTER_SERVERS"].partition(":")[2]) == 0:
                (folder / f"{rank}.finished").touch()
                break
        time.sleep(0.1)
    sys.exit()

signal.signal(signal.SIGTERM, finish)

rank, folder = os.environ["RANK"], Path(sys.argv[1])
(folder / f"{rank}.servers").write_text(os.environ.get("MUSTER_SERVERS", "none"))
if "fail" in sys.argv and rank == "1":
    while not (folder / "0.servers").exists():
        pass
    sys.exit(7)
(folder / f"{rank}.sleeps").touch()
try:
    time.sleep(300)
except KeyboardInterrupt:
    (folder / f"{rank}.interrupted").touch()
    raise
"""


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    return script


@pytest.fixture
def sleeps(tmp_path: Path) -> Path:
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEP)
    return script


def test_a_job(steps: Path, tmp_path: Path) -> None:
    arguments = ["--workers", "9", "-m", "--", "--help", "a b"]
    options = ["--workers", 2, "--servers", 2, "-m"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(temporary)}
    with Command("run", *options, "steps", tmp_path, 5, *arguments, **variables) as job:
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 0, err
    assert list(temporary.iterdir()) == []
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.0").read_text() == f"0 {arguments} 2"


def test_a_job_of_programs(steps: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{steps}" "$@"\n')
    program.chmod(0o755)
    with Command("run", "--workers", 2, "--no-python", program, tmp_path, 5, "--no-python") as job:
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 0, err
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.0").read_text() == "0 ['--no-python'] 1"


def test_what_is_no_script_and_no_program_is_refused(steps: Path) -> None:
    wrong: list[tuple[list[object], str]] = [
        ([sys.executable], "is no script; start it with --no-python"),
        (["--no-python", steps], "is no program that can be executed; make it so: chmod +x"),
        (["--no-python", "-m", "steps"], "not both"),
    ]
    for arguments, expected in wrong:
        with Command("run", *arguments) as job:
            returncode, _, err = job.end()
        assert returncode == 2
        assert expected in " ".join(err.replace("│", " ").split())


def test_a_worker_that_fails_ends_the_job(sleeps: Path, tmp_path: Path) -> None:
    with Command("run", "--workers", 2, "--servers", 0, sleeps, tmp_path, "fail", MUSTER_SERVERS="old:1") as job:
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 7, err
    assert "muster run: worker 1 ended with exit code 7" in err
    assert "Traceback" not in err
    assert (tmp_path / "0.servers").read_text() == "none"


def test_a_job_is_interrupted_while_its_servers_start(sleeps: Path, tmp_path: Path) -> None:
    with Command("run", "--servers", 1, sleeps, tmp_path) as job:
        wait_until(lambda: job.processes("muster.agent"), "the agent starts")
        os.kill(job.process.pid, signal.SIGINT)
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 128 + signal.SIGINT
    assert "Traceback" not in err and "died" not in err
    assert not (tmp_path / "0.servers").exists()


@pytest.mark.parametrize(
    ("number", "victim"),
    [
        (signal.SIGINT, "muster run"),
        (signal.SIGKILL, "muster serve"),
        pytest.param(signal.SIGKILL, "muster run", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "", marks=pytest.mark.long),  # all at once, as systemd does it
        pytest.param(signal.SIGKILL, "muster.agent", marks=pytest.mark.long),
    ],
)
def test_nothing_outlives_a_job(number: int, victim: str, sleeps: Path, tmp_path: Path) -> None:
    with Command("run", "--servers", 1, sleeps, tmp_path) as job:
        wait_until((tmp_path / "0.sleeps").exists, "the worker runs")
        assert len(job.processes()) == 4
        for process in job.processes(victim):
            os.kill(process, number)
        returncode, _, err = job.end()
        wait_until(lambda: job.processes() == [], "all processes end", 10)
    assert (tmp_path / "0.interrupted").exists() == (number == signal.SIGINT)
    address = (tmp_path / "0.servers").read_text()
    if victim == "muster serve":
        assert returncode == 1
        assert f"parameter server {address} died (signal 9, Killed)" in err
        assert "--snapshots FOLDER" in err
    elif victim in {"", "muster run"}:
        assert (tmp_path / "0.finished").exists() == (number == signal.SIGTERM)
        assert "parameter server" not in err
        assert returncode == (-number if number == signal.SIGKILL else 128 + number)
    else:
        assert returncode == 128 + number
        assert "torchrun's agent died (signal 9, Killed)" in err


def test_a_server_is_started_again_for_workers_that_end(sleeps: Path, tmp_path: Path) -> None:
    with Command("run", "--snapshots", tmp_path / "snapshots", sleeps, tmp_path, "late") as job:
        wait_until((tmp_path / "0.sleeps").exists, "the worker runs")
        os.kill(job.process.pid, signal.SIGTERM)
        wait_until((tmp_path / "0.ends").exists, "the worker ends")
        [server] = job.processes("muster serve")
        os.kill(server, signal.SIGKILL)
        returncode, _, err = job.end()
    assert (tmp_path / "0.finished").exists()
    assert "it is started again from" in err
    assert returncode == 128 + signal.SIGTERM


def test_children_of_any_name_are_found() -> None:
    name = b"\xff) 1 2"
    program = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); print(flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert process.pid in importlib.import_module("muster.run")._children()
        process.kill()


def test_a_server_goes_on_until_its_input_ends() -> None:
    command = [sys.executable, "-m", "muster", "serve", "--until-stdin-ends"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline().startswith(b"localhost:")
        server.stdin.write(b"more\n")
        server.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(1)
        server.stdin.close()
        assert server.wait(60) == 0
    closed = subprocess.run(command, stdin=None, capture_output=True, preexec_fn=lambda: os.close(0), timeout=60)
    assert closed.returncode == 0 and closed.stderr.count(b"Traceback") == 0


def test_options_of_torchrun_in_the_environment_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    (program := tmp_path / "program.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    command = [sys.executable, "-m", "muster", "run", "--workers", "1", "--servers", "0", str(program)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "1\n"


def test_a_server_with_snapshots_is_started_again(steps: Path, tmp_path: Path) -> None:
    options = ["--workers", 2, "--snapshots", tmp_path / "snapshots"]
    with Command("run", *options, steps, tmp_path, 20, "wait") as job:
        wait_until(lambda: (tmp_path / "0.half").exists() and (tmp_path / "1.half").exists(), "both are half through")
        [server] = job.processes("muster serve")
        os.kill(server, signal.SIGKILL)
        (tmp_path / "go").touch()
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 0, err
    assert "it is started again from" in err
    assert (tmp_path / "snapshots" / "server-0").is_dir()


@pytest.mark.long
def test_workers_that_are_started_again_go_on(steps: Path, tmp_path: Path) -> None:
    with Command("run", "--max-restarts", 1, steps, tmp_path, 10, "fail") as job:
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 0, err
    assert (tmp_path / "0.0").read_text().split()[0] == "0"
    assert (tmp_path / "0.1").read_text().split()[0] == "6"


@pytest.mark.long
def test_a_server_that_cannot_start_ends_the_job(sleeps: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    for server in (0, 1):
        (tmp_path / "snapshots" / f"server-{server}").touch()
    with Command("run", "--servers", 2, "--snapshots", tmp_path / "snapshots", sleeps, tmp_path) as job:
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 1, err
    assert err.count("before it listened") == 2
    assert "may be old" not in err
    assert not (tmp_path / "0.servers").exists()


@pytest.mark.long
def test_a_server_that_dies_again_and_again_ends_the_job(sleeps: Path, tmp_path: Path) -> None:
    with Command("run", "--snapshots", tmp_path / "snapshots", sleeps, tmp_path) as job:
        wait_until((tmp_path / "0.sleeps").exists, "the worker runs")
        [first] = job.processes("muster serve")
        os.kill(first, signal.SIGKILL)
        name = _server.channel_name((tmp_path / "0.servers").read_text())
        _server.Probe([name], 1000, patience=60.0).leave()
        [second] = job.processes("muster serve")
        os.kill(second, signal.SIGKILL)
        returncode, _, err = job.end()
        assert job.processes() == []
    assert returncode == 1
    assert "died (signal 9, Killed); it is started again" in err
    assert "died (signal 9, Killed) again, soon after" in err


def slow_server(folder: Path, pause: float) -> Any:
    """One that listens, and at its end writes twelve lines of a snapshot, with a pause after each."""
    running = importlib.import_module("muster.run")
    writes = f"""
import sys, time
print("listens", flush=True)
sys.stdin.read()
with open({str(folder / "snapshot")!r}, "w", buffering=1) as snapshot:
    for line in range(12):
        print(line, file=snapshot)
        time.sleep({pause})
"""

    class Slow(running.Server):  # type: ignore[name-defined, misc]
        def _start(self) -> None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", writes], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    server = Slow("localhost:1", None)
    wait_until(server.listens, "the server listens")
    return server


@pytest.mark.long
@pytest.mark.parametrize(("pause", "is_fine"), [(0.2, True), (60.0, False)])
def test_a_last_snapshot_may_take_as_long_as_it_goes_on(
    pause: float, is_fine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server that writes slowly at its end, for longer than it may be still, and one that writes no more."""
    running = importlib.import_module("muster.run")
    monkeypatch.setattr(running, "LAST_SNAPSHOT", 1.0)
    assert running._end_servers([slow_server(tmp_path, pause)], []) is is_fine
    assert capfd.readouterr().err.count("is killed") == (0 if is_fine else 1)
    assert len((tmp_path / "snapshot").read_text().splitlines()) == (12 if is_fine else 1)


def test_another_signal_ends_the_wait_for_last_snapshots(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    running = importlib.import_module("muster.run")
    signals = [signal.SIGINT]  # which ended the job
    sending = threading.Timer(1.0, signals.append, [signal.SIGINT])
    server = slow_server(tmp_path, 60.0)
    sending.start()
    assert running._end_servers([server], signals) is False
    err = capfd.readouterr().err
    assert err.count("still writing its last snapshot at another signal, and is killed") == 1
    assert "its last snapshot may be old" in err


def test_the_document(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.argv[1:] = ['.', '5', *sys.argv[1:]]\n" + STEPS)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    free = iter({_server.free_address().partition(":")[2] for _ in range(20)})
    for block in blocks:
        for port in sorted(set(re.findall(r"\b296\d\d\b", block))):
            block = block.replace(port, next(free))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(["bash", "-ec", block], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, timeout=60)
        servers = block.count("muster serve") or 1
        for rank in (0, 1):
            steps, _, rest = (tmp_path / f"{rank}.0").read_text().partition(" ")
            assert steps == "0"
            assert rest.endswith(f" {servers}")
            (tmp_path / f"{rank}.0").unlink()
    assert len(blocks) == 2
    assert (tmp_path / "snapshots" / "server-0").is_dir()
