"""Training that begins again from the last commit when an operation fails. What of Horovod's elastic mode there is, and
what not, is in docs/migration/horovod.md."""

from __future__ import annotations

from muster.horovod.elastic.restart import run
from muster.horovod.elastic.sampler import ElasticSampler
from muster.horovod.elastic.state import ObjectState, State
from muster.horovod.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
