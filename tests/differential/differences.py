"""What is different from torch on purpose: the one list behind the tester's exceptions and the table in the docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from differential.program import Program

Scope = Literal["torch", "strategies", "servers"]
FLAT = ("SGD", "Adam", "AdamW", "Adagrad")


@dataclass(frozen=True)
class Difference:
    """A row of the table, and the programs that are excepted.

    With the scope `torch` they are not compared with plain torch where `concerns` holds for a job's number of replicas
    (strategies of as many replicas still agree to the last bit); with `strategies` these are not compared either; with
    `servers` they do not run on parameter servers.
    """

    what: str
    sentence: str
    scope: Scope
    concerns: Callable[[Program, int], bool]


def _does(program: Program, *events: str) -> bool:
    return any(program.events_of(event) for event in events)


def _writes_buffers(program: Program) -> bool:
    return (
        any(program.has_block(name) for name in ("BatchNorm", "SyncBatchNorm", "Buffers", "ComplexBuffer"))
        or program.has_block("Norm", kind="tracked")
        or program.has_block("Parametrized", kind="spectral_norm")
    )


def _is_sparse(program: Program) -> bool:
    return any(block.module.get("sparse") for block in program.blocks)


def raises(program: Program) -> bool:
    """Whether an exception comes out of a step."""
    return any(bool(program.events_of("step", fail=way)) for way in ("forward", "backward"))


DIFFERENCES = [
    Difference(
        "BatchNorm",
        "several replicas normalise each by its own part; `nn.SyncBatchNorm` by the whole batch",
        "torch",
        lambda p, replicas: replicas > 1 and p.has_block("BatchNorm"),
    ),
    Difference(
        'buffers that a forward pass writes, with `buffers="chief"`',
        "are those of replica 0's part",
        "torch",
        lambda p, replicas: replicas > 1 and p.option("buffers") == "chief" and _writes_buffers(p),
    ),
    Difference(
        "buffers that a forward pass writes, in windows of several micro-batches",
        "each replica's follow its own parts, and are averaged by the window's weight at its end",
        "torch",
        lambda p, replicas: replicas > 1 and p.accumulate > 1 and _writes_buffers(p),
    ),
    Difference(
        "buffers that a forward pass writes, with a `weight` of the loss other than the samples",
        "are averaged by that weight",
        "torch",
        lambda p, replicas: replicas > 1 and p.loss == "weighted" and _writes_buffers(p),
    ),
    Difference(
        "writing to a buffer while the replicas' differ (in an open window, after an exception)",
        "replica 0's value goes to the replicas of its process; each worker writes to its own",
        "strategies",
        lambda p, replicas: (
            replicas > 1
            and bool(p.events_of("write_buffer"))
            and _writes_buffers(p)
            and (raises(p) or p.accumulate > 1)
        ),
    ),
    Difference(
        "buffers that a forward pass wrote before an exception",
        "stay as each replica wrote them until the next window's end; a replica whose part was empty wrote none",
        "torch",
        lambda p, replicas: replicas > 1 and _writes_buffers(p) and raises(p),
    ),
    Difference(
        "`nn.SyncBatchNorm` over a single row in all",
        "is normalised to its bias where there are several replicas; torch refuses it",
        "torch",
        lambda p, replicas: replicas > 1 and p.has_block("SyncBatchNorm") and bool(p.events_of("step", rows=1)),
    ),
    Difference(
        "dropout and other random operations in a step",
        "draw from the replica's own stream, and not from torch's global generator",
        "torch",
        lambda p, replicas: p.has_block("Dropped", p=0.3),
    ),
    Difference(
        "`nn.Embedding(scale_grad_by_freq=True)`",
        "counts how often an id occurs in the replica's part",
        "torch",
        lambda p, replicas: replicas > 1 and p.has_block("FrequencyScaled"),
    ),
    Difference(
        "hooks on gradients that are not linear (clamping, thresholds)",
        "see the gradient of the part's own loss, as in DistributedDataParallel, before it enters the window's mean",
        "torch",
        lambda p, replicas: (
            (replicas > 1 or p.accumulate > 1)
            and (p.has_block("TensorHook", linear=False) or bool(p.events_of("hook_parameter", linear=False)))
        ),
    ),
    Difference(
        "`register_post_accumulate_grad_hook`, in windows of several micro-batches",
        "sees the gradient of the micro-batch alone",
        "torch",
        lambda p, replicas: p.accumulate > 1 and _does(p, "hook_accumulated"),
    ),
    Difference(
        "optimizers on parameter servers",
        "one of AdamW, Adam, SGD and Adagrad; others, and several, are refused",
        "servers",
        lambda p, replicas: len(p.optimizers) > 1 or p.optimizers[0].name not in FLAT,
    ),
    Difference(
        "writing parameters between steps, on parameter servers",
        "is refused after the first step, `load_state_dict` included",
        "servers",
        lambda p, replicas: (
            _does(p, "scale_parameter", "load_model", "use_averages", "hook_step_after")
            or bool(p.events_of("hook_step_before", does="decay"))
        ),
    ),
    Difference(
        "`keep_gradients`, sparse gradients and complex parameters, on parameter servers",
        "are refused",
        "servers",
        lambda p, replicas: bool(p.option("keep_gradients")) or _is_sparse(p) or p.has_block("ComplexLinear"),
    ),
    Difference(
        "a second strategy, on parameter servers",
        "goes on from what the servers hold",
        "servers",
        lambda p, replicas: _does(p, "restart"),
    ),
    Difference(
        "freezing, `add_param_group`, loading and editing optimizer state, on parameter servers",
        "are refused after the first step",
        "servers",
        lambda p, replicas: _does(p, "freeze", "unfreeze", "add_group", "load_optimizers", "reset_state"),
    ),
]


def table() -> str:
    """The rows of docs/concepts.md."""
    lines = ["| what | under a strategy |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {difference.what} | {difference.sentence} |" for difference in DIFFERENCES)])
