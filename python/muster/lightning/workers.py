"""What Lightning asks of workers that a strategy with parameter servers brings together."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as lightnings_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric

from muster import _C
from muster.addresses import host_and_port, host_of
from muster.errors import InvalidArgument
from muster.parameter_server import ParameterServerStrategy

__all__ = ["Job", "Workers", "check_has_one_replica", "cluster_of_environment"]

T = TypeVar("T")

_NAMES_OF_OPS = {"avg": "mean", "mean": "mean", "sum": "sum", "min": "min", "max": "max"}


def cluster_of_environment() -> _C.Cluster:
    """The job as variables describe it. Raises InvalidArgument, which names what Lightning leaves of them: it sets two
    for the rank of its own launcher, and keeps them when that has ended."""
    try:
        return _C.Cluster.from_env()
    except InvalidArgument as error:
        if "no rank is known" not in str(error):
            raise
        raise InvalidArgument(
            f"{error}; if a Trainer or Fabric of this process set both, as with strategy='muster_ddp' or 'ddp', train "
            "with servers in a process of its own, or take both out of os.environ before"
        ) from error


def check_has_one_replica(options: dict[str, Any], name: str) -> None:
    """Refuses `devices` in a worker's options, which the user gave as `name`."""
    if len(options.get("devices") or ()) > 1:
        raise InvalidArgument(
            f"{name} has 'devices', and Lightning's loops train one replica a worker; leave it out, and start more "
            "workers"
        )


class Job(ClusterEnvironment):
    """The job's workers, as Lightning asks for them."""

    def __init__(self, cluster: _C.Cluster) -> None:
        self._cluster = cluster

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return host_of(self._cluster.address)

    @property
    def main_port(self) -> int:
        return host_and_port(self._cluster.address)[1]

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._cluster.num_workers

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._cluster.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._cluster.local_rank

    def node_rank(self) -> int:
        return 0


class _OfJob:
    """A metric's function that meets others. Copies of the metric meet them too; a pickled one has what was in its
    place before."""

    def __init__(self, function: Callable[..., Any], before: Any) -> None:
        self._function = function
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfJob:
        return self

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._before,)


def _itself(value: T) -> T:
    return value


class Workers:
    """Collectives between workers, under the names that strategies of the Trainer and of Fabric both have."""

    _cluster: _C.Cluster
    _muster: ParameterServerStrategy | None = None
    _metrics: tuple[tuple[Metric, Any, Any], ...] = ()

    @property
    def _job(self) -> ParameterServerStrategy:
        if self._muster is None:
            raise InvalidArgument(
                "workers meet only while the Trainer, or Fabric's launch(), has joined the job; call this in a hook of "
                "fit, validate, test or predict"
            )
        return self._muster

    def tell_lightning_the_rank(self) -> None:
        """Tells Lightning who is rank 0."""
        for decorator in (rank_zero_only, lightnings_rank_zero_only):
            cast(Any, decorator).rank = self._cluster.rank

    def check_devices(self, owner: str, devices: Sequence[torch.device] | None, num_nodes: int) -> None:
        """Raises InvalidArgument where `owner` (the Trainer, or Fabric) was given other `devices` or nodes than the
        job has workers."""
        if len(devices or ()) not in (0, 1, self._cluster.num_workers) or num_nodes != 1:
            raise InvalidArgument(
                f"{owner} has {len(devices or ())} devices on {num_nodes} nodes, and the job "
                f"{self._cluster.num_workers} workers; leave devices and num_nodes out, and start workers with muster "
                "run --workers"
            )

    def connect_metrics(self, module: nn.Module) -> None:
        """Lets metrics in `module` meet through the strategy: they know torch's process groups alone, of which there is
        none. Those of modules before stay connected."""
        known = {id(metric) for metric, _, _ in self._metrics}
        metrics = [part for part in module.modules() if isinstance(part, Metric) and id(part) not in known]
        self._metrics += tuple((m, m.dist_sync_fn, m.distributed_available_fn) for m in metrics)
        for metric in metrics:
            metric.dist_sync_fn = _OfJob(self._gather_all, metric.dist_sync_fn)
            metric.distributed_available_fn = _OfJob(self._has_others, metric.distributed_available_fn)

    def disconnect_metrics(self) -> None:
        """Metrics are as they were."""
        for metric, sync, is_available in self._metrics:
            metric.dist_sync_fn, metric.distributed_available_fn = sync, is_available
        self._metrics = ()

    def _has_others(self) -> bool:
        return self._cluster.num_workers > 1

    def _gather_all(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        _refuse_groups(group)
        rows = tensor if tensor.dim() else tensor.reshape(1)
        sizes = self._job.gather(torch.tensor([len(rows)])).tolist()
        parts = self._job.gather(rows).split(sizes)
        return [part if tensor.dim() else part[0] for part in parts]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The reduction of a tensor over workers by `reduce_op`; `group` must be that of all."""
        _refuse_groups(group)
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        if name not in _NAMES_OF_OPS:
            raise InvalidArgument(f"reduce_op={reduce_op!r}: muster_ps has {', '.join(_NAMES_OF_OPS)}")
        if _NAMES_OF_OPS[name] == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return self._job.reduce(tensor, _NAMES_OF_OPS[name])  # type: ignore[arg-type]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether `decision` is true on `all` workers, or on any."""
        return bool(self._job.reduce(bool(decision), "min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        """Waits for all workers; `name` is for people."""
        if self._muster is not None:
            self._muster.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of worker `src`, which is pickled."""
        if self._muster is None or self._cluster.num_workers == 1:
            return obj
        text = base64.b64encode(pickle.dumps(obj)).decode() if self._cluster.rank == src else ""
        sent: T = pickle.loads(base64.b64decode(self._muster.broadcast(text, src)))
        return sent

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """All workers' tensors of one shape, stacked; inside a step differentiable, with `sync_grads`. `group` must be
        that of all."""
        _refuse_groups(group)
        gathered: Tensor = self._job.gather((tensor if sync_grads else tensor.detach()).unsqueeze(0))
        return gathered


def _refuse_groups(group: Any) -> None:
    if group is not None and group is not getattr(torch.distributed.group, "WORLD", None):
        raise InvalidArgument("muster_ps has one group, of all workers; leave group out")
