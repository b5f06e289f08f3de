"""Strategy.save and Strategy.load: what a checkpoint holds, who writes it and when it is read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from muster import _C, random_states, saved_loaders, saved_modules, saved_optimizer, saved_tree
from muster.collectives import Collectives
from muster.errors import InvalidArgument, LayoutMismatch
from muster.flat_state import giving_runs
from muster.found_checkpoint import Found, check_is_path, found_in
from muster.kinds import is_count
from muster.loader_host import LoaderHost
from muster.options import StrategyOptions, loss_scale_rule
from muster.precision import LossScaler
from muster.preparing import Preparation
from muster.saved_layout import (
    FORMAT,
    Metadata,
    compare_generators,
    compare_place,
    compare_state,
    metadata_of,
    state_of_object,
    with_all_parts,
)
from muster.saved_tables import SavedTables, for_others, leave_to_servers
from muster.sharded_embedding import leaving_rows_out
from muster.stepping import Stepping
from muster.telling import together, told_by_all
from muster.writing import Writing

__all__ = ["Saving"]

_T = TypeVar("_T")


class Saving:
    """The checkpoints of one strategy. Workers write together, each a part, in the chief's folder where they see it,
    and else what they alone have in that of their host. The chief reads, is given what it has not, and tells others.
    With parameter servers it writes with these, and without the other workers, since those that died may not come back.
    Owned by the thread that steps."""

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
        self._is_saving = False
        self._lineage = secrets.token_hex(8)
        """What tells its checkpoints from other jobs': that of the one that was loaded."""
        self.writing = Writing()
        """What ends with the strategy."""

    def save(self, folder: str | os.PathLike[str], keep: int | None, state: Mapping[str, Any]) -> None:
        """As `Strategy.save`."""
        self._check_callable("save")
        if self._is_saving:
            raise InvalidArgument(
                "save() was called inside save(), by a signal handler, say; save after the step (strategy.stopping)"
            )
        self._is_saving = True
        try:
            self._save(folder, keep, state)
        finally:
            self._is_saving = False

    def _save(self, folder: str | os.PathLike[str], keep: int | None, state: Mapping[str, Any]) -> None:
        if self._has_servers and self._core.rank != 0:
            return

        def given() -> tuple[dict[str, Any], list[dict[str, Any]], str]:
            check_is_path("save", folder)
            if keep is not None and not is_count(keep, 1):
                raise InvalidArgument(f"keep={keep!r}: it must be an int >= 1, or None, which keeps all checkpoints")
            described = {
                name: {"object": value.state_dict()}
                if callable(getattr(value, "state_dict", None))
                else {"value": value}
                for name, value in state.items()
            }
            loaders, own = saved_loaders.states_of(self._preparation.loaders)
            return described, loaders, own

        # Code of users comes before the first collective: where it raises on one rank, no other is left waiting.
        described, loaders, own = self._together("save", given, alone=self._has_servers)
        content = {"loaders": loaders, "state": described}
        if not self.saves_alone:
            self._save_with_others(Path(folder), keep, content, own)
        elif not (self._core.has_servers and self._save_with_servers(Path(folder), keep, content)):
            document, tensors = saved_tree.encode({**self._content(self._random()), **content})
            self.writing.write(Path(folder), keep, tensors, self._metadata(document))

    def _save_with_servers(self, folder: Path, keep: int | None, given: Mapping[str, Any]) -> bool:
        """False where servers cannot write to the folder, or an optimizer has a form of its own."""
        if any(map(saved_optimizer.has_own_form, self._preparation.optimizers)):
            return False
        with self.writing.with_servers(folder, keep, self._core) as cut:
            if cut is not None:
                content = {**self._content(self._random(), cut), **given}
                document, tensors = saved_tree.encode_in_place(content)
                self.writing.write_rest(cut, tensors, self._metadata(document))
            return cut is not None

    def _save_with_others(self, folder: Path, keep: int | None, given: dict[str, Any], own: str) -> None:
        """Collective. `given` is what user code gave, and `own` what other ranks are to know of this one's loaders."""
        core = self._core
        joint: _C.JointSnapshot | None = None
        document, size = "", 0

        def announce() -> str:
            nonlocal joint
            joint, text = self.writing.announce(folder, keep, core, self._lineage)
            return text

        def look() -> str:
            nonlocal document, size
            assert joint is not None
            with giving_runs():
                content = {**self._content(random), **given}
            if core.rank != 0:
                content = {part: content[part] for part in ("modules", "optimizers")}
            document, tensors = saved_tree.encode_in_place(content)
            divided = {name: run for name, run in tensors.items() if isinstance(run, _C.Run)}
            whole = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
            alike = self._alike(whole)
            chiefs = {name: tensor for name, tensor in whole.items() if name not in alike}
            size = sum(tensor.nbytes for tensor in whole.values()) + sum(run.whole_bytes for run in divided.values())
            return joint.look(announced, chiefs, alike, divided)

        def copy() -> bool:
            assert joint is not None
            return self.writing.copy(joint, looked)

        def write_alone() -> None:
            content = {**self._content(random), **given}
            if core.rank == 0:
                document, tensors = saved_tree.encode(content)
                self.writing.write(folder, keep, tensors, self._metadata(document))

        try:
            announced = told_by_all(core, "save", announce)
            random = self._random()
            saved_loaders.note_ranks(core, self._preparation.loaders, given["loaders"], own)
            looked = told_by_all(core, "save", look)
            if together(core, "save", copy):
                assert joint is not None
                self.writing.start(joint, size, self._metadata(document), self._options.timeout)
                return
        finally:
            if joint is not None:
                joint.close()
        together(core, "save", write_alone)

    def _alike(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that are the same on all ranks: parameters, and what is kept of them by optimizers that do the same
        everywhere."""
        modules, optimizers = self._preparation.modules, self._preparation.optimizers
        names = {
            f"modules/{number}/{name}"
            for number, replicated in enumerate(modules)
            for name, _ in replicated.module.named_parameters(remove_duplicate=False)
        }
        known = tuple(
            f"optimizers/{number}/state/"
            for number, prepared in enumerate(optimizers)
            if prepared.is_flat or type(prepared.optimizer).__module__.startswith("torch.optim.")
        )
        return {name: tensor for name, tensor in tensors.items() if name in names or name.startswith(known)}

    def _metadata(self, document: str) -> Metadata:
        return metadata_of(
            document, {"muster.format": FORMAT, "muster.lineage": self._lineage, "steps": self._core.steps}
        )

    def load(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> dict[str, Any] | None:
        """As `Strategy.load`."""
        self._check_callable("load")
        if self._core.has_servers:
            raise InvalidArgument(
                "parameter servers hold values and state from the first step on; load() before it, in a new job"
            )
        joins = self._core.joins
        alone = joins or self._core.num_workers == 1

        def prepare() -> None:
            check_is_path("load", folder)
            for name, given in state.items():
                if not callable(getattr(given, "load_state_dict", None)):
                    raise InvalidArgument(
                        f"{name}= is a {type(given).__name__} without load_state_dict(); values that were saved are "
                        "in what load() returns: leave it out"
                    )
            self.writing.finish()

        def compared() -> dict[str, Any]:
            saved = checkpoint.content or with_all_parts(saved_tree.decode(checkpoint.document, checkpoint.tensors))
            try:
                compare_state(saved["state"], state)
                if not joins:
                    saved["tables"] = self._tables.place(saved, self._preparation.modules)
                    self._compare(saved)
            except LayoutMismatch as error:
                raise LayoutMismatch(f"'{checkpoint.place(folder)}': {error}") from error
            return saved

        def take() -> None:
            def take_objects() -> None:
                for name, given in state.items():
                    given.load_state_dict(state_of_object(saved["state"][name]))

            if joins:  # it has the rest from the servers, later ones
                take_objects()
                return
            if saved["modules"] is not None and saved["optimizers"] is not None:
                modules = [module.module for module in self._preparation.modules]
                saved_optimizer.follow_dtypes(self._core, modules, self._preparation.optimizers, saved)

            def take_objects_and_modules() -> None:
                take_objects()
                with leaving_rows_out():
                    saved_modules.take([*_pairs(self._preparation.modules, saved["modules"])])

            try:
                self._take_optimizers(saved, take_objects_and_modules)
            except Exception as error:
                error.add_note(f"while '{checkpoint.place(folder)}' was loaded")
                raise
            self._take(saved)

        self._together("load", prepare, alone=alone)
        snapshot = _C.read_asked_snapshot(Path(folder), None if alone else self._core)
        found = self._together("load", lambda: snapshot and found_in(*snapshot), alone=alone)
        if not alone:
            found = self._tell(found)
        if found is None:
            return None
        checkpoint, self._lineage = found, found.lineage or self._lineage
        saved = self._together("load", compared, alone=alone)
        self._together("load", take, alone=alone)
        return {name: kept["value"] for name, kept in saved["state"].items() if "value" in kept and name not in state}

    def _tell(self, found: Found | None) -> Found | None:
        """What the chief found. Collective."""
        theirs = None
        if found is not None and found.content is not None:
            tables = found.content["tables"] or ()
            theirs = (for_others(found.tensors, tables, self._preparation.modules), found.document, found.name)
        told: Any = self._collectives.send(theirs)
        return found if found is not None or told is None else Found(*told)

    def _check_callable(self, what: str) -> None:
        self._preparation.check_open()
        if not self.writing.is_of_this_process:
            raise InvalidArgument(f"{what}() was called in a fork of the strategy's process; call it in that one")
        if self._collectives.is_in_step:
            raise InvalidArgument(f"{what}() was called inside a step; call it between steps, on every rank")
        self._core.check_alone(what)
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
        return (mine and self._core.rank == 0) if self._has_servers else self.number_of_chief(int(mine)) == 1

    def kept_metric(self, folder: Path) -> tuple[float, str] | None:
        """The metric and mode that best() wrote to the checkpoint that load() would take from a folder, once nothing is
        being written. Collective, of several workers that save together."""
        self._check_callable("best")
        self._together("best", self.writing.finish)
        return _C.kept_metric(folder, self._core)

    def number_of_chief(self, number: int) -> int:
        """The chief's `number`. Collective."""
        if self._core.num_workers == 1:
            return number
        return int(self._core.broadcast([torch.tensor(number)], 0)[0])

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

    def _random(self) -> dict[str, Tensor]:
        """The states of generators, of all workers that save together. Collective where there are several."""
        random = random_states.states_here(self._core.devices)
        if self.saves_alone:
            return random
        gathered: dict[str, Tensor] = self._collectives.gather(random)
        return gathered

    def _content(self, random: Mapping[str, Tensor], cut: _C.CutWriting | None = None) -> dict[str, Any]:
        """`random`: of _random(). `cut`: with whom parameter servers write what they hold; stand-ins are here in its
        place."""
        core = self._core
        modules, optimizers = self._preparation.modules, self._preparation.optimizers
        others, cuda = {name: states for name, states in random.items() if name != "torch"}, random["cuda"]
        with leaving_rows_out():
            states = [replicated.state_dict() for replicated in modules]
            if cut is not None:
                leave_to_servers(cut, core, modules, states)
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
            "units": self._units(),
            "generators": random["torch"],
            "random": {**others, "cuda": cuda if cuda.any() else None},
        }

    def _loss_scales(self) -> list[dict[str, Any]]:
        rule = loss_scale_rule(self._options)
        if rule is None:
            return []
        return [
            {"optimizers": positions, "scale": LossScaler(self._core, number, rule).state_dict()}
            for number, positions in self._sets()
        ]

    def _units(self) -> list[dict[str, Any]]:
        units = ((positions, self._core.unit(number)) for number, positions in self._sets())
        return [{"optimizers": positions, "unit": unit} for positions, unit in units if unit is not None]

    def _sets(self) -> list[tuple[int, list[int]]]:
        """Each set's number, and the positions of its optimizers."""
        sets = self._stepping.sets
        at = {id(prepared): position for position, prepared in enumerate(self._preparation.optimizers)}
        return [(number, [at[id(prepared)] for prepared in sets.optimizers_of(number)]) for number in sets.numbers()]

    def _together(self, what: str, act: Callable[[], _T], *, alone: bool = False) -> _T:
        """As `telling.together`, unless `alone`."""
        return act() if alone else together(self._core, what, act)

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
                saved_modules.compare(module, tensors, f"module {number}")
        for number, (optimizer, theirs) in enumerate(_pairs(optimizers, saved["optimizers"])):
            saved_optimizer.compare(self._core, optimizer, theirs, f"optimizer {number}")
        for number, (loader, theirs) in enumerate(_pairs(loaders, saved["loaders"])):
            place = saved_loaders.of_this_rank(self._core, loader, theirs)
            for states in (place["generators"], place.get("generators_now", place["generators"])):
                compare_generators(loader.generators, states, f"loader {number}")
            compare_place(loader, place, f"loader {number}")

    def _take_optimizers(self, saved: dict[str, Any], then: Callable[[], None]) -> None:
        """Loads them, and calls `then`. Where that or torch raises, they are as they were."""
        optimizers = self._preparation.optimizers
        before = [(each.optimizer, each.optimizer.state, each.optimizer.param_groups) for each in optimizers]
        try:
            for prepared, theirs in _pairs(optimizers, saved["optimizers"]):
                prepared.load(saved_optimizer.with_numbers(self._core, prepared, theirs))
            then()
        except BaseException:
            for optimizer, state, groups in before:
                optimizer.state, optimizer.param_groups = state, groups
            raise

    def _take(self, saved: dict[str, Any]) -> None:
        self._tables.take(saved["tables"])
        for loader, theirs in _pairs(self._preparation.loaders, saved["loaders"]):
            saved_loaders.take_place(loader, saved_loaders.of_this_rank(self._core, loader, theirs))
        for scale in saved["loss_scales"] or ():
            number = self._set_of(scale["optimizers"])
            LossScaler(self._core, number, loss_scale_rule(self._options)).load_state_dict(scale["scale"])
        core, strategy, generators, others = self._core, saved["strategy"], saved["generators"], saved["random"]
        if strategy is not None and strategy["replicas"] == core.num_replicas:  # others have other usual parts
            for each in saved["units"] or ():
                core.set_unit(self._set_of(each["optimizers"]), each["unit"])
        if strategy is None:
            strategy = {"steps": core.steps, "calls": core.calls, "seed": self._host.seed}
        core.go_on_after(strategy["steps"], strategy["calls"], int(strategy["seed"]))
        if generators is not None and len(generators) == core.num_workers:
            torch.random.set_rng_state(generators[core.rank].clone())  # torch takes no view
        if others is not None and len(others["python"]) == core.num_workers:
            as_many = others["cuda"] is not None and len(others["cuda"]) == core.num_replicas
            others = {**others, "cuda": others["cuda"] if as_many else None}
            random_states.restore(others, core.rank, core.first_replica, core.devices)

    def _set_of(self, positions: Sequence[int]) -> int:
        optimizers = self._preparation.optimizers
        return self._stepping.sets.set_of([optimizers[position].optimizer for position in positions])


def _pairs(ours: Sequence[_T], saved: Sequence[Any] | None) -> Iterator[tuple[_T, Any]]:
    return iter(()) if saved is None else zip(ours, saved, strict=True)
