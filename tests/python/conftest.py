"""Fixtures: jobs of every shape."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from support.hosts import Hosts, hosts
from support.jobs import Launcher, WorkerPool, make_job
from support.ranks import hear_interrupts

STARTUP = str(Path(__file__).resolve().parents[1] / "support" / "startup")
if STARTUP not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the file that takes longest: of processes that share the tests none is left alone with it."""
    items.sort(key=lambda item: item.path.name != "test_packaging.py")


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Ctrl-C raises, wherever the tests were started."""
    hear_interrupts()


@pytest.fixture(scope="session", autouse=True)
def no_children() -> Iterator[None]:
    """What a test that failed has left running does not keep pytest from ending."""
    yield
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture(scope="session")
def two_workers() -> Iterator[WorkerPool]:
    """Two processes that stay for the session."""
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def three_workers() -> Iterator[WorkerPool]:
    """Three processes that stay for the session."""
    pool = WorkerPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    """Network namespaces of a file's tests."""
    with hosts(2) as made:
        yield made


@pytest.fixture(params=["mirrored-1", "mirrored-2", "mirrored-3", "workers-2", "workers-2x2"])
def job(request: pytest.FixtureRequest, two_workers: WorkerPool) -> Launcher:
    """Every shape of job."""
    return make_job(request.param, two_workers)


@pytest.fixture(params=["mirrored-2", "mirrored-3", "workers-2", "workers-2x2"])
def wide_job(request: pytest.FixtureRequest, two_workers: WorkerPool) -> Launcher:
    """Every shape of job with several replicas."""
    return make_job(request.param, two_workers)


@pytest.fixture
def worker_job(two_workers: WorkerPool) -> Launcher:
    """Two workers of one replica each."""
    return make_job("workers-2", two_workers)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the C++ programs are: tests/programs, examples/cpp and benchmarks/cpp, built once as an outside project."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # one build for all of pytest's processes
    build = folder / "programs"
    where = subprocess.run([sys.executable, "-m", "muster", "--cmake-dir"], capture_output=True, text=True, check=True)
    source = Path(__file__).resolve().parents[1] / "programs"
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), f"-Dmuster_ROOT={where.stdout.strip()}"]
    with FileLock(folder / "programs.lock"):
        for command in (
            [*configure, "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"],  # -O3 takes longer than what they do
            ["cmake", "--build", str(build), "--target", "programs"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return build
