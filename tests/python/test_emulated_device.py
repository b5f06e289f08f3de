"""Other files' tests again, with replicas on the CPU that work as on a CUDA device: what they do is enqueued, by the
device's side of windows, optimizers and buffers, and the kernels are emulated (tests/support/cuda_emulation.h)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent / "include"
KERNELS = sorted((ROOT / "csrc/kernels/cuda").glob("*.cu"))

PLAYS = """
#include <c10/core/Device.h>
namespace muster {
bool is_streamed(c10::Device) noexcept { return true; }
}
"""
"""Stands before the library's own, which says so of CUDA devices alone."""

PLAYS_APART = """
#include <c10/core/Device.h>
#include <vector>
namespace muster {
bool share_memory(c10::Device, c10::Device) noexcept { return false; }
bool share_memory(const std::vector<c10::Device>&) noexcept { return false; }
}
"""
"""The same, of replicas that have a device each: those of a process divide the optimizers' steps."""

DIFFERS = {
    # Weights are looked at on the device alone: a window without any counts as stepped, and begins the state; the host
    # does not learn that a part of weight 0 has a loss that is not finite.
    "test_step.py": "without_weight or weights_are_finite or not_finite_is_skipped_and_named or weight_0_that_is_not",
    # Each worker steps with its own state, so that what one loads is a difference where its values are.
    "test_agreement.py": "state and loaded",
    # Nobody waits for a rank that cannot step, and the result tells of the gradients before hooks.
    "test_step_hooks.py": "peers_learn_at_once or is_not_finite_skips",
    # Sums that travel as bf16 are not rounded once by who owns them.
    "test_wire.py": "owners",
}
"""By file, the tests (as pytest's -k) of what a device does otherwise, or of what is the host's alone."""


def compiled(folder: Path, name: str, text: str, sources: Sequence[Path] = ()) -> Path:
    """A library for LD_PRELOAD."""
    (folder / f"{name}.cpp").write_text(text)
    library = folder / f"lib{name}.so"
    done = subprocess.run(
        [
            *("g++", "-shared", "-fPIC", "-O1", "-DNDEBUG", "-std=c++20", "-ffp-contract=off", "-o", str(library)),
            *(f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}", f"-I{ROOT / 'csrc/include'}", f"-I{TORCH}"),
            *("-x", "c++", str(folder / f"{name}.cpp"), *map(str, sources)),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the kernels."""
    return compiled(tmp_path_factory.mktemp("emulation"), "emulated", PLAYS, KERNELS)


def run_file(file: str, *libraries: Path) -> None:
    chosen = ["-k", f"not ({DIFFERS[file]})"] if file in DIFFERS else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *chosen, f"tests/python/{file}"],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": " ".join(map(str, libraries))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "file",
    [
        "test_step.py",
        "test_buffers.py",
        "test_agreement.py",
        "test_collectives.py",
        *(
            pytest.param(f"test_{name}.py", marks=pytest.mark.long)
            for name in (
                "by_hand",
                "double_backward",
                "errors_in_steps",
                "gradient_values",
                "gradients",
                "optim",
                "optimizer_state",
                "precision",
                "random_streams",
                "replicas",
                "step_hooks",
                "sync_batch_norm",
                "wire",
            )
        ),
    ],
)
@pytest.mark.timeout(900)
def test_replicas_that_play_devices_do_the_same(emulation: Path, file: str) -> None:
    run_file(file, emulation)


@pytest.mark.parametrize(
    "file", ["test_step.py", "test_step_hooks.py", pytest.param("test_optim.py", marks=pytest.mark.long)]
)
@pytest.mark.timeout(900)
def test_replicas_with_a_device_each_do_the_same(emulation: Path, tmp_path: Path, file: str) -> None:
    run_file(file, emulation, compiled(tmp_path, "apart", PLAYS_APART))
