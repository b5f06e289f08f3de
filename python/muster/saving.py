"""Strategy.save and Strategy.load: who writes a checkpoint, who reads it, and when."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from muster import _C, saved_loaders, saved_optimizer, saved_tree
from muster.collectives import Collectives
from muster.errors import InvalidArgument, LayoutMismatch
from muster.found_checkpoint import Found, check_is_path, found_in
from muster.joint_save import JointSave
from muster.kinds import is_count
from muster.loader_host import LoaderHost
from muster.options import StrategyOptions
from muster.preparing import Preparation
from muster.saved_content import SavedContent
from muster.saved_layout import FORMAT, Metadata, compare_state, metadata_of, state_of_object, with_all_parts
from muster.saved_tables import for_others
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
        collectives: Collectives,
        content: SavedContent,
    ) -> None:
        self._core = core
        self._options = options
        self._host = host
        self._preparation = preparation
        self._collectives = collectives
        self._content = content
        self._is_saving = False
        self._lineage = secrets.token_hex(8)
        """What tells its checkpoints from other jobs': that of the one that was loaded."""
        self.writing = Writing()
        """What ends with the strategy."""

    # --- writing ---

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

        def given() -> tuple[dict[str, Any], str]:
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
            return {"loaders": [*loaders, *self._preparation.awaited_places], "state": described}, own

        # Code of users comes before the first collective: where it raises on one rank, no other is left waiting.
        content, own = self._together("save", given, alone=self._has_servers)
        if not self.saves_alone:
            self._save_with_others(Path(folder), keep, content, own)
        elif not (self._core.has_servers and self._save_with_servers(Path(folder), keep, content)):
            document, tensors = saved_tree.encode({**self._content.of(self._content.random(alone=True)), **content})
            self.writing.write(Path(folder), keep, tensors, self._metadata(document))

    def _save_with_servers(self, folder: Path, keep: int | None, given: Mapping[str, Any]) -> bool:
        """False where servers cannot write to the folder, or an optimizer has a form of its own."""
        if any(map(saved_optimizer.has_own_form, self._preparation.optimizers)):
            return False
        with self.writing.with_servers(folder, keep, self._core) as cut:
            if cut is not None:
                content = {**self._content.of(self._content.random(alone=True), cut), **given}
                document, tensors = saved_tree.encode_in_place(content)
                self.writing.write_rest(cut, tensors, self._metadata(document))
            return cut is not None

    def _save_with_others(self, folder: Path, keep: int | None, given: dict[str, Any], own: str) -> None:
        """Collective. `given` is what user code gave, and `own` what other ranks are to know of this one's loaders."""
        core = self._core
        save = JointSave(core, self.writing, self._content, given, self._metadata)
        try:
            announced = told_by_all(core, "save", lambda: save.announce(folder, keep, self._lineage))
            random = self._content.random(alone=False)
            saved_loaders.note_ranks(core, self._preparation.loaders, given["loaders"], own)
            looked = told_by_all(core, "save", lambda: save.look(announced, random))
            if together(core, "save", lambda: save.copy(looked)):
                save.start(self._options.timeout)
                return
        finally:
            save.close()

        def write_alone() -> None:
            content = {**self._content.of(random), **given}
            if core.rank == 0:
                document, tensors = saved_tree.encode(content)
                self.writing.write(folder, keep, tensors, self._metadata(document))

        together(core, "save", write_alone)

    def _metadata(self, document: str) -> Metadata:
        return metadata_of(
            document, {"muster.format": FORMAT, "muster.lineage": self._lineage, "steps": self._core.steps}
        )

    # --- reading ---

    def load(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> dict[str, Any] | None:
        """As `Strategy.load`."""
        self._check_callable("load")
        core = self._core
        if core.has_servers:
            raise InvalidArgument(
                "parameter servers hold values and state from the first step on; load() before it, in a new job"
            )
        alone = core.joins or core.num_workers == 1
        self._together("load", lambda: self._check_load(folder, state), alone=alone)
        snapshot = _C.read_asked_snapshot(Path(folder), None if alone else core)
        found = self._together("load", lambda: snapshot and found_in(*snapshot), alone=alone)
        if not alone:
            found = self._tell(found)
        if found is None:
            return None
        checkpoint, self._lineage = found, found.lineage or self._lineage
        place = checkpoint.place(folder)
        saved = self._together("load", lambda: self._compared(checkpoint, place, state), alone=alone)
        self._together("load", lambda: self._take(saved, place, state), alone=alone)
        return {name: kept["value"] for name, kept in saved["state"].items() if "value" in kept and name not in state}

    def _check_load(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
        check_is_path("load", folder)
        for name, given in state.items():
            if not callable(getattr(given, "load_state_dict", None)):
                raise InvalidArgument(
                    f"{name}= is a {type(given).__name__} without load_state_dict(); values that were saved are in "
                    "what load() returns: leave it out"
                )
        self.writing.finish()

    def _tell(self, found: Found | None) -> Found | None:
        """What the chief found. Collective."""
        theirs = None
        if found is not None and found.content is not None:
            tables = found.content["tables"] or ()
            theirs = (for_others(found.tensors, tables, self._preparation.modules), found.document, found.name)
        told: Any = self._collectives.send(theirs)
        return found if found is not None or told is None else Found(*told)

    def _compared(self, found: Found, place: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint in `place` holds, by part. Raises LayoutMismatch where it is of other objects."""
        saved = found.content or with_all_parts(saved_tree.decode(found.document, found.tensors))
        try:
            compare_state(saved["state"], state)
            if not self._core.joins:
                self._content.compare(saved)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"'{place}': {error}") from error
        return saved

    def _take(self, saved: dict[str, Any], place: Path, state: Mapping[str, Any]) -> None:
        def take_objects() -> None:
            for name, given in state.items():
                given.load_state_dict(state_of_object(saved["state"][name]))

        if self._core.joins:  # it has the rest from the servers, later ones
            take_objects()
            return
        try:
            self._content.put_back(saved, take_objects)
        except Exception as error:
            error.add_note(f"while '{place}' was loaded")
            raise

    # --- policies ---

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

    def _together(self, what: str, act: Callable[[], _T], *, alone: bool = False) -> _T:
        """As `telling.together`, unless `alone`."""
        return act() if alone else together(self._core, what, act)
