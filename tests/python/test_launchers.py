"""docs/launching.md: a training under every launcher, by the commands that stand there, ends with the same bits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.free_ports import free_ports
from support import launched
from support.commands import Processes, needs, wait_until
from support.hosts import Hosts
from support.slurm import Slurm, missing

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text()
DIGITS = ROOT / "examples" / "python" / "digits.py"
EPOCHS = "4"
TRAINS_DIGITS = f"{DIGITS} --multi-worker --epochs {EPOCHS}"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_")
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Root, and fewer cores than workers, are allowed."""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that no launcher started."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def parameters() -> str:
    """What digits prints of them on two replicas of one process."""
    command = [sys.executable, str(DIGITS), "--epochs", EPOCHS]
    return printed(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


def printed(output: str) -> str:
    found = set(re.findall(r"parameters: (\w{16}) \(sha256\)", output))
    assert len(found) == 1, output
    return str(found.pop())


def commands(section: str, program: str = TRAINS_DIGITS) -> list[str]:
    """The shell blocks of a section, with a program in the place of the user's script, and ports that are free."""
    _, _, text = PAGE.partition(f"\n## {section}\n")
    blocks = re.findall(r"^```sh\n(.*?)^```", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    assert blocks, section
    return [with_program(block, program) for block in blocks]


def with_program(block: str, program: str = TRAINS_DIGITS) -> str:
    for port in sorted(set(re.findall(r"\b29\d\d\d\b", block))):
        block = block.replace(port, str(free_ports(1)[0]))
    return re.sub(r"\btrain\.py\b", program, block)


def shell(block: str, folder: Path, **variables: str) -> Processes:
    return Processes(["bash", "-c", block], folder, PATH=PATH, **variables)


def printed_by(block: str, folder: Path) -> str:
    """The digest of parameters that a block's job prints."""
    with shell(block, folder) as job:
        returncode, out, err = job.end(120)
    assert returncode == 0, err
    return printed(out)


def has_checkpoint(folder: Path) -> bool:
    return bool(list((folder / "checkpoints").glob("snapshot-*")))


def test_torchrun(tmp_path: Path) -> None:
    command, *_ = commands("torchrun", launched.__file__)
    assert printed_by(command, tmp_path) == launched.train_on_replicas(2)


def on_host(made: Hosts, host: int, command: str, folder: Path, **variables: str) -> Processes:
    return Processes(
        ["ip", "netns", "exec", made.name(host), "bash", "-c", f"exec {command}"], folder, PATH=PATH, **variables
    )


def test_torchrun_on_two_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    *_, block = commands("torchrun", launched.__file__)
    first, second = block.replace("node0", two_hosts.address(0)).splitlines()
    with on_host(two_hosts, 0, first, tmp_path) as job, on_host(two_hosts, 1, second, tmp_path) as other:
        returncode, out, err = job.end(120)
        assert (returncode, other.end(120)[0]) == (0, 0), err
    assert printed(out) == launched.train_on_replicas(4)


@pytest.mark.long
def test_torchrun_goes_on_without_a_host_that_is_lost(two_hosts: Hosts, tmp_path: Path) -> None:
    _, elastic, _ = commands("torchrun", f"{launched.__file__} --until-lost")
    elastic = elastic.replace("localhost", two_hosts.address(0))
    agents = []
    for host in range(2):
        # These hosts share a name, by which torchrun would find addresses. A node counts as lost after three intervals.
        command = elastic.replace("torchrun", f"torchrun --local-addr {two_hosts.address(host)}")
        options = f"is_host={1 - host},last_call_timeout=10,keep_alive_interval=1"
        agents.append(on_host(two_hosts, host, command, tmp_path, PET_RDZV_CONF=options))
    with agents[0] as job, agents[1] as lost:
        wait_until(lambda: has_checkpoint(tmp_path), "an epoch is over")
        for process in lost.processes():
            os.kill(process, signal.SIGKILL)
        returncode, out, err = job.end(120)
    assert returncode == 0, err
    assert re.findall(r"\d workers .*", out) == [
        "4 workers begin after 0 steps",
        f"2 workers begin after {launched.STEPS} steps",
        f"2 workers end after {launched.EPOCHS * launched.STEPS} steps",
    ]
    launched.train_on_replicas(4, tmp_path / "expected")
    assert printed(out) == launched.train_on_replicas(2, tmp_path / "expected")


def test_torchrun_starts_workers_again_which_go_on_from_their_checkpoint(tmp_path: Path, parameters: str) -> None:
    _, elastic, _ = commands("torchrun")
    # An elastic job waits for more nodes for as long as this, 30 s by default.
    with shell(elastic, tmp_path, PET_RDZV_CONF="last_call_timeout=1") as job:
        wait_until(lambda: has_checkpoint(tmp_path), "an epoch is over")
        [worker] = job.processes("digits.py", "RANK=1")
        os.kill(worker, signal.SIGKILL)
        returncode, out, err = job.end(120)
    assert returncode == 0, err
    assert printed(out) == parameters


def test_mpirun(tmp_path: Path, parameters: str) -> None:
    needs([] if shutil.which("mpirun") else ["mpirun"], "openmpi-bin")
    [command] = commands("Open MPI")
    with shell(command, tmp_path, **OPEN_MPI) as job:
        returncode, out, err = job.end(120)
    assert returncode == 0, err
    assert printed(out) == parameters


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    needs(missing(), "slurmctld slurmd slurm-client munge")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, Slurm(Path(folder)) as cluster:
        yield cluster


def test_a_job_of_slurm_that_is_asked_to_end_saves_is_queued_again_and_goes_on(
    slurm: Slurm, tmp_path: Path, parameters: str
) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(with_program((ROOT / "deploy" / "slurm" / "train.sbatch").read_text()))
    [sbatch] = commands("Slurm")
    with shell(sbatch, tmp_path, **slurm.environment) as job:
        returncode, out, err = job.end()
        assert returncode == 0, err
        number = out.split()[-1]
        wait_until(lambda: has_checkpoint(tmp_path), "an epoch is over")
        [worker] = job.processes("digits.py", "SLURM_PROCID=1")
        os.kill(worker, signal.SIGSTOP)  # so that nobody is through before the signal comes
        slurm.run("scancel", "--signal=TERM", number)
        os.kill(worker, signal.SIGCONT)
        output = tmp_path / f"train-{number}.out"
        wait_until(lambda: "parameters:" in output.read_text(), "the job goes on to its end", 120)
    assert "stopped in epoch" in output.read_text()
    assert printed(output.read_text()) == parameters


def test_muster_run(tmp_path: Path) -> None:
    [command] = commands("muster run", launched.__file__)
    assert printed_by(command, tmp_path) == launched.train_on_replicas(2)


def test_muster_run_that_binds_workers_to_cores(tmp_path: Path, parameters: str) -> None:
    [command] = commands("Cores, memory nodes, GPUs")
    assert printed_by(command, tmp_path) == parameters


def test_plain_variables(tmp_path: Path) -> None:
    [command] = commands("Plain variables", launched.__file__)
    assert printed_by(command, tmp_path) == launched.train_on_replicas(2)


PEER_LOST = """
import os
import muster

strategy = muster.MultiWorkerMirroredStrategy.from_env()
strategy.barrier()
if strategy.rank == 1:
    os._exit(9)
strategy.barrier()
"""

ENDS = """#!/bin/bash
# Ends with 7 as rank 1; otherwise waits for SIGTERM, takes a moment to save, and ends with 143.
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}}
[ "$1 $rank" = "fail 1" ] && exit 7
trap 'sleep 1; touch saved.$rank; exit 143' TERM
touch ready.$rank
while [ ! -e end ]; do sleep 0.1; done
exit 1
"""


@pytest.fixture
def ends(tmp_path: Path) -> Path:
    program = tmp_path / "ends"
    program.write_text(ENDS)
    program.chmod(0o755)
    return program


def codes(launcher: str) -> tuple[int, int]:
    """What the page says of it: where one worker ends with 7, and where all leave with 143."""
    [row] = re.findall(rf"^\| `{launcher}` \| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
    return int(row[0]), int(row[1])


def are_ready(folder: Path) -> bool:
    return len(list(folder.glob("ready.*"))) == 2


def have_saved(folder: Path) -> bool:
    return len(list(folder.glob("saved.*"))) == 2


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("torchrun", "--standalone --nproc-per-node 2 --no-python"),
        pytest.param("muster run", "--workers 2 --servers 0 --no-python", marks=pytest.mark.long),
        ("mpirun", "-n 2"),
    ],
)
def test_exit_codes(launcher: str, options: str, ends: Path, tmp_path: Path) -> None:
    needs([] if launcher != "mpirun" or shutil.which("mpirun") else ["mpirun"], "openmpi-bin")
    failed, stopped = codes(launcher)
    with shell(f"exec {launcher} {options} {ends} fail", tmp_path, **OPEN_MPI) as job:
        wait_until((tmp_path / "ready.0").exists, "worker 0 runs")
        (tmp_path / "end").touch()
        assert job.end()[0] == failed
    for file in tmp_path.glob("*[!s]"):
        file.unlink()
    with shell(f"exec {launcher} {options} {ends}", tmp_path, **OPEN_MPI) as job:
        wait_until(lambda: are_ready(tmp_path), "both run")
        for process in job.processes(str(ends), "OMPI_COMM_WORLD_SIZE=2") or [job.process.pid]:
            os.kill(process, signal.SIGTERM)
        assert job.end()[0] == stopped
    assert have_saved(tmp_path)


def test_exit_codes_of_srun(slurm: Slurm, ends: Path, tmp_path: Path) -> None:
    failed, stopped = codes("srun")
    with shell(f"srun -n 2 --overcommit {ends} fail", tmp_path, **slurm.environment) as job:
        wait_until((tmp_path / "ready.0").exists, "worker 0 runs")
        (tmp_path / "end").touch()
        assert job.end()[0] == failed
    for file in tmp_path.glob("*[!s]"):
        file.unlink()
    with shell(f"srun -n 2 --overcommit --job-name stop {ends}", tmp_path, **slurm.environment) as job:
        wait_until(lambda: are_ready(tmp_path), "both run")
        slurm.run("scancel", "--signal=TERM", "--name=stop")
        assert job.end()[0] == stopped
    assert have_saved(tmp_path)


def test_a_worker_that_loses_another_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(PEER_LOST)
    [plain] = commands("Plain variables")
    block = re.sub(r"\S*digits\.py[^&\n]*", "lost.py ", plain)
    with shell(block.replace("wait $!", "echo code $?"), tmp_path) as job:
        _, out, err = job.end()
    assert out == "code 1\n"
    assert "PeerLost" in err
