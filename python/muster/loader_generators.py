"""The generators that the user gave to a loader and its sampler, across passes that are cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from muster.tasks import generators_of

__all__ = ["LoaderGenerators"]

_BEGAN, _FIRST, _NOW = "generators", "generators_first", "generators_now"
_DRAWS, _WORKERS = "generators_draws", "workers_begun"


class LoaderGenerators:
    """A loader's generators, which other loaders and the user may draw from, too.

    A pass draws twice: when it begins, the seed of its DataLoader workers, and when its sampler is asked for batches.
    One that goes on draws both anew, each from the states that there were before. What others drew since, and in
    between, stays. Owned by the thread that iterates.
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
        self._first: list[Tensor] = []
        """Of the same pass, as of before its sampler was asked for the first time."""
        self._num_draws = 0
        """How often the sampler of the same pass was asked."""
        self.to_draw_anew = 0
        """How often a pass that goes on asked its sampler until it was saved, while it has not done so again."""
        self._is_asked_anew = False
        """Whether the pass under way is one that asks its sampler again."""
        self._has_seed = False
        """Whether the seed of the workers of the pass under way was drawn."""
        self._knows_others = False
        """Whether a loaded state has what others left."""
        self._others: list[Tensor] | None = None
        """What others left, while a pass draws anew."""

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
            state |= {_NOW: self.states(), _DRAWS: self._num_draws}
            if self._first:
                state[_FIRST] = list(self._first)
        if self._keeps_workers:
            state[_WORKERS] = self._had_workers if is_under_way else self._has_workers
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, skipped: int) -> None:
        """Takes what `fit` lets pass. `skipped`: batches of the middle of a pass."""
        self._began = list(state.get(_BEGAN, ()))
        self._first = list(state.get(_FIRST, ()))
        self._knows_others = _NOW in state
        self._set(list(state.get(_NOW, self._began)))
        self._goes_on = skipped > 0 or _NOW in state
        self._num_draws = max(int(state.get(_DRAWS, skipped)), skipped)
        self._others = None
        self._has_workers = state.get(_WORKERS) is True

    def fit(self, state: Mapping[str, Any]) -> bool:
        """Whether it has states of as many generators."""
        began = state.get(_BEGAN, ())
        others = (state.get(_NOW, began), state.get(_FIRST, began))
        return len(began) == len(self.all) and all(len(states) == len(self.all) for states in others)

    def forget(self) -> None:
        """Another epoch was asked for than the loaded one."""
        self._goes_on = False

    def begin_pass(self, *, draws_anew: bool) -> None:
        """A pass begins, before it draws anything. `draws_anew`: it is the loaded one, and `end_drawing_anew` is
        called."""
        self._others = None
        self.to_draw_anew = self._num_draws if self._goes_on and draws_anew else 0
        if self._goes_on:
            self._others = self.states() if draws_anew and self._knows_others else None
            self._set(self._began)
        self._is_asked_anew, self._has_seed = self.to_draw_anew > 0, False
        if not self.to_draw_anew:
            self._first, self._num_draws = [], 0
        self._goes_on = False
        self._began = self.states()
        self._had_workers = self._has_workers

    def end_beginning(self) -> None:
        """The seed of the pass's DataLoader workers was drawn; where there are some, the sampler was asked, too."""
        self._has_seed = True
        if self.to_draw_anew and self._others is not None:
            self._first = self._first or self.states()
            self._set(self._others)
            self._others = None

    def begin_drawing(self) -> None:
        """The sampler is asked for the first time."""
        if self.to_draw_anew:
            if self._others is None and self._knows_others:
                self._others = self.states()
            self._set(self._first or self.states())
        self._first = self.states()

    def note_drawn(self) -> None:
        """The sampler was asked for a batch, and may have drawn."""
        self._num_draws += 1

    def end_drawing_anew(self) -> None:
        """The pass has asked as often as it had when it was saved."""
        if self._others is not None:
            self._set(self._others)
        self._others = None
        self.to_draw_anew = 0

    def of_workers(self, loader: DataLoader[Any]) -> torch.Generator | None:
        """What torch draws the seed of DataLoader workers from, once in a pass, whose readers may begin again; None
        where the loader has none, or they had theirs."""
        was_drawn_first = self._is_asked_anew and not self.to_draw_anew  # what the sampler draws came after it
        is_drawn = self._has_seed or was_drawn_first or (self._keeps_workers and self._has_workers)
        return None if is_drawn else loader.generator

    def note_workers(self, begun: bool) -> None:
        """Whether persistent workers have begun."""
        self._has_workers = begun

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self.all, states, strict=True):
            generator.set_state(state)
