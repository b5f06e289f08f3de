"""muster checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from muster import _C
from muster.checkpoint import converting, reading, servers
from muster.checkpoint.comparing import compare
from muster.checkpoint.describing import described, lines_of, size_text
from muster.checkpoint.importing import Order
from muster.checkpoint.reading import NoCheckpoint
from muster.errors import CheckpointError, Error, InvalidArgument

__all__ = ["app"]

DAMAGED, NONE = 1, 2
"""Exit codes; of diff, 1 says that the two differ."""

P = ParamSpec("P")

app = typer.Typer(no_args_is_help=True)

At = Annotated[
    Path,
    typer.Argument(help="The folder that save() wrote to (its newest checkpoint), or one checkpoint: FOLDER/7."),
]


@app.callback()
def checkpoint() -> None:
    """Looks at checkpoints, and converts them from and to the files of others."""


def _said(command: Callable[P, None], otherwise: int = DAMAGED) -> Callable[P, None]:
    """Errors as one line on stderr."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # of whoever reads what is printed: typer ends quietly
        except (Error, OSError) as error:
            typer.echo(f"muster checkpoint {command.__name__}: {error}", err=True)
            raise typer.Exit(NONE if isinstance(error, NoCheckpoint) else otherwise) from None

    return wrapped


def verify(
    path: Annotated[
        Path, typer.Argument(help="The folder that save() wrote to (all its checkpoints), or one: FOLDER/7.")
    ],
) -> None:
    """Reads and checks every file of every checkpoint: 0 if all are good, 1 if one is damaged, or parts of it are on
    other hosts, 2 if there is none."""
    damaged = 0
    folders = reading.folders_in(path)
    for folder in folders:
        try:
            typer.echo(f"{folder}: good, {_verified(folder)}")
        except CheckpointError as error:
            damaged += 1
            typer.echo(f"{folder}: {_problem(folder, error)}")
    if damaged:
        typer.echo(f"{damaged} of {len(folders)} damaged or not all here", err=True)
        raise typer.Exit(DAMAGED)


def _problem(folder: Path, error: CheckpointError) -> str:
    """What is wrong with one that cannot be read, or where the rest of it is."""
    try:
        missing = reading.check_folder(folder)[1]
    except CheckpointError as damage:
        return f"{'NOT ALL HERE' if reading.is_part(folder) else 'DAMAGED'}: {damage}"
    if not missing:
        return f"DAMAGED: {error}"
    hosts = "; ".join(f"on host '{host}': {', '.join(files)}" for host, files in sorted(missing.items()))
    return f"NOT ALL HERE, and what is here is good; {hosts}"


def _verified(folder: Path) -> str:
    """What is there. One checkpoint is in memory at a time."""
    found = reading.read_folder(folder)
    if found.is_known:
        found.document()
    size = sum(file.stat().st_size for file in folder.iterdir())
    steps = f", step {found.metadata['steps']}" if "steps" in found.metadata else ""
    kind = "" if found.is_of_strategy else f", a {found.kind}"
    return f"{len(found.tensors)} tensors, {size_text(size)}{steps}{kind}"


def show(
    path: At, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object, for machines.")] = False
) -> None:
    """Prints what a checkpoint holds, but the values of its tensors."""
    found = described(reading.read(path))
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    for line in lines_of(found):
        typer.echo(line)


def diff(first: At, second: At) -> None:
    """Prints in what two checkpoints differ: exit code 0 if in nothing, to the last bit, and 1 if in something."""
    ours, theirs = reading.read(first), reading.read(second)
    found = compare(ours, theirs)
    typer.echo(f"first:  {ours.folder}\nsecond: {theirs.folder}")
    for line in found.differences:
        typer.echo(line)
    equal = f"{found.equal_tensors} tensors and {found.equal_values} values are equal"
    typer.echo(f"{len(found.differences) or 'no'} differences; {equal}")
    if found.differences:
        raise typer.Exit(1)


def convert(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="A checkpoint, as for show; the snapshots' folders of all servers; or files of others, which add up."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="FILE.safetensors or FILE.pt, or a new folder for load().")],
    module: Annotated[int, typer.Option(min=0, help="Which module FILE.safetensors is to hold.")] = 0,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="The class of the first (second, ...) optimizer, which load() then insists on: AdamW."),
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option(help="Take this off the names of parameters ('module.' of DistributedDataParallel).")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE where it exists.")] = False,
) -> None:
    """Converts a checkpoint to a file of weights (.safetensors) or of torch.save (.pt, .pth); files of torch.save,
    torch::save of C++, safetensors and torch.distributed.checkpoint to a checkpoint; or servers' snapshots to either.
    Runs no code of theirs."""
    to_file = {".safetensors": "weights", ".pt": "all", ".pth": "all"}.get(target.suffix)
    is_of_servers = servers.are_of_servers(sources)
    if is_of_servers and (strip_prefix or optimizer):
        raise InvalidArgument("--strip-prefix and --optimizer are for files of others, and not for servers' snapshots")
    if to_file is None and is_of_servers:
        written, notes = converting.from_servers(sources, target)
    elif to_file is None:
        order = Order([str(source) for source in sources], str(target), strip_prefix, tuple(optimizer or ()))
        written, notes = converting.from_others(order)
    else:
        if len(sources) != 1 and not is_of_servers:
            raise InvalidArgument(f"'{target}' is made of one checkpoint, and {len(sources)} are given")
        if sources[0].is_file() and not converting.is_checkpoint(sources[0]):
            raise InvalidArgument(
                f"'{sources[0]}' is no checkpoint of Muster's, and '{target}' can be made of those alone; name a new "
                "folder to make a checkpoint of the files of others"
            )
        if target.exists() and not overwrite:
            raise InvalidArgument(f"'{target}' exists; give --overwrite to replace it")
        if strip_prefix or optimizer:
            raise InvalidArgument("--strip-prefix and --optimizer are for a TARGET that is a folder")
        if to_file == "weights":
            notes = converting.to_safetensors(sources, target, module)
        else:
            notes = converting.to_torch(sources, target)
        written = target
    for note in notes:
        typer.echo(f"muster checkpoint convert: {note}", err=True)
    typer.echo(written)


def sign(
    path: Annotated[
        Path, typer.Argument(help="The folder that save() wrote to (all its checkpoints), or one: FOLDER/7.")
    ],
) -> None:
    """Signs checkpoints with the job secret of MUSTER_SECRET_FILE, whoever wrote them: you trust what they hold."""
    for folder in reading.folders_in(path):
        _C.sign_snapshot(folder)
        typer.echo(f"{folder}: signed")


app.command()(_said(verify))
app.command()(_said(sign))
app.command()(_said(show))
app.command()(_said(diff, NONE))
app.command()(_said(convert))
