"""Checkpoints: when a training loop saves, and what it keeps."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from muster import _C, saved_tree
from muster.checkpoint import reading
from muster.errors import CheckpointError, InvalidArgument
from muster.found_checkpoint import check_is_path
from muster.kinds import is_count, is_real
from muster.saving import Saving
from muster.step import StepResult
from muster.strategy import Strategy

__all__ = ["Checkpoints"]

_BEST = "best"
"""The folder of the best checkpoints in that of the others, and the name of their metric."""


class Checkpoints:
    """The checkpoints of a training loop: `load` before it, `after_step` after each step, and `best` after each
    evaluation. All ranks make the same calls; externally synchronised.

    Every checkpoint is one of `Strategy.save`. What `after_step` and `save` write is in the folder itself, what `best`
    writes in its folder ``best``.
    """

    def __init__(
        self,
        strategy: Strategy,
        folder: str | os.PathLike[str] | None,
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        keep: int | None = None,
        mode: Literal["min", "max"] = "min",
        best_keep: int | None = 1,
        **state: Any,
    ) -> None:
        """Of `strategy`, in `folder` (None: nothing is saved or loaded), the same on every rank. A relative one
        stays where it is when the working directory changes.

        `after_step` saves once `every` further steps were made, or `every_seconds` have passed since the last
        checkpoint, whichever comes first; with neither, only where the job stops. The `keep` newest stay (None: all).

        `mode` says which metric `best` prefers, the least or the greatest; of those that were the best when they came,
        the `best_keep` newest stay (None: all). `state` are objects that have `state_dict` and `load_state_dict`, which
        are saved and loaded by their names. Raises InvalidArgument for anything else.
        """
        _check_count("every", every, "None, which leaves the number of steps out of it")
        _check_count("keep", keep, "None, which keeps all checkpoints")
        _check_count("best_keep", best_keep, "None, which keeps all checkpoints")
        if every_seconds is not None and not _is_duration(every_seconds):
            raise InvalidArgument(f"every_seconds={every_seconds!r}: it must be a number of seconds above 0, or None")
        if mode not in ("min", "max"):
            raise InvalidArgument(f"mode={mode!r}: it must be 'min' or 'max', whichever metric is better")
        for name, given in state.items():
            if not all(callable(getattr(given, method, None)) for method in ("state_dict", "load_state_dict")):
                raise InvalidArgument(
                    f"{name}= is a {type(given).__name__} without state_dict() and load_state_dict(); give values to "
                    f"after_step(result, {name}=...), as they are then: load() returns them"
                )
        if folder is not None:
            check_is_path("Checkpoints", folder)
            if reading.number_of(Path(folder)) is not None:
                raise InvalidArgument(
                    f"'{folder}' is called as one checkpoint; give the folder of all, and load() its number"
                )
        _check_names(state, ())
        self._strategy = strategy
        self._folder = None if folder is None else Path(folder).absolute()
        self._keep = keep
        self._mode = mode
        self._best_keep = best_keep
        self._state = state
        # C++ holds what it is given, out of sight of the garbage collector.
        number_of_chief = partial(_number_of_chief, weakref.ref(strategy._saving))
        self._schedule = _C.SavingSchedule(
            every=every,
            seconds=None if folder is None or every_seconds is None else float(every_seconds),
            now=lambda: time.monotonic(),
            number_of_chief=None if strategy._saving.saves_alone else number_of_chief,
        )
        self._saved_at: int | None = None
        """The strategy's steps when it was saved last."""
        self._known: dict[tuple[Path, tuple[int, ...] | None], tuple[float, str] | None] = {}
        """By checkpoints that best() looked at last, and the files of their manifests: what it has written there."""

    def load(self, number: int | None = None) -> dict[str, Any] | None:
        """As `Strategy.load` of the folder, or of its checkpoint with this `number`, with the objects of `state`: the
        values that were saved by name, or None where there is no checkpoint. Collective, after prepare(). Raises
        InvalidArgument for what is no number of a checkpoint."""
        if number is not None and not is_count(number, 1):
            raise InvalidArgument(f"number={number!r}: it must be an int >= 1, or None, for the newest checkpoint")
        if self._folder is None:
            return None
        asked = self._folder if number is None else self._folder / reading.numbered(number)
        found = self._strategy._saving.load(asked, self._state)
        self._schedule.start_over()
        if found is not None:
            self._saved_at = self._strategy.steps
        return found

    def after_step(self, result: StepResult | None, **values: Any) -> bool:
        """Saves where that is due, and where `strategy.stopping` has turned true; returns whether it has, so that the
        loop is left. `result` is what the step, or flush(), returned. Collective where it saves.

        `values` are numbers, strings, tensors, and tuples, lists and dicts of them, which are saved by their names, and
        which `load` returns. A checkpoint is made after a step that leaves no window open: later, where one is.
        """
        if result is not None and not isinstance(result, StepResult):
            raise InvalidArgument(
                f"after_step() was given a {type(result).__name__}; give it what strategy.step() or flush() returned"
            )
        is_stopping = self._strategy.stopping
        if result is not None and result.stepped:
            self._schedule.note_step(result.step)
        is_due = self._schedule.is_due
        if not (is_due or is_stopping) or self._strategy._saving.has_open_window:
            return False
        if is_due or self._saved_at != self._strategy.steps:
            self.save(**values)
        return is_stopping

    def save(self, **values: Any) -> None:
        """Saves now, with `values` as of `after_step`. Collective, with no window open."""
        _check_names(values, self._state)
        if self._folder is not None:
            self._strategy._saving.save(self._folder, self._keep, {**self._state, **values})
        self._saved_at = self._strategy.steps
        self._schedule.start_over()

    def best(self, metric: float | Tensor, **values: Any) -> bool:
        """Saves into the folder's folder ``best`` where `metric` is better than that of the checkpoint there, whichever
        job made it, or none is there; returns whether it is. NaN is not better than anything.

        `metric` is a number, or a tensor of one, of which the chief's decides; `values` are as of `after_step`.
        Collective, with no window open; waits for a checkpoint that is being written. With parameter servers the chief
        acts alone, and others get False. Raises InvalidArgument where the other `mode` was used in this folder.
        """
        saving, folder = self._strategy._saving, self._folder
        told = None if folder is None or saving.saves_alone else saving.kept_metric(folder / _BEST)

        def is_better() -> bool:
            value = _number_of(metric)
            _check_names(values, self._state)
            if folder is None or self._strategy.rank != 0 or math.isnan(value):
                return False
            kept = told
            if saving.saves_alone:
                saving.writing.finish()
                kept = self._best_in(folder / _BEST)
            if kept is None:
                return True
            before, mode = kept
            if mode != self._mode:
                raise InvalidArgument(
                    f"what is in '{folder / _BEST}' is the best by mode={mode!r}, and mode={self._mode!r} was given; "
                    "give that mode, or another folder"
                )
            return bool(value < before if self._mode == "min" else value > before)

        found = saving.told_by_chief("best", is_better)
        if found and folder is not None:
            described = {_BEST: {"metric": _number_of(metric), "mode": self._mode}}
            saving.save(folder / _BEST, self._best_keep, {**self._state, **values, **described})
        return found

    def _best_in(self, folder: Path) -> tuple[float, str] | None:
        """The metric and mode that best() wrote to the newest good checkpoint there that has them."""
        known, self._known = self._known, {}
        for path in reversed(reading.numbered_in(folder)):
            key = path, _file_of(path)
            found = known[key] if key in known else self._read_metric(path)
            self._known[key] = found
            if found is not None:
                return found
        return None

    def _read_metric(self, path: Path) -> tuple[float, str] | None:
        """What is written in a checkpoint counts where all of it is good, and signed where there is a secret: one that
        cannot be loaded is not the best."""
        metadata = self._strategy._saving.writing.metadata_of(path)
        if metadata is None:
            try:
                metadata = reading.read_folder(path).metadata
            except CheckpointError as error:
                reading.pass_over(path, error)
                return None
        return _metric_in(metadata)


def _number_of_chief(saving: weakref.ref[Saving], number: int) -> int:
    alive = saving()
    assert alive is not None  # its strategy steps
    return alive.number_of_chief(number)


def _check_count(name: str, count: int | None, otherwise: str) -> None:
    if count is not None and not is_count(count, 1):
        raise InvalidArgument(f"{name}={count!r}: it must be an int >= 1, or {otherwise}")


def _is_duration(value: Any) -> bool:
    return is_real(value) and 0 < float(value) < math.inf


def _check_names(names: Iterable[str], taken: Iterable[str]) -> None:
    for name in names:
        if name == _BEST:
            raise InvalidArgument(f"{name}= is what best() calls its metric in a checkpoint; give it another name")
        if name in taken:
            raise InvalidArgument(f"{name}= is an object that Checkpoints() was given; give the value another name")


def _number_of(metric: Any) -> float:
    is_one = isinstance(metric, Tensor) and metric.numel() == 1 and not metric.is_complex()
    if not is_one and not is_real(metric):
        found = f"a tensor of shape {tuple(metric.shape)}" if isinstance(metric, Tensor) else repr(metric)
        raise InvalidArgument(f"best() was given {found}; give it one real number, strategy.reduce()d over all ranks")
    return float(metric)


def _metric_in(metadata: Mapping[str, Any]) -> tuple[float, str] | None:
    """What best() wrote to the checkpoint of this metadata."""
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        node = json.loads(metadata["content"])["dict"]["state"]["dict"][_BEST]["dict"]["value"]
        found: dict[str, Any] = saved_tree.decode(json.dumps(node), {})
        if isinstance(found["metric"], float) and found["mode"] in ("min", "max"):
            return found["metric"], found["mode"]
    return None


def _file_of(checkpoint: Path) -> tuple[int, ...] | None:
    """What tells the file of its manifest from another one; None where there is none."""
    with contextlib.suppress(OSError):
        found = (checkpoint / "manifest.json").stat()
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
    return None
