"""Scripts, run within a process that stays."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from unittest import mock


def output_of(script: str, *options: str) -> str:
    """What it prints as a rank of a job whose launcher has set the variables."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(sys, "argv", [script, *options]),
        mock.patch.dict(os.environ),  # Lightning leaves its seed there
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
