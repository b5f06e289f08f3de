"""The wheel, as a user meets it: built from the sdist, installed in a clean environment, used from Python and C++."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import dockerfile

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
IMAGE = dockerfile.stages(ROOT / "deploy" / "Dockerfile")
QUICK_BUILD = "'-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG' -DMUSTER_UNITY_GROUPS=2"
"""scikit-build-core's CMAKE_ARGS: what the wheel holds does not depend on it, its build is faster."""


def run(*command: str | Path, cwd: Path, path: Path | None = None, fails: bool = False) -> str:
    """Runs a command as a user's shell would, with `path` first on PATH; returns its output, errors included."""
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"}}
    environment["PATH"] = os.pathsep.join([*([str(path)] if path else []), environment["PATH"]])
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
    environment.setdefault("CMAKE_ARGS", QUICK_BUILD)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout.strip()


@dataclass(frozen=True)
class Installed:
    wheel: Path
    bin: Path  # of the clean environment
    elsewhere: Path  # a folder that is not the checkout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment that sees this one's packages, torch among them, but not this one's muster."""
    folder = tmp_path_factory.mktemp("packaging")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", folder, ROOT, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later
        archive.extractall(folder / "source")
    (source,) = (folder / "source").iterdir()
    (make_wheel,) = (command for _, command in IMAGE[0] if " wheel " in command)  # as the image's first stage does
    words = {"python": sys.executable, "/source": str(source), "/wheels": str(folder / "wheels")}
    run(*(words.get(word, word) for word in make_wheel.split()), cwd=folder)
    (wheel,) = (folder / "wheels").glob("*.whl")

    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"(torch_)?muster|__pycache__|.*\.pth$|pip", entry.name):
            (dependencies / entry.name).symlink_to(entry)
    run(sys.executable, "-m", "venv", folder / "clean", cwd=folder)
    python = folder / "clean" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return Installed(wheel, python.parent, elsewhere)


@pytest.mark.timeout(1800)
def test_the_wheel_carries_everything(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    files = {name.removeprefix("muster/") for name in names if name.startswith("muster/")}
    public = {f"include/muster/{p.name}" for p in (ROOT / "csrc" / "include" / "muster").glob("*.h")}
    python = {str(p.relative_to(ROOT / "python" / "muster")) for p in (ROOT / "python" / "muster").rglob("*.py*")}
    expected = public | {p for p in python if not p.endswith(".pyc")}
    expected |= {"lib/libmuster.so", "include/muster/version.h", "py.typed", "_build_info.py"}
    expected |= {f"share/cmake/muster/{n}" for n in ("musterConfig.cmake", "musterConfigVersion.cmake")}
    assert expected <= files
    assert [name for name in files if re.fullmatch(r"_C\..*\.so", name)]
    assert [name for name in names if not name.startswith(("muster/", "torch_muster-"))] == []
    assert len(names) == len(set(names))


def test_the_wheel_requires_the_torch_minor_version_it_was_built_with(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    (needed,) = re.findall(r"^Requires-Dist: torch==(\d+\.\d+)\.\*$", metadata, re.MULTILINE)
    built = run(installed.bin / "python", "-c", "import muster; print(muster._C.built_with_torch)", cwd=ROOT / "docs")
    assert built.startswith(f"{needed}.")
    assert f"Version: {VERSION}" in metadata


def test_it_is_imported_from_another_folder(installed: Installed) -> None:
    script = "import muster; print(muster.__file__, muster._C.__file__, muster.__version__, sep='\\n')"
    module, core, version = run(installed.bin / "python", "-c", script, cwd=installed.elsewhere).splitlines()
    clean = str(installed.bin.parent)
    assert module.startswith(clean)
    assert core.startswith(clean)
    assert version == VERSION


def test_the_command_says_its_version(installed: Installed) -> None:
    by_name = run(installed.bin / "muster", "--version", cwd=installed.elsewhere)
    by_module = run(installed.bin / "python", "-m", "muster", "--version", cwd=installed.elsewhere)
    assert by_name == by_module
    assert by_name.startswith(f"muster {VERSION} ")


def test_the_command_says_where_the_cmake_package_is(installed: Installed) -> None:
    folder = Path(run(installed.bin / "muster", "--cmake-dir", cwd=installed.elsewhere))
    assert (folder / "musterConfig.cmake").is_file()


@pytest.mark.skipif(bool(dockerfile.why_not()), reason=dockerfile.why_not())
def test_the_image_trains(installed: Installed, tmp_path: Path) -> None:
    """Its steps on a copy of this system, where the packages are already: tools, the wheel, a user, training."""
    made_elsewhere = {"COPY . /source", next(f"RUN {command}" for _, command in IMAGE[0] if " wheel " in command)}
    tools = [step for step in IMAGE[0] if " ".join(step) not in made_elsewhere]
    dockerfile.run(tools, tmp_path, tmp_path / "build", installed.bin)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "wheels").symlink_to(installed.wheel.parent)
    output = dockerfile.run(IMAGE[1], tmp_path, tmp_path / "image", installed.bin, "--epochs 1")
    assert "Processing /wheels/torch_muster" in output
    assert "parameters: " in output


def configure(installed: Installed, build: Path, *options: str, fails: bool = False) -> str:
    cmake_dir = run(installed.bin / "muster", "--cmake-dir", cwd=installed.elsewhere)
    source = ROOT / "examples" / "cpp"
    command = ["cmake", "-S", source, "-B", build, "-G", "Ninja", f"-Dmuster_ROOT={cmake_dir}", *options]
    return run(*command, cwd=installed.elsewhere, path=installed.bin, fails=fails)


@pytest.mark.timeout(900)
def test_an_outside_cmake_project_builds_and_runs(installed: Installed) -> None:
    build = installed.elsewhere / "build"
    configure(installed, build)
    # What other tests start of the examples is built for them.
    run("cmake", "--build", build, "--target", "versions", "quick_start", cwd=installed.elsewhere)
    loaded = run(build / "versions", cwd=installed.elsewhere)
    assert loaded.startswith(f"muster {VERSION} (headers {VERSION}), built with torch ")


def test_an_outside_cmake_project_with_another_torch_is_refused(installed: Installed, tmp_path: Path) -> None:
    header = tmp_path / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    parts = {"MAJOR": 1, "MINOR": 99, "PATCH": 0}
    header.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in parts.items()))
    output = configure(installed, tmp_path / "build", f"-DMusterTorch_ROOT={tmp_path}", fails=True)
    assert "torch 1.99.0 is in" in " ".join(output.split())


def test_a_torch_of_another_minor_version_is_refused(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "1.99.0"\n')
    output = run(installed.bin / "python", "-c", "import muster", cwd=tmp_path, fails=True)
    assert "NotBuilt: this muster was built with torch" in output
    assert "pip install 'torch==" in output
