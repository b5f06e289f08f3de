"""The result file of gpu_check.py: which code it is of, and how runs of one day add to it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMPILED = ("csrc", "cmake", "CMakeLists.txt")
MEASURED = (*COMPILED, "python", "benchmarks", "tests/gpu", "tools/gpu_stages.py")
LEFT_OUT = {"__pycache__", "results"}
IDENTITY = ("dry", "machine", "versions", "gpu", "sources")
"""What runs that share a file have in common."""


def digest(places: Sequence[str] = MEASURED, root: Path = ROOT) -> str:
    """Of all files there: equal where these are."""
    found = hashlib.sha256()
    for place in places:
        for file in sorted(files_of(root / place)):
            found.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def files_of(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for folder, folders, files in os.walk(place):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def commit(root: Path = ROOT) -> str | None:
    """The checkout's, with a word where its measured files differ from it; None where there is no git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if shutil.which("git") is None or not (root / ".git").exists():
        return None
    try:
        changed = git("status", "--porcelain", "--", *MEASURED)
        return git("rev-parse", "--short=10", "HEAD") + (" and changes" if changed else "")
    except subprocess.CalledProcessError:
        return None


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    asked = subprocess.run(question, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None if asked.returncode == 0 else None


class Result:
    """What a file says, and is written anew whenever that changes."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        """Goes on with the day's file of this GPU where its code and machine are the same (IDENTITY), else begins one
        whose name is free: an older one stays as it is."""
        gpu = facts["gpu"]
        short = re.sub(r"nvidia|geforce|\d+gb|hbm\d?e?|[^a-z0-9]", "", gpu["name"].lower()) if gpu else "dry"
        name = f"gpu-{facts['date']}-{short}"
        self.content: dict[str, Any] = {**facts, "stages": {}, "goals": []}
        number = 1
        while True:
            self.file = out / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
            if not self.file.exists():
                return
            if (there := read(self.file)) and all(there.get(key) == facts[key] for key in IDENTITY):
                self.content |= {"stages": there["stages"]}
                return
            number += 1

    @property
    def stages(self) -> dict[str, Any]:
        """By name, in the order of `put`."""
        stages: dict[str, Any] = self.content["stages"]
        return stages

    def put(self, stage: str, found: dict[str, Any], order: Sequence[str]) -> None:
        """Of a stage that ran before, what was found then stays beside it; a stage that was left out now changes
        nothing there."""
        before = self.stages.get(stage)
        if before is not None and "left out" in found:
            return
        if before is not None and "left out" not in before:
            found = {**found, "earlier": [*before.pop("earlier", []), before]}
        stages = {**self.stages, stage: found}
        self.content["stages"] = {name: stages[name] for name in order if name in stages}

    def write(self) -> None:
        """At once: who reads it, or is cut off here, finds one of the two states."""
        draft = self.file.with_suffix(".tmp")
        draft.write_text(json.dumps(self.content, indent=1) + "\n")
        draft.replace(self.file)


def read(file: Path) -> dict[str, Any] | None:
    try:
        there: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        return None
    return there
