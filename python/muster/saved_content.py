"""What a strategy's checkpoint holds, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from muster import _C, random_states, saved_loaders, saved_modules, saved_optimizer
from muster.collectives import Collectives
from muster.errors import LayoutMismatch
from muster.loader_host import LoaderHost
from muster.options import StrategyOptions, loss_scale_rule
from muster.precision import LossScaler
from muster.preparing import Preparation
from muster.saved_tables import SavedTables, leave_to_servers
from muster.sharded_embedding import leaving_rows_out
from muster.stepping import Stepping

__all__ = ["SavedContent"]

_T = TypeVar("_T")


class SavedContent:
    """What the checkpoints of one strategy hold of it: everything but loaders' places, which other ranks have a part
    of, and what user code gives by name. Owned by the thread that steps."""

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

    # --- what is saved ---

    def random(self, *, alone: bool) -> dict[str, Tensor]:
        """The states of generators, of this worker `alone` or of all. Collective where these are several."""
        random = random_states.states_here(self._core.devices)
        if alone:
            return random
        gathered: dict[str, Tensor] = self._collectives.gather(random)
        return gathered

    def of(self, random: Mapping[str, Tensor], cut: _C.CutWriting | None = None) -> dict[str, Any]:
        """By part. `random`: of random(). `cut`: with whom parameter servers write what they hold; stand-ins are here
        in its place."""
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

    def alike(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of a document's tensors that are the same on all ranks: parameters, and what is kept of them by
        optimizers that do the same everywhere."""
        names = {
            f"modules/{number}/{name}"
            for number, replicated in enumerate(self._preparation.modules)
            for name, _ in replicated.module.named_parameters(remove_duplicate=False)
        }
        known = tuple(
            f"optimizers/{number}/state/"
            for number, prepared in enumerate(self._preparation.optimizers)
            if prepared.is_flat or type(prepared.optimizer).__module__.startswith("torch.optim.")
        )
        return {name: tensor for name, tensor in tensors.items() if name in names or name.startswith(known)}

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

    # --- what is put back ---

    def compare(self, saved: dict[str, Any]) -> None:
        """Raises LayoutMismatch, before anything is put back, where `saved` is of other objects. Its tables are placed,
        for put_back()."""
        saved["tables"] = self._tables.place(saved, self._preparation.modules)
        modules, optimizers = self._preparation.modules, self._preparation.optimizers
        for what, ours, theirs in (
            ("modules", modules, saved["modules"]),
            ("optimizers", optimizers, saved["optimizers"]),
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
        for number, (loader, theirs) in enumerate(zip(self._preparation.loaders, saved["loaders"] or (), strict=False)):
            saved_loaders.compare(self._core, loader, theirs, number)

    def put_back(self, saved: dict[str, Any], take_objects: Callable[[], None]) -> None:
        """Loads what compare() has seen, and calls `take_objects`, which loads what user code gave by name. Where that
        or an optimizer raises, optimizers are as they were."""
        modules, optimizers = self._preparation.modules, self._preparation.optimizers
        if saved["modules"] is not None and saved["optimizers"] is not None:
            saved_optimizer.follow_dtypes(self._core, [module.module for module in modules], optimizers, saved)
        before = [(each.optimizer, each.optimizer.state, each.optimizer.param_groups) for each in optimizers]
        try:
            for prepared, theirs in _pairs(optimizers, saved["optimizers"]):
                prepared.load(saved_optimizer.with_numbers(self._core, prepared, theirs))
            take_objects()
            with leaving_rows_out():
                saved_modules.take([*_pairs(modules, saved["modules"])])
        except BaseException:
            for optimizer, state, groups in before:
                optimizer.state, optimizer.param_groups = state, groups
            raise
        self._tables.take(saved["tables"])
        if saved["loaders"]:
            self._preparation.take_places(saved["loaders"])
        for scale in saved["loss_scales"] or ():
            number = self._set_of(scale["optimizers"])
            LossScaler(self._core, number, loss_scale_rule(self._options)).load_state_dict(scale["scale"])
        self._go_on_after(saved)

    def _go_on_after(self, saved: Mapping[str, Any]) -> None:
        """Takes over where training was, and the states of generators."""
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
