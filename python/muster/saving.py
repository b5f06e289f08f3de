"""Strategy.save and Strategy.load: what a checkpoint holds, who writes it and when it is read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from muster import _C, saved_optimizer, saved_tree
from muster.collectives import Collectives
from muster.errors import CheckpointError, Error, InvalidArgument, LayoutMismatch
from muster.loader import Loader
from muster.loader_host import LoaderHost
from muster.options import StrategyOptions
from muster.precision import LossScale, LossScaler
from muster.preparing import Preparation
from muster.replicated import Replicated
from muster.saved_optimizer import compare_names
from muster.sharded_embedding import ShardedEmbedding
from muster.stepping import Stepping

__all__ = ["Saving", "Writing"]

_T = TypeVar("_T")
_FORMAT = 1
_ABSENT: dict[str, Any] = {
    **dict.fromkeys(("strategy", "modules", "optimizers", "loss_scales", "loaders", "generators")),
    "state": {},
}
"""What load() leaves as it is in the program. A checkpoint that was converted from other files lacks most."""
_POLL = 0.002  # seconds between two looks at whether a checkpoint is written


class Writing:
    """Checkpoints on their way to the disk. It knows nothing of its strategy, which it outlives."""

    def __init__(self) -> None:
        self._writer: _C.SnapshotWriter | None = None
        self._made_with: tuple[Path, int | None] | None = None
        """The folder and `keep` of the writer."""
        self._pid = os.getpid()

    def write(
        self, folder: Path, keep: int | None, tensors: dict[str, Tensor], metadata: dict[str, str | int | float]
    ) -> None:
        """Copies the tensors and begins to write, once the last checkpoint is written. Raises CheckpointError where
        that went wrong, or the folder cannot be used."""
        self.finish()
        made_with = (folder.absolute(), keep)
        if self._writer is None or self._made_with != made_with:
            self._writer = None  # which lets the folder go
            self._writer, self._made_with = _C.SnapshotWriter(made_with[0], keep), made_with
        self._writer.write_copy(tensors, metadata)

    def finish(self) -> None:
        """Waits until the last checkpoint is written; raises CheckpointError, once, where it could not be. Ctrl-C ends
        the wait, and not the writing."""
        if self._writer is None:
            return
        while not self._writer.is_done:
            time.sleep(_POLL)
        self._writer.wait()

    def end(self) -> None:
        """As finish(), and lets the folder go. No-op in a fork of the process."""
        if os.getpid() != self._pid:
            return
        try:
            self.finish()
        finally:
            self._writer = None


class Saving:
    """The checkpoints of one strategy. The chief writes and reads, and tells the others; with parameter servers it
    writes without them, since those that died may not come back. Owned by the thread that steps."""

    def __init__(
        self,
        core: _C.StrategyCore,
        options: StrategyOptions,
        host: LoaderHost,
        preparation: Preparation,
        stepping: Stepping,
        collectives: Collectives,
    ) -> None:
        self._core = core
        self._options = options
        self._host = host
        self._preparation = preparation
        self._stepping = stepping
        self._collectives = collectives
        self.writing = Writing()
        """What ends with the strategy."""

    def save(self, folder: str | os.PathLike[str], keep: int | None, state: Mapping[str, Any]) -> None:
        """As `Strategy.save`."""
        self._check_callable("save")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise InvalidArgument(f"keep={keep!r}: it must be an int >= 1, or None, which keeps all checkpoints")
        if self._has_servers and self._core.rank != 0:
            return
        content = self._content(state)
        error: Error | None = None
        if self._core.rank == 0:
            try:
                document, tensors = saved_tree.encode(content)
                metadata: dict[str, str | int | float] = {
                    "muster.format": _FORMAT,
                    "muster.version": _C.__version__,
                    "torch.version": torch.__version__,
                    "steps": self._core.steps,
                    "content": document,
                }
                self.writing.write(Path(folder), keep, tensors, metadata)
            except Error as raised:
                error = raised
        self._tell_all(error, "save", alone=self._has_servers)

    def load(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> dict[str, Any] | None:
        """As `Strategy.load`."""
        self._check_callable("load")
        if self._core.has_servers:
            raise InvalidArgument(
                "parameter servers hold values and state from the first step on; load() before it, in a new job"
            )
        for name, given in state.items():
            if not callable(getattr(given, "load_state_dict", None)):
                raise InvalidArgument(
                    f"{name}= is a {type(given).__name__} without load_state_dict(); values that were saved are in "
                    "what load() returns: leave it out"
                )
        found: tuple[dict[str, Tensor], dict[str, str | int | float]] | None = None
        error: Error | None = None
        joins = self._core.joins
        if joins or self._core.rank == 0:
            try:
                self.writing.finish()
                found = _C.read_newest_snapshot(Path(folder))
                if found is not None:
                    _check_format(found[1], folder)
            except Error as raised:
                error = raised
        self._tell_all(error, "load", alone=joins)
        sent: dict[str, Any] | None = None
        if found is not None:
            sent = {"content": found[1]["content"], "tensors": found[0]}
        if self._core.num_workers > 1 and not joins:
            sent = self._collectives.broadcast(sent, 0)
        if sent is None:
            return None
        saved = {**_ABSENT, **saved_tree.decode(sent["content"], sent["tensors"])}
        _compare_state(saved["state"], state)
        if not joins:  # else it has them from the servers, later ones
            self._compare(saved)
            self._take(saved)
        for name, given in state.items():
            given.load_state_dict(_state_of_object(saved["state"][name]))
        return {name: kept["value"] for name, kept in saved["state"].items() if "value" in kept and name not in state}

    def _check_callable(self, what: str) -> None:
        self._preparation.check_open()
        if self._collectives.is_in_step:
            raise InvalidArgument(f"{what}() was called inside a step; call it between steps, on every rank")
        if self._core.open_sets():
            raise InvalidArgument(
                f"a window is open, whose gradients a checkpoint does not hold; call flush() before {what}(), or call "
                "it after a step whose result.stepped is true"
            )

    @property
    def _has_servers(self) -> bool:
        return self._host.passes is not None

    # --- what a checkpoint holds ---

    def _content(self, state: Mapping[str, Any]) -> dict[str, Any]:
        core = self._core
        for replicated in self._preparation.modules:
            for name, module in replicated.module.named_modules():
                if isinstance(module, ShardedEmbedding) and module.on_servers:
                    raise InvalidArgument(
                        f"the rows of '{name}' are on parameter servers alone (on_servers=True), and a checkpoint of "
                        "the workers would lack them; the servers' snapshots keep them"
                    )
        generators = torch.random.get_rng_state().unsqueeze(0)
        if core.num_workers > 1 and not self._has_servers:
            generators = self._collectives.gather(generators)
        return {
            "strategy": {
                "steps": core.steps,
                "calls": core.calls,
                "seed": str(core.seed),  # C++ reads integers of 64 bits with a sign
                "workers": core.num_workers,
                "replicas": core.num_replicas,
            },
            "modules": [replicated.state_dict() for replicated in self._preparation.modules],
            "optimizers": [saved_optimizer.state_of(core, optimizer) for optimizer in self._preparation.optimizers],
            "loss_scales": self._loss_scales(),
            "loaders": [_state_of_loader(loader) for loader in self._preparation.loaders],
            "generators": generators,
            "state": {
                name: {"object": given.state_dict()}
                if callable(getattr(given, "state_dict", None))
                else {"value": given}
                for name, given in state.items()
            },
        }

    def _loss_scales(self) -> list[dict[str, Any]]:
        if self._options.loss_scale is None and self._options.precision != "fp16":
            return []
        sets = self._stepping.sets
        positions = {id(prepared): position for position, prepared in enumerate(self._preparation.optimizers)}
        return [
            {
                "optimizers": [positions[id(prepared)] for prepared in sets.optimizers_of(number)],
                "scale": LossScaler(self._core, number, self._options.loss_scale or LossScale()).state_dict(),
            }
            for number in sets.numbers()
        ]

    def _tell_all(self, error: Error | None, what: str, *, alone: bool) -> None:
        """Raises what went wrong at the chief; on every rank, and collective, unless it acts alone."""
        if self._core.num_workers > 1 and not alone:
            told = self._core.exchange_texts("" if error is None else str(error))[0]
            if told and error is None:
                raise CheckpointError(f"{what}() failed on rank 0: {told}")
        if error is not None:
            raise error

    # --- reading ---

    def _compare(self, saved: dict[str, Any]) -> None:
        """Raises LayoutMismatch before anything is loaded where the checkpoint is of other objects."""
        modules, optimizers = self._preparation.modules, self._preparation.optimizers
        loaders = self._preparation.loaders
        for what, ours, theirs in (
            ("modules", modules, saved["modules"]),
            ("optimizers", optimizers, saved["optimizers"]),
            ("loaders", loaders, saved["loaders"]),
        ):
            if theirs is not None and len(ours) != len(theirs):
                raise LayoutMismatch(
                    f"the checkpoint is of {len(theirs)} {what}, and {len(ours)} are prepared; prepare() what the job "
                    "that saved it had prepared, in the same order, before load()"
                )
        for number, (module, tensors) in enumerate(_pairs(modules, saved["modules"])):
            _compare_module(module, tensors, f"module {number}")
        for number, (optimizer, theirs) in enumerate(_pairs(optimizers, saved["optimizers"])):
            saved_optimizer.compare(self._core, optimizer, theirs, f"optimizer {number}")
        for number, (loader, theirs) in enumerate(_pairs(loaders, saved["loaders"])):
            if loader.has_place and len(theirs["generators"]) != loader.num_generators:
                raise LayoutMismatch(
                    f"loader {number} has {loader.num_generators} generators of its own, and the checkpoint states of "
                    f"{len(theirs['generators'])}; give it the generators that it had"
                )

    def _take(self, saved: dict[str, Any]) -> None:
        for module, tensors in _pairs(self._preparation.modules, saved["modules"]):
            module.load_state_dict(tensors)
        for prepared, theirs in _pairs(self._preparation.optimizers, saved["optimizers"]):
            prepared.optimizer.load_state_dict(saved_optimizer.with_numbers(self._core, prepared, theirs))
        for loader, theirs in _pairs(self._preparation.loaders, saved["loaders"]):
            _take_place(loader, theirs)
        for scale in saved["loss_scales"] or ():
            optimizers = [self._preparation.optimizers[position].optimizer for position in scale["optimizers"]]
            number = self._stepping.sets.set_of(optimizers)
            LossScaler(self._core, number, self._options.loss_scale or LossScale()).load_state_dict(scale["scale"])
        strategy, generators = saved["strategy"], saved["generators"]
        if strategy is not None:
            # Servers give joiners the seed that the job began with.
            seed = None if self._has_servers else int(strategy["seed"])
            self._core.go_on_after(strategy["steps"], strategy["calls"], seed)
        if generators is not None and len(generators) == self._core.num_workers:
            torch.random.set_rng_state(generators[self._core.rank].clone())  # torch takes no view


def _check_format(metadata: Mapping[str, str | int | float], folder: str | os.PathLike[str]) -> None:
    found = metadata.get("muster.format")
    if found is None:
        raise CheckpointError(
            f"what is in '{folder}' are no checkpoints of a strategy; give the folder that save() wrote"
        )
    if found != _FORMAT:
        raise CheckpointError(
            f"the checkpoints in '{folder}' are of format {found}, and this Muster reads {_FORMAT}; load them with the "
            f"version that wrote them ({metadata.get('muster.version')})"
        )


def _state_of_loader(loader: Loader[Any]) -> dict[str, Any]:
    """Batches that parameter servers deal or divide have no place in one worker: their epoch begins anew."""
    return loader.state_dict() if loader.has_place else {"epoch": loader.epoch, "batches": 0, "generators": []}


def _take_place(loader: Loader[Any], saved: dict[str, Any]) -> None:
    if loader.has_place:
        loader.load_state_dict(saved)
        return
    loader.epoch = saved["epoch"]
    if saved["batches"] > 0:
        logging.getLogger("muster").warning(
            "parameter servers divide the batches, so that epoch %d begins anew: its first %d batches come once more",
            saved["epoch"],
            saved["batches"],
        )


def _pairs(ours: Sequence[_T], saved: Sequence[Any] | None) -> Iterator[tuple[_T, Any]]:
    return iter(()) if saved is None else zip(ours, saved, strict=True)


def _compare_module(module: Replicated[Any], saved: Mapping[str, Any], what: str) -> None:
    ours = module.state_dict()
    compare_names(ours, saved, what)
    for name, value in ours.items():
        theirs = saved[name]
        if isinstance(value, Tensor) and isinstance(theirs, Tensor) and value.shape != theirs.shape:
            raise LayoutMismatch(
                f"'{name}' of {what} has shape {tuple(value.shape)}, and in the checkpoint {tuple(theirs.shape)}; "
                "build the model that was saved"
            )


def _state_of_object(kept: Mapping[str, Any]) -> Any:
    """None where it is a value that no object gave. In C++ what an object gave is a dict like any other."""
    value = kept.get("value")
    return kept.get("object", value if isinstance(value, dict) else None)


def _compare_state(saved: Mapping[str, Any], asked: Iterable[str]) -> None:
    for name in asked:
        if _state_of_object(saved.get(name, {})) is None:
            raise LayoutMismatch(
                f"the checkpoint holds no state of an object {name}=; it has {', '.join(saved) or 'none'}: give load() "
                "the names that save() was given"
            )
