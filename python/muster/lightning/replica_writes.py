"""What a training_step writes to a module of which each replica of the process has its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from logging import Logger
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from muster import _C
from muster.attributes import FOLLOWED_OTHERWISE, SHARED_TYPES, attribute_at
from muster.errors import InvalidArgument

__all__ = ["ReplicaWrites", "refuse_what_one_replica_keeps"]

_NUM_COMPARED = 4
"""Steps in which parameters are compared by value, since writes through ``.data`` leave no other trace."""

_NOT_USERS = FOLLOWED_OTHERWISE | vars(pl.LightningModule()).keys() | {"_hparams", "dynamo_ctx"}
"""Attributes that torch, with what torch.compile makes of a module, and Lightning write."""


_SETTINGS = (str, bool, type(None), type, torch.dtype, torch.device)


@dataclass(frozen=True)
class _Contents:
    """An object in an attribute, that was written."""

    name: str
    module: int
    """Its number."""
    path: tuple[Any, ...]
    """In the module's attributes."""
    value: Any
    settings: dict[Any, Any] | None = None
    """All that was written, where that is words and switches, which do not add up over parts (a model's configuration
    that is completed in the first forward)."""

    def are_alike(self, replicas: Sequence[ReplicaWrites]) -> bool:
        """Whether these all have the settings."""
        if self.settings is None:
            return False
        own = [attribute_at(vars(replica.modules[self.module]), self.path) for replica in replicas]
        return all(isinstance(of_one, dict) and self.settings.items() <= of_one.items() for of_one in own)


@dataclass
class _Written:
    """What one call of training_step wrote to one replica's module."""

    attributes: list[str] = field(default_factory=list)
    """Those that are another object."""
    contents: list[_Contents] = field(default_factory=list)
    """Those whose object was written."""
    parameters: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Copies of those that may count something."""


class ReplicaWrites:
    """Watches one replica's module while its training_step runs. Owned by the replica's thread; between steps, by the
    thread that trains."""

    def __init__(self, module: nn.Module) -> None:
        """`module`: the replica's."""
        self._metrics = [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]
        of_metrics = {part for _, metric in self._metrics for part in metric.modules()}
        parts = {name: part for name, part in module.named_modules() if part not in of_metrics}
        self.modules = list(parts.values())
        """Those that are watched: all but metrics."""
        self.written = _Written()
        """What the last step wrote."""
        self._prefixes = [f"self.{name}." if name else "self." for name in parts]
        self._parameters = list(module.named_parameters())
        self._places = list(_places_of_counts(parts))
        known = [*module.parameters(), *module.buffers()]
        self._state = _C.ModuleState(self.modules, known, (Metric, Logger, *SHARED_TYPES), list(_NOT_USERS))
        self._num_steps = 0

    def begin(self) -> None:
        """Whatever is written from here on is the step's."""
        self.written = _Written()
        self._state.note()
        # Weak references, so that what the step replaces is let go of.
        self._tensors = {
            (number, name): weakref.ref(value)
            for number, part in enumerate(self.modules)
            for name, value in vars(part).items()
            if isinstance(value, Tensor)
        }
        self._traces = [(parameter._version, parameter.data_ptr()) for _, parameter in self._parameters]
        self._num_steps += 1
        is_compared = self._num_steps <= _NUM_COMPARED
        self._values = [parameter.detach().clone() for _, parameter in self._parameters] if is_compared else []
        self._buffers = [(table[name], table[name]._version) for _, table, name in self._places]
        self._update_counts = [metric.update_count for _, metric in self._metrics]

    def end(self) -> None:
        """Notes what was written since `begin`."""
        for number, path, changed, gone, container in self._state.changes():
            attributes = vars(self.modules[number])
            if path and attribute_at(attributes, path) is container:
                self._note_contents(number, path, container, None if gone else changed)
            for name in () if path else changed or ():
                before = self._tensors.get((number, name))
                if name in _NOT_USERS:
                    continue
                if before is not None and before() is attributes[name]:
                    self._note_contents(number, (name,), attributes[name])
                # torch's hooks set weights that they compute.
                elif number == 0 or not isinstance(attributes[name], Tensor):
                    self.written.attributes.append(self._prefixes[number] + name)
        for at, (name, parameter) in enumerate(self._parameters):
            is_as_before = self._traces[at] == (parameter._version, parameter.data_ptr())
            if not is_as_before or (self._values and not _is_same(self._values[at], parameter)):
                self.written.parameters.append(name)
        self._values = []
        for (name, table, key), (before, version) in zip(self._places, self._buffers, strict=True):
            if table[key] is not before or before._version != version:
                self.written.buffers[name] = table[key].detach().clone()
        self._buffers = []
        for (name, metric), count in zip(self._metrics, self._update_counts, strict=True):
            if metric.update_count != count:
                self.written.metrics.append(name)

    def _note_contents(
        self, number: int, path: tuple[Any, ...], value: Any, changed: Sequence[Any] | None = None
    ) -> None:
        settings = {key: value[key] for key in changed} if changed is not None and isinstance(value, dict) else None
        if settings is not None and not all(isinstance(setting, _SETTINGS) for setting in settings.values()):
            settings = None
        name = f"{self._prefixes[number]}{path[0]}"
        self.written.contents.append(_Contents(name, number, path, value, settings))


def refuse_what_one_replica_keeps(
    replicas: Sequence[ReplicaWrites], everyone: Sequence[ReplicaWrites], buffers: str
) -> list[str]:
    """Raises InvalidArgument for what a step wrote that would be of one part of the batch, or was written once for each
    part. Returns warnings of what may be so. `replicas`: those that had a part, of `everyone` who has had one in a
    step; `buffers`: the strategy's option."""
    for replica in replicas:
        for name in replica.written.metrics:
            raise InvalidArgument(
                f"training_step updated the metric '{name}', of which each of {len(everyone)} replicas has its own, "
                "with its part of the batch; log a tensor instead, update the metric in on_train_batch_end, or use "
                "strategy='muster_ddp'"
            )
        for name in replica.written.parameters:
            raise InvalidArgument(
                f"training_step wrote the parameter '{name}', and runs once for each of {len(everyone)} replicas; "
                "write it in on_train_batch_end, which runs once for a batch, or use strategy='muster_ddp'"
            )
        for written in replica.written.contents:
            others = (other.modules[written.module] for other in everyone if other is not replica)
            # What cannot be copied is one object for all replicas: a logger, say.
            is_one = all(attribute_at(vars(other), written.path) is written.value for other in others)
            if not is_one and not written.are_alike(replicas):
                raise InvalidArgument(
                    f"training_step wrote to {written.name}, of which each of {len(everyone)} replicas has its own, "
                    "with its part of the batch; return it in training_step's dict, and collect what "
                    "on_train_batch_end gets, or use strategy='muster_ddp'"
                )
    attributes = dict.fromkeys(name for replica in replicas for name in replica.written.attributes)
    counts = [replica.written.buffers for replica in replicas]
    own = dict.fromkeys(
        name for of_one in counts for name in of_one if not all(_is_same(of_one[name], o.get(name)) for o in counts)
    )
    merged = "their mean, or of integers the largest" if buffers == "mean" else "that of replica 0"
    return [
        f"training_step wrote {name}: each replica has its own, and outside of the step it is that of replica 0, of "
        "its part of the batch"
        for name in attributes
    ] + [
        f"training_step wrote the buffer '{name}', each replica by its own part of the batch, and after the step it is "
        f"{merged}; write in on_train_batch_end what all samples are to be in"
        for name in own
    ]


def _places_of_counts(parts: dict[str, nn.Module]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Buffers of the root, and those of integers: where a mean over replicas may not be what is meant."""
    for prefix, part in parts.items():
        for name, buffer in part._buffers.items():
            is_count = buffer is not None and not buffer.is_floating_point() and not isinstance(part, _NormBase)
            if buffer is not None and (is_count or not prefix):
                yield f"{prefix}.{name}" if prefix else name, part._buffers, name


def _is_same(value: Tensor, other: Tensor | None) -> bool:
    if other is None or value.shape != other.shape:
        return False
    return torch.equal(value, other) or torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)
