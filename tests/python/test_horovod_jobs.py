"""Jobs of muster.horovod: how they begin under each launcher, how they end and fail, and how training goes on."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from test_horovod import job, raised
from torch import nn

import muster
import muster.horovod as hvd
from muster.horovod import HorovodInternalError, world
from muster.horovod.world import identity_of_job
from support.jobs import WorkerPool
from support.ranks import Ranks, environment, free_port

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


def late(kind: str) -> Any:
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1.5"}
    if kind == "group":
        variables["HOROVOD_HOSTNAME"] = os.environ["RANK"]
    os.environ.update(variables)
    try:
        hvd.init()
        if hvd.rank() == 1 and kind != "another name":
            time.sleep(3.5)
        name = f"late {hvd.rank()}" if kind == "another name" else "late"
        text = raised(hvd.allreduce, torch.zeros(1), name=name)
        hvd.shutdown()
        return text
    finally:
        for name in variables:
            del os.environ[name]


@pytest.mark.parametrize("kind", ["host", "group", "another name"])
def test_a_rank_that_stays_away_fails_the_others(two_workers: WorkerPool, kind: str) -> None:
    first, second = two_workers.call(late, kind)
    assert first.startswith("HorovodInternalError: allreduce 'late")
    assert second.startswith("HorovodInternalError: allreduce 'late")


class Shown:
    """A dataset of which only the length matters."""

    def __len__(self) -> int:
        return 10


def sampled() -> list[Any]:
    sampler = hvd.elastic.ElasticSampler(Shown(), shuffle=False)
    found: list[Any] = [list(sampler), len(sampler)]
    sampler.record_batch(0, 2)
    found.append(sampler.state_dict())
    sampler.load_state_dict(sampler.state_dict())
    found.append(list(sampler))
    sampler.set_epoch(1)
    found.append(len(sampler))
    shuffled = hvd.elastic.ElasticSampler(Shown(), seed=3)
    shuffled.set_epoch(2)
    found.append(sorted(hvd.allgather(torch.tensor(list(shuffled))).tolist()))
    found.append(list(shuffled) != list(sampler))
    return found


def test_elastic_sampler(two_workers: WorkerPool, three_workers: WorkerPool) -> None:
    first, second = two_workers.call(job, sampled)
    assert first[:2] == [[0, 2, 4, 6, 8], 5] and second[0] == [1, 3, 5, 7, 9]
    assert first[2] == {"epoch": 0, "processed_num": 4} and first[3] == [4, 6, 8] and second[3] == [5, 7, 9]
    assert first[4:] == second[4:] == [5, list(range(10)), True]
    parts = [found[0] for found in three_workers.call(job, sampled)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]


def elastic() -> Any:
    hvd.init()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    sampler = hvd.elastic.ElasticSampler(Shown())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, names=[])
    calls: list[str] = []
    state.register_reset_callbacks([lambda: calls.append(f"reset at {state.batch}")])
    calls.append(f"{model.weight.item():g}")

    @hvd.elastic.run
    def train(state: Any, until: int) -> float:
        calls.append(f"train from {state.batch} at {model.weight.item():g}")
        while state.batch < until:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.batch += 1
            state.names.append(state.batch)
            sampler.record_batch(state.batch, 1)
            if state.batch == 2:
                state.commit()
            if state.batch == 3 and len([c for c in calls if "train" in c]) == 1:
                if hvd.rank() == 1:
                    raise HorovodInternalError("this rank leaves")
                hvd.allreduce(torch.zeros(1), name="left alone")
            if state.batch == 4 and len([c for c in calls if "train" in c]) == 2:
                raise hvd.HostsUpdatedInterrupt
        return float(model.weight.item())

    result = train(state, 5)
    names, processed = state.names, sampler.processed_num
    hvd.shutdown()
    return calls, result, names, processed


def test_elastic_run_restores_what_was_committed(two_workers: WorkerPool) -> None:
    first, second = two_workers.call(elastic)
    weights = [0.0]
    speed = 0.0
    for _ in range(5):
        speed = 0.5 * speed + 1.0
        weights.append(weights[-1] - speed)
    shown = [f"{w:g}" for w in weights]
    expected = [
        f"train from 0 at {shown[0]}", "reset at 2", f"train from 2 at {shown[2]}", "reset at 4",
        f"train from 4 at {shown[4]}",
    ]  # fmt: skip
    assert first == (["0", *expected], weights[5], [1, 2, 3, 4, 5], 10)
    assert second == (["1", *expected], weights[5], [1, 2, 3, 4, 5], 10)
    assert issubclass(HorovodInternalError, RuntimeError)


def elastic_errors() -> Any:
    hvd.init()
    state = hvd.elastic.ObjectState(batch=0)
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any, step: Any) -> None:
        calls.append(state.batch)
        step()

    def fails() -> None:
        raise HorovodInternalError("the switch has burnt")

    def advances() -> None:
        if len(calls) < 6:
            state.batch += 1
            state.commit()
            fails()

    def shapes() -> None:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="shapes")

    def twice() -> None:
        handles = [hvd.allreduce_async(torch.ones(2), name="twice") for _ in range(2)]
        hvd.synchronize(handles[0])

    found = []
    records = Kept()
    logging.getLogger("muster").addHandler(records)
    try:
        for step in (fails, advances, shapes, twice):
            found.append((raised(train, state, step), len(calls), len(records.texts)))
            calls.clear()
            records.texts.clear()
        for step in (shapes, twice):
            with pytest.raises(ValueError, match=step.__name__):
                step()
    finally:
        logging.getLogger("muster").removeHandler(records)
        hvd.shutdown()
    return found


class Kept(logging.Handler):
    """Keeps warnings that name the error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "burnt" in record.getMessage():
            self.texts.append(record.getMessage())


def test_elastic_run_says_why_it_begins_again_and_gives_up(two_workers: WorkerPool) -> None:
    for fails, advances, shapes, twice in two_workers.call(elastic_errors):
        assert fails == ("HorovodInternalError: the switch has burnt", 3, 2)
        assert advances == ("nothing", 6, 5)
        assert "shapes" in shapes[0] and "ranks disagree" in shapes[0] and shapes[1:] == (1, 0)
        assert "under way" in twice[0] and twice[1:] == (1, 0)


def committed(restarts: int, run: str, folder: str) -> Any:
    """Where training begins, in a job's life after so many others."""
    variables = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_RUN_ID": run, "MUSTER_COMMITS": folder}
    os.environ.update(variables)
    hvd.init()
    try:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        state = hvd.elastic.TorchState(model, torch.optim.Adam(model.parameters()), batch=0)

        @hvd.elastic.run
        def train(state: Any) -> Any:
            begun = state.batch, model.weight.item(), len(state.optimizer.state)
            model(torch.ones(1, 1)).sum().backward()
            state.optimizer.step()
            state.batch += 1
            nn.init.constant_(model.weight, 10.0 + state.batch)
            state.commit()
            nn.init.constant_(model.weight, 100.0)  # is lost
            return begun

        return train(state)
    finally:
        hvd.shutdown()
        for name in variables:
            del os.environ[name]


def test_a_restarted_job_goes_on_from_its_commit(two_workers: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "commits")
    assert two_workers.call(committed, 0, "a", folder) == [(0, 1.0, 0)] * 2
    assert two_workers.call(committed, 1, "a", folder) == [(1, 11.0, 1)] * 2
    assert two_workers.call(committed, 2, "a", folder) == [(2, 12.0, 1)] * 2
    assert [path.name for path in (tmp_path / "commits").iterdir()] == ["commit.pt"]
    assert two_workers.call(committed, 1, "b", folder) == [(0, 1.0, 0)] * 2  # another job's
    assert two_workers.call(committed, 0, "b", folder) == [(0, 1.0, 0)] * 2  # begins anew


RESTARTED = """
import os, sys, torch
import muster.horovod as hvd

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, batch=0)


@hvd.elastic.run
def train(state):
    begun = state.batch
    while state.batch < 6:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 2 == 0:
            state.commit()
        if state.batch == 5 and begun == 0 and hvd.rank() == 1:
            os._exit(1)
    print(f"rank {hvd.rank()} from {begun}: {model.weight.item():.4f}", flush=True)


train(state)
"""


def test_lives_of_one_job_are_told_from_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    for store in (dist.TCPStore("127.0.0.1", 0, is_master=True), dist.TCPStore("127.0.0.1", 0, is_master=True)):
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        variables |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        jobs.append([identity_of_job(muster.Cluster.from_env()) for _ in range(2)])
    assert all(first == again != "" for first, again in jobs)
    assert jobs[0] != jobs[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert identity_of_job(muster.Cluster.from_env()) == ""


def torchrun(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["torchrun", "--standalone", "--nproc-per-node", "2", *arguments], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}, timeout=120,
    )  # fmt: skip


def test_the_example_is_the_same_on_two_workers() -> None:
    example = "examples/migrations/horovod_digits.py"
    assert "import muster.horovod as hvd  # import horovod.torch as hvd\n" in (ROOT / example).read_text()
    commands = [
        [sys.executable, example, "--epochs", "3", "--batch-size", "64"],
        [sys.executable, "-m", "muster", "run", "--workers", "2", "--servers", "0", example, "--epochs", "3"],
    ]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    alone, workers = (
        [line.split() for line in process.communicate(timeout=150)[0].splitlines()] for process in running
    )
    assert [process.returncode for process in running] == [0, 0]
    assert len(alone) == len(workers) == 3
    for one, two in zip(alone, workers, strict=True):
        assert float(one[4].strip(",")) == pytest.approx(float(two[4].strip(",")), rel=1e-3)
        assert float(one[6]) == pytest.approx(float(two[6]), abs=0.005)
    assert float(alone[-1][6]) > 0.5


@pytest.mark.long
def test_a_job_that_torchrun_restarts_goes_on_from_its_commit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESTARTED)
    done = torchrun("--max-restarts", "1", "train.py", cwd=tmp_path, MUSTER_COMMITS=str(tmp_path / "commits"))
    assert done.returncode == 0, done.stdout + done.stderr
    weight, speed = 0.0, 0.0
    for _ in range(6):
        speed = 0.5 * speed + 1.0
        weight -= speed
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sorted(lines) == [f"rank {r} from 4: {weight:.4f}" for r in (0, 1)]
    assert [path.name for path in (tmp_path / "commits").iterdir()] == ["commit.pt"]
