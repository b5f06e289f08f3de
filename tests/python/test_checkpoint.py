"""Snapshots are what the tools of others read and write: safetensors files, zlib's checksums, plain JSON."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import muster
from muster import _C

checkpoint: Any = _C._checkpoint

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64,
]  # fmt: skip


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    of_dtypes = {f"of {dtype}": (100 * torch.rand(3, 5)).to(dtype) for dtype in DTYPES}
    odd = {'a "name"\\\n': torch.rand(4, 3).t(), "‐é😀": torch.tensor(7), "": torch.rand(2), "none": torch.empty(0, 4)}
    return {**of_dtypes, **odd}


def check_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and tensor.shape == right[name].shape
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, right[name])] if tensor.dim() else []
        assert torch.equal(*bits) if bits else tensor == right[name]


def test_the_safetensors_library_reads_every_shard(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    folder = checkpoint.write_snapshot(tmp_path, tensors, {}, shard_bytes=100)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    read: dict[str, Tensor] = {}
    for shard in shards:
        read |= load_file(shard)
    check_equal(tensors, read)


def test_files_of_the_safetensors_library_are_read(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "theirs.safetensors"
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata={"format": "pt", "é": "ü"})
    check_equal(tensors, checkpoint.read_safetensors(file))


def test_the_manifest_is_json_with_checksums_of_zlib(tmp_path: Path) -> None:
    metadata = {"text": 'a "b"\n', "count": -(2**63), "rate": 0.1, "whole": 3.0, "infinite": float("inf")}
    folder = checkpoint.write_snapshot(tmp_path, {"a": torch.rand(10), "b": torch.rand(10)}, metadata, shard_bytes=40)
    text = (folder / "manifest.json").read_bytes()
    outer = json.loads(text)
    inner = text[text.index(b'"manifest":') + 11 : text.rindex(b"}")]
    assert int(outer["crc32"], 16) == zlib.crc32(inner)
    manifest = outer["manifest"]
    assert manifest["version"] == 2
    assert manifest["strings"] == {"text": metadata["text"]}
    assert manifest["int64s"] == {"count": metadata["count"]}
    assert {key: float(value) for key, value in manifest["doubles"].items()} == {
        key: value for key, value in metadata.items() if isinstance(value, float)
    }
    assert len(manifest["shards"]) == 2
    for number, entry in enumerate(manifest["tensors"]):
        data = (folder / manifest["shards"][number]["file"]).read_bytes()[-40:]
        (piece,) = entry["pieces"]
        assert (entry["name"], entry["dtype"], entry["shape"]) == ("ab"[number], "F32", [10])
        assert piece == {"shard": number, "begin": 0, "count": 10, "crc32": f"{zlib.crc32(data):08x}"}
    for shard in manifest["shards"]:
        data = (folder / shard["file"]).read_bytes()
        assert (len(data), zlib.crc32(data)) == (shard["bytes"], int(shard["crc32"], 16))
    read, back = checkpoint.read_snapshot(folder)
    assert back == metadata
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in metadata.items()}
    assert read.keys() == {"a", "b"}


def test_damage_is_a_checkpoint_error(tmp_path: Path) -> None:
    folder = checkpoint.write_snapshot(tmp_path, {"a": torch.rand(10)}, {})
    shard = folder / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(muster.CheckpointError, match="shard-00000"):
        checkpoint.read_snapshot(folder)
