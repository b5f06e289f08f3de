"""Checkpoints of a job that has a secret: signed when they are written, and refused where they are not."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import muster
from muster import _C
from muster.cli import app
from support.saving import Job, mirrored
from support.servers import Servers

pytestmark = pytest.mark.skipif(not _C.has_sha256(), reason="needs a build with OpenSSL")

SECRET = b"known to this test alone"


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the job's secret, which MUSTER_SECRET_FILE names."""
    file = tmp_path_factory.mktemp("secret") / "job.secret"
    file.touch(mode=0o600)
    file.write_bytes(SECRET + b"\n")
    monkeypatch.setenv("MUSTER_SECRET_FILE", str(file))
    return file


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of muster checkpoint."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def save(folder: Path, number: int) -> None:
    with mirrored() as strategy:
        Job(strategy)
        strategy.save(folder, number=number)


def loaded(folder: Path) -> object:
    with mirrored() as strategy:
        Job(strategy)
        found = strategy.load(folder)
        return None if found is None else found["number"]


def test_the_signature_is_what_the_documentation_says(secret: Path, tmp_path: Path) -> None:
    tensors = {"a": torch.rand(10), "b": torch.rand(10)}
    folder = Path(_C._checkpoint.write_snapshot(tmp_path, tensors, {"x": 1}, shard_bytes=40))
    text = (folder / "manifest.json").read_bytes()
    inner = text.split(b'"manifest":', 1)[1].rstrip()[:-1]
    outer = json.loads(text)
    assert list(outer) == ["crc32", "hmac", "manifest"]
    key = hmac.digest(SECRET, b"muster snapshot manifest", "sha256")
    assert outer["hmac"] == hmac.new(key, inner, "sha256").hexdigest()
    assert len(outer["manifest"]["shards"]) == 2
    for shard in outer["manifest"]["shards"]:
        assert shard["sha256"] == hashlib.sha256((folder / shard["file"]).read_bytes()).hexdigest()


def test_a_job_loads_what_it_signed_and_nothing_else(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    assert loaded(tmp_path) == 1
    monkeypatch.delenv("MUSTER_SECRET_FILE")
    save(tmp_path, 2)
    assert loaded(tmp_path) == 2
    monkeypatch.setenv("MUSTER_SECRET_FILE", str(secret))
    assert loaded(tmp_path) == 1
    code, out, _ = run("verify", tmp_path)
    good, refused = out.splitlines()
    assert code == 1 and "good" in good
    assert "snapshot-0000000002" in refused and "has no signature" in refused and "muster checkpoint sign" in refused
    code, out, _ = run("sign", tmp_path / "2")
    assert code == 0 and out == f"{tmp_path / 'snapshot-0000000002'}: signed\n"
    assert run("verify", tmp_path)[0] == 0 and loaded(tmp_path) == 2


def test_another_secret_is_told(secret: Path, tmp_path: Path) -> None:
    save(tmp_path, 1)
    secret.write_bytes(b"not the secret of before")
    with pytest.raises(muster.CheckpointError, match="no snapshot in"):
        loaded(tmp_path)
    code, _, error = run("show", tmp_path / "1")
    assert code == 1 and "signed with another job secret" in error
    assert run("sign", tmp_path)[0] == 0 and loaded(tmp_path) == 1


def test_what_is_not_signed_is_not_the_best(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def best(metric: float) -> bool:
        with mirrored() as strategy:
            Job(strategy)
            return muster.Checkpoints(strategy, tmp_path, best_keep=None).best(metric)

    assert best(0.5)
    monkeypatch.delenv("MUSTER_SECRET_FILE")
    assert best(0.1)
    monkeypatch.setenv("MUSTER_SECRET_FILE", str(secret))
    assert not best(0.6) and best(0.4)
    assert any("snapshot-0000000002" in line and "has no signature" in line for line in caplog.messages)
    assert run("sign", tmp_path / "best" / "2")[0] == 0


def test_signing_needs_a_secret_and_a_checkpoint(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "runs", 1)
    assert run("sign", tmp_path / "none")[0] == 2
    secret.chmod(0o644)
    code, _, error = run("sign", tmp_path / "runs")
    assert code == 1 and "chmod 600" in error
    with pytest.raises(muster.InvalidArgument, match="chmod 600"):
        save(tmp_path / "runs", 2)
    monkeypatch.delenv("MUSTER_SECRET_FILE")
    code, _, error = run("sign", tmp_path / "runs")
    assert code == 1 and "no job secret is set" in error


def test_servers_sign_their_snapshots_and_start_from_no_others(secret: Path, tmp_path: Path) -> None:
    servers = Servers(1, tmp_path)
    cluster = muster.Cluster(0, 1, "", 0, servers.addresses)
    with muster.ParameterServerStrategy(cluster, seed=1, threads_per_replica=1) as strategy:
        Job(strategy).train(2)
    servers.running[0].snapshot()
    secret.write_bytes(b"not the secret of before")
    with pytest.raises(muster.CheckpointError, match="no snapshot in"):
        servers.restart(0)
    secret.write_bytes(SECRET)
    servers.restart(0)
    assert "hmac" in json.loads(next((tmp_path / "0").glob("snapshot-*/manifest.json")).read_text())
