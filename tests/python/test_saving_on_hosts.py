"""Checkpoints of workers on hosts that share no file system: folders of their own here. Each host has a part, and the
chief's says which."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import muster
from muster import checkpoint
from muster.checkpoint import reading
from muster.cli import app
from muster.writing import Writing
from support.commands import wait_until
from support.hosts import hosts
from support.ranks import run_ranks

FIRST, SECOND, THIRD = (reading.numbered(number) for number in (1, 2, 3))


class Job:
    """A model and its optimizer, whose state is divided over the workers, and a folder of this worker's host."""

    def __init__(self, strategy: muster.Strategy, folder: Path) -> None:
        self.strategy = strategy
        self.folder = folder
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 500), nn.Linear(500, 3))
        self.user = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.model, _ = strategy.prepare(module, self.user)

    def train(self, until: int) -> Job:
        while self.strategy.steps < until:
            self.strategy.step(lambda x: self.model(x).square().mean(), torch.arange(64.0).view(8, 8) / 64)
        return self

    def save(self) -> Job:
        self.strategy.save(self.folder, keep=2, note=self.strategy.steps)
        return self

    def bits(self) -> list[bytes]:
        state = self.user.state_dict()["state"]
        moments = [state[number][name] for number in sorted(state) for name in sorted(state[number])]
        tensors: list[Tensor] = [*self.model.state_dict().values(), *moments]
        return [tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def job_on(folder: Path, places: Sequence[int], **options: Any) -> Job:
    """Of this worker; `places`: the hosts by rank."""
    options = {"shard_optimizer": True, "threads_per_replica": 1, "timeout": 60.0, **options}
    strategy = muster.MultiWorkerMirroredStrategy.from_env(seed=1, **options)
    own = folder / f"host-{places[strategy.rank]}"
    (own / "best").mkdir(parents=True, exist_ok=True)  # else the host keeps none
    return Job(strategy, own)


def saved(folder: Path, places: Sequence[int]) -> list[list[bytes]]:
    job = job_on(folder, places)
    with job.strategy:
        return [job.train(steps).save().bits() for steps in (1, 2)]


def loaded(folder: Path, places: Sequence[int], **options: Any) -> tuple[list[bytes], int]:
    job = job_on(folder, places, **options)
    with job.strategy:
        found = job.strategy.load(job.folder)
        assert found is None or found == {"note": job.strategy.steps}
        return job.bits(), job.strategy.steps


def loaded_by_number(folder: Path, places: Sequence[int], number: int) -> tuple[list[bytes], int]:
    job = job_on(folder, places)
    with job.strategy:
        job.strategy.load(job.folder / reading.numbered(number))
        return job.bits(), job.strategy.steps


def error_of_loading(folder: Path, places: Sequence[int], number: int) -> str:
    with pytest.raises(muster.CheckpointError) as raised:
        loaded_by_number(folder, places, number)
    return str(raised.value)


def loaded_and_said(folder: Path, places: Sequence[int]) -> tuple[list[bytes], int, list[str]]:
    """And what the log warns of."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("muster").addHandler(handler)
    return *loaded(folder, places), warnings


def loaded_by_one(folder: Path) -> tuple[list[bytes], int]:
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        job = Job(strategy, folder)
        strategy.load(folder)
        return job.bits(), strategy.steps


@pytest.mark.parametrize("places", [(0, 1), (0, 0, 1, 1)])
def test_each_host_has_a_part_and_load_gathers_them(places: tuple[int, ...], tmp_path: Path) -> None:
    older, newest = run_ranks(len(places), saved, tmp_path, places)[0]
    chiefs, other = (tmp_path / f"host-{host}" for host in (0, 1))
    assert not (other / SECOND / "manifest.json").exists()
    written = {file.name.split("-")[1] for file in (other / SECOND).glob("*.safetensors")}
    assert written == {str(rank) for rank, host in enumerate(places) if host == 1}
    with pytest.raises(muster.CheckpointError, match="was written on host '"):
        reading.read_folder(chiefs / SECOND)
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(chiefs / SECOND)])
    assert done.exit_code == 1 and "NOT ALL HERE, and what is here is good; on host '" in done.stdout
    assert done.stdout.count("worker-") == len(written)
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(other / SECOND)])
    assert done.exit_code == 1 and "NOT ALL HERE: " in done.stdout and "manifest is on another host" in done.stdout
    # Also where another host has the chief, or the world is another one.
    for others in (places, places[::-1], (0, 1, 1)):
        assert run_ranks(len(others), loaded, tmp_path, others) == [(newest, 2)] * len(others)
    # And with all of it in one folder.
    together = tmp_path / "together"
    for host in (other, chiefs):
        shutil.copytree(host, together, dirs_exist_ok=True)
    assert loaded_by_one(together) == (newest, 2)
    assert CliRunner().invoke(app, ["checkpoint", "verify", str(together)]).exit_code == 0
    assert checkpoint.model_state(together)
    # A file of the other host is damaged, and then gone.
    part = next((other / SECOND).glob(f"worker-{places.index(1)}-*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    chief, *others = run_ranks(len(places), loaded_and_said, tmp_path, places)
    assert chief[:2] == (older, 1) and others == [(older, 1, [])] * len(others)
    (said,) = chief[2]
    assert f"'{chiefs / SECOND}' is passed over: on rank {places.index(1)}, '{part}' is damaged" in said
    shutil.rmtree(other / SECOND)
    chief, *others = run_ranks(len(places), loaded_and_said, tmp_path, places)
    assert chief[:2] == (older, 1) and others == [(older, 1, [])] * len(others)
    (said,) = chief[2]
    assert "no rank has its file 'worker-" in said and ", which was written on host '" in said


def saved_and_loaded(folder: Path, places: Sequence[int]) -> bool:
    job = job_on(folder, places)
    with job.strategy:
        bits = [job.train(steps).save().bits() for steps in (1, 2)][-1]
        job.train(3)
        return job.strategy.load(job.folder) == {"note": 2} and job.bits() == bits


@pytest.mark.parametrize("chiefs_host", [0, 1])
def test_one_checkpoint_is_loaded_of_hosts_that_have_newer_ones(chiefs_host: int, tmp_path: Path) -> None:
    places = (0, 1)
    written = run_ranks(2, saved, tmp_path, places)[0]
    now = (chiefs_host, 1 - chiefs_host)
    for bits, steps in run_ranks(2, loaded_by_number, tmp_path, now, 1):
        assert steps == 1 and bits == written[0]
    next((tmp_path / "host-1" / FIRST).glob("*.safetensors")).unlink()
    for error in run_ranks(2, error_of_loading, tmp_path, now, 1):
        assert FIRST in error and SECOND not in error
    for error in run_ranks(2, error_of_loading, tmp_path, now, 3):
        assert "there is no checkpoint" in error and THIRD in error and SECOND in error


def test_hosts_on_a_network_of_their_own(tmp_path: Path) -> None:
    with hosts(2) as made:
        assert made.run([0, 1], saved_and_loaded, tmp_path, (0, 1)) == [True, True]
    assert (tmp_path / "host-1" / SECOND).exists()


def saved_over_a_group(folder: Path, places: Sequence[int]) -> list[bytes]:
    torch.distributed.init_process_group("gloo")
    job = job_on(folder, places, process_group=torch.distributed.group.WORLD)
    with job.strategy:
        bits = job.train(1).save().bits()
    torch.distributed.destroy_process_group()
    return bits


def test_hosts_that_reach_one_another_by_a_process_group(tmp_path: Path) -> None:
    bits = run_ranks(2, saved_over_a_group, tmp_path, (0, 1))[0]
    assert (tmp_path / "host-1" / FIRST).exists()
    assert run_ranks(2, loaded, tmp_path, (0, 1)) == [(bits, 1)] * 2


def killed_before_it_is_one(folder: Path, places: Sequence[int]) -> None:
    job = job_on(folder, places)
    with job.strategy:
        job.train(1).save()
        assert job.strategy.load(job.folder) == {"note": 1}
        if job.strategy.is_chief:

            def killed(*_: object) -> None:
                wait_until(lambda: [*folder.glob(f"host-1/{SECOND}/*.part.json")], "the other host's part is there")
                os.kill(os.getpid(), signal.SIGKILL)

            Writing.start = killed  # type: ignore[assignment, method-assign]
        job.train(2).save()
        try:
            job.strategy._saving.writing.finish()
        except muster.CheckpointError as error:  # the chief was dead before it was told of the part
            if not re.search(r"nothing can be told: [^\n]+$", str(error)):
                raise
        os._exit(0)  # the chief is dead


def went_on(folder: Path, places: Sequence[int]) -> int:
    job = job_on(folder, places)
    with job.strategy:
        assert job.strategy.load(job.folder) == {"note": 1}
        job.train(2).save()
        return job.strategy.steps


def test_a_chief_that_is_killed_before_its_part_is_there_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run_ranks(2, killed_before_it_is_one, tmp_path, (0, 1), timeout=100)
    assert (tmp_path / "host-1" / SECOND).exists() and not (tmp_path / "host-0" / SECOND).exists()
    assert run_ranks(2, went_on, tmp_path, (0, 1)) == [2, 2]
    assert [path.name for path in reading.folders_in(tmp_path / "host-0")] == [FIRST, THIRD]
    _, steps = run_ranks(2, loaded, tmp_path, (0, 1))[0]
    assert steps == 2


def saved_whole(folder: Path, places: Sequence[int]) -> list[bytes]:
    job = job_on(folder, places, shard_optimizer=False)
    with job.strategy:
        return job.train(1).save().bits()


def test_what_all_workers_have_is_on_the_chiefs_host_alone(tmp_path: Path) -> None:
    bits, _ = run_ranks(2, saved_whole, tmp_path, (0, 1))
    assert not reading.numbered_in(tmp_path / "host-1")
    assert loaded_by_one(tmp_path / "host-0") == (bits, 1)


def saved_without_a_folder(folder: Path, places: Sequence[int]) -> list[bytes]:
    job = job_on(folder, places)
    with job.strategy:
        job.folder /= "runs"
        return job.train(1).save().bits()


def test_a_host_without_the_folder_keeps_nothing(tmp_path: Path) -> None:
    bits, _ = run_ranks(2, saved_without_a_folder, tmp_path, (0, 1))
    assert not (tmp_path / "host-1" / "runs").exists()
    assert loaded_by_one(tmp_path / "host-0" / "runs") == (bits, 1)


def kept_the_best(folder: Path, places: Sequence[int], metric: float) -> bool:
    job = job_on(folder, places)
    with job.strategy:
        checkpoints = muster.Checkpoints(job.strategy, job.folder, keep=2)
        checkpoints.load()
        job.train(job.strategy.steps + 1)
        checkpoints.save()
        return checkpoints.best(metric if job.strategy.is_chief else math.nan)


def best_loaded(folder: Path, places: Sequence[int]) -> float:
    job = job_on(folder, places)
    with job.strategy:
        found = job.strategy.load(job.folder / "best")
        assert found is not None
        return float(found["best"]["metric"])


def test_the_best_counts_whichever_host_has_the_chief(tmp_path: Path) -> None:
    moves = [
        ((0, 1), 1.0, True),
        ((0, 1), 2.0, False),
        ((1, 0), 1.5, False),
        ((1, 0), 0.5, True),
        ((0, 1), 0.75, False),
    ]
    for places, metric, is_best in moves:
        assert run_ranks(2, kept_the_best, tmp_path, places, metric) == [is_best] * 2
    for places in ((0, 1), (1, 0)):
        assert run_ranks(2, best_loaded, tmp_path, places) == [0.5] * 2
    # What cannot be loaded is not the best.
    shutil.rmtree(tmp_path / "host-0" / "best" / SECOND)
    assert run_ranks(2, kept_the_best, tmp_path, (1, 0), 3.0) == [True] * 2
    assert run_ranks(2, best_loaded, tmp_path, (0, 1)) == [3.0] * 2


def kept_bests(folder: Path, places: Sequence[int]) -> list[bool]:
    """Of three in one job, and once a host has lost what it has of them."""
    job = job_on(folder, places)
    with job.strategy:
        checkpoints = muster.Checkpoints(job.strategy, job.folder)
        job.train(1)
        found = [checkpoints.best(metric) for metric in (3.0, 4.0, 2.0)]
        job.strategy._saving.writing.finish()
        job.strategy.barrier()
        if not job.strategy.is_chief:
            for lost in reading.numbered_in(job.folder / "best"):
                shutil.rmtree(lost)
        job.strategy.barrier()
        return [*found, checkpoints.best(5.0)]


def test_a_job_knows_the_best_that_it_has_written(tmp_path: Path) -> None:
    assert run_ranks(2, kept_bests, tmp_path, (0, 1)) == [[True, False, True, True]] * 2


def went_on_from(folder: Path, places: Sequence[int], steps: int, sharded: bool = True) -> list[list[bytes]]:
    """The bits that were loaded, and those saved after another step."""
    job = job_on(folder, places, shard_optimizer=sharded)
    with job.strategy:
        assert job.strategy.load(job.folder) == {"note": steps}
        return [job.bits(), job.train(steps + 1).save().bits()]


@pytest.mark.parametrize("sharded", [True, False])
def test_the_chief_moves_between_hosts(sharded: bool, tmp_path: Path) -> None:
    if sharded:
        bits, steps = run_ranks(2, saved, tmp_path, (0, 1))[0][-1], 2
    else:
        bits, steps = run_ranks(2, saved_whole, tmp_path, (0, 1))[0], 1
    for places in ((1, 0), (0, 1), (1, 0), (1, 0)):
        found, after = run_ranks(2, went_on_from, tmp_path, places, steps, sharded)[0]
        assert found == bits
        bits, steps = after, steps + 1
    chief, *others = run_ranks(2, loaded_and_said, tmp_path, (0, 1))
    assert chief[:2] == (bits, steps) and others == [(bits, steps, [])]
    newest = tmp_path / "host-0" / reading.numbered_in(tmp_path / "host-1")[-1].name
    (said,) = chief[2]
    assert f"'{newest}' on host '" in said and f"(rank 1), of {steps} steps, is loaded: its manifest is on" in said


def saved_often(folder: Path, places: Sequence[int], times: int = 7, has_lineage: bool = True) -> list[bytes]:
    """Alone on a host, of another job."""
    job = job_on(folder, places)
    with job.strategy:
        if not has_lineage:
            job.strategy._saving._lineage = ""
        for steps in range(1, times + 1):
            job.train(steps).strategy.save(job.folder, note=steps)
        return job.bits()


def test_what_another_job_left_on_a_host_is_named_and_stays(tmp_path: Path) -> None:
    bits = run_ranks(2, saved, tmp_path, (0, 2))[0]
    run_ranks(1, saved_often, tmp_path, (1,))
    shutil.copytree(tmp_path / "host-2", tmp_path / "host-1", dirs_exist_ok=True, ignore=shutil.ignore_patterns("l*"))
    names = [numbered.name for numbered in reading.numbered_in(tmp_path / "host-1")]
    # In the folder of the second, which is another job's checkpoint of that number, is the part of the chief's.
    chief, *others = run_ranks(2, loaded_and_said, tmp_path, (0, 1))
    assert chief[:2] == (bits[-1], 2) and others == [(bits[-1], 2, [])]
    (said,) = chief[2]
    assert "snapshot-0000000007' on host '" in said and "of 7 steps, is passed over for 'snapshot-0000000002'" in said
    assert "it is of another lineage than what the chief's host has" in said
    bits = run_ranks(2, went_on_from, tmp_path, (0, 1), 2)[0]
    assert (tmp_path / "host-0" / reading.numbered(8) / "manifest.json").exists()
    assert run_ranks(2, loaded, tmp_path, (0, 1)) == [(bits[-1], 3)] * 2
    assert [each.name for each in reading.numbered_in(tmp_path / "host-1")] == [*names, reading.numbered(8)]


def refused(folder: Path, places: Sequence[int]) -> str:
    job = job_on(folder, places)
    with job.strategy, pytest.raises(muster.CheckpointError) as caught:
        job.strategy.load(job.folder)
    return str(caught.value)


def test_another_jobs_checkpoint_is_not_taken_where_none_of_the_chiefs_is_good(tmp_path: Path) -> None:
    run_ranks(2, saved, tmp_path, (0, 1))
    bits = run_ranks(1, saved_often, tmp_path, (2,))[0]
    for error in run_ranks(2, refused, tmp_path, (0, 2)):
        assert f"{tmp_path}/host-" in error
    assert run_ranks(2, loaded, tmp_path, (3, 2)) == [(bits, 7)] * 2  # the chief's host has none


def judged(folder: Path, places: Sequence[int], metric: float) -> bool:
    job = job_on(folder, places)
    with job.strategy:
        return muster.Checkpoints(job.train(1).strategy, job.folder).best(metric)


def test_another_jobs_best_does_not_count_where_none_of_the_chiefs_is_good(tmp_path: Path) -> None:
    assert run_ranks(2, judged, tmp_path, (0, 1), 1.0) == [True] * 2
    assert run_ranks(1, judged, tmp_path, (2,), 0.5) == [True]
    assert run_ranks(2, judged, tmp_path, (0, 2), 0.75) == [True] * 2


def test_checkpoints_of_no_lineage_are_of_their_hosts_own(tmp_path: Path) -> None:
    bits = run_ranks(1, saved_often, tmp_path, (0,), 2, False)[0]
    run_ranks(1, saved_often, tmp_path, (1,), 7, False)
    assert run_ranks(2, loaded, tmp_path, (0, 1)) == [(bits, 2)] * 2


@pytest.mark.parametrize("is_shorter", [True, False])
def test_a_file_that_is_damaged_on_one_host_is_read_on_another(is_shorter: bool, tmp_path: Path) -> None:
    _, newest = run_ranks(2, saved, tmp_path, (0, 1))[0]
    for part in (tmp_path / "host-1" / SECOND).glob("*.safetensors"):
        data = part.read_bytes()
        end = b"" if is_shorter else bytes([data[-1] ^ 1])
        (tmp_path / "host-0" / SECOND / part.name).write_bytes(data[:-1] + end)
    assert run_ranks(2, loaded, tmp_path, (0, 1)) == [(newest, 2)] * 2


def test_what_is_no_manifest_is_damaged(tmp_path: Path) -> None:
    for text in ("[" * 200_000, '{"crc32":"00000000","manifest":{"shards":' + "[" * 200_000):
        folder = tmp_path / FIRST
        folder.mkdir(exist_ok=True)
        (folder / "manifest.json").write_text(text)
        done = CliRunner().invoke(app, ["checkpoint", "verify", str(folder)])
        assert done.exit_code == 1 and f"{folder}: DAMAGED: " in done.stdout
