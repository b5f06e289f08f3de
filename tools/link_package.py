"""Makes a build importable without copying its Python files.

Usage: link_package.py BUILD_FOLDER [INTO]

Installs what CMake built into INTO/muster (INTO defaults to this interpreter's site-packages, where the muster command
is written too) and links every file and folder of python/muster beside it, so that edits count at once.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "python" / "muster"
COMMAND = '#!{python}\nfrom muster.cli import app\n\nif __name__ == "__main__":\n    app()\n'


def link(package: Path) -> None:
    for entry in package.iterdir():
        if entry.is_symlink() and not entry.exists():
            entry.unlink()
    for entry in SOURCE.iterdir():
        target = package / entry.name
        if entry.name == "__pycache__" or (target.is_symlink() and target.readlink() == entry):
            continue
        target.unlink(missing_ok=True)
        target.symlink_to(entry)


def main() -> None:
    build = sys.argv[1]
    site = Path(sysconfig.get_path("platlib"))
    into = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else site
    package = into / "muster"
    package.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cmake", "--install", build, "--prefix", str(package)], check=True, stdout=subprocess.DEVNULL)
    link(package)
    if into == site:
        command = Path(sysconfig.get_path("scripts")) / "muster"
        command.write_text(COMMAND.format(python=sys.executable))
        command.chmod(0o755)


if __name__ == "__main__":
    main()
