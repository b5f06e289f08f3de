"""What is different from torch on purpose: the one list behind the tester's exceptions and the table in the docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from differential import modules, training
from differential.program import Program

Scope = Literal["torch", "strategies", "servers", "sharded", "nowhere"]
_FLAT = ("SGD", "Adam", "AdamW", "Adagrad")


@dataclass(frozen=True)
class Shape:
    """What of a job a difference may depend on."""

    replicas: int
    fuses: bool = True

    @staticmethod
    def of(job: str) -> Shape:
        """Of a job by its name."""
        _, *rest = job.split("-")
        return Shape(int(rest[0][0]), fuses="unfused" not in rest)


@dataclass(frozen=True)
class Difference:
    """A row of the table, and the programs that are excepted.

    With the scope `torch` they are not compared with plain torch where `concerns` holds for a job's shape (strategies
    of as many replicas still agree to the last bit); with `strategies` these are not compared either; with `servers`
    they do not run on parameter servers, with `sharded` not with shard_optimizer=True. With `nowhere` nothing is
    excepted: the training does what the sentence asks for.
    """

    what: str
    sentence: str
    scope: Scope
    concerns: Callable[[Program, Shape], bool]


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


@lru_cache(maxsize=16)
def _parameters(program: Program) -> tuple[list[nn.Parameter], list[set[int]]]:
    """Of the network as it is built, and by optimizer which of them it is given."""
    with torch.random.fork_rng():
        blocks = [modules.pool()[block.module.name](**dict(block.module.options)) for block in program.blocks]
        net = nn.ModuleList([nn.Linear(8, 8), *blocks])
    numbers = {parameter: number for number, parameter in enumerate(net.parameters())}
    given = []
    for optimizer in program.optimizers:
        made = training.make_optimizer(net, optimizer.name, **dict(optimizer.options))
        given.append({numbers[parameter] for group in made.param_groups for parameter in group["params"]})
    return list(numbers), given


def is_flat(program: Program, optimizer: int) -> bool:
    """Whether an optimizer has a flat version."""
    parameters, given = _parameters(program)
    return program.optimizers[optimizer].name in _FLAT and not any(parameters[n].is_complex() for n in given[optimizer])


def _adds_complex(program: Program) -> bool:
    parameters, given = _parameters(program)
    left_out = set(range(len(parameters))).difference(*given)
    return _does(program, "add_group") and any(parameters[number].is_complex() for number in left_out)


def _trains_nothing(program: Program) -> bool:
    """Whether a step comes when all parameters of its optimizers are frozen."""
    parameters, initial = _parameters(program)
    trained = [parameter.requires_grad for parameter in parameters]
    given = [set(numbers) for numbers in initial]
    for event in (*program.early, *program.events):
        number = int(event.get("parameter", 0)) % len(parameters)
        if event.name == "freeze" and sum(trained) > 1:
            trained[number] = False
        elif event.name == "unfreeze":
            trained[number] = True
        elif event.name == "add_group":
            given[0] |= set(range(len(parameters))).difference(*given)
        elif event.name == "step":
            only = event.get("only")
            if not any(trained[n] for numbers in (given if only is None else [given[only]]) for n in numbers):
                return True
    return False


def _steps_flat(program: Program, shape: Shape) -> bool:
    """Whether a step of the first optimizer goes without `.grad`: that of a set of flat ones alone does."""
    alone = any(event.get("only") is not None for event in program.events_of("step"))
    return shape.fuses and all(is_flat(program, n) for n in range(1 if alone else len(program.optimizers)))


def raises(program: Program) -> bool:
    """Whether an exception comes out of a step: a planned one, or torch's of a buffer that is written again before its
    value was differentiated."""
    is_planned = any(bool(program.events_of("step", fail=way)) for way in ("forward", "backward"))
    return is_planned or (program.loss == "twice" and program.has_block("ComplexBuffer"))


DIFFERENCES = [
    Difference(
        "BatchNorm",
        "several replicas normalise each by its own part; `nn.SyncBatchNorm` by the whole batch",
        "torch",
        lambda p, job: job.replicas > 1 and p.has_block("BatchNorm"),
    ),
    Difference(
        'buffers that a forward pass writes, with `buffers="chief"`',
        "are those of replica 0's part",
        "torch",
        lambda p, job: job.replicas > 1 and p.option("buffers") == "chief" and _writes_buffers(p),
    ),
    Difference(
        "buffers that a forward pass writes, in windows of several micro-batches",
        "each replica's follow its own parts, and are averaged by the window's weight at its end",
        "torch",
        lambda p, job: job.replicas > 1 and p.accumulate > 1 and _writes_buffers(p),
    ),
    Difference(
        "buffers that a forward pass writes, with a `weight` of the loss other than the samples",
        "are averaged by that weight",
        "torch",
        lambda p, job: job.replicas > 1 and p.loss == "weighted" and _writes_buffers(p),
    ),
    Difference(
        "writing to a buffer while the replicas' differ (in an open window, after an exception)",
        "replica 0's value goes to the replicas of its process; each worker writes to its own",
        "strategies",
        lambda p, job: (
            job.replicas > 1
            and bool(p.events_of("write_buffer"))
            and _writes_buffers(p)
            and (raises(p) or p.accumulate > 1)
        ),
    ),
    Difference(
        "buffers that a forward pass wrote before an exception",
        "stay as each replica wrote them until the next window's end; a replica whose part was empty wrote none",
        "torch",
        lambda p, job: job.replicas > 1 and _writes_buffers(p) and raises(p),
    ),
    Difference(
        "`nn.SyncBatchNorm` over a single row in all",
        "is normalised to its bias where there are several replicas; torch refuses it",
        "torch",
        lambda p, job: job.replicas > 1 and p.has_block("SyncBatchNorm") and bool(p.events_of("step", rows=1)),
    ),
    Difference(
        "dropout and other random operations in a step",
        "draw from the replica's own stream, and not from torch's global generator",
        "torch",
        lambda p, job: p.has_block("Dropped", p=0.3),
    ),
    Difference(
        "`nn.Embedding(scale_grad_by_freq=True)`",
        "counts how often an id occurs in the replica's part",
        "torch",
        lambda p, job: job.replicas > 1 and p.has_block("FrequencyScaled"),
    ),
    Difference(
        "hooks on gradients that are not linear (clamping, thresholds)",
        "see the gradient of the part's own loss, as in DistributedDataParallel, before it enters the window's mean",
        "torch",
        lambda p, job: (
            (job.replicas > 1 or p.accumulate > 1)
            and (p.has_block("TensorHook", linear=False) or bool(p.events_of("hook_parameter", linear=False)))
        ),
    ),
    Difference(
        "`register_post_accumulate_grad_hook`, in windows of several micro-batches",
        "sees the gradient of the micro-batch alone",
        "torch",
        lambda p, job: p.accumulate > 1 and _does(p, "hook_accumulated"),
    ),
    Difference(
        "a step pre-hook of AdamW, Adam, SGD or Adagrad that reads or edits gradients",
        "sees the mean before norm and clipping with `keep_gradients=True`, else `.grad` is None; with `fuse=False` as "
        "in torch",
        "torch",
        lambda p, job: bool(p.events_of("hook_step_before", does="gradient")) and _steps_flat(p, job),
    ),
    Difference(
        "`weight_decay` of SGD and Adagrad, with sparse gradients",
        "decays every row; torch, and `fuse=False`, refuse it",
        "torch",
        lambda p, job: _steps_flat(p, job) and _is_sparse(p) and bool(p.events_of("set_decay", value=0.1)),
    ),
    Difference(
        "a step whose optimizers' parameters are all frozen",
        "is refused",
        "torch",
        lambda p, job: _trains_nothing(p),
    ),
    Difference(
        "`torch.compile`, where more sizes come than `torch._dynamo.config.recompile_limit`",
        "the replicas of a process share that limit, beyond which code runs uncompiled, with other bits: raise it",
        "nowhere",
        lambda p, job: p.compiled,
    ),
    Difference(
        "hooks of modules that were compiled before",
        "are seen when code is compiled for another size, as in torch, and parts have others than batches: set "
        "`torch._dynamo.config.skip_nnmodule_hook_guards = False`",
        "nowhere",
        lambda p, job: p.compiled and _does(p, "hook_forward", "hook_forward_before", "hook_backward"),
    ),
    Difference(
        "`add_param_group` of complex parameters to AdamW, Adam, SGD or Adagrad",
        "is refused by the next step, but with `fuse=False`",
        "torch",
        lambda p, job: job.fuses and is_flat(p, 0) and _adds_complex(p),
    ),
    Difference(
        "optimizers with `shard_optimizer=True`",
        "AdamW, Adam, SGD and Adagrad, of real parameters; others are refused",
        "sharded",
        lambda p, job: not all(is_flat(p, number) for number in range(len(p.optimizers))),
    ),
    Difference(
        "a second strategy, after one with `shard_optimizer=True`",
        "takes optimizer state from `state_dict()` of before `close()` alone, by `load_state_dict()` after it",
        "nowhere",
        lambda p, job: _does(p, "restart"),
    ),
    Difference(
        "a step pre-hook that raises, on parameter servers",
        "raises when the step is made",
        "servers",
        lambda p, job: bool(p.events_of("hook_step_before", does="raise")),
    ),
    Difference(
        "optimizers on parameter servers",
        "one of AdamW, Adam, SGD and Adagrad; others, and several, are refused",
        "servers",
        lambda p, job: len(p.optimizers) > 1 or p.optimizers[0].name not in _FLAT,
    ),
    Difference(
        "writing parameters between steps, on parameter servers",
        "is refused after the first step, `load_state_dict` included",
        "servers",
        lambda p, job: (
            _does(p, "scale_parameter", "load_model", "use_averages", "hook_step_after")
            or bool(p.events_of("hook_step_before", does="decay"))
        ),
    ),
    Difference(
        "`keep_gradients`, sparse gradients and complex parameters, on parameter servers",
        "are refused",
        "servers",
        lambda p, job: bool(p.option("keep_gradients")) or _is_sparse(p) or p.has_block("ComplexLinear"),
    ),
    Difference(
        "a second strategy, on parameter servers",
        "goes on from what the servers hold",
        "servers",
        lambda p, job: _does(p, "restart"),
    ),
    Difference(
        "freezing, `add_param_group`, loading and editing optimizer state, on parameter servers",
        "are refused after the first step",
        "servers",
        lambda p, job: _does(p, "freeze", "unfreeze", "add_group", "load_optimizers", "reset_state"),
    ),
]


def table() -> str:
    """The rows of docs/concepts.md."""
    lines = ["| what | under a strategy |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {difference.what} | {difference.sentence} |" for difference in DIFFERENCES)])
