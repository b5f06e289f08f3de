"""Refuses, when imported, a torch that the C++ core was not built with; so it is imported before the core.

C++ symbols and layouts of torch change between minor versions: a core loaded into another one may crash or compute
wrongly, so the versions are compared as text first. Importing torch here also loads the libraries the core links to.
"""

from __future__ import annotations

import torch

from muster._build_info import built_with_torch
from muster.errors import NotBuilt


def check_torch(built_with: str, found: str) -> None:
    """Raises NotBuilt, an ImportError, unless both versions have the same major and minor number."""
    needed = built_with.split(".")[:2]
    if found.split(".")[:2] == needed:
        return
    raise NotBuilt(
        f"this muster was built with torch {built_with} and cannot be loaded into torch {found}: install a matching "
        f"torch (pip install 'torch=={'.'.join(needed)}.*'), or build muster for the torch that is installed "
        "(pip install --no-build-isolation --no-deps --force-reinstall . in its source folder)"
    )


check_torch(built_with_torch, str(torch.__version__))
