"""Muster's checkpoints as a storage of torch.distributed.checkpoint."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from muster import saved_tree
from muster.checkpoint import reading
from muster.checkpoint.converting import torch_value
from muster.checkpoint.reading import DCP_FORMAT, Checkpoint
from muster.errors import CheckpointError, InvalidArgument
from muster.saved_layout import metadata_of
from muster.writing import Writing

__all__ = ["StorageReader", "StorageWriter"]


class StorageReader(storage.StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`: one that `StorageWriter` wrote, under the keys that
    were saved; or one of `Strategy.save`.

    The latter has the keys "model" and "optimizer" (lists where several were prepared), "steps", and the names that
    were given to save(). An optimizer has names of parameters, as in what
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives, or with ``numbers=True`` the numbers of
    ``optimizer.state_dict()``.

    `path`: a folder of checkpoints, for the newest good one, or one checkpoint's folder. Every rank reads and checks
    the whole checkpoint when the reader is made, and holds it. Raises CheckpointError where there is no good one.
    """

    def __init__(self, path: str | os.PathLike[str], *, numbers: bool = False) -> None:
        self._numbers = numbers
        self._read(path)

    def _read(self, path: str | os.PathLike[str]) -> None:
        self.checkpoint_id = path
        """As torch's readers name it."""
        self._values, self._paths = _flat(reading.read(path), numbers=self._numbers)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reads the checkpoint at another path, if one is given."""
        if checkpoint_id is not None:
            self._read(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which keys there are, with dtypes and shapes."""
        described = {
            key: _metadata_of(value) if isinstance(value, Tensor) else BytesStorageMetadata()
            for key, value in self._values.items()
        }
        return Metadata(described, planner_data=self._paths, storage_meta=StorageMeta(self.checkpoint_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what the plan asks for."""
        for item in plan.items:
            value = self._values[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                packed = io.BytesIO()
                torch.save(value, packed)
                packed.seek(0)
                planner.load_bytes(item, packed)
                continue
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dimension, offset, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != value.shape:
                raise InvalidArgument(
                    f"'{item.storage_index.fqn}' has shape {tuple(target.shape)}, and {tuple(value.shape)} in the "
                    "checkpoint; build what was saved"
                )
            target.copy_(value)
            planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a checkpoint."""
        try:
            return bool(reading.folders_in(checkpoint_id))
        except CheckpointError:
            return False


class StorageWriter(storage.StorageWriter):
    """Writes what `torch.distributed.checkpoint.save` is given as the next checkpoint in a folder, which is there whole
    or not at all. `StorageReader` and `muster checkpoint` read it; `Strategy.load` does not.

    The coordinating rank gets everything and writes it, so that the folder is needed there alone and its memory holds
    all. Values that are no tensors are numbers, strings, and tuples, lists and dicts of them: nothing is pickled.

    `path`: the folder, which belongs to one process at a time. `keep`: how many of the newest checkpoints stay (None:
    all). save() raises torch's CheckpointException with a CheckpointError in it where the checkpoint could not be
    written, and with an InvalidArgument for other values.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int | None = None) -> None:
        self.checkpoint_id: str | os.PathLike[str] = path
        """As torch's writers name it."""
        self._keep = keep

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Writes to another folder from here on, if one is given."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises InvalidArgument where ranks would write by themselves."""
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument("one rank writes a checkpoint of Muster's; leave use_collectives=False out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hands this rank's part to the coordinator, in memory."""
        return _done([_result_of(item, planner) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes all of it."""
        values: dict[str, Any] = {}
        for result in (result for each in results for result in each):
            key, (offsets, value) = result.index.fqn, result.storage_data
            described = metadata.state_dict_metadata[key]
            if not isinstance(described, TensorStorageMetadata) or value.shape == described.size:
                values[key] = value
                continue
            if key not in values:
                values[key] = torch.empty(described.size, dtype=value.dtype)
            whole = values[key]
            for dimension, (offset, length) in enumerate(zip(offsets, value.shape, strict=True)):
                whole = whole.narrow(dimension, offset, length)
            whole.copy_(value)
        document, tensors = saved_tree.encode({"values": values, "paths": metadata.planner_data})
        writing = Writing()
        about = metadata_of(document, {"dcp.format": DCP_FORMAT})
        writing.write(Path(self.checkpoint_id), self._keep, tensors, about)
        writing.end()

    def storage_meta(self) -> StorageMeta | None:
        """Where it goes."""
        return StorageMeta(self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it may be a folder."""
        path = Path(checkpoint_id)
        return path.is_dir() or not path.exists()


def _flat(checkpoint: Checkpoint, *, numbers: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The values by keys, and for each key the way to it in the nested value that was saved."""
    if "dcp.format" not in checkpoint.metadata:
        return flatten_state_dict(torch_value(checkpoint.parts(), numbers=numbers))
    if checkpoint.metadata["dcp.format"] != DCP_FORMAT:
        raise CheckpointError(f"'{checkpoint.folder}' was written by a later Muster; read it with that version")
    document = checkpoint.document()
    return document["values"], document["paths"]


def _metadata_of(tensor: Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [whole])


def _result_of(item: WriteItem, planner: SavePlanner) -> WriteResult:
    data = planner.resolve_data(item)
    if isinstance(data, Tensor):
        assert item.tensor_data is not None
        tensor = data.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # a view of a larger one travels with all of that
        return WriteResult(item.index, tensor.nbytes, (tuple(item.tensor_data.chunk.offsets), tensor))
    assert item.type == WriteItemType.BYTE_IO
    packed = io.BytesIO(data.getbuffer())
    try:
        value = torch.load(packed, map_location="cpu", weights_only=True)
        saved_tree.encode({item.index.fqn: value})
    except (pickle.UnpicklingError, InvalidArgument) as error:
        raise InvalidArgument(
            f"'{item.index.fqn}' is no tensor, number or string, nor a tuple, list or dict of them, which a checkpoint "
            f"holds: {str(error).partition(chr(10))[0]}"
        ) from error
    return WriteResult(item.index, len(packed.getbuffer()), (None, value))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
