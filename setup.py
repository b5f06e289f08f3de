"""The wheel: CMake builds everything (CMakeLists.txt), pyproject.toml describes it; here is what neither can say."""

import os
from importlib.metadata import version

from scikit_build_core.setuptools.wrapper import setup

# The core works with the minor version of torch that it is built with (docs/versions.md).
torch_minor = ".".join(version("torch").split(".")[:2])

setup(
    cmake_source_dir=".",
    cmake_install_dir="python/muster",
    cmake_args=["-DMUSTER_PYTHON=ON", f"-DMUSTER_UNITY_GROUPS={2 * (os.cpu_count() or 1)}"],
    install_requires=[f"torch=={torch_minor}.*", "typer>=0.12"],
)
