"""Folders of torch.distributed.checkpoint, read whole by one process, without the code that a pickle may name."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from muster.checkpoint.zips import check_zip

__all__ = ["METADATA", "read_folder"]

METADATA = ".metadata"

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    **{(filesystem.__name__, name): getattr(filesystem, name) for name in ("_StorageInfo", "_StoragePrefix")},
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}  # fmt: skip


def read_folder(folder: Path) -> dict[str, Any]:
    """The nested value that was saved. Raises pickle.UnpicklingError where that needs other classes than tensors."""
    value: dict[str, Any] = {}
    reader, planner = _Reader(folder), cast(Any, _Planner)()
    reader.read_metadata()  # what is wrong with it is said as it is
    try:
        _load_state_dict(value, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    return value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name} in {METADATA}")


class _Reader(FileSystemReader):
    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        part = io.BytesIO(super()._slice_file(file, sinfo).read(-1))
        check_zip(part, Path(self.path) / sinfo.relative_path)
        part.seek(0)
        return part

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{METADATA} holds a {type(found).__name__}")
        return found


class _Planner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's own runs what the pickle says. Given the value as it stands there.
        plain = io.BytesIO()
        torch.save(torch.load(value, map_location="cpu", weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
