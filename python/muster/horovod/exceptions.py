"""What goes wrong in a job of muster.horovod."""

from __future__ import annotations

from muster.errors import CommError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "InvalidOperation"]


class HorovodInternalError(CommError):
    """A collective operation failed: a peer is gone, ranks disagree about a tensor, or the job was shut down.

    A RuntimeError, as Horovod's. `muster.horovod.elastic.run` restores what was committed and begins again, unless it
    is an InvalidOperation.
    """


class InvalidOperation(HorovodInternalError, ValueError):
    """An operation that fails as often as the program asks for it: ranks disagree about a tensor, or its name is under
    way already. `muster.horovod.elastic.run` raises it."""


class HostsUpdatedInterrupt(RuntimeError):
    """The job's hosts have changed: `muster.horovod.elastic.run` begins again from the state as it is.

    Nothing of Muster raises it, for want of Horovod's elastic driver; a program may, on all ranks at once.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        """With `skip_sync` the state is not broadcast before the function is called again."""
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
