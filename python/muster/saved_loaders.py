"""The places of prepared loaders in a checkpoint. Of a sharded one, "ranks" has what is each rank's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from muster import _C, stream_states
from muster.loader import Loader

__all__ = ["note_ranks", "of_this_rank", "states_of", "take_place"]


def states_of(loaders: Sequence[Loader[Any]]) -> tuple[list[dict[str, Any]], str]:
    """The state of each, and what note_ranks() tells other ranks of them. Calls code of users. Local."""
    states = [_state_of(loader) for loader in loaders]
    own = [
        {name: state[name] for name in ("generators", "streams") if name in state}
        for loader, state in zip(loaders, states, strict=True)
        if loader.is_sharded
    ]
    return states, stream_states.packed(own)


def note_ranks(
    core: _C.StrategyCore, loaders: Sequence[Loader[Any]], states: Sequence[dict[str, Any]], own: str
) -> None:
    """Adds what is each rank's own to the states of sharded loaders. Collective where there are any."""
    sharded = [state for loader, state in zip(loaders, states, strict=True) if loader.is_sharded]
    if not sharded:
        return
    everyones = [stream_states.unpacked(text) for text in core.exchange_texts(own)]
    for state, *ranks in zip(sharded, *everyones, strict=True):
        if any(each["generators"] or "streams" in each for each in ranks):
            state["ranks"] = ranks


def of_this_rank(core: _C.StrategyCore, loader: Loader[Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A loader's state, with what is this rank's own, where as many ranks saved."""
    ranks = saved.get("ranks")
    if not loader.is_sharded or ranks is None or len(ranks) != core.num_workers:
        return saved
    return {**saved, **ranks[core.rank]}


def take_place(loader: Loader[Any], saved: Mapping[str, Any]) -> None:
    """The loader goes on there."""
    if loader.has_place:
        loader.load_state_dict(saved)
        return
    loader.epoch = saved["epoch"]
    if saved["batches"] > 0:
        logging.getLogger("muster").warning(
            "parameter servers deal the batches, so that epoch %d begins anew: its first %d batches come once more",
            saved["epoch"],
            saved["batches"],
        )


def _state_of(loader: Loader[Any]) -> dict[str, Any]:
    """Batches that parameter servers deal have no place in one worker: their epoch begins anew."""
    return loader.state_dict() if loader.has_place else {"epoch": loader.epoch, "batches": 0, "generators": []}
