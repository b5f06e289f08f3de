"""torchrun's agent of one host, as a process of `muster run` that ends with its parent and with the workers' exit code.

python -m muster.agent PARENT TOLD WORKERS MAX_RESTARTS BIND script|module|program PROGRAM [ARGUMENT...]

BIND is none, or what muster/binding.py takes; PARENT is the process id of `muster run`, and TOLD the end of a pipe from
it, in which it says that workers may begin.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from types import FrameType

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from muster import binding
from muster.serve import LOOK

KINDS = {"script": [], "module": ["--module"], "program": ["--no-python"]}
PYTHON = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "program": []}
"""How torchrun starts them."""


def main(
    parent: str, told: str, workers: str, max_restarts: str, bind: str, kind: str, program: str, *arguments: str
) -> int:
    if bind != "none":
        command = [sys.executable, binding.__file__, bind, *PYTHON[kind], program, *arguments]
        kind, program, arguments = "program", command[0], tuple(command[1:])
    # Until torch's handlers take over, with the first worker.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    if int(workers) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, but that warns
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun's options, which may be for several hosts
    options = run.parse_args(  # type: ignore[no-untyped-call]
        [
            "--standalone",
            f"--nproc-per-node={workers}",
            f"--max-restarts={max_restarts}",
            *KINDS[kind],
            program,
        ]
    )
    options.training_script_args = list(arguments)
    with open(int(told), "rb", buffering=0) as pipe:
        if not pipe.read(1):
            return 1
    try:
        with tempfile.TemporaryDirectory(prefix="muster-run-") as options.log_dir:  # torch's own would stay
            run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        how = f"exit code {code}; what it printed says why"
        if code < 0:
            how = f"signal {-code}, {signal.strsignal(-code)}"
        print(f"muster run: worker {rank} ended with {how}", file=sys.stderr, flush=True)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
