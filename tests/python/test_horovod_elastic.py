"""muster.horovod.elastic: what is kept, restored and the same on all ranks, and how training goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_horovod import job, raised
from torch import nn

import muster
import muster.horovod as hvd
from muster.horovod import HorovodInternalError
from muster.horovod.world import identity_of_job
from support.jobs import WorkerPool


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


class Counter:
    """Something with a state, of a class that nobody knows."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def followed(over: str) -> Any:
    """What a schedule, a scaler and a counter say of three epochs, of which the second failed once."""
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    followed = inner if over == "inner" else optimizer
    schedule = torch.optim.lr_scheduler.StepLR(followed, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (1 + hvd.rank()))
    counter = Counter()
    counter.count = 10 * hvd.rank()
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, scaler=scaler, counter=counter, epoch=0)
    found: list[Any] = []
    failures = [HorovodInternalError("once")]

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 3:
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            optimizer.step()
            state.schedule.step()
            scaler.update(2 * scaler.get_scale())
            state.counter.count += 1
            state.epoch += 1
            if state.epoch == 2 and failures:
                raise failures.pop()
            state.commit()
            found.append((inner.param_groups[0]["lr"], scaler.get_scale(), counter.count))

    train(state)
    assert state.schedule is schedule and schedule.optimizer is followed
    assert state.scaler is scaler and state.counter is counter
    return found


@pytest.mark.parametrize("over", ["inner", "wrapped"])
def test_what_has_a_state_dict_stays_the_programs_own(two_workers: WorkerPool, over: str) -> None:
    expected = [(0.5, 16.0, 1), (0.25, 32.0, 2), (0.125, 64.0, 3)]
    assert job(followed, over) == expected
    assert two_workers.call(job, followed, over) == [expected] * 2


class Progress:
    """Something without a state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def referred(folder: str) -> list[Any]:
    rank = hvd.rank()
    progress, names, total = Progress(rank), [f"of {rank}"], torch.full((2,), 1.0 + rank)
    seen: dict[str, Any] = {"names": names, "set": {rank}, "both": (names, [total])}
    seen["itself"] = seen
    state = hvd.elastic.ObjectState(progress=progress, names=names, seen=seen, total=total)
    names.append("before sync")  # is rank 0's, which goes to all
    state.sync()
    is_own = [state.progress is progress, state.names is names, state.seen is seen, state.total is total]
    assert is_own == [rank == 0] * 4
    found = [state.progress.rank, *state.names, state.total.tolist()]
    # What is in containers and tensors goes back, whoever else looks at them; others stay as they are.
    kept = state.names, state.seen, state.total, state.progress
    state.names.append("lost")
    state.seen["both"][1].append("lost")
    state.seen["set"].add("lost")
    del state.seen["itself"]
    state.total.add_(5)
    state.progress.rank = 7
    state.progress = state.names = None
    state.restore()
    assert all(a is b for a, b in zip((state.names, state.seen, state.total, state.progress), kept, strict=True))
    assert state.seen["both"][0] is state.seen["names"] and state.seen["itself"] is state.seen
    found += [*state.names, state.seen["set"] == {0}, len(state.seen["both"][1]), state.total.tolist()]
    found.append(state.progress.rank)
    # What cannot be copied.
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    with open(f"{folder}/{rank}", "w") as log:
        state = hvd.elastic.TorchState(log=log, pair=[optimizer, 1])
        state.commit()
        state.restore()
        assert state.log is log and state.pair[0] is optimizer
    return found


def test_objects_stay_the_programs_own(two_workers: WorkerPool, tmp_path: Path) -> None:
    names = ["of 0", "before sync"]
    expected = [0, *names, [1.0, 1.0], *names, True, 1, [1.0, 1.0], 7]
    assert job(referred, str(tmp_path)) == expected
    assert two_workers.call(job, referred, str(tmp_path)) == [expected] * 2


def gained() -> Any:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(3)
    commit = hvd.elastic.TorchState(model=model, epoch=2).kept()
    of_now = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(of_now.parameters(), lr=0.5)
    state = hvd.elastic.TorchState(model=of_now, optimizer=optimizer, epoch=0, batch=7)
    state.keep(commit)
    state.restore()
    return [of_now.weight.item(), optimizer.param_groups[0]["lr"], state.epoch, state.batch]


def test_a_script_that_has_gained_state_goes_on_from_an_older_commit() -> None:
    assert job(gained) == [3.0, 0.5, 2, 7]


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
        names = [f"twice {rank}" for rank in range(2)]
        own = hvd.allreduce_async(torch.ones(2), name=names[hvd.rank()])  # it waits for the other rank to ask for it
        try:
            hvd.allreduce_async(torch.ones(2), name=names[hvd.rank()])
        finally:
            hvd.barrier()
            hvd.allreduce(torch.ones(2), name=names[1 - hvd.rank()])
            hvd.synchronize(own)

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


def given_up(kind: str) -> Any:
    """What each rank raises where rank 0 alone fails, how often training began, and whether the job goes on."""
    hvd.init()
    state = hvd.elastic.ObjectState(batch=0)
    begun: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun.append(len(begun))
        if hvd.rank() == 0:
            raise HorovodInternalError("of rank 0")
        if kind == "interrupt" and len(begun) == 3:
            raise hvd.HostsUpdatedInterrupt
        if kind == "commit":
            state.commit()  # which rank 0 has not come to
        hvd.allreduce(torch.ones(1), name=f"other names, {len(begun)}")

    begins = time.monotonic()
    text = raised(train, state)
    try:
        return text, len(begun), time.monotonic() - begins < 20, hvd.allreduce(torch.ones(1)).item()
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("kind", ["words", "commit", "interrupt"])
def test_all_ranks_give_up_where_one_does(two_workers: WorkerPool, kind: str) -> None:
    (first, *rest), (second, *others) = two_workers.call(given_up, kind)
    assert first == "HorovodInternalError: of rank 0"
    if kind == "interrupt":
        assert second == "HorovodInternalError: rank 0 has failed 3 times in a row without a commit: of rank 0"
    else:
        assert second.startswith("HorovodInternalError: allreduce 'other names, 3'")
    assert rest == others == [3, True, 1.0]


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
