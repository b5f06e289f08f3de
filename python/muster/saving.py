"""Strategy.save and Strategy.load: what a checkpoint holds, who writes it and when it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from muster import _C, random_states, saved_loaders, saved_optimizer, saved_tree
from muster.collectives import Collectives
from muster.errors import CheckpointError, Error, InvalidArgument, LayoutMismatch
from muster.loader_host import LoaderHost
from muster.options import StrategyOptions
from muster.precision import LossScale, LossScaler
from muster.preparing import Preparation
from muster.replicated import Replicated
from muster.saved_layout import (
    FORMAT,
    check_content,
    check_format,
    compare_generators,
    compare_module,
    compare_streams,
    metadata_of,
    with_all_parts,
)
from muster.saved_tables import SavedTables, for_others
from muster.sharded_embedding import leaving_rows_out
from muster.stepping import Stepping
from muster.writing import Writing

__all__ = ["Saving"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Found:
    """A checkpoint that was read."""

    tensors: dict[str, Tensor]
    document: str
    name: str
    """Of its folder."""
    content: dict[str, Any] | None = None
    """The document's value: what the checkpoint holds, by part; None where another rank decoded it."""


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
        self._tables = SavedTables(core)
        self.writing = Writing()
        """What ends with the strategy."""

    def save(self, folder: str | os.PathLike[str], keep: int | None, state: Mapping[str, Any]) -> None:
        """As `Strategy.save`."""
        self._check_callable("save")
        if self._has_servers and self._core.rank != 0:
            return

        def given() -> tuple[dict[str, Any], list[dict[str, Any]], str]:
            if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
                raise InvalidArgument(f"keep={keep!r}: it must be an int >= 1, or None, which keeps all checkpoints")
            described = {
                name: {"object": value.state_dict()}
                if callable(getattr(value, "state_dict", None))
                else {"value": value}
                for name, value in state.items()
            }
            loaders, own = saved_loaders.states_of(self._preparation.loaders)
            return described, loaders, own

        def write() -> None:
            if not self.saves_alone:
                saved_loaders.note_ranks(self._core, self._preparation.loaders, loaders, own)
            if self._core.has_servers:
                with self.writing.with_servers(Path(folder), keep, self._core) as cut:
                    tensors, metadata = self._encoded({**self._content(cut), "loaders": loaders, "state": described})
                    self.writing.write_rest(cut, Path(folder), keep, tensors, metadata)
                return
            content = {**self._content(), "loaders": loaders, "state": described}
            if self._core.rank == 0:
                self.writing.write(Path(folder), keep, *self._encoded(content))

        # Code of users comes before the first collective: where it raises on one rank, no other is left waiting.
        described, loaders, own = self._together("save", given, alone=self._has_servers)
        self._together("save", write, alone=self._has_servers)

    def load(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> dict[str, Any] | None:
        """As `Strategy.load`."""
        self._check_callable("load")
        if self._core.has_servers:
            raise InvalidArgument(
                "parameter servers hold values and state from the first step on; load() before it, in a new job"
            )
        joins = self._core.joins
        alone = joins or self._core.num_workers == 1

        def read() -> _Found | None:
            for name, given in state.items():
                if not callable(getattr(given, "load_state_dict", None)):
                    raise InvalidArgument(
                        f"{name}= is a {type(given).__name__} without load_state_dict(); values that were saved are "
                        "in what load() returns: leave it out"
                    )
            return self._read(Path(folder)) if joins or self._core.rank == 0 else None

        def compared() -> dict[str, Any]:
            saved = checkpoint.content or with_all_parts(saved_tree.decode(checkpoint.document, checkpoint.tensors))
            try:
                _compare_state(saved["state"], state)
                if not joins:
                    saved["tables"] = self._tables.place(saved, self._preparation.modules)
                    self._compare(saved)
            except LayoutMismatch as error:
                raise LayoutMismatch(f"'{Path(folder, checkpoint.name)}': {error}") from error
            return saved

        def take() -> None:
            def take_objects() -> None:
                for name, given in state.items():
                    given.load_state_dict(_state_of_object(saved["state"][name]))

            if joins:  # it has the rest from the servers, later ones
                take_objects()
                return
            try:
                self._take_optimizers(saved, take_objects)
            except Exception as error:
                error.add_note(f"while '{Path(folder, checkpoint.name)}' was loaded")
                raise
            self._take(saved)

        found = self._together("load", read, alone=alone)
        if not alone:
            found = self._tell(found)
        if found is None:
            return None
        checkpoint = found
        saved = self._together("load", compared, alone=alone)
        self._together("load", take, alone=alone)
        return {name: kept["value"] for name, kept in saved["state"].items() if "value" in kept and name not in state}

    def _read(self, folder: Path) -> _Found | None:
        """The newest checkpoint."""
        self.writing.finish()
        found = _C.read_newest_snapshot(folder)
        if found is None:
            return None
        tensors, metadata, place = found
        check_format(metadata, folder)
        document = str(metadata.get("content"))
        try:
            content: dict[str, Any] = with_all_parts(saved_tree.decode(document, tensors))
            check_content(content)
        except CheckpointError as error:
            raise CheckpointError(f"'{place}' cannot be loaded: {error}") from error
        return _Found(tensors, document, place.name, content)

    def _tell(self, found: _Found | None) -> _Found | None:
        """What the chief found. Collective."""
        theirs = None
        if found is not None and found.content is not None:
            tables = found.content["tables"] or ()
            theirs = (for_others(found.tensors, tables, self._preparation.modules), found.document, found.name)
        told: Any = self._collectives.broadcast(theirs, 0)
        return found if found is not None or told is None else _Found(*told)

    def _check_callable(self, what: str) -> None:
        self._preparation.check_open()
        if not self.writing.is_of_this_process:
            raise InvalidArgument(f"{what}() was called in a fork of the strategy's process; call it in that one")
        if self._collectives.is_in_step:
            raise InvalidArgument(f"{what}() was called inside a step; call it between steps, on every rank")
        if self.has_open_window:
            raise InvalidArgument(
                f"a window is open, whose gradients a checkpoint does not hold; call flush() before {what}(), or call "
                "it after a step whose result.stepped is true"
            )

    def told_by_chief(self, what: str, act: Callable[[], bool]) -> bool:
        """What `act` gives on the chief, which every rank calls; where it raises on any, all raise. Collective; with
        parameter servers local, and False on the others."""
        self._check_callable(what)
        mine = self._together(what, act, alone=self._has_servers)
        if self._has_servers:
            return mine and self._core.rank == 0
        return self.number_of_chief(int(mine)) == 1

    def number_of_chief(self, number: int) -> int:
        """The chief's `number`. Collective."""
        if self._core.num_workers == 1:
            return number
        (told,) = self._core.broadcast([torch.tensor(number)], 0)
        return int(told)

    @property
    def saves_alone(self) -> bool:
        """Whether no other worker saves with this one."""
        return self._has_servers or self._core.num_workers == 1

    @property
    def has_open_window(self) -> bool:
        """Whether there are gradients that a checkpoint would not hold."""
        return bool(self._core.open_sets())

    @property
    def _has_servers(self) -> bool:
        return self._host.passes is not None

    # --- what a checkpoint holds ---

    def _encoded(self, content: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str | int | float]]:
        document, tensors = saved_tree.encode(content)
        return tensors, metadata_of(document, {"muster.format": FORMAT, "steps": self._core.steps})

    def _content(self, cut: _C.CutWriting | None = None) -> dict[str, Any]:
        """`cut`: with whom parameter servers write what they hold; stand-ins are here in its place."""
        core = self._core
        modules, optimizers = self._preparation.modules, self._preparation.optimizers
        random = random_states.states_here(core.devices)
        if core.num_workers > 1 and not self._has_servers:
            random = self._collectives.gather(random)
        generators, cuda = random.pop("torch"), random["cuda"]
        with leaving_rows_out():
            states = [replicated.state_dict() for replicated in modules]
            if cut is not None:
                _leave_to_servers(cut, core, modules, states)
            saved_optimizers = [saved_optimizer.state_of(core, optimizer) for optimizer in optimizers]
        tables = self._tables.state(modules, optimizers)
        return {
            "strategy": {
                "steps": core.steps,
                "calls": core.calls,
                "seed": str(core.seed),  # C++ reads integers of 64 bits with a sign
                "workers": core.num_workers,
                "replicas": core.num_replicas,
            },
            "modules": states,
            "optimizers": saved_optimizers,
            **({"tables": tables} if tables else {}),
            "loss_scales": self._loss_scales(),
            "generators": generators,
            "random": {**random, "cuda": cuda if cuda.any() else None},
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

    def _together(self, what: str, act: Callable[[], _T], *, alone: bool) -> _T:
        """What `act` gives, which every rank calls; where it raises on any, all raise. Collective, unless `alone`."""
        error: BaseException | None = None
        try:
            result = act()
        except BaseException as raised:
            error = raised
        if self._core.num_workers > 1 and not alone:
            mine = "" if error is None else f"{type(error).__name__}\n{_text_of(error)}"
            try:
                told = self._core.exchange_texts(mine)
            except Error:
                if error is None:
                    raise
                told = []
            for rank, text in enumerate(told):
                if text and error is None:
                    kind, _, words = text.partition("\n")
                    shown = LayoutMismatch if kind == LayoutMismatch.__name__ else CheckpointError
                    raise shown(f"{what}() failed on rank {rank}: {words}")
        if error is not None:
            raise error
        return result

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
        with leaving_rows_out():
            for number, (module, tensors) in enumerate(_pairs(modules, saved["modules"])):
                compare_module(module, tensors, f"module {number}")
        for number, (optimizer, theirs) in enumerate(_pairs(optimizers, saved["optimizers"])):
            saved_optimizer.compare(self._core, optimizer, theirs, f"optimizer {number}")
        for number, (loader, theirs) in enumerate(_pairs(loaders, saved["loaders"])):
            if loader.has_place:
                place = saved_loaders.of_this_rank(self._core, loader, theirs)
                compare_generators(loader.generators, place["generators"], f"loader {number}")
                compare_streams(loader, place, f"loader {number}")

    def _take_optimizers(self, saved: dict[str, Any], then: Callable[[], None]) -> None:
        """Loads them, and calls `then`. Where that or torch raises, they are as they were."""
        optimizers = self._preparation.optimizers
        before = [(each.optimizer, each.optimizer.state, each.optimizer.param_groups) for each in optimizers]
        try:
            for prepared, theirs in _pairs(optimizers, saved["optimizers"]):
                prepared.optimizer.load_state_dict(saved_optimizer.with_numbers(self._core, prepared, theirs))
            then()
        except BaseException:
            for optimizer, state, groups in before:
                optimizer.state, optimizer.param_groups = state, groups
            raise

    def _take(self, saved: dict[str, Any]) -> None:
        with leaving_rows_out():
            for module, tensors in _pairs(self._preparation.modules, saved["modules"]):
                module.load_state_dict(tensors)
        self._tables.take(saved["tables"])
        for loader, theirs in _pairs(self._preparation.loaders, saved["loaders"]):
            saved_loaders.take_place(loader, saved_loaders.of_this_rank(self._core, loader, theirs))
        for scale in saved["loss_scales"] or ():
            optimizers = [self._preparation.optimizers[position].optimizer for position in scale["optimizers"]]
            number = self._stepping.sets.set_of(optimizers)
            LossScaler(self._core, number, self._options.loss_scale or LossScale()).load_state_dict(scale["scale"])
        strategy, generators = saved["strategy"], saved["generators"]
        if strategy is not None:
            # Servers give joiners the seed that the job began with.
            seed = None if self._has_servers else int(strategy["seed"])
            self._core.go_on_after(strategy["steps"], strategy["calls"], seed)
        core, others = self._core, saved["random"]
        if generators is not None and len(generators) == core.num_workers:
            torch.random.set_rng_state(generators[core.rank].clone())  # torch takes no view
        if others is not None and len(others["python"]) == core.num_workers:
            as_many = others["cuda"] is not None and len(others["cuda"]) == core.num_replicas
            others = {**others, "cuda": others["cuda"] if as_many else None}
            random_states.restore(others, core.rank, core.first_replica, core.devices)


def _text_of(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, Error) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _pairs(ours: Sequence[_T], saved: Sequence[Any] | None) -> Iterator[tuple[_T, Any]]:
    return iter(()) if saved is None else zip(ours, saved, strict=True)


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


def _leave_to_servers(
    cut: _C.CutWriting,
    core: _C.StrategyCore,
    modules: Sequence[Replicated[Any]],
    states: Sequence[dict[str, Any]],
) -> None:
    """Puts stand-ins in the place of what servers write of modules' `states`."""
    for replicated, state in zip(modules, states, strict=True):
        for name, parameter in replicated.module.named_parameters(remove_duplicate=False):
            stand_in = cut.stand_in(core.find(parameter)) if name in state else None
            if stand_in is not None:
                state[name] = stand_in
