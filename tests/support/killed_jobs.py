"""Jobs that save every few steps and are killed: what they do, and what they must leave."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import muster
from muster import _C, saved_tree
from support.commands import Command, wait_until
from support.ranks import Ranks, process_context
from support.servers import Servers, on_servers

SAMPLES, EPOCHS, EVERY = 80, 3, 5
DATA = TensorDataset(
    torch.arange(8.0 * SAMPLES).view(SAMPLES, 8).sin(), torch.arange(SAMPLES) % 3, torch.arange(SAMPLES)
)
TESTS = str(Path(__file__).parents[1])
JOINED, AGAIN = "joined", "again"
"""A life in which a worker dies, which the others wait for before the last epoch, and the file that says it came."""
WORKERS = {"mirrored": 1}
"""By layout; 2 otherwise. Layouts of servers: their number, and whether batches are `sharded`, divided or dealt."""


def num_servers(layout: str) -> int:
    return int(layout.rpartition("-")[2]) if "-" in layout else 0


class Notes:
    """What a rank did in one of its lives, line by line: it survives whatever happens to the process."""

    def __init__(self, folder: Path, life: str, rank: int) -> None:
        self._file = os.open(folder / f"{life}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def notes_of(folder: Path, life: str) -> list[list[list[str]]]:
    """By rank, the words of each line."""
    return [[line.split() for line in path.read_text().splitlines()] for path in sorted(folder.glob(f"{life}.?"))]


def build_strategy(layout: str, addresses: list[str]) -> muster.Strategy:
    options: dict[str, Any] = {"seed": 3, "threads_per_replica": 1, "timeout": 60.0}
    if layout == "mirrored":
        return muster.MirroredStrategy(["cpu:0", "cpu:1"], **options)
    if layout == "workers":
        return muster.MultiWorkerMirroredStrategy.from_env(**options)
    staleness = 2 if layout.startswith("dealt") else 0
    options |= {"staleness": staleness, "heartbeat": 1.0}
    return on_servers(addresses, **options) if addresses else muster.ParameterServerStrategy.from_env(**options)


def train(layout: str, folder: Path, notes_folder: Path, life: str, addresses: list[str]) -> list[Any]:
    """One life of a rank, to the end of the last epoch: parameters and optimizer state."""
    torch.manual_seed(5)
    with build_strategy(layout, addresses) as strategy:
        notes = Notes(notes_folder, life, strategy.rank)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        user = torch.optim.AdamW(module.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(user, 7, gamma=0.8)
        model, optimizer = strategy.prepare(module, user)
        if layout.startswith("sharded"):
            own = Subset(DATA, range(strategy.rank, SAMPLES, strategy.num_workers))
            loader = strategy.prepare_loader(DataLoader(own, batch_size=2, shuffle=True), sharded=True)
        else:
            loader = strategy.prepare(DataLoader(DATA, batch_size=4, shuffle=True))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        strategy.load(folder, schedule=schedule)
        notes.add("begins", strategy.steps, loader.epoch)
        if strategy.joins:
            (notes_folder / AGAIN).touch()
        while loader.epoch < EPOCHS:
            if life == JOINED and loader.epoch == EPOCHS - 1:
                wait_until((notes_folder / AGAIN).exists, "the other worker comes again")
            for x, y, index in loader:
                parts = list(index) if isinstance(index, muster.PerReplica) else [index]
                batch = [loader.epoch, *torch.cat(parts).tolist()]
                notes.add("takes", *batch)
                strategy.step(loss, x, y)
                notes.add("took", *batch)
                schedule.step()
                if strategy.steps % EVERY == 0:
                    strategy.save(folder, keep=3, schedule=schedule)
                    notes.add("saved", strategy.steps)
        state = optimizer.state_dict()["state"]
        values = [*model.state_dict().values(), *(state[n][name] for n in sorted(state) for name in sorted(state[n]))]
        result = [value.detach().numpy().copy() for value in values]
        notes.add("ends", strategy.steps)
    return result


def main() -> None:
    """A worker that `muster run` starts."""
    layout, folder, notes, life = sys.argv[1:]
    values = train(layout, Path(folder), Path(notes), life, [])
    torch.save([torch.from_numpy(value) for value in values], f"{notes}/{life}-{os.environ['RANK']}.pt")


def _host(number: int, pipe: Any) -> None:
    servers = Servers(number)
    pipe.send(servers.addresses)
    pipe.poll(300)  # until the other end is closed
    del servers


class Job:
    """One life of a job: a process for each worker, and one for its servers."""

    def __init__(self, layout: str, folder: Path, notes: Path, life: str) -> None:
        addresses: list[str] = []
        self._servers: Any = None
        if num_servers(layout):
            context = process_context()
            self._pipe, theirs = context.Pipe()
            self._servers = context.Process(target=_host, args=(num_servers(layout), theirs), daemon=True)
            self._servers.start()
            theirs.close()
            addresses = self._pipe.recv()
        self.ranks = Ranks(WORKERS.get(layout, 2), train, layout, folder, notes, life, addresses)

    def kill(self, *victims: int) -> None:
        """At once: these workers."""
        for victim in victims:
            self.ranks.processes[victim].kill()

    def end_others(self, *, notice: bool) -> None:
        """Kills the workers that are left, and servers; they must have ended themselves before where they `notice`."""
        if notice:
            wait_until(lambda: not any(p.is_alive() for p in self.ranks.processes), "all miss the dead", 20)
        for process in self.ranks.processes:
            process.kill()
            process.join()
        self.end_servers(kill=True)

    def end_servers(self, *, kill: bool = False) -> None:
        if self._servers is not None:
            if kill:
                self._servers.kill()
            self._pipe.close()
            self._servers.join(20)
            assert self._servers.exitcode is not None
            self._servers.close()
            self._servers = None

    def results(self) -> list[Any]:
        values = self.ranks.results(120)
        self.end_servers()
        return values


def check_folder(folder: Path, saved: int, *, grows: bool = True) -> None:
    """Every checkpoint that is there is whole, and none is older than the one before that of step `saved`, whose
    save() returned. Their steps grow, unless a chief that came again counts its own from 0."""
    paths = sorted(folder.glob("snapshot-*")) if folder.exists() else []
    steps = [_C._checkpoint.read_snapshot(path)[1]["steps"] for path in paths]
    assert not grows or steps == sorted(steps)
    assert (steps[-1] if steps else 0) >= saved - EVERY, (steps, saved)
    if paths:
        tensors, metadata, _ = _C.read_asked_snapshot(folder) or ({}, {}, folder)
        assert saved_tree.decode(str(metadata["content"]), tensors)["strategy"]["steps"] == steps[-1]


def last_saved(notes: Path, life: str) -> int:
    """The step of the last save() of the chief that returned."""
    lines = [line for lines in notes_of(notes, life)[:1] for line in lines]
    return max((int(line[1]) for line in lines if line[0] == "saved"), default=0)


def check_samples(notes: Path, *lives: str, deaths: int = 0) -> None:
    """In lives of which the last came to its end each sample of each of their epochs was trained on, but for those that
    a worker had taken when it died and others went on."""
    ranks = [lines for life in lives for lines in notes_of(notes, life)]
    begun = [line for lines in ranks for line in lines if line[0] == "begins"]
    done: Counter[tuple[int, int]] = Counter()
    taken: set[tuple[int, int]] = set()
    for lines in ranks:
        for words, after in itertools.pairwise([*lines, ["ends here"]]):
            if words[0] not in ("takes", "took"):
                continue
            batch = [(int(words[1]), int(index)) for index in words[2:]]
            if words[0] == "took":
                done.update(batch)
            elif after[0] != "took":
                taken.update(batch)
    first = min(int(words[2]) for words in begun)
    assert deaths or len(lives) > 1 or not taken
    excused = taken if deaths else set()
    for epoch in range(first, EPOCHS):
        missing = [i for i in range(SAMPLES) if not done[epoch, i] and (epoch, i) not in excused]
        assert not missing, (epoch, missing)


class Kills:
    """Runs jobs of one layout that are killed at random, and started again with the same command."""

    def __init__(self, layout: str, folder: Path, seed: int) -> None:
        self.layout = layout
        self._folder = folder
        self._dice = random.Random(seed)
        self._seconds = 0.0  # that an undisturbed life takes
        self.expected = self._undisturbed()
        self.points = 0
        self.found: Counter[str] = Counter()
        """What kills left."""

    def _undisturbed(self) -> list[Any]:
        (folder := self._folder / "calm").mkdir(parents=True)
        Job(self.layout, folder / "none", folder, "warm").results()
        begin = time.monotonic()
        results = Job(self.layout, folder / "saved", folder, "calm").results()
        self._seconds = time.monotonic() - begin
        assert all(same(each, results[0]) for each in results) or self.layout.startswith("dealt")
        return results[0]

    def chain(self, name: str, kills: int) -> None:
        """A job that is killed so often, and then left in peace; kills of those that had ended do not count."""
        (notes := self._folder / name / "notes").mkdir(parents=True)
        folder = self._folder / name / "saved"
        saved = 0
        for life in range(kills):
            job = Job(self.layout, folder, notes, str(life))
            self._wait(folder, kills)
            ranks = range(len(job.ranks.processes))
            victims = self._dice.choice([[rank] for rank in ranks] + [list(ranks)])
            job.kill(*victims)
            has_begun = len(notes_of(notes, str(life))) == len(ranks)
            time.sleep(self._dice.choice([0.0, 0.05]))
            job.end_others(notice=self.layout == "workers" and has_begun)
            saved = max(saved, last_saved(notes, str(life)))
            self.found["half written"] += len(list(folder.glob(".partial-snapshot-*")))
            check_folder(folder, saved)
            if any(line[0] == "ends" for lines in notes_of(notes, str(life)) for line in lines):
                self.found["all"] += 1
                break
            self.points += 1
        results = Job(self.layout, folder, notes, "last").results()
        begun = {line[1] for lines in notes_of(notes, "last") for line in lines if line[0] == "begins"}
        assert len(begun) == 1 and int(*begun) >= saved - EVERY
        self.found["no checkpoint" if begun == {"0"} else "a checkpoint"] += 1
        if self.layout.startswith("dealt"):
            check_samples(notes, *map(str, range(kills)), "last")
        else:
            assert all(same(each, self.expected) for each in results)

    def launched(self, name: str, victim: str) -> None:
        """As `chain`, of `muster run`: the processes with this word in their commands are killed, first of all, and
        nothing else may be left before the job is started again."""
        (notes := self._folder / name / "notes").mkdir(parents=True)
        folder = self._folder / name / "saved"
        script = self._folder / "worker.py"
        script.write_text("from support.killed_jobs import main\nmain()\n")
        layout = ["--workers", 2, "--servers", num_servers(self.layout)]
        variables = {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}
        with Command("run", *layout, script, self.layout, folder, notes, "killed", **variables) as job:
            lines = self._dice.randrange(1, SAMPLES)
            path = notes / "killed.0"
            wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > lines, "it has begun")
            for process in job.processes(victim):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            wait_until(lambda: job.processes() == [], "all processes end", 60)
        saved = last_saved(notes, "killed")
        check_folder(folder, saved)
        with Command("run", *layout, script, self.layout, folder, notes, "last", **variables) as job:
            returncode, _, err = job.end(120)
            assert returncode == 0, err
        for rank in range(2):
            values = [tensor.numpy() for tensor in torch.load(notes / f"last-{rank}.pt")]
            assert same(values, self.expected)
        (begun,) = {line[1] for lines in notes_of(notes, "last") for line in lines if line[0] == "begins"}
        assert int(begun) >= saved - EVERY
        self.found["no checkpoint" if begun == "0" else "a checkpoint"] += 1
        self.points += 1

    def _wait(self, folder: Path, kills: int) -> None:
        """Until a life is to be killed: any time, or one at which a checkpoint is being written."""
        time.sleep(self._dice.uniform(0.0, 1.6 / (kills + 1)) * self._seconds)
        if self._dice.random() < 0.5:
            return
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and not any(folder.glob(".partial-snapshot-*")):
            time.sleep(0.0002)
        time.sleep(self._dice.uniform(0.0, 0.004))

    def joining(self, name: str, victim: int) -> None:
        """A job of which one worker is killed and comes again, while the others go on."""
        (notes := self._folder / name / "notes").mkdir(parents=True)
        folder = self._folder / name / "saved"
        job = Job(self.layout, folder, notes, JOINED)
        lines = self._dice.randrange(12, SAMPLES - 10)  # a worker that dies in the first step takes the job with it
        wait_until(lambda: sum(map(len, notes_of(notes, JOINED))) > lines, "all have begun")
        job.kill(victim)
        job.ranks.restart(victim)
        results = job.results()
        check_samples(notes, JOINED, deaths=1)
        check_folder(folder, 0, grows=not self.layout.startswith("dealt"))
        assert self.layout.startswith("dealt") or all(same(each, results[0]) for each in results)
        self.points += 1


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all((a == b).all() for a, b in zip(left, right, strict=True))


def with_seed(seed: int, act: Callable[[], None]) -> None:
    """Says which seed failed."""
    try:
        act()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
