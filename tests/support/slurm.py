"""A Slurm cluster of this host alone: its daemons as plain processes, all of whose files are in one folder."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType

from muster.free_ports import free_ports
from support.commands import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
"""With the folders of daemons, which a user's may lack."""

# No cgroups and no systemd: a container has neither. A job does not run again while its credential is valid, for two
# minutes by default.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={controller_port}
SlurmdPort={node_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


class Slurm:
    """The cluster, for as long as the context; `environment` is what its commands need.

    `folder` is one of its own, with a short name: a Unix socket is in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        for name in ("state", "spool"):
            (self._folder / name).mkdir()
        key = self._folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        controller_port, node_port = free_ports(2)
        (self._folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                folder=self._folder,
                controller_port=controller_port,
                node_port=node_port,
                cores=os.cpu_count(),
            )
        )
        try:
            files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            options = [f"--{option}={self._folder}/munge.{name}" for option, name in files.items()]
            self._start("munged", "--foreground", "--force", *options)
            wait_until((self._folder / "munge.socket").exists, f"munged listens; {self._folder}/*.log say why not")
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D")
            state = ("sinfo", "-h", "-o", "%t")
            wait_until(lambda: self.run(*state).stdout.strip() == "idle", f"a node; {self._folder}/*.log say why not")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """What a command of Slurm's says, whatever its exit code."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, env=environment, cwd=self._folder, capture_output=True, text=True, timeout=120, check=False
        )

    def _start(self, program: str, *options: str) -> None:
        with open(self._folder / f"{program}.log", "wb") as log:
            environment = {**os.environ, **self.environment, "PATH": PATH}
            command = [shutil.which(program, path=PATH) or program, *options]
            self._daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
