"""What a loader can be prepared from."""

from __future__ import annotations

from torch.utils.data import DataLoader, DistributedSampler

from muster.errors import InvalidArgument
from muster.stream_states import is_stateful_loader
from muster.tasks import samplers_of

__all__ = ["check"]


def check(loader: object, *, sharded: bool, alone: bool) -> None:
    """Raises InvalidArgument for what no loader is made of. `alone`: no other worker reads the same batches."""
    if not isinstance(loader, DataLoader):
        raise InvalidArgument(
            f"a {type(loader).__name__} cannot be prepared as a loader; wrap the data in a torch.utils.data.DataLoader"
        )
    # A torchdata StatefulDataLoader's state is that of passes which it makes itself; Loader has its own.
    if type(loader).__iter__ is not DataLoader.__iter__ and not is_stateful_loader(loader):
        raise InvalidArgument(
            f"{type(loader).__name__} iterates in a way of its own, which would be lost when its batch sampler is cut "
            "into parts; pass a plain torch.utils.data.DataLoader with the same data set, sampler and collate function"
        )
    if not sharded and any(isinstance(sampler, DistributedSampler) for sampler in samplers_of(loader)):
        raise InvalidArgument(
            "the loader's DistributedSampler shards the data already, so that most samples would be left out; pass a "
            "plain sampler (or shuffle=True), with the global batch size, or prepare_loader(loader, sharded=True)"
        )
    if not sharded and not alone and loader.num_workers > 0 and not loader.in_order:
        raise InvalidArgument(
            "in_order=False lets each worker see the batches in another order, but all take parts of the same batch; "
            "leave in_order out, or use prepare_loader(loader, sharded=True)"
        )
