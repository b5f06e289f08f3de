"""Tables in a checkpoint: rows of embeddings that parameter servers alone hold.

A checkpoint has the rows that are no longer what the embedding begins with, and what gives all others; under another
strategy, or in an embedding without ``on_servers``, they become a dense weight with its optimizer's state, and the
other way round.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muster import _C
from muster.errors import InvalidArgument, LayoutMismatch
from muster.prepared_optimizer import PreparedOptimizer
from muster.replicated import Replicated
from muster.sharded_embedding import ShardedEmbedding

__all__ = ["SavedTables", "for_others", "leave_to_servers", "with_dense_weights"]

_BLOCK = 1 << 20
"""Elements that are compared at once."""


class SavedTables:
    """Those of the prepared modules. Owned by the thread that steps."""

    def __init__(self, core: _C.StrategyCore) -> None:
        self._core = core
        self._loaded: dict[int, tuple[list[str], bool]] = {}
        """By parameter's number, of what servers will begin with: kinds of state, and whether steps are counted."""

    def state(
        self, modules: Sequence[Replicated[Any]], optimizers: Sequence[PreparedOptimizer]
    ) -> list[dict[str, Any]]:
        """What a checkpoint keeps of them."""
        return [
            self._state_of(embedding, places, optimizers)
            for embedding, places in _on_servers([replicated.module for replicated in modules])
        ]

    def _state_of(
        self,
        embedding: ShardedEmbedding,
        places: list[list[Any]],
        optimizers: Sequence[PreparedOptimizer],
    ) -> dict[str, Any]:
        index = self._core.find(embedding.weight)
        rows, values, states, steps, seed = _C.table_contents(self._core, index)
        table: dict[str, Any] = {
            "places": places,
            "num_rows": embedding.num_embeddings,
            "dim": embedding.dim,
            "init": embedding.init,
            "scale": float(embedding.scale),
            "seed": str(seed),
            "optimizer": None,
            "parameter": None,
            "rows": rows,
            "values": values,
        }
        kinds, counts_steps = self._loaded.get(index, ([], False))
        for number, prepared in enumerate(optimizers):
            if index in prepared.indices():
                table |= {"optimizer": number, "parameter": self._core.name_of(index)}
                if self._core.has_servers:
                    kinds, counts_steps = prepared.kinds_of_state()
        count = states.size(1) // (1 if embedding.row_wise_adagrad else embedding.dim)
        columns = states.chunk(count, 1) if count else ()
        return table | {
            "step": torch.tensor(float(steps)) if counts_steps else None,
            # Of kinds that the optimizer's options leave out there are no columns.
            "state": {
                # A stand-in is known by its place.
                kind: each if each.is_meta else each.contiguous()
                for kind, each in zip(kinds, columns, strict=False)
            },
        }

    def place(
        self, saved: dict[str, Any], modules: Sequence[Replicated[Any]]
    ) -> list[tuple[ShardedEmbedding, dict[str, Any]]]:
        """Brings `saved`, the parts of a checkpoint, into the form that the prepared modules need: embeddings with
        ``on_servers`` get tables, which are returned, and all others dense weights in `saved` itself. Raises
        LayoutMismatch for a table of another size."""
        if saved["modules"] is None:
            return []
        tables = {tuple(place): table for table in saved["tables"] or () for place in table["places"]}
        placed: list[tuple[ShardedEmbedding, dict[str, Any]]] = []
        for embedding, places in _on_servers([replicated.module for replicated in modules]):
            table = tables.get(tuple(places[0]))
            if table is None:
                table = self._sparse(saved, embedding, places)
            if table is None:  # comparing modules says what is missing
                continue
            number, name = places[0]
            if (table["num_rows"], table["dim"]) != (embedding.num_embeddings, embedding.dim):
                raise LayoutMismatch(
                    f"'{name}' of module {number} has shape {(embedding.num_embeddings, embedding.dim)}, and in the "
                    f"checkpoint {(table['num_rows'], table['dim'])}; build the model that was saved"
                )
            placed.append((embedding, table))
        for table in saved["tables"] or ():
            if not any(table is each for _, each in placed):
                _make_dense(saved, table)
        return placed

    def take(self, placed: Sequence[tuple[ShardedEmbedding, dict[str, Any]]]) -> None:
        """Lets servers begin with tables that `place` gave."""
        for embedding, table in placed:
            index = self._core.find(embedding.weight)
            state = list(table["state"].values())
            states = torch.cat(state, 1) if state else torch.empty(len(table["rows"]), 0)
            steps = 0 if table["step"] is None else int(table["step"])
            seed = int(table["seed"])
            _C.begin_with(
                self._core,
                index,
                table["init"],
                table["scale"],
                seed,
                table["rows"].contiguous(),
                table["values"].contiguous(),
                states,
                steps,
            )
            embedding.init, embedding.scale, embedding.seed = table["init"], table["scale"], seed
            self._loaded[index] = (list(table["state"]), table["step"] is not None)

    def _sparse(
        self, saved: dict[str, Any], embedding: ShardedEmbedding, places: list[list[Any]]
    ) -> dict[str, Any] | None:
        """The table of a dense weight, which goes from `saved`: rows that differ from the embedding's first ones."""
        number, name = places[0]
        weight = saved["modules"][number].get(name) if number < len(saved["modules"]) else None
        if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype != torch.float32:
            return None
        index = self._core.find(embedding.weight)
        parameter = self._core.name_of(index)
        *_, seed = _C.table_contents(self._core, index)
        state: dict[str, Tensor] = {}
        step = None
        optimizers = list(saved["optimizers"] or ())
        for position, of in enumerate(optimizers):
            values = of["state"].get(parameter)
            if values is None:
                continue
            state = {kind: value for kind, value in values.items() if isinstance(value, Tensor) and value.dim() == 2}
            step = values.get("step")
            optimizers[position] = {
                **of,
                "state": {key: value for key, value in of["state"].items() if key != parameter},
            }
        if saved["optimizers"] is not None:
            saved["optimizers"] = optimizers
        modules = list(saved["modules"])
        for number, name in places:
            modules[number] = {key: value for key, value in modules[number].items() if key != name}
        saved["modules"] = modules
        block = max(_BLOCK // weight.size(1), 1)
        found = []
        for first in range(0, len(weight), block):
            part = weight[first : first + block]
            begun = torch.empty_like(part, memory_format=torch.contiguous_format)
            _C.fill_rows(begun, embedding.init, float(embedding.scale), seed, first)
            differs = part.ne(begun).any(1)
            for columns in state.values():
                differs |= columns[first : first + block].ne(0).any(1)
            found.append(differs.nonzero().view(-1) + first)
        rows = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
        return {
            "num_rows": len(weight),
            "dim": weight.size(1),
            "init": embedding.init,
            "scale": float(embedding.scale),
            "seed": str(seed),
            "rows": rows,
            "values": weight[rows],
            "step": step,
            "state": {kind: columns[rows] for kind, columns in state.items()},
        }


def for_others(
    tensors: Mapping[str, Tensor], tables: Sequence[Mapping[str, Any]], modules: Sequence[Replicated[Any]]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint as ranks need them that do not begin the job: without rows that servers alone get.
    `tables`: the checkpoint's."""
    theirs = {tuple(places[0]) for _, places in _on_servers([replicated.module for replicated in modules])}
    prefixes = tuple(
        f"tables/{number}/"
        for number, table in enumerate(tables)
        if any(tuple(place) in theirs for place in table["places"])
    )
    return {
        name: tensor[:0] if name.startswith(prefixes) and tensor.dim() > 0 else tensor
        for name, tensor in tensors.items()
    }


def with_dense_weights(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a checkpoint without tables: their weights and state are dense. Raises InvalidArgument for a table
    that memory does not hold."""
    dense = dict(saved)
    for table in dense.pop("tables", None) or ():
        _make_dense(dense, table)
    return dense


def _on_servers(modules: Sequence[nn.Module]) -> Iterator[tuple[ShardedEmbedding, list[list[Any]]]]:
    """Embeddings whose rows servers alone hold, and where their weights are: numbers of modules, and names."""
    places: dict[ShardedEmbedding, list[list[Any]]] = {}
    for number, module in enumerate(modules):
        for path, part in module.named_modules(remove_duplicate=False):
            if isinstance(part, ShardedEmbedding) and part.on_servers:
                places.setdefault(part, []).append([number, f"{path}.weight" if path else "weight"])
    yield from places.items()


def _make_dense(saved: dict[str, Any], table: Mapping[str, Any]) -> None:
    """Puts a table's whole weight and state where modules and optimizers have theirs. Copies what it changes of
    `saved`."""
    rows, dim = table["num_rows"], table["dim"]
    widths = [dim, *(values.size(1) for values in table["state"].values())]
    needed = 4 * rows * sum(widths)
    if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise InvalidArgument(
            f"'{table['places'][0][1]}' is a table of {rows:,} rows on parameter servers, which takes {needed:,} bytes "
            "as a dense weight with its state: more than this machine has; use ParameterServerStrategy and "
            "on_servers=True"
        )
    weight = torch.empty(rows, dim)
    _C.fill_rows(weight, table["init"], table["scale"], int(table["seed"]))
    weight.index_copy_(0, table["rows"], table["values"])
    modules = list(saved["modules"])
    for number, name in table["places"]:
        modules[number] = {**modules[number], name: weight}
    saved["modules"] = modules
    if saved.get("optimizers") is None or table["optimizer"] is None or not (table["state"] or table["step"]):
        return
    values = {
        kind: torch.zeros(rows, columns.size(1)).index_copy_(0, table["rows"], columns)
        for kind, columns in table["state"].items()
    }
    if table["step"] is not None:
        values = {"step": table["step"], **values}
    optimizers = list(saved["optimizers"])
    of = optimizers[table["optimizer"]]
    optimizers[table["optimizer"]] = {**of, "state": {**of["state"], table["parameter"]: values}}
    saved["optimizers"] = optimizers


def _is_same_memory(value: object, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == parameter.dtype
        and (value.data_ptr(), value.shape, value.stride())
        == (parameter.data_ptr(), parameter.shape, parameter.stride())
    )


def leave_to_servers(
    cut: _C.CutWriting,
    core: _C.StrategyCore,
    modules: Sequence[Replicated[Any]],
    states: Sequence[dict[str, Any]],
) -> None:
    """Puts stand-ins in the place of what servers write of modules' `states`."""
    for replicated, state in zip(modules, states, strict=True):
        for name, parameter in replicated.module.named_parameters(remove_duplicate=False):
            # What a hook of the module's made of it is the chief's.
            is_it = _is_same_memory(state.get(name), parameter)
            stand_in = cut.stand_in(core.find(parameter)) if is_it else None
            if stand_in is not None:
                state[name] = stand_in
