"""Messages of the C++ core arrive at logging.getLogger("muster"), whatever the thread and moment."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import muster
from muster._C import _log, _log_from_thread, _set_log_rank
from muster.replica_threads import warn_of_one_lock
from support.ranks import run_ranks


@pytest.fixture(autouse=True)
def no_rank() -> Iterator[None]:
    _set_log_rank(-1, 0)  # strategies of other tests leave theirs
    yield
    _set_log_rank(-1, 0)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR])
def test_levels(caplog: pytest.LogCaptureFixture, level: int) -> None:
    with caplog.at_level(logging.DEBUG, "muster"):
        _log(level, "100 % of it")
    assert caplog.record_tuples == [("muster", level, "100 % of it")]


def test_rank_prefix(caplog: pytest.LogCaptureFixture) -> None:
    _set_log_rank(1, 4)
    _log(logging.WARNING, "hello")
    assert caplog.messages == ["[rank 1/4] hello"]


def test_the_logger_filters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "muster"):
        _log(logging.WARNING, "dropped")
    assert caplog.messages == []


class Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.arrived.release()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Counting()
    logger = logging.getLogger("muster")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(handler)
    try:
        for _ in range(3):
            _log_from_thread(logging.WARNING, "x", 200)
        assert all(handler.arrived.acquire(timeout=60) for _ in range(600))
    finally:
        logger.removeHandler(handler)


def test_a_pending_exception_survives(caplog: pytest.LogCaptureFixture) -> None:
    def raise_and_log() -> None:
        try:
            raise KeyError("mine")
        finally:
            _log(logging.WARNING, "meanwhile")

    with pytest.raises(KeyError, match="mine"):
        raise_and_log()
    assert caplog.messages == ["meanwhile"]


class Failing(logging.Handler):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error


@pytest.fixture
def failing(request: pytest.FixtureRequest) -> Iterator[None]:
    handler = Failing(request.param)
    logging.getLogger("muster").addHandler(handler)
    yield
    logging.getLogger("muster").removeHandler(handler)


@pytest.mark.parametrize("failing", [RuntimeError("disk full")], indirect=True)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failing_handler_harms_nobody(failing: None) -> None:
    _log(logging.WARNING, "lost")


@pytest.mark.parametrize("failing", [KeyboardInterrupt()], indirect=True)
def test_an_interrupt_while_logging_is_kept(failing: None) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def log_and_go_on() -> None:
        _log(logging.WARNING, "Ctrl-C here")
        for _ in range(1000):  # the interrupt is raised between two of these
            pass

    with pytest.raises(KeyboardInterrupt):
        log_and_go_on()


def test_threads_that_log_while_the_interpreter_exits() -> None:
    code = """
import logging
import muster
from muster._C import _log, _log_from_thread
logging.getLogger("muster").setLevel(logging.DEBUG)
logging.getLogger("muster").addHandler(logging.NullHandler())
for _ in range(3):
    _log_from_thread(10, "x", 1 << 30)
for _ in range(20):
    _log(10, "y")
print("end", flush=True)
"""
    for _ in range(2):
        done = run(code)
        assert done.stdout == "end\n"
        assert done.returncode == 0, done.stderr[-2000:]


def test_messages_of_exit_handlers_arrive_or_fall_to_torch() -> None:
    code = """
import atexit
from muster._C import _log
atexit.register(lambda: _log(40, "late"))
_log(40, "early")
"""
    done = run(code)
    assert done.returncode == 0
    assert "early" in done.stderr
    assert "late" in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_logs() -> None:
    code = """
import os
from muster._C import _log
pid = os.fork()
if pid == 0:
    _log(40, "child")
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "child" in done.stderr


def _mirrored_in_a_launch() -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("muster").addHandler(handler)
    with muster.MirroredStrategy(["cpu"]):
        return said


def test_mirrored_in_several_processes_of_a_launcher_is_said_once() -> None:
    chiefs, others = run_ranks(2, _mirrored_in_a_launch)
    assert others == []
    assert len(chiefs) == 1
    assert "trains in one process, and the launcher (torchrun) has started 2, which learn apart" in chiefs[0]
    assert run_ranks(1, _mirrored_in_a_launch) == [[]]


@pytest.mark.parametrize(("devices", "is_told"), [("cuda:0 cuda:1 cuda:1", False), ("cuda:0 cuda:1 cuda:2", True)])
def test_many_gpus_under_one_lock_are_told(
    devices: str, is_told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="muster")
    warn_of_one_lock([torch.device(name) for name in devices.split()])
    assert ("muster run --workers 3" in caplog.text) == is_told
    caplog.clear()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    warn_of_one_lock([torch.device(name) for name in devices.split()])
    assert not caplog.text
