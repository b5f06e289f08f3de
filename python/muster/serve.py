"""muster serve: one parameter server."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from muster._C import _server
from muster.errors import Error

__all__ = ["LOOK", "serve"]

LOOK = 0.05
"""Seconds from one look at what may end a process to the next."""


def serve(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Listen at localhost:PORT; without, at a free port.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Listen at host:port, where the host is this one.")] = None,
    snapshots: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder of this server alone; it goes on from the newest snapshot there."),
    ] = None,
    snapshot_every: Annotated[float, typer.Option(min=0.1, help="Seconds between snapshots.")] = 30.0,
    until_deserted: Annotated[
        bool, typer.Option("--until-deserted", help="End once all workers that joined have left or died.")
    ] = False,
    until_stdin_ends: Annotated[
        bool,
        typer.Option(
            "--until-stdin-ends",
            help="End once standard input ends, as a child that its parent ends or leaves; signals are ignored.",
        ),
    ] = False,
) -> None:
    """Serves parameters until SIGINT or SIGTERM; prints the address that MUSTER_SERVERS names."""
    if port is not None and address is not None:
        raise typer.BadParameter("--port and --address both say where to listen; give one of them")
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # Under `muster run`, which outlives the workers, a signal to all of its processes is for the workers.
        signal.signal(number, signal.SIG_IGN if until_stdin_ends else lambda number, _: signals.append(number))
    try:
        where = address or (_server.free_address() if port is None else f"localhost:{port}")
        logging.basicConfig(format=f"muster serve, {where}: %(message)s")
        logging.getLogger("muster").setLevel(logging.INFO)
        server = _server.ParameterServer(_server.channel_name(where), str(snapshots or ""), snapshot_every)
        typer.echo(where)
        while not (signals or (until_deserted and server.is_deserted()) or (until_stdin_ends and _stdin_ended())):
            time.sleep(LOOK)
        server.snapshot()
    except (Error, OSError) as error:
        typer.echo(f"muster serve: {error}", err=True)
        raise typer.Exit(1) from None


def _stdin_ended() -> bool:
    if sys.stdin is None:  # closed by who started this
        return True
    return bool(select.select([sys.stdin], [], [], 0)[0]) and os.read(sys.stdin.fileno(), 4096) == b""
