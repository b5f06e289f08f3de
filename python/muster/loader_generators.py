"""The generators that the user gave to a loader and its sampler, across passes that are cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from muster.tasks import generators_of

__all__ = ["LoaderGenerators"]

_BEGAN, _NOW, _MOVED, _WORKERS = "generators", "generators_now", "generators_moved", "workers_begun"


class LoaderGenerators:
    """A loader's generators, which other loaders and the user may draw from, too.

    A pass that goes on draws anew, from the states at its beginning, what its sampler drew. Where others drew since,
    the generators then get the states that they had when the pass was saved. Owned by the thread that iterates.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.all = generators_of(loader)
        self._keeps_workers = loader.persistent_workers and loader.generator is not None
        self._has_workers = False
        """Whether torch has drawn the seed of persistent workers, which it does once."""
        self._had_workers = False
        """The same, as of the beginning of the pass under way."""
        self._goes_on = False
        """Whether a loaded pass goes on next."""
        self._began: list[Tensor] = []
        """As of the beginning of the pass under way, or of the one that goes on next."""
        self._drawn: list[Tensor] = []
        """After the last draw of that pass; empty where others had drawn since when it was saved."""
        self._others: list[Tensor] | None = None
        """What others left, of a pass that is drawing anew."""

    def states(self) -> list[Tensor]:
        """Of now."""
        return [generator.get_state() for generator in self.all]

    def began(self, *, is_under_way: bool) -> list[Tensor]:
        """As of the beginning of the pass under way or of the loaded one that goes on next, if any, or else of now."""
        return list(self._began) if is_under_way or self._goes_on else self.states()

    def state_dict(self, *, is_under_way: bool) -> dict[str, Any]:
        """For load_state_dict(): what a pass that goes on needs, or the next one."""
        state: dict[str, Any] = {_BEGAN: self.began(is_under_way=is_under_way)}
        if self.all and (is_under_way or self._goes_on):
            moved = self._others is not None or self._have_others_drawn()
            state |= {_NOW: self._others or self.states(), _MOVED: moved}
        if self._keeps_workers:
            state[_WORKERS] = self._had_workers if is_under_way else self._has_workers
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, goes_on: bool) -> None:
        """Takes what `check` lets pass. `goes_on`: it is of the middle of a pass."""
        self._began = list(state.get(_BEGAN, ()))
        now = list(state.get(_NOW, self._began))
        self._set(now)
        self._goes_on = goes_on or _NOW in state
        self._drawn = [] if state.get(_MOVED) else now
        self._others = None
        self._has_workers = state.get(_WORKERS) is True

    def fit(self, state: Mapping[str, Any]) -> bool:
        """Whether it has states of as many generators."""
        began = state.get(_BEGAN, ())
        return len(began) == len(self.all) and len(state.get(_NOW, began)) == len(self.all)

    def forget(self) -> None:
        """Another epoch was asked for than the loaded one."""
        self._goes_on = False

    def begin_pass(self, *, draws_anew: bool) -> None:
        """A pass begins. `draws_anew`: it is the loaded one, and `end_drawing_anew` is called."""
        self._others = None
        if self._goes_on:
            self._others = self.states() if draws_anew and self._have_others_drawn() else None
            self._set(self._began)
        self._goes_on = False
        self._began = self.states()
        self._had_workers = self._has_workers
        self.note_drawn()

    def note_drawn(self) -> None:
        """The loader drew."""
        self._drawn = self.states()

    def end_drawing_anew(self) -> None:
        """The pass has drawn what it had drawn when it was saved."""
        if self._others is not None:
            self._set(self._others)
        self._others = None

    def of_workers(self, loader: DataLoader[Any]) -> torch.Generator | None:
        """What torch draws the seed of DataLoader workers from; None where the loader has none, or they had theirs."""
        return None if self._keeps_workers and self._has_workers else loader.generator

    def note_workers(self, begun: bool) -> None:
        """Whether persistent workers have begun."""
        self._has_workers = begun

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self.all, states, strict=True):
            generator.set_state(state)

    def _have_others_drawn(self) -> bool:
        now = self.states()
        return len(now) != len(self._drawn) or not all(map(torch.equal, now, self._drawn))
