"""Imported by every Python that tests start: its folder is on their PYTHONPATH (conftest.py).

What the import of torch leaves behind is nothing for the garbage collector, neither while it grows nor when the process
ends: that took a third of the time of a process that does little else. Objects made later are collected as ever.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False  # typing's own is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class Uncollected(SourceFileLoader):
    """Runs a module, and keeps its objects, and all that were there before, from the collector."""

    def exec_module(self, module: ModuleType) -> None:
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            gc.freeze()
            gc.enable()


class TorchFinder:
    """Finds torch where it is found otherwise."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Uncollected(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, TorchFinder)
