"""muster serve: where it listens, what it keeps, how it ends."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from typer.testing import CliRunner

import muster
from muster._C import _server
from muster.cli import app
from support.commands import Command


def probe(address: str) -> _server.Probe:
    return _server.Probe([_server.channel_name(address)], 1000, staleness=0, patience=30.0)


def error_of(command: Command) -> str:
    returncode, out, err = command.end()
    assert (returncode, out) == (1, ""), err
    assert "Traceback" not in err
    error = err.splitlines()[-1]
    assert error.startswith("muster serve: ")
    return error


def test_it_keeps_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "server-0"
    with Command("serve", "--snapshots", folder) as first:
        address = first.line()
        assert muster.Cluster(0, 1, "", servers=[address]).servers == (address,)
        worker = probe(address)
        for _ in range(5):
            worker.step()
        worker.leave()
        left = shutil.copytree(folder, tmp_path / "left" / "server-0")
        first.process.send_signal(signal.SIGTERM)
        assert first.end()[:2] == (0, "")

    # What was there before the server was asked to end, at another address.
    with Command("serve", "--snapshots", left) as second:
        worker = probe(second.line())
        assert worker.steps == 5
        worker.step()
        worker.leave()
        second.process.send_signal(signal.SIGINT)
        returncode, _, err = second.end()
    assert returncode == 0
    assert "goes on after step 5 " in err

    for file in left.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-100])
    with Command("serve", "--snapshots", left) as third:
        assert str(left) in error_of(third)


def test_it_ends_when_deserted() -> None:
    with Command("serve", "--until-deserted") as server:
        worker = probe(server.line())
        worker.step()
        assert server.process.poll() is None
        worker.leave()
        assert server.end()[:2] == (0, "")


def test_what_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    address = _server.free_address()
    port = address.partition(":")[2]
    with (
        Command("serve", "--port", port) as server,
        Command("serve", "--address", "no-such-host:5000") as elsewhere,
        Command("serve", "--snapshots", tmp_path / "file" / "folder") as unwritable,
    ):
        assert server.line() == address
        with Command("serve", "--address", f"127.0.0.1:{port}") as taken:
            assert "taken" in error_of(taken)
        assert "write localhost:5000" in error_of(elsewhere)
        assert str(tmp_path / "file") in error_of(unwritable)
    done = CliRunner().invoke(app, ["serve", "--address", "localhost:5000", "--port", "5000"])
    assert done.exit_code == 2
    assert "--port and --address both" in done.output


def test_a_server_that_stood_still_takes_nobody_for_dead() -> None:
    """Stopped for longer than the heartbeat's 5 s, as by a debugger or a virtual machine that moves."""
    with Command("serve") as server:
        name = _server.channel_name(server.line())
        workers = [_server.Probe([name], 1000, rank=rank, workers=8, patience=30.0, lanes=1) for rank in range(8)]
        for worker in workers:
            worker.step()
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        server.process.send_signal(signal.SIGCONT)
        for worker in workers:
            worker.step()
        server.process.send_signal(signal.SIGTERM)
        assert "silent" not in server.end()[2]


def test_it_ends_although_its_disk_takes_no_snapshots(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    with Command("serve", "--snapshots", folder, "--snapshot-every", "0.3") as server:
        worker = probe(server.line())
        worker.step()
        folder.rename(tmp_path / "away")
        worker.step()
        worker.leave()
        time.sleep(4)  # it has tried for a while, and waits before it tries again
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        returncode, _, err = server.end()
    assert returncode == 1, err
    assert time.monotonic() - begin < 5
    assert "cannot be written, and is tried again" in err
