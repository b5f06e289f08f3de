"""muster run --bind: which cores and which GPU a worker gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from muster import binding
from support.commands import Command

SEEN = """
import os, sys
from pathlib import Path

cores = sorted(os.sched_getaffinity(0))
text = f"{cores} {os.environ.get('CUDA_VISIBLE_DEVICES')} {sys.argv[2:]}"
(Path(sys.argv[1]) / os.environ["RANK"]).write_text(text)
"""


def a_system(folder: Path) -> Path:
    """Two memory nodes of two cores with two threads each, as Linux numbers them, and a GPU of node 1."""
    for node, cores in {"node0": "0-1,4-5", "node1": "2-3,6-7"}.items():
        where = folder / "devices/system/node" / node
        where.mkdir(parents=True)
        (where / "cpulist").write_text(f"{cores}\n")
    for core in range(8):
        where = folder / f"devices/system/cpu/cpu{core}/topology"
        where.mkdir(parents=True)
        (where / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    where = folder / "bus/pci/devices/0000:41:00.0"
    where.mkdir(parents=True)
    (where / "numa_node").write_text("1\n")
    return folder


def test_nodes_have_the_usable_cores_threads_beside_each_other(tmp_path: Path) -> None:
    system = a_system(tmp_path)
    assert binding.nodes_of(set(range(8)), system) == {0: [0, 4, 1, 5], 1: [2, 6, 3, 7]}
    assert binding.nodes_of({2, 3}, system) == {1: [2, 3]}
    assert binding.nodes_of({3, 1}, tmp_path / "none") == {0: [1, 3]}
    assert binding.node_of("00000000:41:00.0", system) == 1
    assert binding.node_of("00000000:42:00.0", system) == binding.node_of("", system) == -1


@pytest.mark.parametrize("bind", ["cores", "numa"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 11])
def test_workers_have_all_cores_together(bind: str, workers: int, tmp_path: Path) -> None:
    """Their number is what threads_per_replica follows from, bound or not."""
    nodes = binding.nodes_of(set(range(8)), a_system(tmp_path))
    shares = [binding.cores_for(bind, worker, workers, nodes) for worker in range(workers)]
    assert set().union(*shares) == set(range(8))
    if bind == "cores" and workers <= 8:
        assert sum(map(len, shares)) == 8
    if bind == "numa" and workers > 1:
        assert all(set(share) in ({0, 1, 4, 5}, {2, 3, 6, 7}) for share in shares)


def seen_by(tmp_path: Path, *options: object, **variables: str) -> list[str]:
    script = tmp_path / "seen.py"
    script.write_text(SEEN)
    with Command("run", "--workers", 2, "--servers", 0, *options, script, tmp_path, "a b", **variables) as job:
        returncode, _, err = job.end()
    assert returncode == 0, err
    return [(tmp_path / rank).read_text() for rank in "01"]


def test_workers_have_cores_and_a_gpu_of_their_own(tmp_path: Path) -> None:
    nodes = binding.nodes_of(os.sched_getaffinity(0))
    expected = [sorted(binding.cores_for("cores", worker, 2, nodes)) for worker in (0, 1)]
    seen = seen_by(tmp_path, "--bind", "cores", CUDA_VISIBLE_DEVICES="3,GPU-7")
    assert seen == [f"{cores} {gpu} ['a b']" for cores, gpu in zip(expected, ("3", "GPU-7"), strict=True)]


def test_gpus_are_those_that_may_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a, 00000000:01:00.0'\necho '1, GPU-b, 00000000:41:00.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert binding.gpus() == {"GPU-a": "00000000:01:00.0", "GPU-b": "00000000:41:00.0"}
    for chosen, expected in {"1": {"1": "00000000:41:00.0"}, "GPU-a": {"GPU-a": "00000000:01:00.0"}, "": {}}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert binding.gpus() == expected


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"2 workers and 1 GPUs.*CUDA_VISIBLE_DEVICES="):
        binding.main("cores", sys.executable)
