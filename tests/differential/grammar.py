"""The grammar: a program from a seed."""

from __future__ import annotations

from random import Random
from typing import Any

from differential.program import Block, Program, Term, term

_BLOCKS: dict[str, dict[str, list[Any]]] = {
    "Dense": {"bias": [True, False]},
    "Conv1d": {"groups": [1, 2], "padding_mode": ["circular", "reflect", "zeros"]},
    "Conv2d": {"channels_last": [False, True]},
    "Conv3d": {},
    "TransposedConv": {},
    "BatchNorm": {"momentum": [0.1, None], "affine": [True, False]},
    "SyncBatchNorm": {},
    "Norm": {"kind": ["layer", "group", "instance", "tracked", "rms", "response"]},
    "Attention": {"causal": [False, True]},
    "Transformer": {},
    "Recurrent": {"kind": ["LSTM", "GRU", "RNN"], "layers": [1, 2], "bidirectional": [False, True]},
    "Cell": {},
    "Embedding": {"padding": [False, True], "tables": [6, 7], "sparse": [False, False, True]},
    "FrequencyScaled": {},
    "Bag": {"mode": ["mean", "sum", "max"]},
    "Slope": {},
    "BilinearForm": {},
    "Tied": {},
    "Frozen": {},
    "Unused": {},
    "Experts": {},
    "ComplexPhase": {"conjugate": [False, True]},
    "ComplexLinear": {},
    "Fourier": {},
    "Parametrized": {"kind": ["weight_norm", "spectral_norm", "orthogonal"]},
    "Pruned": {},
    "Buffers": {},
    "ComplexBuffer": {},
    "Shapes": {},
    "MixedTypes": {"dtype": ["float32", "float64"]},
    "Dropped": {"kind": ["Dropout", "Dropout1d", "AlphaDropout"], "p": [0.0, 0.3]},
    "Functional": {},
    "Force": {},
    "TensorHook": {"linear": [True, False]},
}
_ONCE_DIFFERENTIABLE = {"Recurrent", "Cell", "Attention", "Transformer"}
"""What torch computes with kernels that have no second derivative, or not with the same bits each time."""
_WRITES_BUFFERS = {"BatchNorm", "SyncBatchNorm", "Buffers", "ComplexBuffer", "Parametrized"}
"""Blocks that a second forward pass would change."""

_EVENTS: dict[str, dict[str, list[Any]]] = {
    "evaluate": {"rows": [1, 2, 5, 7]},
    "look": {},
    "freeze": {"parameter": list(range(8))},
    "unfreeze": {"parameter": list(range(8))},
    "add_group": {"lr": [0.01, 0.02]},
    "set_rate": {"group": [0, 1], "factor": [0.5, 2.0, 0.0]},
    "set_decay": {"group": [0, 1], "value": [0.0, 0.1]},
    "scale_parameter": {"parameter": list(range(8)), "way": ["in place", "data", "replaced data", "copy"]},
    "write_buffer": {"buffer": [0, 1, 2]},
    "save": {},
    "load_model": {},
    "load_optimizers": {},
    "reset_state": {"way": ["clear", "pop", "zero", "replace"]},
    "average": {},
    "look_at_averages": {},
    "use_averages": {},
    "hook_forward": {"block": [0, 1, 2]},
    "hook_forward_before": {"block": [0, 1, 2]},
    "hook_backward": {"block": [0, 1, 2]},
    "hook_parameter": {"parameter": list(range(8)), "linear": [True, False]},
    "hook_accumulated": {"parameter": list(range(8))},
    "hook_step_before": {"does": ["nothing", "decay", "gradient", "raise"]},
    "hook_step_after": {},
    "unhook": {},
    "set_attribute": {"block": [0, 1, 2]},
    "evaluate_block": {"block": [0, 1, 2]},
    "train_all": {},
    "differentiate": {},
    "differentiate_model": {},
    "clear_gradients": {},
    "draw": {},
    "restart": {},
    "average_model": {},
    "look_at_copy": {},
}
_EARLY = ("freeze", "hook_forward", "hook_parameter", "hook_accumulated", "hook_step_before", "hook_step_after",
          "hook_forward_before", "hook_backward", "set_attribute", "evaluate_block")  # fmt: skip
_LOSSES = (
    "mse",
    "mse",
    "cross_entropy",
    "sum",
    "weighted",
    "metrics",
    "contrast",
    "moment",
    "penalty",
    "regularised",
    "twice",
    "distilled",
)
_SCHEDULES = ("StepLR", "CosineAnnealingWarmRestarts", "LambdaLR", "ReduceLROnPlateau", "MultiplicativeLR",
              "OneCycleLR", "SequentialLR")  # fmt: skip


def derive(seed: int) -> Program:
    """The program of a seed."""
    random = Random(seed)
    dtype = random.choices(["float64", "float32"], [5, 1])[0]
    precision = "bf16" if dtype == "float32" and random.random() < 0.4 else "fp32"
    loss = random.choice(_LOSSES)
    blocks = []
    for _ in range(random.choice([1, 1, 2, 2, 3, 4])):
        module = _module(random, loss)
        again = ""
        if module.name not in _WRITES_BUFFERS | {"Force"} and loss != "penalty" and random.random() < 0.2:
            again = random.choice(["reentrant", "non-reentrant"])
        blocks.append(Block(module, again))
    if loss == "penalty":
        blocks = [block for block in blocks if block.module.name not in _ONCE_DIFFERENTIABLE]
    two = random.random() < 0.15
    # The bias of attention's keys has no gradient but of rounding: with a small epsilon that moves it like any other.
    has_noise = dtype != "float64" or any(block.module.name in ("Attention", "Transformer") for block in blocks)
    optimizers = [_optimizer(random, has_noise, (number, 2) if two else None) for number in range(2 if two else 1)]
    is_sparse = any(block.module.get("sparse") for block in blocks)
    if is_sparse:
        optimizers = [random.choice([term("SGD", lr=0.1), term("Adagrad", lr=0.05, eps=1e-3)])]
    alternating = len(optimizers) == 2 and random.random() < 0.5
    schedules = tuple((n, random.choice(_SCHEDULES)) for n in range(len(optimizers)) if random.random() < 0.3)
    options: dict[str, Any] = {}
    if random.random() < 0.35 and not alternating:
        options["accumulate"] = random.choice([2, 3])
    if random.random() < 0.3 and not is_sparse:
        options["clip_norm"] = random.choice([0.05, 0.5, 100.0])
    if precision != "fp32":
        options["precision"] = precision
    if random.random() < 0.1:
        options["buffers"] = "chief"
    if random.random() < 0.2:
        options["bucket_bytes"] = random.choice([1024, 2048])
    if random.random() < 0.15:
        options["keep_gradients"] = True
    early = tuple(_event(random, name) for name in random.choices(_EARLY, k=random.choice([0, 0, 0, 1, 2])))
    events: list[Term] = []
    for _ in range(random.choice([3, 4, 6])):
        for name in random.choices(list(_EVENTS), k=random.choice([0, 0, 1, 1, 2])):
            events.append(_event(random, name))
        even = random.random() < 0.4
        for call in range(options.get("accumulate", 1)):
            rows = 6 if even else random.choice([1, 2, 3, 4, 5, 7, 8, 9])
            given: dict[str, Any] = {"rows": rows}
            if random.random() < 0.06:
                given["fail"] = random.choice(["forward", "backward", "nan"])
            if alternating:
                given["only"] = random.choice([0, 1])
            events.append(term("step", **given))
            if call == 0 and random.random() < 0.05:
                events.append(_event(random, random.choice(["evaluate", "draw", "look"])))
    events += [term("evaluate", rows=5)] if random.random() < 0.3 else []
    return Program(
        seed=seed,
        dtype=dtype,
        blocks=tuple(blocks),
        loss=loss,
        optimizers=tuple(optimizers),
        schedules=schedules,
        options=tuple(options.items()),
        early=early,
        events=tuple(events),
        compiled=random.random() < 0.01,
        autocast=dtype == "float32" and precision == "fp32" and random.random() < 0.5,
    )


def _module(random: Random, loss: str) -> Term:
    while True:
        name = random.choice(list(_BLOCKS))
        if loss == "penalty" and name in _ONCE_DIFFERENTIABLE:
            continue
        return _event_or_block(random, name, _BLOCKS[name])


def _event(random: Random, name: str) -> Term:
    return _event_or_block(random, name, _EVENTS[name])


def _event_or_block(random: Random, name: str, choices: dict[str, list[Any]]) -> Term:
    return term(name, **{option: random.choice(values) for option, values in choices.items()})


def _optimizer(random: Random, has_noise: bool, share: tuple[int, int] | None) -> Term:
    eps = 1e-2 if has_noise else 1e-6
    kind = random.choice(["SGD", "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adadelta", "Adamax", "ASGD"])
    options: dict[str, Any] = {"lr": random.choice([0.01, 0.05]) if kind != "SGD" else random.choice([0.05, 0.1])}
    if kind == "SGD":
        options["momentum"] = random.choice([0.0, 0.9])
        if options["momentum"]:
            options.update(random.choice([{}, {"nesterov": True}, {"dampening": 0.5}]))
    elif kind in ("Adagrad", "Adadelta"):
        # These hardly forget: what is near zero at first grows by rate * decay / eps.
        options["eps"] = max(eps, 1e-3)
    elif kind != "ASGD":
        options["eps"] = eps
    if kind in ("Adam", "AdamW") and random.random() < 0.3:
        options["amsgrad"] = True
    if random.random() < 0.5:
        options["weight_decay"] = 0.1
    if kind != "NAdam" and random.random() < 0.15:
        options["maximize"] = True
    if random.random() < 0.25:
        options["foreach"] = random.choice([True, False])
    if random.random() < 0.5:
        options["groups"] = random.choice([2, 3])
    if share is not None:
        options["share"] = share
    elif random.random() < 0.2:
        options["left_out"] = random.choice([1, 2])
    return term(kind, **options)
