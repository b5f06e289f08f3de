"""strategy.reduce of a tensor between hosts, against Gloo's all-reduce of the same tensor over the same link.

Hosts are network namespaces of this machine (tests/support/hosts.py, which needs root and iproute2), joined by links
that `tc tbf` limits. Both columns live in the same processes and take turns; what is kept are quartiles over rounds, as
rank 0 sees them. reduce returns a tensor of its own; Gloo reduces in place.

    python benchmarks/several_hosts.py --out benchmarks/results
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import muster
from muster.benchmarks.record import Out, need_gloo, record, write
from muster.benchmarks.rounds import quartiles, ratio, take_turns

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

MB = 1 << 20


def measure(megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by round, in each worker."""
    torch.set_num_threads(1)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    place = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1000}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=workers)
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=100.0) as strategy:
        tensor = torch.zeros(megabytes * MB // 4)  # repeated sums of other values would grow
        columns = {"muster": lambda: strategy.reduce(tensor, "sum"), "Gloo": lambda: dist.all_reduce(tensor)}
        times = take_turns(columns, rounds)
    dist.destroy_process_group()
    return times


def main(
    megabytes: Annotated[int, typer.Option(help="Of the tensor, fp32.", min=1)] = 32,
    rate: Annotated[str, typer.Option(help="Of each host's link, as tc writes it.")] = "10gbit",
    hosts: Annotated[int, typer.Option(min=2)] = 2,
    workers: Annotated[list[int] | None, typer.Option(help="Of a host; 1 and 2 when not given.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds.", min=3)] = 15,
    out: Out = None,
) -> None:
    """A sum over workers of several hosts, against Gloo."""
    need_gloo()
    from support.hosts import hosts as namespaces

    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    import several_hosts

    cases: list[dict[str, Any]] = []
    with namespaces(hosts) as made:
        for host in range(hosts):
            limit = f"tc qdisc replace dev eth0 root tbf rate {rate} burst 4mb latency 50ms"
            subprocess.run(["ip", "netns", "exec", made.name(host), *limit.split()], check=True)
        for count in workers or (1, 2):
            places = [host for host in range(hosts) for _ in range(count)]
            times = made.run(places, several_hosts.measure, megabytes, rounds, timeout=600)[0]
            case = {
                "hosts": hosts,
                "workers a host": count,
                "bytes": megabytes * MB,
                "rate": rate,
                "ms": {name: quartiles(values) for name, values in times.items()},
                "Gloo over muster": ratio(times["Gloo"], times["muster"]),
            }
            cases.append(case)
            ours, theirs = case["ms"]["muster"][1], case["ms"]["Gloo"][1]
            print(
                f"{hosts} hosts, {count} worker(s) each, {megabytes} MB at {rate}: muster {ours:.1f} ms, Gloo "
                f"{theirs:.1f} ms, Gloo over muster {case['Gloo over muster'][1]:.2f}"
            )
    write(record("several_hosts", cases=cases), out)


if __name__ == "__main__":
    typer.run(main)
