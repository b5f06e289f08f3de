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
from muster.lightning.mirrored import MirroredStrategy
from muster.lightning.parameter_server import ParameterServerStrategy

__all__ = ["DDPStrategy", "FabricDDPStrategy", "MirroredStrategy", "ParameterServerStrategy"]

StrategyRegistry.register("muster_ddp", DDPStrategy, "A process a rank; Muster averages gradients", override=True)
StrategyRegistry.register("muster_mirrored", MirroredStrategy, "Several replicas in one process", override=True)
StrategyRegistry.register("muster_ps", ParameterServerStrategy, "Workers, and servers that step", override=True)
STRATEGY_REGISTRY.register(
    "muster_ddp", FabricDDPStrategy, StrategyRegistry["muster_ddp"]["description"], override=True
)
