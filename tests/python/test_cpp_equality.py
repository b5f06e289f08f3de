"""C++ and Python train the same bits, mirrored and over processes, shuffling included."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from support.commands import Command, wait_until
from support.hosts import hosts, names_ended
from support.ranks import environment, free_port

ROOT = Path(__file__).resolve().parents[2]
STEPS = 50


class Net(nn.Module):
    """As in examples/cpp/digits.cpp."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(images)))))


def read_idx(path: Path) -> torch.Tensor:
    raw = path.read_bytes()
    sizes = np.frombuffer(raw, ">u4", count=raw[3], offset=4).astype(int)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes).copy())


def save_weights(model: nn.Module, path: Path) -> None:
    header = "".join(f"{name} {' '.join(map(str, p.shape))}\n" for name, p in model.named_parameters()) + "\n"
    path.write_bytes(header.encode() + b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


def values_of(path: Path) -> bytes:
    return path.read_bytes().split(b"\n\n", 1)[1]


@pytest.fixture(scope="module")
def program(programs: Path) -> Path:
    return programs / "examples" / "digits"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, str(ROOT / "examples/python/make_idx.py"), str(folder)], check=True)
    torch.manual_seed(3)
    save_weights(Net(), folder / "initial")
    return folder


# Optimizer, accumulate, and what else is equal in both languages.
CASES = [
    ("sgd", 1, {}),
    ("adagrad", 3, {}),
    ("adamw", 1, {"clip_norm": 0.5}),
    ("adamw", 2, {"precision": "bf16"}),
    ("sgd", 1, {"precision": "fp16"}),
]


def train_in_python(data: Path, replicas: int, optimizer: str, accumulate: int, options: dict[str, Any]) -> bytes:
    torch.manual_seed(3)
    module = Net()
    images = read_idx(data / "train-images-idx3-ubyte").flatten(1).float() / 16
    labels = read_idx(data / "train-labels-idx1-ubyte").long()
    loader = DataLoader(TensorDataset(images, labels), batch_size=61, shuffle=True)
    if optimizer == "sgd":
        chosen: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    elif optimizer == "adagrad":
        chosen = torch.optim.Adagrad(module.parameters(), lr=0.02)
    else:
        chosen = torch.optim.AdamW(module.parameters(), lr=1e-3)
    with muster.MirroredStrategy(["cpu"] * replicas, seed=1, accumulate=accumulate, **options) as strategy:
        model, _, loader = strategy.prepare(module, chosen, loader)
        while strategy.steps < STEPS:
            for x, y in loader:
                strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
                if strategy.steps == STEPS:
                    break
    return b"".join(p.detach().numpy().tobytes() for p in module.parameters())


def train_in_cpp(
    program: Path, data: Path, replicas: int, optimizer: str, accumulate: int, options: dict[str, Any], *, workers: int
) -> bytes:
    final = data / f"final-{replicas}-{optimizer}-{accumulate}-{workers}"
    command = [
        str(program), str(data), "--steps", str(STEPS), "--batch-size", "61", "--optimizer", optimizer,
        "--accumulate", str(accumulate), "--initial", str(data / "initial"), "--final", str(final),
    ]  # fmt: skip
    flags = {"clip_norm": "--clip", "precision": "--precision"}
    command += itertools.chain.from_iterable((flags[name], str(value)) for name, value in options.items())
    if workers == 1:
        jobs = [subprocess.Popen([*command, "--devices", ",".join(["cpu"] * replicas)])]
    else:
        port = free_port()
        jobs = [
            subprocess.Popen([*command, "--multi-worker"], env={**os.environ, **environment(rank, workers, port)})
            for rank in range(workers)
        ]
    assert [job.wait(120) for job in jobs] == [0] * len(jobs)
    return values_of(final)


@pytest.mark.parametrize(("optimizer", "accumulate", "options"), CASES)
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_cpp_and_python_give_the_same_bits(
    program: Path, data: Path, replicas: int, optimizer: str, accumulate: int, options: dict[str, Any]
) -> None:
    expected = train_in_python(data, replicas, optimizer, accumulate, options)
    assert expected != values_of(data / "initial")
    assert train_in_cpp(program, data, replicas, optimizer, accumulate, options, workers=1) == expected
    if not options or replicas == 2:
        assert train_in_cpp(program, data, replicas, optimizer, accumulate, options, workers=replicas) == expected


def run_command(command: list[str]) -> tuple[int, str]:
    """Its exit code and what it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    return done.returncode, done.stdout


def test_cpp_workers_of_several_hosts_give_the_bits_of_one_and_name_who_died(program: Path, data: Path) -> None:
    command = [str(program), str(data), "--batch-size", "61", "--clip", "0.5", "--initial", str(data / "initial")]
    one, several = data / "one-host", data / "several-hosts"
    some = [*command, "--steps", str(STEPS), "--optimizer", "adamw"]
    subprocess.run([*some, "--devices", "cpu,cpu,cpu,cpu", "--final", str(one)], check=True, timeout=100)
    with hosts(2) as both:
        for places in ([0, 0, 1, 1], [1, 0, 1, 1]):
            ended = both.run(places, run_command, [*some, "--multi-worker", "--final", str(several)])
            assert [code for code, _ in ended] == [0] * 4, ended
            assert values_of(several) == values_of(one)
            several.unlink()
        many = [*command, "--epochs", "100000", "--multi-worker"]
        *others, _ = both.run([0, 0, 1, 1], run_until_rank_3_is_killed, many, data / "trains")
        for code, text in others:
            assert code == 1
            assert names_ended(3, text), text


def run_until_rank_3_is_killed(command: list[str], trains: Path) -> tuple[int, str]:
    """Its exit code and what it printed. `trains`: a file that is there once it trains."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        printed = ""
        if os.environ["RANK"] == "0":
            while "epoch 0" not in printed and job.poll() is None:
                printed += job.stdout.readline()
            trains.touch()
        elif os.environ["RANK"] == "3":
            wait_until(trains.exists, "it trains", 60)
            job.kill()
        printed += job.stdout.read()
        return job.wait(60), printed


def test_a_cpp_program_that_sigterm_stopped_goes_on_with_the_same_bits(
    program: Path, data: Path, tmp_path: Path
) -> None:
    command = [str(program), str(data), "--devices", "cpu,cpu", "--epochs", "40", "--initial", str(data / "initial")]
    subprocess.run([*command, "--final", str(tmp_path / "undisturbed")], check=True, timeout=120)
    command += ["--checkpoint", str(tmp_path / "kept"), "--final", str(tmp_path / "final")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("kept/snapshot-*")) and time.monotonic() < deadline:
            time.sleep(0.002)
        first.send_signal(signal.SIGTERM)
        printed, _ = first.communicate(timeout=60)
    assert first.returncode == 128 + signal.SIGTERM
    assert "stopped after" in printed
    subprocess.run(command, check=True, timeout=120)
    assert values_of(tmp_path / "final") == values_of(tmp_path / "undisturbed")


def train_on_servers(servers: str, *command: str) -> list[str]:
    """What each of two workers prints."""
    port = free_port()
    jobs = [
        subprocess.Popen(
            [*command, "--parameter-server"],
            env={**os.environ, **environment(rank, 2, port), "MUSTER_SERVERS": servers},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    return printed


@pytest.mark.parametrize(("is_embedded", "replicas"), [(False, 1), (True, 1), (False, 2)])
def test_cpp_workers_of_a_parameter_server_give_the_same_bits(
    program: Path, data: Path, is_embedded: bool, replicas: int
) -> None:
    expected = train_in_python(data, 2 * replicas, "adamw", 2, {"clip_norm": 0.5})
    final = data / f"final-servers-{is_embedded}-{replicas}"
    command = [
        str(program), str(data), "--steps", str(STEPS), "--batch-size", "61", "--optimizer", "adamw",
        "--accumulate", "2", "--clip", "0.5", "--initial", str(data / "initial"), "--final", str(final),
        "--devices", ",".join(["cpu"] * replicas),
    ]  # fmt: skip
    if is_embedded:
        train_on_servers("", *command)
    else:
        with Command("serve", "--until-deserted") as server:
            train_on_servers(server.line(), *command)
            assert server.end()[0] == 0
    assert values_of(final) == expected


def test_cpp_workers_that_step_on_their_own_learn(program: Path, data: Path) -> None:
    chief, _ = train_on_servers("", str(program), str(data), "--staleness", "none", "--optimizer", "adamw")
    assert float(chief.rpartition("test accuracy: ")[2]) >= 0.95


def test_the_click_model_learns_the_same_bits_from_the_same_impressions(programs: Path) -> None:
    options = ["--rows", "3000", "--impressions", "20000", "--epochs", "2", "--batch-size", "500", "--least", "0.7"]
    cpp = [str(programs / "examples" / "click_through"), *options]
    python = [sys.executable, str(ROOT / "examples/python/click_through.py"), *options]
    printed = []
    for command in (cpp, python):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    printed.append(train_on_servers("", *cpp)[0])
    in_cpp, in_python, on_servers = (
        [line for line in text.splitlines() if not line.startswith("trained in")] for text in printed
    )
    assert any(line.startswith("parameters:") for line in in_cpp)
    assert in_cpp == in_python == on_servers
