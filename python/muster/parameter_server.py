"""ParameterServerStrategy: workers, and servers that hold the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from muster import _C
from muster.errors import InvalidArgument
from muster.kinds import BOOL, Requirement, check_kinds, is_count, is_real, or_none
from muster.options import CommonOptions, device_names, options_of, with_options
from muster.strategy import Strategy

__all__ = ["ParameterServerStrategy"]

_COUNT: Requirement = (or_none(is_count), "an int >= 0, or None")
_SECONDS: Requirement = (is_real, "a number of seconds from 0.01 to 86400")
_REQUIREMENTS: dict[str, Requirement] = {
    "staleness": _COUNT,
    "log_bytes": _COUNT,
    "patience": _SECONDS,
    "heartbeat": _SECONDS,
    "takeover": BOOL,
}


class ParameterServerStrategy(Strategy):
    """A process per worker, each with a CPU replica for each of its devices (none given: one); parameters and optimizer
    state live on parameter servers. Gradients of a worker's replicas are added in its process, and pushed once: for
    servers, and in everything said of workers here, they are one.

    The servers are those of the cluster (``MUSTER_SERVERS``, ``muster serve``, ``muster run``), on this host so far;
    without any the chief hosts one in its process until all workers have left. The optimizer is one of AdamW, Adam, SGD
    and Adagrad. The first step connects: where the servers hold values already, of a job that was started again, all
    workers go on from them.

    `staleness` 0 is synchronous: each step is made of all workers' parts, with the bits of MultiWorkerMirroredStrategy
    (with several replicas a worker, where all workers have the same power of two; else sums are added in another
    order), and collectives inside a step work as there. A worker that dies no longer counts after 5 s without a sign of
    life, and the others go on. With another `staleness` each step is one worker's, which may be so many steps ahead of
    the slowest live one (None: any number): loss, metrics, buffers and norm are its own, and collectives inside a step
    see it alone. A server that stays away for `patience` seconds is PeerLost; started again with its snapshots before
    that, it is as if nothing had happened. While it reads its snapshot it is not away; one that says nothing though its
    process listens (it was stopped, say) has 30 s, or `patience` if that is more.

    `log_bytes` bounds what a worker keeps of what it pushed, for a server that starts again (None: 256 MiB, with
    tables on servers 1 GiB, or eight steps, whichever is more, and at most an eighth of the memory); where it is full,
    the worker waits for a snapshot. After `heartbeat` seconds without a sign of life a worker, or a server, counts as
    dead. A job that another launcher started is refused while somebody trains on the servers, unless `takeover` ends
    theirs.

    Parameters must not be written between steps, and sparse gradients are refused but for a `ShardedEmbedding`'s.
    Options are those of `StrategyOptions` but fuse, keep_gradients, shard_optimizer and wire.
    """

    @with_options(CommonOptions)
    def __init__(
        self,
        cluster: _C.Cluster,
        devices: Sequence[str | torch.device] | None = None,
        *,
        staleness: int | None = 0,
        log_bytes: int | None = None,
        patience: float = 5.0,
        heartbeat: float = 5.0,
        takeover: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        """A worker of the job that `cluster` describes, with a replica for each of `devices` (``["cpu"] * 4``, say), at
        most `staleness` steps ahead of the others. A worker that comes back has as many replicas as before."""
        chosen = options_of(options)
        given: dict[str, Any] = {
            "staleness": staleness, "log_bytes": log_bytes, "patience": patience, "heartbeat": heartbeat,
            "takeover": takeover,
        }  # fmt: skip
        check_kinds(given, _REQUIREMENTS)
        servers = _C.ServerOptions(**given)
        super().__init__(_C.make_parameter_server(cluster, device_names(devices), servers, asdict(chosen)), chosen)
        self._staleness = staleness

    @property
    def passes(self) -> _C.Loaders | None:
        """Servers deal whole batches, or, where the job is synchronous, live workers divide them."""
        return self._passes.of_core

    def broadcast_state(self, state: Tensor) -> Tensor:
        """Collective: the chief's `state`. Raises InvalidArgument where this worker joins a running job."""
        if self._core.joins:
            raise InvalidArgument(
                "a worker that joins a running job cannot know how far the generator is that the loader was given; "
                "leave generator= out, so that the order follows from the job's seed"
            )
        return super().broadcast_state(state)

    def any_has_more(self, has_more: bool) -> bool:
        """Whether `has_more` is true on a worker that steps with this one: with a staleness on this one alone."""
        return has_more if self._staleness != 0 else super().any_has_more(has_more)

    @classmethod
    @with_options(CommonOptions)
    def from_env(
        cls,
        devices: Sequence[str | torch.device] | None = None,
        *,
        staleness: int | None = 0,
        log_bytes: int | None = None,
        patience: float = 5.0,
        heartbeat: float = 5.0,
        takeover: bool = False,
        **options: Unpack[CommonOptions],
    ) -> Self:
        """The job that torchrun's, Slurm's or Open MPI's variables and MUSTER_SERVERS describe; a world of one without
        a launcher. `devices`, `staleness`, `log_bytes`, `patience`, `heartbeat` and `takeover` as of the class."""
        return cls(
            _C.Cluster.from_env(),
            devices,
            staleness=staleness,
            log_bytes=log_bytes,
            patience=patience,
            heartbeat=heartbeat,
            takeover=takeover,
            **options,
        )

    @property
    def staleness(self) -> int | None:
        """Steps that a worker may be ahead of the slowest live one; None: any number."""
        return self._staleness
