"""The muster command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster import _build_info
from muster.benchmarks.command import app as bench
from muster.checkpoint.command import app as checkpoint
from muster.run import run
from muster.serve import serve

app = typer.Typer(name="muster", add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")
app.command()(serve)
# What follows PROGRAM is PROGRAM's.
app.command(context_settings={"allow_interspersed_args": False})(run)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"muster {_build_info.version} (built with torch {_build_info.built_with_torch})")
        raise typer.Exit


def _print_cmake_dir(wanted: bool) -> None:
    if wanted:
        typer.echo(Path(_build_info.__file__).resolve().parent / "share" / "cmake" / "muster")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    cmake_dir: Annotated[
        bool,
        typer.Option(
            "--cmake-dir",
            callback=_print_cmake_dir,
            is_eager=True,
            help="Print the folder of musterConfig.cmake, for find_package(muster), and exit.",
        ),
    ] = False,
) -> None:
    """Distribution strategies for PyTorch."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
