"""The Python examples, run as a user runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.jobs import WorkerPool
from support.scripts import output_of

ROOT = Path(__file__).resolve().parents[2]
DIGITS = "examples/python/digits.py"
CHAR_LM = "examples/python/char_lm.py"
CLICK_THROUGH = "examples/python/click_through.py"
DDP_DIGITS = "examples/migrations/ddp_digits.py"


def environment() -> dict[str, str]:
    """The shell's of a user whose environment is activated."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def line(output: str, beginning: str) -> str:
    (found,) = (text for text in output.splitlines() if text.startswith(beginning))
    return found.removeprefix(beginning).strip()


@pytest.fixture(scope="module")
def mirrored() -> str:
    """What `make train` prints."""
    return run("python", DIGITS)


def test_digits_learns(mirrored: str) -> None:
    accuracy, seen = re.fullmatch(r"([\d.]+) \(\d+ of (\d+)\)", line(mirrored, "test accuracy:")).groups()  # type: ignore[union-attr]
    assert float(accuracy) >= 0.95
    assert int(seen) == 1797 // 5


def test_the_change_that_digits_prints_gives_the_same_bits_on_two_workers(mirrored: str) -> None:
    source = (ROOT / DIGITS).read_text()
    assert line(mirrored, "-   ") in source
    assert line(mirrored, "+   ") in source
    command = line(mirrored, "    torchrun")
    workers = run("torchrun", *command.split())
    assert line(workers, "trained in").endswith("on 2 replicas of 2 process(es)")
    for measured in ("parameters:", "test accuracy:"):
        assert line(workers, measured) == line(mirrored, measured)


def with_a_server(*options: str) -> list[str]:
    """The command that digits prints, of two workers and a parameter server."""
    return ["muster", "run", "--workers", "2", "--servers", "1", DIGITS, "--parameter-server", *options]


def test_digits_has_the_same_bits_with_a_parameter_server(mirrored: str) -> None:
    assert line(mirrored, "    muster").split() == with_a_server()[1:]
    workers = run(*with_a_server())
    assert line(workers, "trained in").endswith("on 2 replicas of 2 process(es)")
    for measured in ("parameters:", "test accuracy:"):
        assert line(workers, measured) == line(mirrored, measured)


@pytest.mark.long
def test_digits_learns_where_workers_step_on_their_own() -> None:
    accuracy = line(run(*with_a_server("--staleness", "none")), "test accuracy:").split()
    assert float(accuracy[0]) >= 0.95
    assert accuracy[-1] == f"{1797 // 5})"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--multi-worker", "--parameter-server"], "choose"),
        (["--parameter-server", "--staleness", "1", "--checkpoint", "file"], "together"),
    ],
)
def test_digits_refuses_what_cannot_work(options: list[str], reason: str) -> None:
    done = subprocess.run([sys.executable, DIGITS, *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert reason in done.stderr


def exit_code_once_stopped(command: list[str], folder: Path) -> int:
    """That of a training which gets SIGTERM once it has kept a checkpoint, and says so."""
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 120
        while not list(folder.glob("snapshot-*")) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        first.send_signal(signal.SIGTERM)
        output, _ = first.communicate(timeout=60)
    assert re.search(r"stopped in epoch \d+ after \d+ batches", output)
    return first.returncode


def test_digits_stopped_by_sigterm_goes_on_from_its_checkpoint(mirrored: str, tmp_path: Path) -> None:
    command = [sys.executable, DIGITS, "--checkpoint", str(tmp_path)]
    assert exit_code_once_stopped(command, tmp_path) == 128 + signal.SIGTERM
    assert line(run(*command), "parameters:") == line(mirrored, "parameters:")


@pytest.mark.long
def test_digits_with_a_parameter_server_goes_on_from_its_checkpoint(mirrored: str, tmp_path: Path) -> None:
    command = with_a_server("--checkpoint", str(tmp_path))
    assert exit_code_once_stopped(command, tmp_path) == 128 + signal.SIGTERM
    assert line(run(*command), "parameters:") == line(mirrored, "parameters:")


def char_lm(*options: str) -> str:
    short = ("--steps", "8", "--width", "32", "--layers", "2", "--context", "64", "--megabytes", "0.3")
    return run("python", CHAR_LM, *short, *options)


def test_the_language_model_learns_and_recomputation_changes_nothing() -> None:
    outputs = [char_lm("--recompute", kind) for kind in ("none", "non-reentrant", "reentrant")]
    losses = [line(output, "loss on unseen files:") for output in outputs]
    assert float(losses[0].split()[0]) < 4.5  # ln 128 = 4.85 is what a guess costs
    assert losses[1:] == losses[:1] * 2


def click_through(command: str, *options: str) -> str:
    short = ("--rows", "2000", "--impressions", "60000", "--epochs", "1", "--batch-size", "256")
    return run(*command.split(), CLICK_THROUGH, *short, *options)


@pytest.fixture(scope="module")
def clicks_mirrored() -> str:
    return click_through("python")


def test_the_click_model_learns_what_can_be_known(clicks_mirrored: str) -> None:
    assert 0.9 < float(line(clicks_mirrored, "of what can be known:")) < 1
    for field in ("users", "ads", "pages"):
        assert float(line(clicks_mirrored, f"{field}: correlation with true effects").split()[0]) > 0.95
    learnt, true = re.fullmatch(r"(.*) \(true (.*)\)", line(clicks_mirrored, "features: effects")).groups()  # type: ignore[union-attr]
    assert [float(text) for text in learnt.split()] == pytest.approx([float(text) for text in true.split()], abs=0.1)
    auc, best = re.fullmatch(r"([\d.]+) .* ([\d.]+)\)", line(clicks_mirrored, "AUC:")).groups()  # type: ignore[union-attr]
    assert float(best) - 0.02 < float(auc) < float(best)


def test_the_click_model_has_the_same_bits_on_two_workers(clicks_mirrored: str) -> None:
    workers = click_through("torchrun --nproc-per-node 2", "--multi-worker")
    assert line(workers, "trained in").endswith("on 2 replicas of 2 process(es)")
    for measured in ("epoch 1:", "parameters:", "log loss:", "AUC:"):
        assert line(workers, measured) == line(clicks_mirrored, measured)


MUSTER_RUN = "muster run --workers 2 --servers 2"


def test_the_click_model_has_the_same_bits_where_its_rows_live_on_servers(clicks_mirrored: str) -> None:
    workers = click_through(MUSTER_RUN, "--parameter-server")
    assert line(workers, "trained in").endswith("on 2 replicas of 2 process(es)")
    for measured in ("epoch 1:", "parameters:", "users:", "log loss:", "AUC:"):
        assert line(workers, measured) == line(clicks_mirrored, measured)


@pytest.mark.long
@pytest.mark.parametrize("staleness", ["2", "none"])
def test_the_click_model_learns_where_workers_step_on_their_own(staleness: str) -> None:
    workers = click_through(MUSTER_RUN, "--parameter-server", "--staleness", staleness)
    assert float(line(workers, "of what can be known:")) > 0.85


def test_the_click_model_fails_where_it_learns_too_little() -> None:
    command = [sys.executable, CLICK_THROUGH, "--rows", "2000", "--impressions", "10000", "--epochs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert float(line(done.stdout, "of what can be known:")) < 0.8
    assert "less than 0.8" in done.stderr


def test_the_script_for_torchs_class_prints_the_same_with_one_line_changed(
    two_workers: WorkerPool, tmp_path: Path
) -> None:
    source = (ROOT / DDP_DIGITS).read_text()
    ours = "from muster import DistributedDataParallel"
    torchs = "from torch.nn.parallel import DistributedDataParallel"
    assert source.count(f"\n{ours}  # {torchs}\n") == 1
    found = []
    for name, line in (("torchs", torchs), ("ours", ours)):
        script = tmp_path / f"{name}.py"
        script.write_text(source.replace(f"{ours}  # {torchs}", line))
        options = ("--epochs", "2", "--checkpoint", str(tmp_path / f"{name}.pt"))
        chief, other = two_workers.call(output_of, str(script), *options)
        assert other == ""
        assert len(chief.splitlines()) == 2
        found.append([float(number) for number in re.findall(r"\d+\.\d+", chief)])
        assert (tmp_path / f"{name}.pt").exists()
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[1][3] < found[1][0] / 2
