"""Process sets: the ranks that a collective operation is among."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from muster.errors import InvalidArgument
from muster.horovod.runtime import running
from muster.horovod.world import check_ranks

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Ranks that run collective operations together. It can be used once it was given to init() or
    add_process_set(), which number it: `process_set_id`."""

    mpi_comm: None = None
    """Sets made of MPI communicators do not exist here."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Of the ranks `ranks_or_comm`, in any order; an MPI communicator is refused. Raises ValueError."""
        if not isinstance(ranks_or_comm, Iterable):
            raise InvalidArgument(
                f"ProcessSet({type(ranks_or_comm).__name__}): MPI communicators are not used; give a list of ranks"
            )
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise InvalidArgument(f"ProcessSet({ranks}): ranks are integers")
        self.ranks: list[int] = sorted(ranks)
        """In ascending order."""
        self.process_set_id: int | None = None
        """None until it is initialized, and when it was removed."""

    def size(self) -> int | None:
        """How many ranks it has; None while it is not initialized."""
        return None if self.process_set_id is None else len(running().sets[self.process_set_id])

    def rank(self) -> int | None:
        """This process's rank in it; None while it is not initialized. Raises ValueError where it has no part in it."""
        return None if self.process_set_id is None else running().engine(self.process_set_id).rank

    def included(self) -> bool:
        """Whether this process is one of them."""
        return running().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds `process_set` (or the set of these ranks) to the running job, and returns it, initialized.

    Collective over all ranks of the job, which name the same ranks. Raises ValueError where there is a set of the same
    ranks already, and unless init(process_sets="dynamic") or HOROVOD_DYNAMIC_PROCESS_SETS=1 has said that sets may
    change.
    """
    job = running()
    _check_may_change()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    check_ranks(added.ranks, job.size)
    number = job.change_sets("add_process_set", added.ranks)
    if number is None:
        raise InvalidArgument(f"there is a process set of these ranks already: {added}; use that one")
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes `process_set` from the running job; False where it is the global one, or not initialized.

    Collective over all ranks of the job. What is under way in it fails. Raises ValueError as add_process_set().
    """
    job = running()
    if not process_set.process_set_id:
        return False
    _check_may_change()
    process_set.process_set_id = None
    return job.change_sets("remove_process_set", process_set.ranks) is not None


def _check_may_change() -> None:
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
        raise InvalidArgument(
            "process sets of a running job change only where that was announced: init(process_sets='dynamic'), or "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1"
        )
