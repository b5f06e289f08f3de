"""State with modules, optimizers and whatever else has a state_dict()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from muster.horovod.elastic.sampler import ElasticSampler
from muster.horovod.elastic.state import ObjectState
from muster.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["TorchState"]


class _Handler:
    """An object whose state_dict() is kept."""

    def __init__(self, value: Any, send: Callable[[Any], None]) -> None:
        self.value = value
        self._send = send
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        self._send(self.value)
        self.save()


class TorchState(ObjectState):
    """Modules, optimizers and whatever else has state_dict() and load_state_dict() (schedulers, GradScalers, samplers),
    by name, and other objects; all are its attributes.

    What state_dict() says is kept, of the object that was given; of other objects what ObjectState keeps.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Any of `model`, `optimizer` and the objects `kwargs` may have a state_dict(), or be something else."""
        self._handlers: dict[str, _Handler] = {}
        named = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in named.items():
            if (handler := _handler_of(value)) is not None:
                self._handlers[name] = handler
                super().__setattr__(name, value)
        super().__init__(**{name: value for name, value in named.items() if name not in self._handlers})

    def save(self) -> None:
        """Keeps copies of all."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Loads what was kept."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Gives what has a state_dict() the state of rank 0, and makes objects those that it has kept. Collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divides what samplers have left over the ranks that there are."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def kept(self) -> Any:
        """As of State."""
        return {name: handler.saved for name, handler in self._handlers.items()}, super().kept()

    def keep(self, state: Any) -> None:
        """As of State: `state` of kept()."""
        saved, objects = state
        for name, handler in self._handlers.items():
            handler.saved = saved.get(name, handler.saved)  # the script may have got it since
        super().keep(objects)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].value = value
            handlers[name].save()
        super().__setattr__(name, value)


def _handler_of(value: Any) -> _Handler | None:
    if isinstance(value, nn.Module):
        return _Handler(value, lambda module: broadcast_parameters(module.state_dict(), 0))
    if isinstance(value, torch.optim.Optimizer):
        return _Handler(value, lambda optimizer: broadcast_optimizer_state(optimizer, 0))
    if not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _Handler(value, lambda other: other.load_state_dict(broadcast_object(other.state_dict())))
    return None
