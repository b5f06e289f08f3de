"""Jobs of muster.horovod: how they begin under each launcher, how they end and how they fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_horovod import job, raised

import muster.horovod as hvd
from muster.horovod import world
from support.commands import Processes, needs
from support.jobs import WorkerPool
from support.messages import messages_of_muster
from support.ranks import Ranks, environment, free_port
from support.scripts import output_of

ROOT = Path(__file__).resolve().parents[2]


def by_variables(variables: dict[str, str], comm: Any = None) -> Any:
    """The sum of ranks + 1 in a job that these variables describe, torchrun's taken away."""
    rank = os.environ["RANK"]
    kept = dict(os.environ)
    for name in environment(0, 1, 0):
        del os.environ[name]
    try:
        os.environ.update({name: value.replace("{rank}", rank) for name, value in variables.items()})
        hvd.init(comm)
        try:
            return hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum).item(), hvd.rank(), hvd.local_rank()
        finally:
            hvd.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(kept)


class Values(BaseHTTPRequestHandler):
    """What horovodrun's server does: it keeps what is put at a path, and says 404 before."""

    values: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, b"")

    def do_GET(self) -> None:
        value = self.values.get(self.path)
        self.answer(404 if value is None else 200, value or b"")

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


HOROVODRUN = {"HOROVOD_RANK": "{rank}", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "{rank}", "HOROVOD_HOSTNAME": "h"}


def test_horovodruns_variables_and_server(two_workers: WorkerPool) -> None:
    Values.values.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Values)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    meet = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port)}
    for _ in range(2):  # the same processes begin again
        assert two_workers.call(by_variables, {**HOROVODRUN, **meet}) == [(3, 0, 0), (3, 1, 1)]
    assert list(Values.values) == ["/muster/address"]
    server.shutdown()
    server.server_close()
    meet["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(free_port())
    for text in two_workers.call(raised, by_variables, {**HOROVODRUN, **meet}):
        assert text.startswith("InvalidArgument: no server of horovodrun answers")
        assert "MASTER_ADDR" in text


def test_other_launchers(two_workers: WorkerPool) -> None:
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert two_workers.call(by_variables, {**HOROVODRUN, **meet}) == [(3, 0, 0), (3, 1, 1)]
    mpi = {
        "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    assert two_workers.call(by_variables, mpi) == [(3, 0, 0), (3, 1, 1)]
    assert two_workers.call(by_variables, {}) == [(1, 0, 0), (1, 0, 0)]  # alone
    for text in two_workers.call(raised, by_variables, HOROVODRUN):
        assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" in text
    for text in two_workers.call(raised, by_variables, {**HOROVODRUN, "HOROVOD_ELASTIC": "1"}):
        assert "torchrun --max-restarts" in text


def some_ranks() -> Any:
    if int(os.environ["RANK"]) == 1:
        return raised(hvd.init, [0, 2])
    hvd.init(comm=[2, 0])
    try:
        return hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum).item()
    finally:
        hvd.shutdown()


def test_a_job_of_some_ranks(three_workers: WorkerPool) -> None:
    first, second, third = three_workers.call(some_ranks)
    assert first == (0, 2, 1) and third == (1, 2, 1)
    assert "name ranks of the job" in second


def test_places_of_uneven_hosts() -> None:
    found = world.places(["a", "b", "a", "a", "b"], [0, 0, 1, 2, 1])
    assert [(p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in found] == [
        (0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2), (2, 3, 0, 1), (1, 2, 1, 2),
    ]  # fmt: skip
    assert not found[0].is_homogeneous
    assert [p.local_rank for p in world.places(["a", "a", "b"], [0, 0, 0])] == [0, 1, 0]


def asked() -> list[Any]:
    with pytest.warns(UserWarning, match="torch.profiler"):
        hvd.start_timeline("timeline.json")
    hvd.stop_timeline()
    return [
        hvd.mpi_built(), hvd.mpi_enabled(), raised(hvd.mpi_threads_supported), hvd.gloo_built(), hvd.gloo_enabled(),
        hvd.nccl_built(), hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built(),
    ]  # fmt: skip


def test_what_is_built_is_said_honestly(two_workers: WorkerPool) -> None:
    cuda = torch.version.cuda is not None
    for answers in two_workers.call(job, asked):
        assert "MPI is not in use" in answers.pop(2)
        assert answers == [False, False, True, True, 0, False, False, cuda, False]


def test_nothing_works_before_init() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.join, hvd.barrier):
        with pytest.raises(ValueError, match=r"use hvd\.init"):
            call()
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        hvd.allreduce(torch.zeros(1))
    hvd.shutdown()
    with pytest.raises(ValueError, match="integers"):
        hvd.ProcessSet(["0"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet(3)  # type: ignore[arg-type]


def again() -> list[Any]:
    found = []
    for i in range(3):
        hvd.init()
        hvd.init()
        found.append(hvd.allreduce(torch.tensor(i), op=hvd.Sum).item())
        hvd.shutdown()
        hvd.shutdown()
    return found


def test_init_again(two_workers: WorkerPool) -> None:
    assert two_workers.call(again) == [[0, 2, 4]] * 2


def leaves() -> str:
    hvd.init()
    hvd.allreduce(torch.zeros(1))
    text = ""
    if hvd.rank() == 0:
        text = raised(hvd.allreduce, torch.zeros(1), name="alone")
        text += "\n" + raised(hvd.allreduce, torch.zeros(1), name="later")
    else:
        handle = hvd.allreduce_async(torch.zeros(1), name="open")
        hvd.shutdown()
        text = raised(hvd.synchronize, handle)
    hvd.shutdown()
    return text


def test_shutdown_of_one_rank_ends_the_others_operations(two_workers: WorkerPool) -> None:
    begun = time.monotonic()
    first, second = two_workers.call(leaves)
    assert time.monotonic() - begun < 20
    lines = first.splitlines()
    assert lines[0].startswith("HorovodInternalError: allreduce 'alone': ")
    assert lines[1].startswith("HorovodInternalError: ")
    assert "rank 1 has called hvd.shutdown()" in second


def waits_in_vain(away: int) -> Any:
    """What init() raises, and after how many seconds, where rank `away` does not come."""
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "4"
    if int(os.environ["RANK"]) == away:
        return None
    begun = time.monotonic()
    text = raised(hvd.init)
    waited = time.monotonic() - begun
    time.sleep(1)  # of rank 0, whose process has the store
    return text, waited


@pytest.mark.parametrize("away", [0, 2])
def test_init_waits_as_long_as_the_variable_says(away: int) -> None:
    for rank, found in enumerate(Ranks(3, waits_in_vain, away).results(60)):
        if rank == away:
            continue
        text, waited = found
        missing = "ranks [2] of 3 did not come" if away == 2 else f"rank {rank} cannot reach rank 0"
        assert text.startswith(f"Timeout: {missing}") and "4 s (HOROVOD_GLOO_TIMEOUT_SECONDS)" in text
        assert 3.9 < waited < 6


def ends_while_others_wait() -> str:
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "30"
    rank = int(os.environ["RANK"])
    if rank == 0:
        waiting = threading.Thread(target=hvd.init, daemon=True)
        waiting.start()
        time.sleep(3)
    return raised(hvd.init) if rank == 1 else ""


def test_init_says_that_rank_0_has_ended() -> None:
    _, text, _ = Ranks(3, ends_while_others_wait).results(60)
    assert text.startswith("Timeout: rank 1 waits in init() for others, and rank 0") and "start all ranks again" in text


def dies(kind: str) -> Any:
    if kind == "group":
        os.environ["HOROVOD_HOSTNAME"] = os.environ["RANK"]
    hvd.init()
    hvd.allreduce(torch.zeros(1))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    texts = [raised(hvd.allreduce, torch.zeros(1), name="x"), raised(hvd.allreduce, torch.zeros(1), name="y")]
    return texts, time.monotonic() - begun


@pytest.mark.parametrize("kind", ["host", "group"])
def test_a_peer_that_dies_is_an_error(kind: str) -> None:
    (texts, seconds), _ = Ranks(2, dies, kind).results(60)
    assert seconds < 20
    assert texts[0].startswith("HorovodInternalError: allreduce 'x': communication with the other ranks failed")
    assert texts[1].startswith("HorovodInternalError")


@contextmanager
def stalls_after(seconds: float, kind: str) -> Iterator[None]:
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(seconds)}
    if kind == "group":
        variables["HOROVOD_HOSTNAME"] = os.environ["RANK"]
    os.environ.update(variables)
    try:
        hvd.init()
        yield
        hvd.shutdown()
    finally:
        for name in variables:
            del os.environ[name]


def late(kind: str) -> Any:
    with stalls_after(1.5, kind):
        if hvd.rank() == 1 and kind != "another name":
            time.sleep(3.5)
        name = f"late {hvd.rank()}" if kind == "another name" else "late"
        return raised(hvd.allreduce, torch.zeros(1), name=name)


@pytest.mark.parametrize("kind", ["host", "group", "another name"])
def test_a_rank_that_stays_away_fails_the_others(two_workers: WorkerPool, kind: str) -> None:
    first, second = two_workers.call(late, kind)
    assert first.startswith("HorovodInternalError: allreduce 'late")
    assert second.startswith("HorovodInternalError: allreduce 'late")


def mismatched(kind: str) -> Any:
    with stalls_after(4.5, kind):
        hvd.allreduce(torch.zeros(1))
        with messages_of_muster() as messages:
            text = raised(hvd.allgather if hvd.rank() == 0 else hvd.allreduce, torch.zeros(1), name="kd")
        return text, messages


@pytest.mark.parametrize("kind", ["host", "group"])
def test_a_name_that_ranks_use_for_different_operations_is_told(two_workers: WorkerPool, kind: str) -> None:
    for rank, (text, messages) in enumerate(two_workers.call(mismatched, kind)):
        own, other = ("allgather", "allreduce") if rank == 0 else ("allreduce", "allgather")
        assert any(
            f"{own} 'kd' has waited" in message and f"rank {1 - rank} has asked for {other} 'kd'" in message
            for message in messages
        )
        assert text.startswith(f"HorovodInternalError: {own} 'kd': ")
        if kind == "host":  # where reasons reach other ranks
            assert "allgather 'kd'" in text and "allreduce 'kd'" in text


EXAMPLE = "examples/migrations/horovod_digits.py"
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Root, and fewer cores than workers, are allowed."""


def measured(output: str) -> list[list[float]]:
    """The losses and the accuracies that the example prints."""
    return [[float(number) for number in re.findall(r"\d+\.\d+", line)] for line in output.splitlines()]


def test_the_example_is_the_same_on_two_workers() -> None:
    assert "import muster.horovod as hvd  # import horovod.torch as hvd\n" in (ROOT / EXAMPLE).read_text()
    commands = [
        [sys.executable, EXAMPLE, "--epochs", "3", "--batch-size", "64"],
        [sys.executable, "-m", "muster", "run", "--workers", "2", "--servers", "0", EXAMPLE, "--epochs", "3"],
    ]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    alone, workers = (measured(process.communicate(timeout=150)[0]) for process in running)
    assert [process.returncode for process in running] == [0, 0]
    assert len(alone) == len(workers) == 3
    for one, two in zip(alone, workers, strict=True):
        assert one[0] == pytest.approx(two[0], rel=1e-3)
        assert one[1] == pytest.approx(two[1], abs=0.005)
    assert alone[-1][1] > 0.5


def example_of_ranks() -> str:
    try:
        return output_of(str(ROOT / EXAMPLE), "--epochs", "1")
    finally:
        hvd.shutdown()


def test_the_example_prints_the_same_under_mpirun(two_workers: WorkerPool) -> None:
    needs([] if shutil.which("mpirun") else ["mpirun"], "openmpi-bin")
    command = ["mpirun", "-n", "2", "--bind-to", "none", sys.executable, EXAMPLE, "--epochs", "1"]
    with Processes(command, ROOT, **OPEN_MPI) as job:
        chief, other = two_workers.call(example_of_ranks)
        returncode, printed, errors = job.end(120)
    assert returncode == 0, errors
    assert other == ""
    assert len(measured(chief)) == 1
    assert measured(printed) == measured(chief)
