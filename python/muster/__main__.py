"""python -m muster is the muster command."""

from __future__ import annotations

from muster.cli import app

app(prog_name="muster")
