"""What a checkpoint must hold, and how it is compared with what is prepared, before anything is loaded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from muster import _C, random_states
from muster.errors import CheckpointError, InvalidArgument, LayoutMismatch
from muster.kinds import is_count, or_none
from muster.loader import Loader

__all__ = [
    "FORMAT",
    "Metadata",
    "check_content",
    "check_format",
    "compare_generators",
    "compare_names",
    "compare_place",
    "compare_state",
    "metadata_of",
    "state_of_object",
    "with_all_parts",
]

FORMAT = 1
Metadata = dict[str, str | int | float]
"""What is written of a checkpoint beside its tensors: its document, and by whom it was written."""


def metadata_of(document: str, others: Metadata) -> Metadata:
    """That of a snapshot with this document: `others`, and who wrote it."""
    versions = {"muster.version": _C.__version__, "torch.version": torch.__version__}
    return {**others, **versions, "content": document}


def check_format(metadata: Metadata, folder: str | os.PathLike[str]) -> None:
    """Raises CheckpointError for what `save` of this version does not write."""
    found = metadata.get("muster.format")
    if found is None:
        raise CheckpointError(
            f"what is in '{folder}' are no checkpoints of a strategy; give the folder that save() wrote"
        )
    if found != FORMAT:
        raise CheckpointError(
            f"the checkpoints in '{folder}' are of format {found}, and this Muster reads {FORMAT}; load them with the "
            f"version that wrote them ({metadata.get('muster.version')})"
        )


def _is_count(value: Any) -> bool:
    """One that C++ can hold, too."""
    return is_count(value) and value < 1 << 62


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_generator_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def _are_states_of_generators(value: Any) -> bool:
    if not (isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 2):
        return False
    try:
        for state in value:
            torch.Generator().set_state(state.clone())  # torch takes no view
    except RuntimeError:
        return False
    return True


def _is_seed(value: Any) -> bool:
    return isinstance(value, str) and value.isdecimal() and len(value) <= 20 and int(value) < 1 << 64


def _is_name_or_position(value: Any) -> bool:
    return _is_text(value) or _is_count(value)


def _are_of_ranks(value: Any) -> bool:
    """Of a sharded loader, if it has them."""
    return value is None or (
        isinstance(value, list)
        and all(isinstance(each, dict) and _are_generator_states(each.get("generators")) for each in value)
    )


def _are_passes(value: Any) -> bool:
    """Of a loader whose batches servers deal: the batches below "next" are trained on, but for those undone."""
    return value is None or (isinstance(value, list) and all(map(_is_pass, value)))


def _is_pass(value: Any) -> bool:
    if not (isinstance(value, dict) and all(_is_count(value.get(key)) for key in ("epoch", "batches", "next"))):
        return False
    undone = value.get("undone")
    if not (isinstance(undone, list) and all(map(_is_count, undone))):
        return False
    ascends = all(first < second for first, second in itertools.pairwise([*undone, value["next"]]))
    return ascends and (value["batches"] == 0 or value["next"] <= value["batches"])


def _are_generator_states(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_generator_state, value))


def _is_saved_object(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("object", "value")


def _is_place(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_count(value[0]) and _is_text(value[1])


def _tensor_of(dtype: torch.dtype, dims: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Tensor) and value.dtype == dtype and value.dim() == dims


class _Every:
    """A dict of any keys, whose values have one form."""

    def __init__(self, form: Any) -> None:
        self.form = form


_CONTENT = {
    "strategy": {
        "steps": _is_count,
        "calls": _is_count,
        "seed": _is_seed,
        "workers": _is_count,
        "replicas": _is_count,
    },
    "modules": [dict],
    "optimizers": [
        {
            "name": or_none(_is_text),
            "groups": [{"params": [_is_name_or_position]}],
            "state": _Every(dict),
            "others": or_none(lambda value: isinstance(value, dict)),
        }
    ],
    "tables": [
        {
            "places": [_is_place],
            "num_rows": _is_count,
            "dim": _is_count,
            "init": lambda value: value in ("normal", "uniform"),
            "scale": _is_number,
            "seed": _is_seed,
            "optimizer": or_none(_is_count),
            "parameter": or_none(_is_text),
            "rows": _tensor_of(torch.int64, 1),
            "values": _tensor_of(torch.float32, 2),
            "step": or_none(_tensor_of(torch.float32, 0)),
            "state": _Every(_tensor_of(torch.float32, 2)),
        }
    ],
    "loss_scales": [{"optimizers": [_is_count], "scale": {"scale": _is_number, "_growth_tracker": _is_count}}],
    "units": [{"optimizers": [_is_count], "unit": lambda value: _is_number(value) and value > 0}],
    "loaders": [
        {
            "epoch": _is_count,
            "batches": _is_count,
            "generators": [_is_generator_state],
            "generators_now": or_none(_are_generator_states),
            "batch_size": or_none(_is_count),
            "size": or_none(_is_count),
            "ranks": _are_of_ranks,
            "passes": _are_passes,
        }
    ],
    "generators": _are_states_of_generators,
    "random": random_states.is_of_form,
    "state": _Every(_is_saved_object),
}
"""The form of what `save` writes: dicts have these members at least, lists have items of one form."""


def with_all_parts(saved: Any) -> Any:
    """What was read, with None for the parts that it lacks: load() leaves those as they are in the program.

    A checkpoint that was converted from other files lacks most.
    """
    return {**dict.fromkeys(_CONTENT), "state": {}, **saved} if isinstance(saved, dict) else saved


def check_content(saved: Any) -> None:
    """Raises CheckpointError, naming the place, for what is not of the form that `save` writes."""
    form = _CONTENT
    if isinstance(saved, dict):
        form = {part: each for part, each in _CONTENT.items() if saved.get(part) is not None}
    place = _misfit(saved, form, "")
    if place is not None:
        raise CheckpointError(f"'{place}' is not what a checkpoint has there; load another one")
    known = range(len(saved["optimizers"] or ()))
    for part in ("loss_scales", "units"):
        if any(number not in known for each in saved[part] or () for number in each["optimizers"]):
            raise CheckpointError(f"'{part}' names an optimizer that is not in the checkpoint; load another one")
    place = _contradiction(saved)
    if place is not None:
        raise CheckpointError(f"'{place}' contradicts the rest of the checkpoint; load another one")


def _contradiction(saved: Mapping[str, Any]) -> str | None:
    """The first place of tables that others, or modules and optimizers, contradict; None where there is none."""
    modules, optimizers = saved["modules"] or (), saved["optimizers"] or ()
    for number, table in enumerate(saved["tables"] or ()):
        rows, path = table["rows"], f"tables/{number}"
        if not table["places"] or any(place[0] >= len(modules) for place in table["places"]):
            return f"{path}/places"
        if table["optimizer"] is not None and (table["optimizer"] >= len(optimizers) or table["parameter"] is None):
            return f"{path}/optimizer"
        is_inside = len(rows) == 0 or (int(rows[0]) >= 0 and int(rows[-1]) < table["num_rows"])
        if not is_inside or not bool((rows[1:] > rows[:-1]).all()):
            return f"{path}/rows"
        if table["values"].shape != (len(rows), table["dim"]):
            return f"{path}/values"
        if any(len(columns) != len(rows) for columns in table["state"].values()):
            return f"{path}/state"
    return None


def _misfit(value: Any, form: Any, path: str) -> str | None:
    """The first place that has another form; None where there is none."""
    if isinstance(form, (dict, _Every)):
        if not isinstance(value, dict):
            return path or "the document"
        forms = dict.fromkeys(value, form.form) if isinstance(form, _Every) else form
        pairs = [(f"{path}/{key}" if path else str(key), value.get(key), each) for key, each in forms.items()]
    elif isinstance(form, list):
        if not isinstance(value, list):
            return path
        pairs = [(f"{path}/{i}", item, form[0]) for i, item in enumerate(value)]
    else:
        fits = isinstance(value, form) if isinstance(form, type) else form(value)
        return None if fits else path
    return next((found for each in pairs if (found := _misfit(each[1], each[2], each[0])) is not None), None)


def compare_names(ours: Iterable[str], saved: Iterable[str], what: str) -> None:
    """Raises LayoutMismatch for a name that one of them lacks, whatever their order."""
    here, there = dict.fromkeys(ours), dict.fromkeys(saved)
    for name in here:
        if name not in there:
            raise LayoutMismatch(f"the checkpoint lacks '{name}' of {what}; build the model that was saved")
    for name in there:
        if name not in here:
            raise LayoutMismatch(
                f"the checkpoint has '{name}' in {what}, which lacks it; build the model that was saved"
            )


def compare_generators(ours: list[torch.Generator], saved: list[Tensor], what: str) -> None:
    """Raises LayoutMismatch where states cannot be those of our generators."""
    if len(ours) != len(saved):
        raise LayoutMismatch(
            f"{what} has {len(ours)} generators of its own, and the checkpoint states of {len(saved)}; give it the "
            "generators that it had"
        )
    for generator, state in zip(ours, saved, strict=True):
        try:
            torch.Generator(generator.device).set_state(state)
        except RuntimeError as error:
            raise LayoutMismatch(
                f"the checkpoint's state of a generator of {what} is none of one on {generator.device}; give it the "
                "generators that it had"
            ) from error


def compare_place(loader: Loader[Any], saved: Mapping[str, Any], what: str) -> None:
    """Raises LayoutMismatch where our loader cannot go on in the middle of the saved one's epoch."""
    try:
        loader.check_place(saved)
    except InvalidArgument as error:
        raise LayoutMismatch(f"{what}: {error}") from error


def state_of_object(kept: Mapping[str, Any]) -> Any:
    """KeyError where it is a value that no object gave. In C++ what an object gave is a dict like any other."""
    if "object" not in kept and isinstance(kept.get("value"), dict):
        return kept["value"]
    return kept["object"]


def compare_state(saved: Mapping[str, Any], asked: Iterable[str]) -> None:
    """Raises LayoutMismatch where there is no state of an object that was given to load()."""
    for name in asked:
        try:
            state_of_object(saved.get(name, {}))
        except KeyError:
            raise LayoutMismatch(
                f"the checkpoint holds no state of an object {name}=; it has {', '.join(saved) or 'none'}: give load() "
                "the names that save() was given"
            ) from None
