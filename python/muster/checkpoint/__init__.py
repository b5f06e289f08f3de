"""Checkpoints without a strategy: what `Strategy.save` wrote, for inference, for plain torch and for its tools.

`StorageReader` and `StorageWriter` let `torch.distributed.checkpoint` read and write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.checkpoint.reading import model_state, optimizer_state

if TYPE_CHECKING:
    from muster.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["StorageReader", "StorageWriter", "model_state", "optimizer_state"]


def __getattr__(name: str) -> Any:
    # torch.distributed.checkpoint takes a while to import, and few need it.
    if name in ("StorageReader", "StorageWriter"):
        from muster.checkpoint import storage

        return getattr(storage, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
