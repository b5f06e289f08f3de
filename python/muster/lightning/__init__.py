"""Strategies for Lightning's Trainer and Fabric. Importing this registers them by their names."""

from __future__ import annotations

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
except ImportError as error:
    raise ImportError(
        "muster.lightning needs Lightning, which Muster does without: pip install 'lightning>=2.6'"
    ) from error

from muster.lightning.ddp import DDPStrategy, FabricDDPStrategy
from muster.lightning.fabric import FabricMirroredStrategy, FabricParameterServerStrategy
from muster.lightning.mirrored import MirroredStrategy
from muster.lightning.parameter_server import ParameterServerStrategy

__all__ = [
    "DDPStrategy",
    "FabricDDPStrategy",
    "FabricMirroredStrategy",
    "FabricParameterServerStrategy",
    "MirroredStrategy",
    "ParameterServerStrategy",
]

for _name, _of_trainer, _of_fabric, _description in (
    ("muster_ddp", DDPStrategy, FabricDDPStrategy, "A process a rank; Muster averages gradients"),
    ("muster_mirrored", MirroredStrategy, FabricMirroredStrategy, "Several replicas in one process"),
    ("muster_ps", ParameterServerStrategy, FabricParameterServerStrategy, "Workers, and servers that step"),
):
    StrategyRegistry.register(_name, _of_trainer, _description, override=True)
    STRATEGY_REGISTRY.register(_name, _of_fabric, _description, override=True)
