"""What a strategy watches of a prepared module between its calls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from muster import _C
from muster.errors import InvalidArgument

__all__ = ["ModuleWatch"]


class ModuleWatch:
    """The replicas of one prepared module. Owned by the thread that prepares and steps.

    User code between steps acts on replica 0's module: the others take over its training mode, and the buffers that
    were written since `note_buffers`. A parameter or submodule that was replaced since prepare() would no longer be
    trained, so that is refused by name. Buffers may be replaced.
    """

    def __init__(self, replicas: Sequence[nn.Module], core: _C.StrategyCore, number: int) -> None:
        self._replicas = replicas
        self._core = core
        self._number = number
        self._tables: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._members: list[Any] = []
        for module in replicas[0].modules():
            for table in (module._parameters, module._modules):
                self._tables += [table] * len(table)
                self._names += table.keys()
                self._members += table.values()
        self._modules = [] if len(replicas) == 1 else list(zip(*(m.modules() for m in replicas), strict=True))
        self._buffers = [_places_of_buffers(module) for module in replicas]
        self._versions: list[tuple[Tensor, int]] = []
        self.note_buffers()

    def follow_first_replica(self) -> None:
        """Raises InvalidArgument naming a parameter or submodule that was replaced."""
        # Thousands of members in every step: in C.
        if not all(map(operator.is_, map(dict.get, self._tables, self._names), self._members)):
            self._refuse()
        for first, *others in self._modules:
            for other in others:
                if other.training != first.training:
                    other.training = first.training
        for local in range(len(self._replicas)):
            self.adopt_buffers(local)
        for at, (noted, version) in enumerate(self._versions):
            first, *others = (places[at][2] for places in self._buffers)
            if first is not noted or first._version != version:
                with torch.no_grad():
                    for other in others:
                        other.copy_(first)

    def _refuse(self) -> NoReturn:
        members = zip(self._tables, self._names, self._members, strict=True)
        table, name, member = next((t, n, m) for t, n, m in members if t.get(n) is not m)
        owners = self._replicas[0].named_modules()
        prefix = next(p for p, module in owners if table is module._parameters or table is module._modules)
        kind = "submodule" if isinstance(member, nn.Module) else "parameter"
        raise InvalidArgument(
            f"{kind} '{prefix}{'.' if prefix else ''}{name}' was replaced since prepare(), so it would not be trained; "
            "write into it instead (load_state_dict without assign=True, copy_ under no_grad), or make the change "
            "before prepare()"
        )

    def adopt_buffers(self, local: int) -> None:
        """Tells the core of a replica's buffers that are other tensors than before. Called by its thread in a step."""
        if any(table.get(name) is not buffer for table, name, buffer in self._buffers[local]):
            self._buffers[local] = _places_of_buffers(self._replicas[local])
            self._core.set_buffers(self._number, local, [buffer for _, _, buffer in self._buffers[local]])

    def note_buffers(self) -> None:
        """Whatever is written to replica 0's buffers from here on is the user's."""
        if len(self._replicas) > 1:
            self._versions = [(buffer, buffer._version) for _, _, buffer in self._buffers[0]]


def _places_of_buffers(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    # Each tensor once, in the order of Module.buffers().
    places: dict[int, tuple[dict[str, Any], str, Tensor]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), (owner._buffers, name, buffer))
    return list(places.values())
