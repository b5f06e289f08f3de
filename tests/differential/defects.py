"""Defects that are known and not mended: programs that touch one are not derived. Empty is how it should be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from differential.program import Program


@dataclass(frozen=True)
class Defect:
    """What is wrong, and which programs show it."""

    name: str
    what: str
    concerns: Callable[[Program], bool]


_KNOWN = [
    Defect("state", "editing an optimizer's state is not seen", lambda p: bool(p.events_of("reset_state"))),
    Defect("state-load", "loading optimizer state that has less", lambda p: bool(p.events_of("load_optimizers"))),
    Defect("step-hooks", "step hooks race with the peers' stores",
           lambda p: bool(p.events_of("hook_step_before") or p.events_of("hook_step_after"))),
    Defect("negative", "gradients with the negative bit", lambda p: p.has_block("ComplexPhase", conjugate=True)),
    Defect("seed", "gradient hooks see another scale",
           lambda p: p.has_block("TensorHook", linear=False) or bool(p.events_of("hook_parameter", linear=False))),
    Defect("twice", "collectives are not differentiable twice",
           lambda p: (p.loss == "penalty" or p.has_block("Force")) and p.has_block("SyncBatchNorm")),
    Defect("complex", "complex parameters and buffers",
           lambda p: p.has_block("ComplexLinear") or p.has_block("ComplexBuffer")),
    Defect("empty", "servers have no state of parameters without elements", lambda p: p.has_block("Shapes")),
    Defect("untouched", "servers have no state of parameters that took no step",
           lambda p: any(o.name == "Adagrad" for o in p.optimizers)),
    Defect("sharded", "add_param_group with shard_optimizer",
           lambda p: any(o.name in ("Adam", "AdamW", "Adagrad", "SGD") for o in p.optimizers)
           and bool(p.events_of("add_group"))),
    Defect("restart", "a second strategy", lambda p: bool(p.events_of("restart"))),
]  # fmt: skip

_mended = os.environ.get("MUSTER_DIFFERENTIAL_MENDED", "").split(",")
OPEN: list[Defect] = [] if "all" in _mended else [defect for defect in _KNOWN if defect.name not in _mended]
