"""Runs a program everywhere and compares."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from differential import differences, events, modules, training
from differential.compare import Record, bound, encoded, first_difference
from differential.differences import DIFFERENCES, Shape
from differential.jobs import Job, TorchJob, make_job
from differential.program import Program
from differential.shrink import shrunk
from support.jobs import WorkerPool
from support.servers import Servers

JOBS = {
    1: ["mirrored-1", "mirrored-2", "mirrored-3", "mirrored-1-unfused", "mirrored-2-unfused"],
    2: ["workers-2", "workers-2-unfused", "workers-2-sharded", "servers-2x1", "servers-2x2"],
    3: ["workers-3", "servers-3x1"],
}
"""By number of processes."""


@dataclass(frozen=True)
class Failure:
    """Where a program's runs differ that must not."""

    program: Program
    first: str
    second: str
    where: str
    texts: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple[str, str]:
        """What stays while a program is shrunk."""
        return self.first, self.second


@dataclass(frozen=True)
class Rejected:
    """A program that says nothing: torch alone is not deterministic, not stable, or breaks off."""

    program: Program
    why: str


def names() -> dict[str, Any]:
    """What the text of a program may use."""
    return {
        "torch": torch,
        "OrderedDict": OrderedDict,
        "Callable": Callable,
        "Job": Job,
        "Net": modules.Net,
        "Checkpointed": modules.Checkpointed,
        "Training": training.Training,
        "make_optimizer": training.make_optimizer,
        **modules.pool(),
        **events.EVENTS,
    }


def execute(program: Program, job: str, servers: Sequence[str] = (), noise: float = 0.0) -> Record:
    """One run, as one process sees it."""
    dtype = torch.get_default_dtype()
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    made: list[Job] = []

    def make() -> Job:
        made.append(make_job(job, servers, **dict(program.options)))
        if isinstance(made[-1], TorchJob):
            torch.set_num_threads(1)
        return made[-1]

    try:
        space = names()
        exec(compile(program.text(), f"<program {program.seed}>", "exec"), space)
        ended = space["program"](make, noise)
        return Record({label: encoded(value) for label, value in ended.record}, ended.texts)
    except Exception as error:
        return Record({}, traceback.format_exc().splitlines()[-8:], f"{type(error).__name__}: {error}")
    finally:
        torch.set_default_dtype(dtype)
        for each in made:
            each.close()


def run_jobs(
    program: Program, jobs: Sequence[str], addresses: dict[str, list[str]], noise: float = 0.0
) -> list[Record]:
    """Runs one after another in a process."""
    return [execute(program, job, addresses.get(job, ()), noise) for job in jobs]


class Tester:
    """Processes that stay, for programs one after another."""

    __test__ = False

    def __init__(self) -> None:
        self._pools = {workers: WorkerPool(workers) for workers in (1, 2, 3)}

    def close(self) -> None:
        """Ends the processes."""
        for pool in self._pools.values():
            pool.close()

    def _run(self, workers: int, program: Program, jobs: list[str], noise: float = 0.0) -> dict[str, list[Record]]:
        servers = {job: Servers(int(job[-1])) for job in jobs if job.startswith("servers")}
        addresses = {job: group.addresses for job, group in servers.items()}
        by_rank = self._pools[workers].call(run_jobs, program, jobs, addresses, noise, timeout=120)
        return {job: [records[number] for records in by_rank] for number, job in enumerate(jobs)}

    def test(self, program: Program) -> Failure | Rejected | None:
        """None: everything agrees."""
        try:
            limit = bound(
                "bfloat16" if program.option("precision") == "bf16" or program.autocast else _narrowest(program)
            )
            (reference,), (again,) = self._run(1, program, ["torch", "torch-again"]).values()
            if reference.broken:
                return Rejected(program, reference.broken)
            if where := first_difference(reference, again, None):
                return Rejected(program, f"torch is not deterministic: {where}")
            noise = limit**2
            (moved,) = self._run(1, program, ["torch"], noise)["torch"]
            if where := first_difference(moved, reference, limit / 2):
                return Rejected(program, f"not stable: {where}")
            records: dict[str, list[Record]] = {}
            for workers, jobs in JOBS.items():
                records.update(self._run(workers, program, [job for job in jobs if _runs(program, job)]))
        except AssertionError as error:
            return Failure(program, "process", "process", str(error))
        return self._compare(program, reference, records, limit)

    def shrunk(self, failure: Failure) -> Failure:
        """A smaller program that fails between the same runs."""
        last = failure

        def fails(program: Program) -> bool:
            nonlocal last
            found = self.test(program)
            if not isinstance(found, Failure) or found.kind != failure.kind:
                return False
            last = found
            return True

        shrunk(failure.program, fails)
        return last

    def _compare(
        self, program: Program, reference: Record, records: dict[str, list[Record]], limit: float
    ) -> Failure | None:
        for job, ranks in records.items():
            for rank, record in enumerate(ranks[1:], start=1):
                if where := first_difference(_agreed(program, ranks[0]), _agreed(program, record), None):
                    return Failure(
                        program, job, job, f"ranks 0 and {rank}: {where}", tuple(ranks[0].texts + record.texts)
                    )
        families: dict[Shape, str] = {}
        for job, (record, *_) in records.items():
            first = families.setdefault(Shape.of(job), job)
            if first == job:
                if not _excepted(program, "torch", job) and (where := first_difference(record, reference, limit)):
                    return Failure(program, job, "torch", where, tuple(record.texts))
            elif not _excepted(program, "strategies", job) and (
                where := first_difference(record, records[first][0], None)
            ):
                return Failure(program, job, first, where, tuple(record.texts))
        return None


def _agreed(program: Program, record: Record) -> Record:
    """What all ranks see alike: an exception comes to the others at the window's end, and within a window and after
    an exception buffers are the replica's own."""
    own = ["raised", "stepped"] if differences.raises(program) else []
    if differences.raises(program) or program.accumulate > 1:
        own += ["buffer", "of copy", "of averages", "jacobian", "gradient"]
    kept = {label: value for label, value in record.values.items() if not any(f" {word}" in label for word in own)}
    return replace(record, values=kept)


def _narrowest(program: Program) -> str:
    if program.option("precision") == "bf16" or program.autocast:
        return "bfloat16"
    return "float32" if program.has_block("MixedTypes") or program.has_block("Buffers") else program.dtype


def _runs(program: Program, job: str) -> bool:
    scopes: tuple[differences.Scope, ...] = ("servers", "sharded")
    return not any(scope in job and _excepted(program, scope, job) for scope in scopes)


def _excepted(program: Program, scope: differences.Scope, job: str) -> bool:
    scopes = (scope, "strategies") if scope == "torch" else (scope,)
    return any(d.scope in scopes and d.concerns(program, Shape.of(job)) for d in DIFFERENCES)


@contextmanager
def tester() -> Iterator[Tester]:
    """A Tester that ends."""
    made = Tester()
    try:
        yield made
    finally:
        made.close()
