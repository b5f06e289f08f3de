"""The precision of steps: autocast, options of loss scaling, and the scale of a strategy's steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from muster import _C
from muster.errors import InvalidArgument
from muster.kinds import Requirement, check_kinds, is_int, is_real
from muster.texts import lists_fields

__all__ = ["LossScale", "LossScaler", "autocast"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Literal["fp32", "bf16", "fp16"], device: torch.device) -> AbstractContextManager[Any]:
    """A context for step functions on `device`: torch's autocast; with "fp32" nothing."""
    return contextlib.nullcontext() if precision == "fp32" else torch.autocast(device.type, _DTYPES[precision])


@lists_fields
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Scaling of the loss against underflow of fp16 gradients, as torch.amp.GradScaler."""

    init: float = 65536.0
    """Scale of the first step."""
    growth: float = 2.0
    """Factor after `interval` finite steps in a row."""
    backoff: float = 0.5
    """Factor after a step with a gradient that is not finite."""
    interval: int = 2000
    """Finite steps in a row after which the scale grows."""

    def __post_init__(self) -> None:
        check_kinds(vars(self), _REQUIREMENTS)


_REQUIREMENTS: dict[str, Requirement] = {
    "init": (is_real, "a positive number"),
    "growth": (is_real, "a number above 1"),
    "backoff": (is_real, "a number between 0 and 1"),
    "interval": (is_int, "an int of at least 1"),
}


class LossScaler:
    """The loss scale of a set of optimizers. Its state has the format of torch.amp.GradScaler's."""

    def __init__(self, core: _C.StrategyCore, set_number: int, rule: LossScale | None) -> None:
        """As `Strategy.loss_scaler` makes it: of the set `set_number` of the strategy of `core`, which changes the
        scale by `rule` (None: losses are not scaled)."""
        self._core = core
        self._set = set_number
        self._rule = rule

    def get_scale(self) -> float:
        """What losses are multiplied by; 1.0 where they are not scaled."""
        return self._core.loss_scale(self._set)[0]

    def state_dict(self) -> dict[str, Any]:
        """Equal on all ranks; empty where losses are not scaled, as that of a GradScaler that is not enabled."""
        if self._rule is None:
            return {}
        scale, tracker = self._core.loss_scale(self._set)
        return {
            "scale": scale,
            "growth_factor": self._rule.growth,
            "backoff_factor": self._rule.backoff,
            "growth_interval": self._rule.interval,
            "_growth_tracker": tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The scale and its tracker from `state`, of a GradScaler too; factors and interval stay those of the options.
        Load the same on all ranks. No-op where losses are not scaled; raises InvalidArgument where they are, and
        `state` is of a job in which they were not."""
        if self._rule is None:
            return
        if not state:
            raise InvalidArgument(
                "the state of the loss scale is empty: it is of steps that scaled no losses; load one of steps that "
                "did, or none"
            )
        self._core.set_loss_scale(self._set, float(state["scale"]), int(state["_growth_tracker"]))
