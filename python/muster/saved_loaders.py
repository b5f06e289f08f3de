"""The places of prepared loaders in a checkpoint. Of a sharded one, "ranks" has what is each rank's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from muster import _C, stream_states
from muster.loader import Loader
from muster.loader_host import LoaderHost
from muster.saved_layout import compare_generators, compare_place

__all__ = ["compare", "note_ranks", "states_of", "take_place", "tell_servers"]


def states_of(loaders: Sequence[Loader[Any]]) -> tuple[list[dict[str, Any]], str]:
    """The state of each, and what note_ranks() tells other ranks of them. Calls code of users. Local."""
    states = [_state_of(loader) for loader in loaders]
    own = [
        {name: value for name, value in state.items() if name not in ("epoch", "batches")}
        for loader, state in zip(loaders, states, strict=True)
        if loader.is_sharded
    ]
    return states, stream_states.packed(own)


def note_ranks(
    core: _C.StrategyCore, loaders: Sequence[Loader[Any]], states: Sequence[dict[str, Any]], own: str
) -> None:
    """Adds what is each rank's own to the states of sharded loaders. Behind theirs, `states` may have others.
    Collective where there are any sharded ones."""
    sharded = [state for loader, state in zip(loaders, states, strict=False) if loader.is_sharded]
    if not sharded:
        return
    everyones = [stream_states.unpacked(text) for text in core.exchange_texts(own, "save()")]
    for state, *ranks in zip(sharded, *everyones, strict=True):
        if any(each["generators"] or "streams" in each for each in ranks):
            state["ranks"] = ranks


def compare(core: _C.StrategyCore, loader: Loader[Any], saved: Mapping[str, Any], number: int) -> None:
    """Raises LayoutMismatch where the loader with that number cannot go on where a checkpoint has it."""
    place = _of_this_rank(core, loader, saved)
    for states in (place["generators"], place.get("generators_now", place["generators"])):
        compare_generators(loader.generators, states, f"loader {number}")
    compare_place(loader, place, f"loader {number}")


def take_place(core: _C.StrategyCore, loader: Loader[Any], saved: Mapping[str, Any]) -> None:
    """The loader goes on there, once servers that deal its batches were told."""
    saved = _of_this_rank(core, loader, saved)
    if loader.dealt is None:
        epoch, passes = saved["epoch"], saved.get("passes")
        loader.load_state_dict({**saved, "batches": _batches_in_order(epoch, passes)} if passes else saved)
        return
    loader.epoch = saved["epoch"]
    for generator, state in zip(loader.generators, saved["generators"], strict=True):
        generator.set_state(state)


def tell_servers(host: LoaderHost, number: int, saved: Mapping[str, Any]) -> None:
    """Where the loader with that number is in a checkpoint, before servers that deal its batches are connected."""
    if host.passes is None or not host.passes.are_dealt:
        return
    known = [(each["epoch"], each["batches"], each["next"], each["undone"]) for each in saved.get("passes") or ()]
    host.passes.go_on(number, known if saved["batches"] == 0 else [(saved["epoch"], 0, saved["batches"], [])])


def _of_this_rank(core: _C.StrategyCore, loader: Loader[Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A loader's state, with what is this rank's own, where as many ranks saved."""
    ranks = saved.get("ranks")
    if not loader.is_sharded or ranks is None or len(ranks) != core.num_workers:
        return saved
    return {**saved, **ranks[core.rank]}


def _batches_in_order(epoch: int, passes: Sequence[Mapping[str, Any]]) -> int:
    """Those of the epoch up to the first that is undone, for a worker that has its batches for itself."""
    for each in passes:
        if each["epoch"] == epoch:
            first: int = min(each["undone"], default=each["next"])
            again = each["next"] - first - len(each["undone"])
            if again > 0:
                logging.getLogger("muster").warning(
                    "epoch %d goes on with batch %d: parameter servers had dealt its batches, and %d that were trained "
                    "on come once more",
                    epoch,
                    first,
                    again,
                )
            return first
    return 0


def _state_of(loader: Loader[Any]) -> dict[str, Any]:
    if loader.dealt is None:
        return loader.state_dict()
    servers, number = loader.dealt
    passes = [
        {"epoch": epoch, "batches": batches, "next": following, "undone": undone}
        for epoch, batches, following, undone in servers.passes_of(number, loader.epoch)
    ]
    return {
        "epoch": loader.epoch,
        "batches": 0,
        "generators": loader.generator_states,
        "passes": passes,
        **loader.extent,
    }
