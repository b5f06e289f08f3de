"""Parameters, optimizer state and objects of one rank on all."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muster.errors import InvalidArgument
from muster.horovod.differentiable import allgather
from muster.horovod.handles import synchronize
from muster.horovod.operations import broadcast_, broadcast_async_
from muster.horovod.process_sets import ProcessSet, global_process_set
from muster.horovod.runtime import running
from muster.tensor_memory import memory_of

__all__ = [
    "allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_optimizer_state",
    "broadcast_parameters",
]  # fmt: skip

# As in Horovod, objects may be lambdas and of classes of __main__ where cloudpickle is installed.
_pickle = importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Tensor | tuple[str, Tensor]], root_rank: int) -> None:
    """Copies tensors of rank `root_rank` into those of all. Collective.

    `params` are model.state_dict(), model.named_parameters() or model.parameters(): the same names, shapes and dtypes
    on all ranks. What is None is passed over. Raises ValueError for anything else.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = [*sorted(params.items())]
    elif isinstance(params, (str, Tensor)) or not isinstance(params, Iterable):
        raise InvalidArgument(f"broadcast_parameters() of a {type(params).__name__}: pass model.state_dict()")
    else:
        pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    tensors = [(name, value) for name, value in pairs if value is not None]
    for name, value in tensors:
        if not isinstance(value, Tensor):
            raise InvalidArgument(f"broadcast_parameters(): {name} is a {type(value).__name__}, not a tensor")
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None) -> None:
    """Gives `optimizer` the state and the options of the groups that it has on rank `root_rank`. Collective.

    Other ranks may have no state yet, or other state. `model` is not needed. The optimizer is not stepped. Raises
    ValueError for LBFGS, whose state belongs to one rank's losses.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument("broadcast_optimizer_state() of LBFGS: its state cannot be shared; use another optimizer")
    written = io.BytesIO()
    if running().rank == root_rank:
        torch.save(optimizer.state_dict(), written)
    sent = broadcast_object(written.getvalue(), root_rank, "optimizer_state")
    if running().rank != root_rank:
        # Tensors of a device are those of the sender's; the optimizer puts them where its parameters are.
        optimizer.load_state_dict(torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object `obj` of rank `root_rank`, pickled; on that rank itself. Collective over `process_set`. `name`: as of
    allreduce_async()."""
    name = name or "object"
    is_root = running().rank == root_rank
    sent = _bytes_of(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = broadcast_(torch.tensor([len(sent)]), root_rank, f"{name}.sz", process_set)
    received = sent if is_root else torch.empty(int(size), dtype=torch.uint8)
    broadcast_(received, root_rank, f"{name}.t", process_set)
    return obj if is_root else _object_of(received)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that does broadcast_object(obj, root_rank, name, process_set)."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The object `obj` of every rank, pickled, in rank order. Collective. `name`: as of allreduce_async()."""
    name = name or "object"
    mine = _bytes_of(obj)
    sizes = allgather(torch.tensor([len(mine)]), f"{name}.sz").tolist()
    parts = torch.split(allgather(mine, f"{name}.t"), sizes)
    return [_object_of(part) for part in parts]


def _bytes_of(obj: Any) -> Tensor:
    buffer = io.BytesIO()
    _pickle.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _object_of(data: Tensor) -> Any:
    return _pickle.loads(memory_of(data))
