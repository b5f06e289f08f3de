"""What a strategy watches of a prepared module between its calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from muster import _C
from muster.attributes import FOLLOWED_OTHERWISE, SHARED_TYPES, follow
from muster.errors import InvalidArgument
from muster.hooks import HOOK_TABLES, followed_hook

__all__ = ["ModuleWatch"]


class ModuleWatch:
    """The replicas of one prepared module. Owned by the thread that prepares and steps.

    The replicas' modules are copies, not one module: forward may write to the module, and two threads that do so at
    once would not see what one process alone sees. So user code between calls acts on replica 0's module, and when a
    call begins the others take over what it changed since `note` (`muster.replicated` says what). A parameter or
    submodule that was replaced since prepare() would no longer be trained, so that is refused by name. Buffers may be
    replaced.
    """

    def __init__(
        self,
        replicas: Sequence[nn.Module],
        core: _C.StrategyCore,
        number: int,
        counterparts: Callable[[int], dict[int, Any]],
        leaf_types: tuple[type, ...],
    ) -> None:
        """`counterparts(replica)`: of all parts of replica 0's prepared modules, by id, to copy attributes with.
        Objects of `leaf_types` that attributes refer to are not looked into."""
        self._replicas = replicas
        self._core = core
        self._number = number
        self._counterparts = counterparts
        self._tables: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._own_tables: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._prefixes: list[str] = []
        for prefix, module in replicas[0].named_modules():
            for table in (module._parameters, module._modules):
                self._prefixes += [prefix and prefix + "."] * len(table)
                self._tables += [table] * len(table)
                self._names += table.keys()
                self._members += table.values()
                self._own_tables.append(table)
        self._modules = [] if len(replicas) == 1 else list(zip(*(m.modules() for m in replicas), strict=True))
        self._buffer_tables = [module._buffers for module in replicas[0].modules()]
        self._num_buffers = 0
        self._buffers = [_places_of_buffers(module) for module in replicas]
        self._noted: list[tuple[Tensor, tuple[int, int, int]]] = []
        if len(replicas) > 1:
            self._parameters = [list(module.parameters()) for module in replicas]
            self._state = _C.ModuleState(
                list(replicas[0].modules()),
                [*replicas[0].parameters(), *replicas[0].buffers()],
                (*leaf_types, *SHARED_TYPES),
                list(FOLLOWED_OTHERWISE),
            )
            self._follow_hooks_before_prepare()
        self.note()

    def check_members(self) -> None:
        """Raises InvalidArgument naming a parameter or submodule that was replaced, or where there are several replicas
        added, or a buffer that replica 0 alone has or has not any more."""
        # Thousands of members in every step: in C.
        if not all(map(operator.is_, map(dict.get, self._tables, self._names), self._members)):
            self._refuse()
        if len(self._replicas) > 1 and sum(map(len, self._own_tables)) != len(self._members):
            self._refuse_added()
        if len(self._replicas) > 1 and self._count_buffers() != self._num_buffers:
            self._refuse_buffers()

    def follow_first_replica(self) -> None:
        """Lets the others take over what changed in replica 0's module since `note`; raises as `check_members`."""
        self.check_members()
        for first, *others in self._modules:
            for other in others:
                if other.training != first.training:
                    other.training = first.training
        if len(self._replicas) > 1:
            self._follow_attributes()
            self._follow_tensor_hooks()
        for local in range(len(self._replicas)):
            self.adopt_buffers(local)
        replaced: set[int] = set()
        traces = _C.write_traces([buffer for _, _, buffer in self._buffers[0]]) if self._noted else []
        for at, (noted, trace) in enumerate(self._noted):
            first, *others = (places[at][2] for places in self._buffers)
            if first is noted and trace == traces[at]:
                continue
            for local, other in enumerate(others, 1):
                if (other.shape, other.dtype) == (first.shape, first.dtype):
                    with torch.no_grad():
                        other.copy_(first)
                else:
                    _replace(self._replicas[local], other, first.detach().to(other.device, copy=True))
                    replaced.add(local)
        for local in replaced:
            self.adopt_buffers(local)

    def _follow_attributes(self) -> None:
        changes = self._state.changes()
        if not changes:
            return
        for local in range(1, len(self._replicas)):
            # One for all changes, so that what replica 0's attributes share is shared in the copies.
            memo = self._counterparts(local)
            for number, path, changed, gone, container in changes:
                first, other = self._modules[number][0], self._modules[number][local]
                follow(first, other, path, changed, gone, container, memo)

    def _follow_tensor_hooks(self) -> None:
        first = self._parameters[0]
        for others in self._parameters[1:]:
            for at in _C.hooks_that_differ(first, others):
                # One dict for all: what is registered or removed later is so everywhere.
                others[at]._backward_hooks = first[at]._backward_hooks
                others[at]._post_accumulate_grad_hooks = first[at]._post_accumulate_grad_hooks

    # deepcopy copies the objects that hooks belong to as well.
    def _follow_hooks_before_prepare(self) -> None:
        for local in range(1, len(self._replicas)):
            memo = self._counterparts(local)
            for modules in self._modules:
                first, other = modules[0].__dict__, modules[local].__dict__
                for name in HOOK_TABLES & first.keys() & other.keys():
                    if first[name].keys() == other[name].keys():
                        other[name].update({key: followed_hook(name, hook, memo) for key, hook in first[name].items()})

    def _refuse(self) -> NoReturn:
        members = zip(self._tables, self._prefixes, self._names, self._members, strict=True)
        prefix, name, member = next((p, n, m) for table, p, n, m in members if table.get(n) is not m)
        kind = "submodule" if isinstance(member, nn.Module) else "parameter"
        raise InvalidArgument(
            f"{kind} '{prefix}{name}' was replaced since prepare(), so it would not be trained; write into it instead "
            "(load_state_dict without assign=True, copy_ under no_grad), or make the change before prepare()"
        )

    def _refuse_added(self) -> NoReturn:
        known = {(id(table), name) for table, name in zip(self._tables, self._names, strict=True)}
        for prefix, module in self._replicas[0].named_modules():
            for kind, table in (("parameter", module._parameters), ("submodule", module._modules)):
                for name in table:
                    if (id(table), name) not in known:
                        raise InvalidArgument(
                            f"{kind} '{prefix}{'.' if prefix else ''}{name}' was added since prepare(), and the other "
                            "replicas have none; make the change before prepare()"
                        )
        raise InvalidArgument("the modules of a prepared module changed since prepare(); make the change before it")

    def _count_buffers(self) -> int:
        """Of replica 0, but those that are None."""
        values = chain.from_iterable(map(dict.values, self._buffer_tables))
        return sum(map(operator.is_not, values, repeat(None)))

    # Those that forward registers when it first runs are on all replicas that had a part.
    def _refuse_buffers(self) -> None:
        for modules in zip(self._replicas[0].named_modules(), *(m.modules() for m in self._replicas[1:]), strict=True):
            (prefix, first), *others = modules
            for name in first._buffers.keys() | {name for other in others for name in other._buffers}:
                is_there = first._buffers.get(name) is not None
                if any((other._buffers.get(name) is not None) != is_there for other in others):
                    what = f"'{prefix}{'.' if prefix else ''}{name}' was {'added' if is_there else 'removed'}"
                    raise InvalidArgument(
                        f"buffer {what} since prepare(), in replica 0 alone; make the change before prepare() (give a "
                        "later buffer a value there, and write into it)"
                    )

    def adopt_buffers(self, local: int) -> None:
        """Tells the core of a replica's buffers that are other tensors than before. Called by its thread in a step."""
        if any(table.get(name) is not buffer for table, name, buffer in self._buffers[local]):
            places = _places_of_buffers(self._replicas[local])
            self._core.set_buffers(self._number, local, [buffer for _, _, buffer in places])
            self._buffers[local] = places  # what was refused is refused again

    def note(self) -> None:
        """Whatever is written to replica 0's buffers and attributes from here on is the user's."""
        if len(self._replicas) > 1:
            buffers = [buffer for _, _, buffer in self._buffers[0]]
            self._noted = list(zip(buffers, _C.write_traces(buffers), strict=True))
            self._num_buffers = self._count_buffers()
            self._state.note()


def _replace(module: nn.Module, buffer: Tensor, by: Tensor) -> None:
    """Wherever the buffer is registered."""
    for owner in module.modules():
        for name, known in owner._buffers.items():
            if known is buffer:
                owner._buffers[name] = by


def _places_of_buffers(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    # Each tensor once, in the order of Module.buffers(). One that was made in inference mode does not count how often
    # it is written, and cannot be written outside: a copy takes its place.
    for made in [buffer for buffer in module.buffers() if buffer.is_inference()]:
        with torch.inference_mode(False):
            _replace(module, made, made.clone())
    places: dict[int, tuple[dict[str, Any], str, Tensor]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), (owner._buffers, name, buffer))
    return list(places.values())
