"""The steps of a Dockerfile, run on a copy of this system that takes what they write and is thrown away."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path


def stages(dockerfile: Path) -> list[list[tuple[str, str]]]:
    """The instructions of each stage and what follows them, FROM left out."""
    found: list[list[tuple[str, str]]] = []
    for line in dockerfile.read_text().splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            found.append([])
        elif instruction and not instruction.startswith("#"):
            found[-1].append((instruction, rest))
    return found


def script(steps: list[tuple[str, str]], context: Path, root: Path, arguments: str) -> str:
    """The shell's, which makes the steps in `root`.

    `context` has what is copied, by its path, from other stages too. CMD is started with the arguments.
    """
    lines = []
    user, folder = "root", "/"
    for instruction, rest in steps:
        enter = f'chroot --userspec={user} {root} sh -ec "cd {folder}; HOME={folder} exec \\"\\$@\\"" step '
        if instruction == "RUN":
            lines.append(f"{enter} sh -ec {shlex.quote(rest)}")
        elif instruction == "COPY":
            source, to = rest.split()[-2:]
            lines.append(f"cp -rL {context}/{source} {root}{Path(folder) / to}")
        elif instruction == "USER":
            user = rest
        elif instruction == "WORKDIR":
            folder = rest
        else:
            assert instruction == "CMD", instruction
            lines.append(f"{enter} {shlex.join(json.loads(rest))} {arguments}")
    return "\n".join(lines)


def run(steps: list[tuple[str, str]], context: Path, scratch: Path, bin_folder: Path, arguments: str = "") -> str:
    """What the steps print, errors included. Needs root; `python` is that of `bin_folder`, `scratch` a new folder."""
    for name in ("above", "work", "root"):
        (scratch / name).mkdir(parents=True)
    root = scratch / "root"
    # What only root may read here, an image has for all.
    known = [bin_folder, (bin_folder / "python").resolve(), Path(sysconfig.get_path("purelib"))]
    private = sorted({str(parent) for path in known for parent in path.parents if parent != Path("/")})
    body = f"""
mount -t overlay overlay -o lowerdir=/,upperdir={scratch}/above,workdir={scratch}/work {root}
mount --rbind /dev {root}/dev
mount -t proc proc {root}/proc
chmod a+rx {" ".join(f"{root}{folder}" for folder in private)}
{script(steps, context, root, arguments)}
"""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-ec", body],
        env={"PATH": f"{bin_folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def why_not() -> str:
    """Why steps cannot be run here; empty where they can."""
    if os.geteuid() != 0:
        return "steps of an image are root's"
    probe = 'd=$(mktemp -d); mkdir $d/a $d/w $d/r; mount -t overlay o -o "lowerdir=/,upperdir=$d/a,workdir=$d/w" $d/r'
    done = subprocess.run(["unshare", "--mount", "sh", "-ec", probe], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no overlay over /: {done.stderr.strip()}"
