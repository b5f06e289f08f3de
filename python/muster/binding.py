"""Gives a worker its cores and its GPU by its place on the host, and becomes its program.

python binding.py numa|cores PROGRAM [ARGUMENT...]

It imports nothing but the standard library: it is run as a file, once for each worker. The workers of a host share all
cores that they may use: "cores" gives each its own, "numa" those of its memory node, or its nodes. Each sees one GPU,
where there are GPUs. LOCAL_RANK and LOCAL_WORLD_SIZE say which worker this is.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

SYSTEM = Path("/sys")


def cores_of(text: str) -> list[int]:
    """Of a list as Linux writes it, "0-3,8" (cpuset(7))."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def nodes_of(usable: set[int], system: Path = SYSTEM) -> dict[int, list[int]]:
    """The usable cores of each memory node that has some, threads of a core beside each other; a single node where the
    system names none."""
    nodes: dict[int, list[int]] = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        cores = usable.intersection(cores_of((folder / "cpulist").read_text()))
        if cores:
            nodes[int(folder.name.removeprefix("node"))] = sorted(
                cores, key=lambda core: (_first_thread(core, system), core)
            )
    return dict(sorted(nodes.items())) or {0: sorted(usable)}


def _first_thread(core: int, system: Path) -> int:
    siblings = system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    return min(cores_of(siblings.read_text())) if siblings.exists() else core


def share(count: int, worker: int, workers: int) -> range:
    """A worker's part of `count` things in a row. Together they have all; each has one where there are too few."""
    begin = count * worker // workers
    return range(begin, max(count * (worker + 1) // workers, begin + 1))


def cores_for(bind: str, worker: int, workers: int, nodes: dict[int, list[int]]) -> list[int]:
    """A worker's cores, among `nodes`."""
    if bind == "cores":
        every = [core for cores in nodes.values() for core in cores]
        return [every[i] for i in share(len(every), worker, workers)]
    rows = list(nodes.values())
    return sorted(core for i in share(len(rows), worker, workers) for core in rows[i])


def gpus() -> dict[str, str]:
    """Of each GPU that may be seen: as CUDA_VISIBLE_DEVICES names it, and its place on the PCI bus ("": not known)."""
    found: dict[str, str] = {}
    if (command := shutil.which("nvidia-smi")) is not None:
        query = [command, "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=False)
        for line in told.stdout.splitlines() if told.returncode == 0 else ():
            index, uuid, bus = (field.strip() for field in line.split(","))
            found[index] = found[uuid] = bus
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in found if name.startswith("GPU-")] if chosen is None else chosen.split(",")
    # As CUDA reads it: what follows a name that is none, -1 by custom, is not seen.
    named = itertools.takewhile(lambda name: name and name != "-1", (name.strip() for name in names))
    return {name: found.get(name, "") for name in named}


def node_of(bus: str, system: Path = SYSTEM) -> int:
    """The memory node of a GPU; -1 where it is not known."""
    # nvidia-smi writes the domain with 8 digits, the kernel with 4.
    file = system / "bus/pci/devices" / bus[-12:].lower() / "numa_node"
    return int(file.read_text()) if bus and file.exists() else -1


def main(bind: str, program: str, *arguments: str) -> None:
    worker, workers = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = nodes_of(os.sched_getaffinity(0))
    seen = gpus()
    if 0 < len(seen) < workers:
        sys.exit(
            f"muster run --bind {bind}: {workers} workers and {len(seen)} GPUs, and each worker is to see one; start "
            "no more workers than GPUs, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    if seen:
        name, bus = list(seen.items())[worker]
        os.environ["CUDA_VISIBLE_DEVICES"] = name
        if bind == "numa" and (node := node_of(bus)) in nodes:
            nodes = {node: nodes[node]}
            worker, workers = 0, 1
    os.sched_setaffinity(0, cores_for(bind, worker, workers, nodes))
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
