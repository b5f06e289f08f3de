"""A push and a pull of all parameters, and a small round trip: parameter servers against torch.distributed.rpc.

One worker and its servers are processes of this host. A push and pull sends 64 MB of gradients and gets 64 MB of
parameters back: by memcpy from one memory of this process to another and back, by rpc_sync in one call, and by as many
rpc_async calls of 4 MB at once; by Muster over a Unix socket and with memory that both ends share, in chunks of 1 MB,
as a worker that steps on its own sends a step that is dropped. A step does plain SGD with the gradients in between,
where workers step together and where they step on their own. A round trip asks for 4 KB of parameters. All columns take
turns; what is kept are quartiles over rounds.

Uneven workers: 4 workers whose computation is a sleep, five times as long on a random fifth of their steps, or always
for one of them; steps a second of all of them, synchronous and not.

Decisions: how long a server takes to agree with up to 800 workers on a step. One process speaks for all workers, over a
connection each, and pushes no gradients.

    python benchmarks/parameter_server.py --out benchmarks/results
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch
import torch.multiprocessing as mp
import typer
from torch.distributed import rpc

from muster import _C
from muster.benchmarks.record import Out, record, write
from muster.benchmarks.rounds import Column, quartiles, ratio, take_turns
from muster.free_ports import free_ports

server: Any = _C._server

MB = 1 << 20
PUSHED = 64 * MB
PIECE = 4 * MB
SMALL = 4 << 10
RATE = 0.1
WORKERS = 4
COMPUTED = 4e-3  # seconds of a worker's computation
SLOWED = 5
MANY = (50, 200, 400, 800)  # workers that agree

_parameters: dict[str, torch.Tensor] = {}  # of rpc's server


def hold(name: str, numel: int) -> None:
    _parameters[name] = torch.zeros(numel)


def exchange(name: str, gradient: torch.Tensor) -> torch.Tensor:
    return _parameters[name]


def step(name: str, gradient: torch.Tensor) -> torch.Tensor:
    return _parameters[name].add_(gradient, alpha=-RATE)


def read(name: str) -> torch.Tensor:
    return _parameters[name]


def serve(name: str, ready: Any, stop: Any) -> None:
    """The process of one of Muster's servers."""
    torch.set_num_threads(1)
    running = server.ParameterServer(name)
    ready.set()
    stop.wait()
    del running


def serve_rpc(port: int) -> None:
    """The process of rpc's server; ends with the worker."""
    torch.set_num_threads(1)
    join_rpc("server", 1, port)
    rpc.shutdown()


def join_rpc(name: str, rank: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]


class Jobs:
    """The processes, and what takes turns."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.context = mp.get_context("spawn")
        self.stop = self.context.Event()
        self.processes: list[Any] = []
        (port,) = free_ports(1)
        self.start(serve_rpc, port)
        join_rpc("worker", 0, port)

    def start(self, target: Any, *args: Any) -> None:
        process = self.context.Process(target=target, args=args, daemon=True)
        process.start()
        self.processes.append(process)

    def probe(
        self, name: str, nbytes: int, *, servers: int = 1, shares_memory: bool = True, staleness: int | None = None
    ) -> Any:
        names = [f"muster-benchmark-{os.getpid()}-{name}-{i}" for i in range(servers)]
        for each in names:
            ready = self.context.Event()
            self.start(serve, each, ready, self.stop)
            ready.wait(60)
        return server.Probe(names, nbytes // 4, shares_memory=shares_memory, staleness=staleness)

    def memcpy(self) -> Column:
        here, there, back = (torch.zeros(PUSHED // 4) for _ in range(3))

        def column() -> None:
            there.copy_(here)
            back.copy_(there)

        return column

    def rpc_whole(self, request: Any) -> Column:
        rpc.rpc_sync("server", hold, ("whole", PUSHED // 4))
        gradient = torch.zeros(PUSHED // 4)
        return lambda: rpc.rpc_sync("server", request, ("whole", gradient))

    def rpc_pieces(self, request: Any) -> Column:
        names = [f"piece{i}" for i in range(PUSHED // PIECE)]
        for name in names:
            rpc.rpc_sync("server", hold, (name, PIECE // 4))
        gradients = [torch.zeros(PIECE // 4) for _ in names]

        def column() -> None:
            for future in [rpc.rpc_async("server", request, pair) for pair in zip(names, gradients, strict=True)]:
                future.wait()

        return column

    def rpc_small(self) -> Column:
        rpc.rpc_sync("server", hold, ("small", SMALL // 4))
        return lambda: rpc.rpc_sync("server", read, ("small",))

    def decisions(self, workers: int, rounds: int) -> list[float]:
        """Milliseconds of a decision, quartiles."""
        name = f"muster-benchmark-{os.getpid()}-decisions-{workers}"
        ready, stop = self.context.Event(), self.context.Event()
        self.start(serve, name, ready, stop)
        ready.wait(60)
        raw = server.RawWorkers(name, workers)
        raw.time_decisions(3)
        found = quartiles([raw.time_decisions(1) * 1e3 for _ in range(rounds)])
        stop.set()
        return found

    def uneven(self, staleness: int | None, steps: int, *, always: bool) -> float:
        """Steps a second of a worker, in the mean over all, until the first one has made its own."""
        name = f"muster-benchmark-{os.getpid()}-uneven-{staleness}-{always}-{time.monotonic_ns()}"
        ready, stop = self.context.Event(), self.context.Event()
        self.start(serve, name, ready, stop)
        ready.wait(60)

        def work(rank: int) -> tuple[int, float]:
            probe = server.Probe([name], SMALL // 4, rank=rank, workers=WORKERS, staleness=staleness)
            slow = random.Random(rank)
            began, made = time.perf_counter(), 0
            while made < steps and not ended:
                is_slow = rank == 0 if always else slow.random() < 1 / SLOWED
                time.sleep(COMPUTED * (SLOWED if is_slow else 1))
                probe.step()
                made += 1
            ended.append(rank)
            took = time.perf_counter() - began
            probe.leave()
            return made, took

        ended: list[int] = []
        with ThreadPoolExecutor(WORKERS) as pool:
            made = list(pool.map(work, range(WORKERS)))
        stop.set()
        return sum(count / took for count, took in made) / WORKERS

    def end(self) -> None:
        rpc.shutdown()
        self.stop.set()
        for process in self.processes:
            process.join(30)


def summary(times: dict[str, list[float]], baselines: list[str]) -> dict[str, Any]:
    """Milliseconds, and each baseline's time over that, round by round."""
    return {
        name: {"ms": quartiles(values), "over": {base: ratio(times[base], values) for base in baselines}}
        for name, values in times.items()
    }


def uneven(jobs: Jobs, rounds: int) -> dict[str, Any]:
    """Steps a second, and how many times those of the synchronous run, round by round."""
    cases = {
        "each slowed on a random fifth, staleness 4": (4, False),
        "one always slowed, no bound": (None, True),
    }
    measured: dict[str, Any] = {}
    for name, (staleness, always) in cases.items():
        bounded, together = [], []
        for _ in range(max(rounds, 2)):
            together.append(jobs.uneven(0, 100, always=always))
            bounded.append(jobs.uneven(staleness, 100, always=always))
        measured[name] = {"steps a second": quartiles(bounded), "over synchronous": ratio(bounded, together)}
    return measured


def main(rounds: Annotated[int, typer.Option(help="Rounds of turns.")] = 30, out: Out = None) -> None:
    """Parameter servers against torch.distributed.rpc, and uneven workers."""
    jobs = Jobs()
    over_socket = jobs.probe("socket", PUSHED, shares_memory=False)
    shared = jobs.probe("shared", PUSHED)
    two = jobs.probe("two", PUSHED, servers=2)
    together = jobs.probe("together", PUSHED, staleness=0)
    small = {
        "muster, Unix socket": jobs.probe("small-socket", SMALL, shares_memory=False),
        "muster, shared memory": jobs.probe("small-shared", SMALL),
    }
    tasks: dict[str, tuple[int, dict[str, Column]]] = {
        "push_pull": (
            PUSHED,
            {
                "memcpy": jobs.memcpy(),
                "rpc, one call": jobs.rpc_whole(exchange),
                "rpc, 4 MB calls": jobs.rpc_pieces(exchange),
                "muster, Unix socket": lambda: over_socket.time_exchanges(1),
                "muster, shared memory": lambda: shared.time_exchanges(1),
                "muster, shared memory, 2 servers": lambda: two.time_exchanges(1),
            },
        ),
        "step": (
            PUSHED,
            {
                "rpc, one call": jobs.rpc_whole(step),
                "rpc, 4 MB calls": jobs.rpc_pieces(step),
                "muster, Unix socket": lambda: over_socket.time_steps(1),
                "muster, shared memory": lambda: shared.time_steps(1),
                "muster, shared memory, 2 servers": lambda: two.time_steps(1),
                "muster, shared memory, synchronous": lambda: together.time_steps(1),
            },
        ),
        "round_trip": (
            SMALL,
            {"rpc": jobs.rpc_small()}
            | {name: lambda probe=probe: probe.time_reads(1) for name, probe in small.items()},  # type: ignore[misc]
        ),
    }
    measured = {}
    for name, (nbytes, columns) in tasks.items():
        times = take_turns(columns, rounds, repeats=100 if nbytes == SMALL else 3)
        baselines = [column for column in columns if not column.startswith("muster")]
        measured[name] = {"bytes": nbytes, "columns": summary(times, baselines)}
    result = record("parameter_server", rounds=rounds, **measured)
    result["uneven"] = uneven(jobs, max(1, rounds // 6))
    result["decisions"] = {str(workers): {"ms": jobs.decisions(workers, rounds)} for workers in MANY}
    for probe in [over_socket, shared, two, together, *small.values()]:
        probe.leave()
    jobs.end()
    write(result, out)
    for name in tasks:
        for column, found in result[name]["columns"].items():
            over = "  ".join(f"{base} {times[1]:6.2f}x" for base, times in found["over"].items())
            print(f"{name:10} {column:34} {found['ms'][1]:9.3f} ms  {over}")
    for name, found in result["uneven"].items():
        print(f"{name}: {found['over synchronous'][1]:.2f}x the synchronous run's steps")
    for workers, decision in result["decisions"].items():
        print(f"{workers} workers: a decision in {decision['ms'][1]:.1f} ms")


if __name__ == "__main__":
    typer.run(main)
