"""Files of others become a checkpoint. A program of its own: what a damaged file does to it ends it alone.

Usage: python -m muster.checkpoint.importing ORDER

ORDER is `Order` as JSON. Prints a JSON object: "folder", "notes" (what was left out, and doubts), or "error".
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from muster import _C, optim, saved_tree
from muster.checkpoint.foreign import Found, found_in
from muster.checkpoint.libtorch import read_archive
from muster.checkpoint.zips import check_zip
from muster.errors import CheckpointError, Error, InvalidArgument
from muster.saved_layout import FORMAT, metadata_of

__all__ = ["Order", "convert", "write"]

_PARTS = ("strategy", "modules", "optimizers", "loss_scales", "loaders", "generators")
"""Those that every checkpoint names, None where it lacks them."""


@dataclass(frozen=True)
class Order:
    """What is to be converted."""

    sources: list[str]
    target: str
    """A folder."""
    strip_prefix: str = ""
    optimizers: tuple[str, ...] = ()
    """Names of the optimizers' classes, in their order; fewer leave the others without."""

    def text(self) -> str:
        """For main()."""
        return json.dumps(asdict(self))


def convert(order: Order) -> tuple[Path, list[str]]:
    """The folder of the checkpoint, and what of the sources is not in it or may be meant otherwise, a line each. Raises
    CheckpointError."""
    found = Found()
    for source in order.sources:
        found.add(_read(Path(source)))
    if order.strip_prefix:
        found.strip(order.strip_prefix)
    if len(order.optimizers) > len(found.optimizers):
        raise CheckpointError(
            f"--optimizer names {len(order.optimizers)} optimizers, and the sources hold {len(found.optimizers)}"
        )
    for optimizer, name in zip(found.optimizers, order.optimizers, strict=False):
        optimizer["name"] = name
    state, notes = _state_of(found.values)
    notes += [*_doubts(found.modules, order.optimizers)]
    parts = {"modules": found.modules or None, "optimizers": found.optimizers or None, "state": state}
    return write(order.target, parts, order.sources), notes


def write(target: str | Path, parts: Mapping[str, Any], sources: Sequence[str | Path]) -> Path:
    """Writes a checkpoint with these parts, of which others are absent, to a folder; returns its own."""
    document, tensors = saved_tree.encode({**dict.fromkeys(_PARTS), **parts})
    names = ", ".join(Path(source).name for source in sources)
    metadata = metadata_of(document, {"muster.format": FORMAT, "converted.from": names})
    return Path(_C._checkpoint.write_snapshot(Path(target), tensors, metadata))


def _state_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """As named values of a checkpoint, and what cannot be."""
    state, notes = {}, []
    for name, value in values.items():
        try:
            saved_tree.encode({name: value})
        except InvalidArgument as error:
            notes.append(f"'{name}' is left out: {error}")
            continue
        state[name] = {"value": value}
    return state, notes


_WRAPPERS = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile", "_forward_module.": "Fabric"}
"""What they put before the names of a module's parameters."""


def _doubts(modules: Sequence[Mapping[str, Any]], optimizers: Sequence[str]) -> Iterator[str]:
    for number, module in enumerate(modules):
        for prefix, wrapper in _WRAPPERS.items():
            if module and all(name.startswith(prefix) for name in module):
                yield (
                    f"the names of module {number} begin with '{prefix}', as {wrapper} makes them: "
                    f"--strip-prefix {prefix} takes that off"
                )
    for name in optimizers:
        if not any(hasattr(library, name) for library in (torch.optim, optim)):
            yield f"torch.optim has no {name}, which load() will insist on: see that its class is called so"


def _read(source: Path) -> Found:
    if source.is_dir():
        from muster.checkpoint import dcp  # which takes a while to import

        if not (source / dcp.METADATA).is_file():
            raise CheckpointError(f"'{source}' has no {dcp.METADATA}: it is no folder of torch.distributed.checkpoint")
        return found_in(_weights_only(dcp.read_folder, source), source)
    if not source.is_file():
        raise CheckpointError(f"there is no file '{source}'")
    if source.suffix == ".safetensors":
        return Found(modules=[_C._checkpoint.read_safetensors(source)])
    members = check_zip(source, source)
    if any(name.endswith("/constants.pkl") for name in members):
        return read_archive(source)
    if not members:
        _check_is_of_torch(source)
    return found_in(_weights_only(_torch_load, source), source)


_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
"""With a pickle of this number files begin that torch.save writes with _use_new_zipfile_serialization=False."""


def _check_is_of_torch(source: Path) -> None:
    """Of a file that is no zip."""
    with source.open("rb") as file:
        if _MAGIC not in file.read(32):
            raise CheckpointError(
                f"'{source}' is no file of torch.save, torch::save or safetensors (whose names end in .safetensors); "
                "name one of those, or a folder of torch.distributed.checkpoint"
            )


def _torch_load(source: Path) -> Any:
    return torch.load(source, map_location="cpu", weights_only=True)


def _weights_only(read: Any, source: Path) -> Any:
    try:
        return read(source)
    except CheckpointError:
        raise
    except Exception as error:
        text = (str(error).strip() or repr(error)).splitlines()[0]
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named or isinstance(error, pickle.UnpicklingError):
            what = named[1] if named else text
            raise CheckpointError(
                f"'{source}' holds other objects than tensors, numbers, strings and lists and dicts of them ({what}), "
                "and is not read: making those runs code that the file names. Where you trust it, load it yourself "
                "with torch.load(weights_only=False) and save the state_dicts alone"
            ) from error
        raise CheckpointError(f"'{source}' cannot be read ({type(error).__name__}: {text})") from error


def main() -> None:
    """Answers on stdout."""
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    order = Order(**{**given, "optimizers": tuple(given["optimizers"])})
    try:
        folder, notes = convert(order)
        print(json.dumps({"folder": str(folder), "notes": notes}))
    except (Error, OSError) as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
