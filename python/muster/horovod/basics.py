"""Beginning and ending a job, and what a process may ask about its place in it."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from muster.errors import InvalidArgument, NotBuilt
from muster.horovod import runtime
from muster.horovod.process_sets import ProcessSet, global_process_set
from muster.horovod.runtime import running

__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size", "start_timeline",
    "stop_timeline",
]  # fmt: skip


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Begins the job: this process finds the others as its launcher describes them. Collective; without effect where it
    was called before.

    The launcher is torchrun, `muster run`, horovodrun (or another one that sets HOROVOD_RANK), srun or mpirun; without
    one the process is alone. `comm`: ranks that alone make up the job, 0 among them (None: all). `process_sets`: sets
    to initialize besides the global one, the same on all ranks; "dynamic": such may be added later.

    Raises ValueError for ranks, sets or an environment that cannot be honoured, and Timeout where the other processes
    do not come within HOROVOD_GLOO_TIMEOUT_SECONDS (600).
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise NotBuilt("muster.horovod needs torch.distributed with Gloo; install a build of torch that has both")
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InvalidArgument(f"init(process_sets={process_sets!r}): a list of ProcessSet, 'dynamic' or None")
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    if runtime.is_running():
        return
    if len({tuple(s.ranks) for s in sets}) < len(sets):
        raise InvalidArgument(f"init(process_sets=...) names a set twice: {', '.join(map(str, sets))}")
    job = runtime.begin(comm, [s.ranks for s in sets])
    for number, process_set in enumerate(sets, 1):
        process_set.process_set_id = number
    global_process_set.ranks = list(range(job.size))
    atexit.unregister(shutdown)
    atexit.register(shutdown)


def shutdown() -> None:
    """Ends the job for this process: what is under way fails, on other ranks too. init() may begin another one, on all
    ranks. Called when the program ends."""
    runtime.end()


def is_initialized() -> bool:
    """Whether the job has begun, and not ended."""
    return runtime.is_running()


def size() -> int:
    """Processes of the job. Raises ValueError before init()."""
    return running().size


def rank() -> int:
    """This process's number among them. Raises ValueError before init()."""
    return running().rank


def local_size() -> int:
    """Processes of the job on this host. Raises ValueError before init()."""
    return running().place.local_size


def local_rank() -> int:
    """This process's number among those of its host. Raises ValueError before init()."""
    return running().place.local_rank


def cross_size() -> int:
    """Hosts that have a process of this local rank. Raises ValueError before init()."""
    return running().place.cross_size


def cross_rank() -> int:
    """This host's number among those. Raises ValueError before init()."""
    return running().place.cross_rank


def is_homogeneous() -> bool:
    """Whether every host has as many processes. Raises ValueError before init()."""
    return running().place.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """No timeline is written to `file_path`, with `mark_cycles` or without: a warning says what to use instead."""
    running()
    warnings.warn(
        f"no timeline is written to {file_path}; use torch.profiler.profile(), whose export_chrome_trace() writes what "
        "chrome://tracing shows",
        stacklevel=2,
    )


def stop_timeline() -> None:
    """Without effect, as start_timeline() is. Raises ValueError before init()."""
    running()


def mpi_built() -> bool:
    """False: MPI carries nothing here, though mpirun may start the processes."""
    return False


def mpi_enabled() -> bool:
    """False, as mpi_built()."""
    return False


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does where MPI is not in use."""
    raise InvalidArgument("MPI is not in use: tensors go through torch.distributed and common memory")


def gloo_built() -> bool:
    """Whether torch has Gloo, without which there is no job."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """As gloo_built()."""
    return gloo_built()


def nccl_built() -> int:
    """0: tensors of CUDA devices go through the host's memory, and NCCL carries nothing."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA, so that tensors of its devices are taken."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None
