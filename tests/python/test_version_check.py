"""The package refuses a torch that its core was not built with, before it loads the core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import muster
from muster import NotBuilt
from muster._version_check import check_torch

ATTEMPT = """
import sys
try:
    import muster
except ImportError as error:
    assert "muster._C" not in sys.modules
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("found", ["2.13.0", "2.13.1", "2.13.0+cpu", "2.13.2+cu130"])
def test_the_same_minor_version_is_accepted(found: str) -> None:
    check_torch("2.13.0", found)


@pytest.mark.parametrize("found", ["2.12.1", "2.14.0a0+git123", "3.13.0", "2.1.3"])
def test_another_minor_version_is_refused_with_a_remedy(found: str) -> None:
    with pytest.raises(NotBuilt, match=r"pip install 'torch==2\.13\.\*'") as caught:
        check_torch("2.13.0", found)
    assert found in str(caught.value)


def test_import_refuses_before_the_core_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "1.99.0"\n')
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("NotBuilt this muster was built with torch ")
    assert "1.99.0" in done.stdout


def test_the_version_is_the_one_in_the_version_file() -> None:
    version = (Path(__file__).resolve().parents[2] / "VERSION").read_text().strip()
    assert muster.__version__ == version
    assert muster._C.__version__ == version
