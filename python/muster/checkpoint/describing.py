"""What a checkpoint holds, as plain values for machines and as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from torch import Tensor

from muster.checkpoint.reading import Checkpoint
from muster.saved_optimizer import others_of

__all__ = ["described", "dtype_of", "lines_of", "size_text", "value_text"]

_MOST_TEXT = 60


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that is known of it but the tensors' values; only what JSON has words for."""
    files = [file for file in checkpoint.folder.iterdir() if file.is_file()]
    metadata = checkpoint.metadata
    result: dict[str, Any] = {
        "folder": str(checkpoint.folder),
        "number": checkpoint.number,
        "kind": checkpoint.kind,
        "written": max(file.stat().st_mtime for file in files),
        "bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
        "muster_version": metadata.get("muster.version"),
        "torch_version": metadata.get("torch.version"),
        "converted_from": metadata.get("converted.from"),
    }
    if not checkpoint.is_of_strategy:
        known = ("content", "muster.version", "torch.version")
        result["metadata"] = {key: _plain(value) for key, value in metadata.items() if key not in known}
        result["tensors"] = _tensors(checkpoint.tensors)
        if checkpoint.is_known:
            values = checkpoint.document()["values"]
            result["tensors"] = _tensors(values)
            result["values"] = {key: _plain(value) for key, value in values.items() if not isinstance(value, Tensor)}
        return result
    parts = checkpoint.parts()
    generators = parts.get("generators")
    return result | {
        "steps": None if parts.get("strategy") is None else parts["strategy"]["steps"],
        "strategy": parts.get("strategy"),
        "modules": [_module(module) for module in parts.get("modules") or ()],
        "optimizers": [_optimizer(optimizer) for optimizer in parts.get("optimizers") or ()],
        "tables": [_table(table) for table in parts.get("tables") or ()],
        "loss_scales": [
            {"optimizers": each["optimizers"], **_plain(each["scale"])} for each in parts.get("loss_scales") or ()
        ],
        "loaders": [
            {"epoch": each["epoch"], "batches": _num_trained(each), "generators": len(each["generators"])}
            for each in parts.get("loaders") or ()
        ],
        "generators": None if generators is None else len(generators),
        "random": sorted(name for name, states in (parts.get("random") or {}).items() if states is not None),
        "state": {
            name: {
                "kind": "object" if "object" in each else "value",
                "value": _plain(each.get("object", each.get("value"))),
            }
            for name, each in (parts.get("state") or {}).items()
        },
        "absent": [name for name in ("strategy", "modules", "optimizers", "loaders") if parts.get(name) is None],
    }


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield found["folder"]
    yield _line("kind", found["kind"])
    yield _line("number", "none, its folder was renamed" if found["number"] is None else found["number"])
    versions = [
        f"{of} {found[key]}" for of, key in (("Muster", "muster_version"), ("torch", "torch_version")) if found[key]
    ]
    when = datetime.fromtimestamp(found["written"]).astimezone().isoformat(" ", "seconds")
    yield _line("written", when + (f" by {' and '.join(versions)}" if versions else ""))
    if found["converted_from"]:
        yield _line("from", found["converted_from"])
    yield _line("size", f"{size_text(found['bytes'])} in {_count(found['files'], 'file')}")
    if "tensors" in found:
        for key, value in found["metadata"].items():
            yield _line(key, value_text(value))
        yield from _tensor_lines("tensors", found["tensors"])
        for name, value in found.get("values", {}).items():
            yield f"    {name} = {value_text(value)}"
        return
    strategy = found["strategy"]
    if strategy is not None:
        yield _line("steps", f"{strategy['steps']}, by {_count(strategy['calls'], 'call')}")
        yield _line("strategy", f"{_count(strategy['workers'], 'worker')}, {_count(strategy['replicas'], 'replica')}")
        yield _line("seed", strategy["seed"])
    for number, module in enumerate(found["modules"]):
        yield from _tensor_lines(f"module {number}", module["tensors"])
        for name, value in module["values"].items():
            yield f"    {name} = {value_text(value)}"
    for number, optimizer in enumerate(found["optimizers"]):
        yield from _optimizer_lines(f"optimizer {number}", optimizer)
    for number, table in enumerate(found["tables"]):
        rows = f"{table['rows']:,} of {table['num_rows']:,} rows of {table['dim']} values"
        yield from _tensor_lines(f"table {number}", table["tensors"])
        places = ", ".join(f"'{name}' of module {module}" for module, name in table["places"])
        yield f"    {places}: {rows}, others as {table['init']} {table['scale']:g} of seed {table['seed']}"
    for each in found["loss_scales"]:
        of = " and ".join(map(str, each["optimizers"]))
        yield _line("loss scale", f"of optimizer {of}: {_options(each, skip='optimizers')}")
    for number, loader in enumerate(found["loaders"]):
        own = f", {_count(loader['generators'], 'generator')} of its own" if loader["generators"] else ""
        yield _line(
            f"loader {number}", f"epoch {loader['epoch']}, {_count(loader['batches'], 'batch', 'batches')} in{own}"
        )
    if found["generators"] is not None:
        others = f", and those of {', '.join(found['random'])}" if found["random"] else ""
        yield _line("generators", f"torch's default one of {_count(found['generators'], 'worker')}{others}")
    for name, each in found["state"].items():
        what = "object" if each["kind"] == "object" else "value"
        yield _line(f"{what} '{name}'", value_text(each["value"]))
    if found["absent"]:
        yield _line("absent", ", ".join(found["absent"]) + ": load() leaves those of the program as they are")


def size_text(number: int) -> str:
    """Bytes in words."""
    if number < 1000:
        return _count(number, "byte")
    power = min(int(math.log10(number)) // 3, 5)
    return f"{number / 1000**power:.3g} {' kMGTP'[power]}B"


def dtype_of(tensor: Tensor) -> str:
    """As in torch.float32, without torch."""
    return str(tensor.dtype).removeprefix("torch.")


def value_text(value: object) -> str:
    """One line of it."""
    text = repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _num_trained(loader: Mapping[str, Any]) -> int:
    """Batches of its epoch that steps had, of one whose batches servers dealt also those out of order."""
    passes = [each for each in loader.get("passes") or () if each["epoch"] == loader["epoch"]]
    batches: int = loader["batches"] + sum(each["next"] - len(each["undone"]) for each in passes)
    return batches


def _module(module: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tensors": _tensors(module),
        "values": {name: _plain(value) for name, value in module.items() if not isinstance(value, Tensor)},
    }


def _table(table: Mapping[str, Any]) -> dict[str, Any]:
    known = ("places", "num_rows", "dim", "init", "scale", "seed", "optimizer", "parameter")
    tensors = {"rows": table["rows"], "values": table["values"], **table["state"]}
    return {**{key: table[key] for key in known}, "rows": len(table["rows"]), "tensors": _tensors(tensors)}


def _optimizer(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    state = optimizer["state"]
    return {
        "name": optimizer["name"],
        "groups": [_plain(group) for group in optimizer["groups"]],
        "state": {
            str(parameter): {
                "tensors": _tensors(values),
                "values": {name: _plain(value) for name, value in values.items() if not isinstance(value, Tensor)},
            }
            for parameter, values in state.items()
        },
        "others": _plain(others_of(optimizer)),
    }


def _tensors(tensors: Mapping[Any, Any]) -> list[dict[str, Any]]:
    return [_tensor(str(name), value) for name, value in tensors.items() if isinstance(value, Tensor)]


def _tensor(name: str, tensor: Tensor) -> dict[str, Any]:
    size = tensor.numel() * tensor.element_size()
    return {"name": name, "dtype": dtype_of(tensor), "shape": list(tensor.shape), "bytes": size}


def _plain(value: object) -> Any:
    """What JSON has words for: a tensor is described."""
    if isinstance(value, Tensor):
        return {"dtype": dtype_of(value), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _line(name: str, value: object) -> str:
    return f"  {name:<12} {value}"


def _count(number: int, what: str, several: str = "") -> str:
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def _tensor_lines(title: str, tensors: list[dict[str, Any]]) -> Iterator[str]:
    elements = sum(math.prod(tensor["shape"]) for tensor in tensors)
    size = size_text(sum(tensor["bytes"] for tensor in tensors))
    yield _line(title, f"{_count(len(tensors), 'tensor')}, {_count(elements, 'element')}, {size}")
    yield from _columns([(tensor["name"], tensor["dtype"], str(tensor["shape"])) for tensor in tensors])


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "    " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _optimizer_lines(title: str, optimizer: Mapping[str, Any]) -> Iterator[str]:
    yield _line(title, optimizer["name"] or "of a class that the checkpoint does not name")
    for number, group in enumerate(optimizer["groups"]):
        count = _count(len(group["params"]), "parameter")
        yield f"    group {number}: {count}, {_options(group, skip='params')}"
    if optimizer["others"]:
        yield f"    of no parameter: {_options(optimizer['others'])}"
    rows = []
    for parameter, found in optimizer["state"].items():
        rows += [(parameter, each["name"], each["dtype"], str(each["shape"])) for each in found["tensors"]]
        rows += [(parameter, name, "=", value_text(value)) for name, value in found["values"].items()]
    yield from _columns(rows)


def _options(options: Mapping[str, Any], *, skip: str = "") -> str:
    return ", ".join(f"{key}={value_text(value)}" for key, value in options.items() if key != skip)
