"""The GPUs that a build has code for, which cmake/MusterCudaArchitectures.cmake chooses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def chosen(folder: Path, known: Sequence[int], wanted: str = "") -> str:
    """CMAKE_CUDA_ARCHITECTURES, with a compiler that knows these."""
    nvcc = folder / "nvcc"
    nvcc.write_text("#!/bin/sh\n[ $1 = --list-gpu-arch ] || exit 1\n" + "".join(f"echo compute_{a}\n" for a in known))
    nvcc.chmod(0o755)
    script = folder / "choose.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/MusterCudaArchitectures.cmake")\n'
        f'muster_cuda_architectures(found "{nvcc}" "{wanted}")\n'
        'message("${found}")\n'
    )
    done = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, check=True)
    return done.stderr.strip()


def test_a_build_has_code_for_what_its_compiler_knows_of_a100_h100_and_b200(tmp_path: Path) -> None:
    assert chosen(tmp_path, [75, 80, 86, 90, 100, 120]) == "80-real;90-real;100"
    assert chosen(tmp_path, [70, 80, 86, 87, 89, 90]) == "80-real;90"  # CUDA 12.0
    assert chosen(tmp_path, [70, 80]) == "80"
    assert chosen(tmp_path, []) == "90"  # a compiler that lists nothing


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("9.0", "90-real"), ("8.0 9.0a+PTX", "80-real;90a"), ("8.6;8.9", "86-real;89-real"), ("10.0+PTX", "100")],
)
def test_torchs_list_chooses_others(tmp_path: Path, wanted: str, expected: str) -> None:
    assert chosen(tmp_path, [80, 90, 100], wanted) == expected


def test_the_list_of_a_real_compiler_is_understood(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("there is no nvcc")
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = [int(number) for number in re.findall(r"\d+", listed)]
    assert 80 in known
    assert chosen(tmp_path, known).startswith("80")
