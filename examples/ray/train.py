"""Runs a training script, unchanged, in the workers of Ray Train, with parameter servers as actors if it needs them.

python examples/ray/train.py --workers 2 examples/python/digits.py --multi-worker
python examples/ray/train.py --workers 2 --servers 1 --snapshots snapshots examples/python/digits.py --parameter-server

What follows the script is the script's. With --max-failures N all workers are started again, up to N times, after one
has failed; a script that keeps checkpoints then goes on from its last one. A server that dies is started again from its
snapshots, at its address. Servers, and workers that have some, are on the node where this command runs.

Needs: pip install "ray[train]"
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import IO, Annotated, Any

import ray
import typer
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

TAKEOVER = 30.0
"""Seconds within which a server that was killed has let go of its address and its snapshots."""


class Server:
    """An actor whose child is `muster serve`. Either ends with the other, and Ray starts both again."""

    def __init__(self, address: str, snapshots: Path) -> None:
        deadline = time.monotonic() + TAKEOVER
        while not self._start(address, snapshots):
            if time.monotonic() > deadline:
                raise RuntimeError(f"parameter server {address} does not start; what it printed says why")
            time.sleep(0.5)
        self._is_asked_to_end = False
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def _start(self, address: str, snapshots: Path) -> bool:
        command = [sys.executable, "-m", "muster", "serve", "--address", address, "--snapshots", str(snapshots)]
        self._process = subprocess.Popen(
            [*command, "--until-stdin-ends"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return bool(pipe(self._process.stdout).readline())

    def _end_with_it(self) -> None:
        self._process.wait()
        if not self._is_asked_to_end:
            os._exit(1)

    def pids(self) -> tuple[int, int]:
        """The actor's and its server's. Once it answers, workers reach the server."""
        return os.getpid(), self._process.pid

    def end(self) -> int:
        """Lets it write a last snapshot; its exit code."""
        self._is_asked_to_end = True
        pipe(self._process.stdin).close()
        return self._process.wait()


def pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def train(job: dict[str, Any]) -> None:
    """What each worker does: the script, as if Python had been started with it.

    `job` has the script, its arguments, and variables of the environment.
    """
    os.environ.update(job["environment"])
    # Ray's process group has a store at MASTER_ADDR and MASTER_PORT, as torchrun's agent has: rank 0 makes none.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.chdir(job["folder"])
    sys.argv = [job["script"], *job["arguments"]]
    sys.path.insert(0, str(Path(job["script"]).parent))
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{job['script']} ended with exit code {end.code}") from None


def main(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Its arguments.")] = None,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    servers: Annotated[int, typer.Option(min=0, help="Parameter servers, on the node of this command.")] = 0,
    snapshots: Annotated[Path, typer.Option(help="Folder of the servers' snapshots.")] = Path("snapshots"),
    max_failures: Annotated[int, typer.Option(min=0, help="How often all workers are started again.")] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="A GPU for each worker.")] = False,
    storage: Annotated[str, typer.Option(help="Where Ray Train keeps its own files.")] = "~/ray_results",
) -> None:
    """Trains, on the cluster that RAY_ADDRESS names, or on one of this host."""
    from muster._C import _server  # imports torch, which actors that are no workers do without

    ray.init()
    node = ray.get_runtime_context().get_node_id()
    name = uuid.uuid4().hex
    addresses = [_server.free_address() for _ in range(servers)]
    placed = ray.remote(Server).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    actors = [
        placed.remote(address, (snapshots / f"server-{index}").absolute()) for index, address in enumerate(addresses)
    ]
    ray.get([actor.pids.remote() for actor in actors])
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "script": str(Path(script).absolute()),
            "arguments": arguments or [],
            "folder": os.getcwd(),
            "environment": {"MUSTER_JOB": name, "MUSTER_SERVERS": ",".join(addresses)},
        },
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpus, label_selector={"ray.io/node-id": node} if servers else None
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(Path(storage).expanduser().absolute()),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    try:
        trainer.fit()
    finally:
        ray.get([actor.end.remote() for actor in actors])
        ray.shutdown()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_interspersed_args": False})(main)
    app()
