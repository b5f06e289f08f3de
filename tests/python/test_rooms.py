"""Who may know whom: the include rules of CONTRIBUTING.md, checked on every file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

# From the ground up: a room may include those of the floors below its own. Rooms of one floor do not know each other,
# but for the exceptions below.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("core", "kernels"),
    ("device",),
    ("net",),
    ("comm",),
    ("embedding",),
    ("gradient", "optimizer", "checkpoint", "server"),
    ("job",),
    ("window", "data"),
    ("strategy",),
    ("bindings",),
)
NEIGHBOURS = {("server", "optimizer"), ("server", "checkpoint")}
MAY_USE: dict[str, set[str]] = {
    room: {below for lower in FLOORS[:floor] for below in lower} | {to for of, to in NEIGHBOURS if of == room}
    for floor, rooms in enumerate(FLOORS)
    for room in rooms
}
MAY_USE["kernels"] = set()

PICTURE = (ROOT / "docs" / "architecture.md").read_text()

TORCH = ("ATen/", "c10/", "torch/")
# Only these files may include these outside headers.
OUTSIDE = {
    "nccl.h": re.compile(r"^comm/nccl/nccl_api\.cpp$"),
    "nvtx3/": re.compile(r"^comm/nccl/cuda_device\.cpp$"),
    "openssl/": re.compile(r"^net/tls[^/]*$|^checkpoint/sha256\.cpp$"),
    "libdeflate.h": re.compile(r"^checkpoint/crc32\.cpp$"),
    "zlib.h": re.compile(r"^checkpoint/crc32_(by_zlib|combine)\.cpp$"),
    "pybind11/": re.compile(r"^bindings/"),
    "Python.h": re.compile(r"^bindings/"),
    "torch/extension.h": re.compile(r"^bindings/"),
    "torch/csrc/utils/pybind.h": re.compile(r"^bindings/"),
    "torch/csrc/Exceptions.h": re.compile(r"^bindings/"),
    "cuda": re.compile(r"^kernels/cuda/|^comm/nccl/cuda_device\.cpp$|^device/cuda_memory\.cpp$"),
    "c10/cuda": re.compile(r"^comm/nccl/cuda_device\.cpp$|^device/cuda_memory\.cpp$"),
}


def sources() -> list[str]:
    return sorted(str(p.relative_to(CSRC)) for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def includes(path: str, text: str | None = None) -> Iterator[str]:
    text = (CSRC / path).read_text() if text is None else text
    for match in re.finditer(r'^\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', text, re.MULTILINE):
        yield match[1] or match[2]


def violations(path: str, text: str | None = None) -> list[str]:
    room = path.split("/")[0]
    found = []
    for header in includes(path, text):
        target = header.split("/")[0]
        is_torch = header.startswith(TORCH)
        if room == "include" and not (is_torch or target == "muster" or "/" not in header):
            found.append(f"{path}: public headers include only torch and each other, not {header}")
        if room == "kernels" and (is_torch or target == "muster"):
            found.append(f"{path}: kernels include only themselves, not {header}")
        if path.endswith((".cu", ".cuh")) and not path.startswith("kernels/cuda/"):
            found.append(f"{path}: only kernels/cuda needs nvcc")
        if target in MAY_USE and room in MAY_USE and target != room and target not in MAY_USE[room]:
            found.append(f"{path}: {room} may not know {target} ({header})")
        for outside, allowed in OUTSIDE.items():
            if header.startswith(outside) and not allowed.search(path):
                found.append(f"{path}: {header} may be included only in {allowed.pattern}")
    return found


def test_every_source_lies_in_a_known_room() -> None:
    rooms = {path.split("/")[0] for path in sources()}
    assert rooms <= {*MAY_USE, "include"}, (
        "a new room needs its floor in FLOORS, CONTRIBUTING.md and docs/architecture.md"
    )


def test_rooms_know_only_the_rooms_below_them() -> None:
    assert sources()
    assert [message for path in sources() for message in violations(path)] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/a.cpp", '#include "comm/communicator.h"\n'),
        ("gradient/a.cpp", '#include "strategy/mirrored.h"\n'),
        ("window/a.cpp", '#include "data/batch.h"\n'),
        ("job/a.cpp", '#include "window/window.h"\n'),
        ("device/a.cpp", '#include "comm/communicator.h"\n'),
        ("checkpoint/a.cpp", '#include "server/shard/shard.h"\n'),
        ("optimizer/a.cpp", '#include "gradient/engine.h"\n'),
        ("kernels/cpu/a.cpp", "#include <ATen/core/Tensor.h>\n"),
        ("kernels/cpu/a.cpp", "#include <muster/error.h>\n"),
        ("strategy/a.cpp", "#include <torch/extension.h>\n"),
        ("comm/a.cpp", "#  include <openssl/ssl.h>\n"),
        ("checkpoint/no_sha256.cpp", "#include <openssl/evp.h>\n"),
        ("comm/local.cpp", "#include <nccl.h>\n"),
        ("comm/nccl/communicator.cpp", "#include <nccl.h>\n"),
        ("comm/nccl/nccl_api.cpp", "#include <cuda_runtime.h>\n"),
        ("strategy/nccl/group.cpp", "#include <nccl.h>\n"),
        ("comm/shared/group.h", "#include <cuda_runtime.h>\n"),
        ("gradient/a.cpp", "#include <c10/cuda/CUDAStream.h>\n"),
        ("kernels/cuda/a.cu", "#include <c10/macros/Macros.h>\n"),
        ("gradient/a.cu", "#include <vector>\n"),
        ("include/muster/a.h", '#include "core/log.h"\n'),
    ],
)
def test_the_rules_can_fail(path: str, text: str) -> None:
    assert len(violations(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("comm/a.cpp", '#include "kernels/kernels.h"\n#include <muster/error.h>\n#include <vector>\n'),
        ("server/a.cpp", '#include "checkpoint/reader.h"\n#include <ATen/core/Tensor.h>\n'),
        ("comm/nccl/nccl_api.cpp", "#include <nccl.h>\n"),
        ("comm/nccl/cuda_device.cpp", "#include <c10/cuda/CUDAStream.h>\n#include <cuda_runtime.h>\n"),
        ("checkpoint/sha256.cpp", "#include <openssl/evp.h>\n"),
        ("kernels/cuda/a.cu", "#include <cuda_runtime.h>\n"),
        ("bindings/a.cpp", "#include <pybind11/stl.h>\n"),
    ],
)
def test_the_rules_allow(path: str, text: str) -> None:
    assert violations(path, text) == []


def test_the_picture_of_the_house_shows_the_floors() -> None:
    drawn = PICTURE.split("```mermaid\n")[1].split("```")[0]
    arrows = [line.split(" --> ") for line in drawn.splitlines() if " --> " in line]
    shown = {(upper.strip(), lower.strip()) for upper, lower in arrows}
    for above, below in pairwise(reversed(FLOORS)):
        assert any(
            set(upper.split(" & ")) == set(above) and set(lower.split(" & ")) == set(below) for upper, lower in shown
        ), f"docs/architecture.md has no arrow from {above} to {below}"
    assert all(f"| `{room}` |" in PICTURE for floor in FLOORS for room in floor)
