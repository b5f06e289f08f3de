"""Options of strategies, and what is taken for a list of devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, cast

import torch

from muster.errors import InvalidArgument
from muster.kinds import BOOL, Requirement, check_kinds, is_int, is_real, or_none
from muster.precision import LossScale
from muster.texts import listed, lists_fields, sentences_of

__all__ = [
    "CommonOptions",
    "Options",
    "StrategyOptions",
    "device_names",
    "loss_scale_rule",
    "options_of",
    "with_options",
]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@lists_fields
@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Options that all strategies share; every rank passes the same."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What step functions compute in, by torch's autocast rules; "fp32" leaves the caller's autocast as it is, but for
    its cache of casts, which is off in a step."""
    loss_scale: LossScale | None = None
    """Scaling of the loss; None: LossScale() with fp16, else off."""
    accumulate: int = 1
    """Micro-batches (calls of step) per optimizer update."""
    drop_incomplete: bool = False
    """Drop a window that a loader's end left short, instead of averaging what it holds."""
    clip_norm: float | None = None
    """Upper bound of the gradient norm over all parameters of a set, applied after reduction; None: no bound."""
    clip_norm_type: float = 2.0
    """p of that norm and of `StepResult.grad_norm`, above 0; `float("inf")`: the maximum. As `norm_type` of
    `torch.nn.utils.clip_grad_norm_`; other types than 2 are taken of real gradients alone."""
    clip_value: float | None = None
    """Upper bound of the magnitude of each element of the mean gradient, as `torch.nn.utils.clip_grad_value_`; of
    complex gradients it bounds both parts; None: no bound. Not together with `clip_norm`."""
    seed: int | None = None
    """Seed of the replicas' random streams and of shuffling; None: the chief's torch.initial_seed()."""
    buffers: Literal["mean", "chief"] = "mean"
    """At a window's end: floating buffers averaged by weight and integer ones by maximum, or replica 0's for all."""
    threads_per_replica: int | None = None
    """Intra-op threads of each replica; None: the cores that workers of the chief's host may use together (no more than
    a CPU limit of their container), over the replicas there, at least 1."""
    fuse: bool = True
    """Step AdamW, Adam, SGD and Adagrad straight from the reduced sums; False: every optimizer from `.grad`."""
    keep_gradients: bool = False
    """With a flat optimizer, leave the mean gradient (before clipping) in `.grad` after a step."""
    shard_optimizer: bool = False
    """Divide the state of flat optimizers over the workers (ZeRO stage 1); parameters are gathered after each step."""
    bucket_bytes: int | None = None
    """Upper bound of a bucket in bytes, counted in fp32; None: chosen from what `prepare` measures; see `explain`."""
    wire: Literal["bf16"] | None = None
    """What gradients travel in from replica to replica. None: as they are accumulated. "bf16" halves the bytes of
    fp32 ones: each replica's gradient is rounded once, a relative error of up to 2^-9. On one host sums are fp32, and
    rounded once more only where all replicas need them (fuse=False, keep_gradients, shard_optimizer); NCCL and process
    groups round after every addition. Weights, losses, metrics, buffers, sparse rows and backward by hand stay
    exact."""
    max_skipped: int = 20
    """Windows in a row that may be skipped for non-finite gradients before NonFinite is raised."""
    timeout: float = 600.0
    """Seconds that a live peer may be late."""


class CommonOptions(TypedDict, total=False):
    """Options that every strategy takes; `StrategyOptions` says what each is."""

    precision: Literal["fp32", "bf16", "fp16"]
    loss_scale: LossScale | None
    accumulate: int
    drop_incomplete: bool
    clip_norm: float | None
    clip_norm_type: float
    clip_value: float | None
    seed: int | None
    buffers: Literal["mean", "chief"]
    threads_per_replica: int | None
    bucket_bytes: int | None
    max_skipped: int
    timeout: float


class Options(CommonOptions, total=False):
    """All of `StrategyOptions`: for strategies whose workers step, not servers."""

    fuse: bool
    keep_gradients: bool
    shard_optimizer: bool
    wire: Literal["bf16"] | None


def with_options(options: type[Any]) -> Callable[[FunctionT], FunctionT]:
    """For a function with ``**options: Unpack[options]``: its signature and docstring list them."""
    taken = [field for field in fields(StrategyOptions) if field.name in options.__annotations__]
    sentences = sentences_of(StrategyOptions)

    def decorate(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in taken
        ]
        cast(Any, function).__signature__ = signature.replace(parameters=[*parameters, *keywords])
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = f"{text}\n\nOptions:\n\n{listed({f.name: sentences.get(f.name, '') for f in taken})}"
        return function

    return decorate


def loss_scale_rule(options: StrategyOptions) -> LossScale | None:
    """By what rule steps change the loss scale; None: losses are not scaled."""
    return LossScale() if options.loss_scale is None and options.precision == "fp16" else options.loss_scale


def options_of(given: Mapping[str, Any]) -> StrategyOptions:
    """The options of these names. Raises InvalidArgument for a name that there is not, and for a value of another
    kind; the core looks at their sizes."""
    for name in given:
        if name not in StrategyOptions.__dataclass_fields__:
            raise InvalidArgument(
                f"unknown option {name!r}; there are {', '.join(StrategyOptions.__dataclass_fields__)}"
            )
    check_kinds(given, _REQUIREMENTS)
    return StrategyOptions(**cast(Any, given))


def device_names(devices: Sequence[str | torch.device] | None) -> list[str]:
    """Names for the core. Raises InvalidArgument for what is no list of devices."""
    if isinstance(devices, (str, torch.device)) or not (devices is None or isinstance(devices, Sequence)):
        example = f'["{devices}"]' if isinstance(devices, (str, torch.device)) else '["cpu:0", "cpu:1"]'
        raise InvalidArgument(f"devices={devices!r}: it must be a list with a device for each replica, as {example}")
    return [str(device) for device in devices or ()]


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


_REQUIREMENTS: dict[str, Requirement] = {
    "precision": (_one_of("fp32", "bf16", "fp16"), "'fp32', 'bf16' or 'fp16'"),
    "loss_scale": (or_none(lambda value: isinstance(value, LossScale)), "a muster.LossScale, or None"),
    "accumulate": (is_int, "an int of at least 1"),
    "drop_incomplete": BOOL,
    "clip_norm": (or_none(is_real), "a positive number, or None for no clipping"),
    "clip_norm_type": (is_real, 'a positive number, or float("inf") for the maximum norm'),
    "clip_value": (or_none(is_real), "a positive number, or None for no clipping"),
    "seed": (or_none(lambda value: is_int(value) and 0 <= value < 2**64), "an int from 0 to 2**64 - 1, or None"),
    "buffers": (_one_of("mean", "chief"), "'mean' or 'chief'"),
    "threads_per_replica": (or_none(is_int), "an int of at least 1, or None to share the cores"),
    "fuse": BOOL,
    "keep_gradients": BOOL,
    "shard_optimizer": BOOL,
    "bucket_bytes": (or_none(is_int), "an int of at least 1024, or None"),
    "wire": (or_none(_one_of("bf16")), "'bf16', or None for what gradients are accumulated in"),
    "max_skipped": (is_int, "an int of at least 1"),
    "timeout": (is_real, "a number of seconds from 0.001 to 1e9"),
}
