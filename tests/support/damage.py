"""Damages of checkpoints: what disks, people and attackers do to their files."""

from __future__ import annotations

import filecmp
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]
"""Of a checkpoint's folder."""


def _file(folder: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(folder.iterdir()))


def _shard(folder: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(folder.glob("*.safetensors")))


# --- what a manifest's checksums tell ---------------------------------------------------------------------------------
def flip(folder: Path, dice: random.Random) -> None:
    path = _file(folder, dice)
    content = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 1, 1, 50])):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def truncate(folder: Path, dice: random.Random) -> None:
    path = _file(folder, dice)
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])


def empty(folder: Path, dice: random.Random) -> None:
    _file(folder, dice).write_bytes(b"")


def lengthen(folder: Path, dice: random.Random) -> None:
    path = _file(folder, dice)
    path.write_bytes(path.read_bytes() + b"}" + dice.randbytes(dice.randrange(9)))


def remove(folder: Path, dice: random.Random) -> None:
    _file(folder, dice).unlink()


def begin_absurdly(folder: Path, dice: random.Random) -> None:
    path = _shard(folder, dice)
    path.write_bytes((1 << dice.randrange(17, 63)).to_bytes(8, "little") + path.read_bytes()[8:])


def swap_shards(folder: Path, dice: random.Random) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        take_the_others(folder, dice)
        return
    one, two = dice.sample(shards, 2)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def take_the_others(folder: Path, dice: random.Random) -> None:
    """A shard of the other checkpoint."""
    (other,) = [each for each in folder.parent.glob("snapshot-*") if each != folder]
    paths = [path for path in sorted(folder.glob("*.safetensors")) if not filecmp.cmp(path, other / path.name, False)]
    path = dice.choice(paths)
    shutil.copy(other / path.name, path)


# --- what is no file --------------------------------------------------------------------------------------------------
def make_folder(folder: Path, dice: random.Random) -> None:
    path = _file(folder, dice)
    path.unlink()
    path.mkdir()


def make_fifo(folder: Path, dice: random.Random) -> None:
    path = _file(folder, dice)
    path.unlink()
    os.mkfifo(path)


def make_link(folder: Path, dice: random.Random) -> None:
    """To a device, to nothing, to itself, to a file of another kind."""
    path = _file(folder, dice)
    path.unlink()
    path.symlink_to(dice.choice(["/dev/zero", "/dev/full", "/dev/stdin", "nowhere", path.name, "/proc/self/mem", "."]))


def make_whole_checkpoint_something_else(folder: Path, dice: random.Random) -> None:
    shutil.rmtree(folder)
    make: list[Callable[[Path], Any]] = [Path.mkdir, Path.touch, os.mkfifo, lambda path: path.symlink_to(path.name)]
    dice.choice(make)(folder)


DAMAGES: list[Damage] = [
    flip, flip, truncate, empty, lengthen, remove, begin_absurdly, swap_shards, take_the_others, make_folder, make_fifo,
    make_link, make_whole_checkpoint_something_else,
]  # fmt: skip


# --- what a forger does who repairs the checksums ---------------------------------------------------------------------
def sign(folder: Path, manifest: str) -> None:
    """Writes a manifest with its right checksum."""
    crc = f"{zlib.crc32(manifest.encode()):08x}"
    (folder / "manifest.json").write_text(f'{{"crc32":"{crc}","manifest":{manifest}}}\n')


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["manifest"]
    return manifest


NESTED = "[" * 100_000
WRONG: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 1e308, 0.5, "", "x", "é\ud800",
    "/", [], [[]], {}, {"tensor": "none"}, {"tensor": 3}, {"tensor": "generators"}, {"tuple": 5}, {"dict": []},
    {"items": {}}, {"items": [[[], 1]]},
    {"counter": 1}, {"float": []}, {"float": "nan"}, {"a": 1, "b": 2}, {"object": None},
]  # fmt: skip


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Of all values below: their containers and keys."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        found.append((node, key))
        _places(value, found)
    return found


def _change(document: Any, dice: random.Random) -> None:
    """Somewhere in a document: a value removed, replaced, exchanged, or put in twice."""
    places = _places(document, [])
    if not places:
        return
    node, key = dice.choice(places)
    other, other_key = dice.choice(places)
    match dice.randrange(5):
        case 0:
            del node[key]
        case 1 if isinstance(node, list):
            node.insert(key, node[key])
        case 2:
            node[key] = json.loads(json.dumps(other[other_key]))
        case 3 if isinstance(node, dict):
            node[f"{key}x"] = node.pop(key)
        case _:
            node[key] = dice.choice(WRONG)


def forge_content(folder: Path, dice: random.Random) -> None:
    manifest = manifest_of(folder)
    document = json.loads(manifest["strings"]["content"])
    for _ in range(dice.choice([1, 1, 2, 5])):
        _change(document, dice)
    manifest["strings"]["content"] = json.dumps(document)
    sign(folder, json.dumps(manifest))


def forge_text(folder: Path, dice: random.Random) -> None:
    """A document that is deep, no JSON, or has a key twice."""
    manifest = manifest_of(folder)
    text = manifest["strings"]["content"]
    manifest["strings"]["content"] = dice.choice(
        [
            NESTED,
            '{"dict":' * 50_000,
            text[:-1],
            "",
            "NaN",
            text.replace('{"dict":', '{"dict": 1, "dict":', 1),
            "9" * 5000,
        ]
    )
    sign(folder, json.dumps(manifest))


def forge_manifest(folder: Path, dice: random.Random) -> None:
    manifest = manifest_of(folder)
    for _ in range(dice.choice([1, 1, 3])):
        _change(manifest, dice)
    sign(folder, json.dumps(manifest))


def forge_name(folder: Path, dice: random.Random) -> None:
    """A shard that is elsewhere."""
    manifest = manifest_of(folder)
    shard = dice.choice(manifest["shards"])
    path = folder / shard["file"]
    outside = folder.parent / "outside.safetensors"
    shutil.copy(path, outside)
    shard["file"] = dice.choice(
        ["../outside.safetensors", str(outside), "..", ".", "", "a\0b", f"./{path.name}", f"{path.name}/", "x" * 5000]
    )
    sign(folder, json.dumps(manifest))


def forge_bytes(folder: Path, dice: random.Random) -> None:
    """A manifest that is no manifest."""
    text = json.dumps(manifest_of(folder))
    shards = '"shards": ['
    sign(
        folder,
        dice.choice(
            [
                NESTED, text + text, text.replace(shards, f"{shards}{NESTED},"),
                text.replace('"version": 1', '"version": 2'),
                text.replace('"int64s"', '"version": 1, "int64s"'),
                text.replace('"strings": {', '"strings": {"content": "", '),
                text.replace('"bytes": ', '"bytes": -'), text.replace('"bytes": ', '"bytes": 1e'), "{}", "[]", "",
            ]
        ),
    )  # fmt: skip


def forge_header(folder: Path, dice: random.Random) -> None:
    """Another header of a shard, with the right checksums of shard and manifest."""
    path = _shard(folder, dice)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if dice.random() < 0.8:
        entry = header[dice.choice(sorted(header))]
        member = dice.choice(["dtype", "shape", "data_offsets"])
        entry[member] = dice.choice(
            {
                "dtype": ["F64", "F16", "I32", "C64", "", None, 3],
                "shape": [
                    [2**62],
                    [2**31, 2**31, 0],
                    [2**32, 2**32],
                    [-1],
                    [-4, -4],
                    [1] * 70,
                    [0],
                    [],
                    5,
                    [0.5],
                    NESTED,
                ],
                "data_offsets": [
                    [0, 2**62],
                    [2**62, 2**63 - 1],
                    [-8, 0],
                    [8, 0],
                    [0],
                    [0, 0],
                    [0, 4, 8],
                    None,
                    [1e3, 2e3],
                ],
            }[member]
        )
    else:
        _change(header, dice)
    text = json.dumps(header)
    if dice.random() < 0.1:
        text = dice.choice([NESTED, '{"a":' * 50_000, text[:-1] + "," + text[1:], " " + text, ""])
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + content[8 + length :])
    manifest = manifest_of(folder)
    for shard in manifest["shards"]:
        if shard["file"] == path.name:
            shard |= {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
    sign(folder, json.dumps(manifest))


FORGERIES: list[Damage] = [
    forge_content, forge_content, forge_content, forge_text, forge_manifest, forge_name, forge_bytes, forge_header,
    forge_header,
]  # fmt: skip
