"""Distribution strategies for PyTorch: write a training step once, choose in one line how it is spread."""

from __future__ import annotations

from muster import _version_check as _version_check  # isort: split

from muster import _C as _C
from muster import _random, checkpoint, optim
from muster._build_info import version as __version__
from muster._C import Cluster, FixedShards, MaxSize, MinSize
from muster.distributed_data_parallel import DistributedDataParallel
from muster.errors import (
    AuthError,
    CheckpointError,
    CommError,
    Error,
    InvalidArgument,
    LayoutMismatch,
    NonFinite,
    NotBuilt,
    PeerLost,
    RemoteError,
    Timeout,
)
from muster.loader import Loader
from muster.parameter_server import ParameterServerStrategy
from muster.per_replica import PerReplica
from muster.precision import LossScale, LossScaler
from muster.replicated import Replicated
from muster.saving_policy import Checkpoints
from muster.sharded_embedding import ShardedEmbedding
from muster.step import Loss, StepResult
from muster.strategy import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    Strategy,
    StrategyOptions,
)

__all__ = [
    "AuthError",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "CommError",
    "DistributedDataParallel",
    "Error",
    "FixedShards",
    "InvalidArgument",
    "LayoutMismatch",
    "Loader",
    "Loss",
    "LossScale",
    "LossScaler",
    "MaxSize",
    "MinSize",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NonFinite",
    "NotBuilt",
    "ParameterServerStrategy",
    "PeerLost",
    "PerReplica",
    "RemoteError",
    "Replicated",
    "ShardedEmbedding",
    "StepResult",
    "Strategy",
    "StrategyOptions",
    "Timeout",
    "__version__",
    "checkpoint",
    "optim",
]

_random.install()
