"""Tensors of what torch::save wrote in C++, or torch.jit.save, without running or compiling the code that is in it.

Such an archive is a zip of a pickle that names classes of the archive's own TorchScript code. Here every one of them is
a bag of attributes; of all else the pickle may name a few functions alone, which make tensors and lists.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.storage import _get_dtype_from_pickle_storage_type

from muster.checkpoint.foreign import Found
from muster.errors import CheckpointError

__all__ = ["read_archive"]


class _Bag:
    """An object of the archive: its attributes."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, reader: Any) -> None:
        super().__init__(io.BytesIO(reader.get_record("data.pkl")))
        self._reader = reader
        self._allowed: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("collections", "OrderedDict"): OrderedDict,
            ("torch.jit._pickle", "restore_type_tag"): lambda value, _tag: value,
            **{("torch.jit._pickle", f"build_{kind}list"): list for kind in ("int", "double", "bool", "tensor")},
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Bag
        if module == "torch" and name.endswith("Storage"):
            return name
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        raise pickle.UnpicklingError(f"it needs {module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage, as a tensor of one dimension."""
        _, storage, key, _, numel = pid
        dtype = _get_dtype_from_pickle_storage_type(storage)
        record = self._reader.get_storage_from_record(f"data/{key}", numel * dtype.itemsize, torch.uint8)
        return torch.empty(0, dtype=torch.uint8).set_(record._typed_storage()._untyped_storage).view(dtype)


def read_archive(path: Path) -> Found:
    """The modules' tensors by name, and optimizers. Raises CheckpointError where the archive holds something else."""
    try:
        reader: Any = torch._C.PyTorchFileReader(str(path))
        if reader.has_record("byteorder") and reader.get_record("byteorder") != b"little":
            raise CheckpointError(f"'{path}' was written on a machine of another byte order; save it on one like this")
        top = _Unpickler(reader).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise CheckpointError(
            f"'{path}' is an archive of TorchScript, and cannot be read without running its code ({reason}); save the "
            "module's and the optimizer's state with torch::save"
        ) from error
    if _is_optimizer(top):
        return Found(optimizers=[_optimizer(top, path)])
    children = vars(top) if isinstance(top, _Bag) else {}
    if not any(map(_is_optimizer, children.values())):
        return Found(modules=[_checked(dict(_tensors(top, "")), path)])
    found = Found()
    for name, child in children.items():
        if _is_optimizer(child):
            found.optimizers.append(_optimizer(child, path))
        elif isinstance(child, _Bag):
            found.modules.append(_checked(dict(_tensors(child, "")), path))
        else:
            found.values[name] = child
    return found


def _tensor(storage: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> Tensor:
    """As torch._utils._rebuild_tensor_v2, within the storage's bounds."""
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride), default=0) < 0 or (0 not in size and last >= storage.numel()):
        raise ValueError("a tensor reaches beyond its storage")
    return storage.as_strided(tuple(size), tuple(stride), offset).clone()


def _tensors(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """By the names of the modules that they are in."""
    for name, child in vars(value).items() if isinstance(value, _Bag) else ():
        if isinstance(child, Tensor):
            yield prefix + name, child
        else:
            yield from _tensors(child, f"{prefix}{name}.")


def _checked(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    if not tensors:
        raise CheckpointError(f"'{path}' holds no tensors of a module; save the module, or its optimizer")
    return tensors


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, _Bag) and {"pytorch_version", "state", "param_groups"} <= vars(value).keys()


def _optimizer(archive: _Bag, path: Path) -> dict[str, Any]:
    """C++ has the addresses that parameters had for keys, and the groups their order."""
    fields = vars(archive)
    try:
        groups: list[dict[str, Any]] = []
        places: dict[Any, int] = {}
        for group in _items(fields["param_groups"], "param_groups"):
            addresses = _items(group, "params")
            params = list(range(len(places), len(places) + len(addresses)))
            places |= dict(zip(addresses, params, strict=True))
            groups.append({"params": params, **{name: _plain(value) for name, value in vars(group["options"]).items()}})
        state = {
            places[address]: {name: _as_in_python(name, value) for name, value in vars(values).items()}
            for address, values in vars(fields["state"]).items()
        }
        # Of flat optimizers, by position (csrc/optimizer/masters.h).
        for position, master in vars(fields.get("masters", _Bag())).items():
            state.setdefault(range(len(places))[int(position)], {})["master"] = master
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"an optimizer in '{path}' is none that torch::save writes ({error!r})") from error
    return {"name": None, "groups": groups, "state": dict(sorted(state.items()))}


def _items(value: Any, name: str) -> list[Any]:
    """Those of an archive of several things called alike: name/size, name/0, ..."""
    fields = value if isinstance(value, dict) else vars(value)
    items = [fields[f"{name}/{number}"] for number in range(int(fields[f"{name}/size"]))]
    return [vars(item) if isinstance(item, _Bag) else item for item in items]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _as_in_python(name: str, value: Any) -> Any:
    """torch.optim counts steps in tensors."""
    return torch.tensor(float(value)) if name == "step" and not isinstance(value, Tensor) else value
