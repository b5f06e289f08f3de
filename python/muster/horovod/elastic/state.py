"""What a training function goes on from, after a failure."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.horovod.functions import broadcast_object
from muster.horovod.runtime import running

__all__ = ["ObjectState", "State"]

KEPT = "commit.pt"
"""The file of the last commit, in the folder MUSTER_COMMITS."""
_looked_at: set[tuple[Path, str, int]] = set()
"""Files of commits that this process has looked at, in which life of which job: what is in one later is that job's."""


class State:
    """What commit() keeps, restore() brings back and sync() makes equal on all ranks. Derive from it for state of other
    kinds."""

    def __init__(self, bcast_object: Callable[..., Any] = broadcast_object, get_rank: Callable[[], int] | None = None):
        """`bcast_object` sends an object of rank 0 to all; `get_rank` says which rank this is. Both as in Horovod."""
        self._bcast_object = bcast_object
        self._get_rank = get_rank or (lambda: running().rank)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._failures = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Has `callbacks` called after ranks have met again, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Ranks have met again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keeps the state as it is: in memory, and on rank 0 in the folder MUSTER_COMMITS, where that is set."""
        self.save()
        self._failures = 0
        self.check_host_updates()
        folder = os.environ.get("MUSTER_COMMITS")
        if folder and self._get_rank() == 0:
            _write(Path(folder), {"job": _job(), "state": self.kept()})

    def count_failure(self) -> int:
        """How often training has failed since the last commit, with this time."""
        self._failures += 1
        return self._failures

    def agree_on_failures(self, error: Exception) -> tuple[int, str]:
        """Collective, after each rank's `error`: how often training has failed since the last commit of rank 0, from
        which all would go on, and rank 0's error. Other ranks may have failed before that commit."""
        self._failures, text = broadcast_object((self._failures, str(error)), name="hvd.elastic.run")
        return self._failures, text

    def check_host_updates(self) -> None:
        """Without effect: nobody tells of hosts that come and go."""

    def load_kept(self) -> None:
        """Goes on from the commit in the folder MUSTER_COMMITS, where this process is rank 0 and an earlier life of
        this job has written it. Of lives tell torchrun's store and, where it has none of its own,
        TORCHELASTIC_RESTART_COUNT."""
        folder = os.environ.get("MUSTER_COMMITS")
        if not folder or self._get_rank() != 0:
            return
        path = Path(folder) / KEPT
        life = path, _job(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if not running().job and life[2] == 0 and life not in _looked_at and path.exists():
            path.replace(path.with_suffix(".old"))  # another job's: a later life of this one could not tell
        _looked_at.add(life)
        if not path.exists():
            return
        read = torch.load(path, map_location="cpu", weights_only=False)
        if read["job"] == _job():
            self.keep(read["state"])
            self.restore()
        else:
            warnings.warn(f"{path} is another job's commit: training begins anew", stacklevel=2)

    def kept(self) -> Any:
        """What save() has kept, to be pickled; for commits that outlive the process."""
        raise NotImplementedError

    def keep(self, state: Any) -> None:
        """Takes `state`, of kept(), for what save() has kept."""
        raise NotImplementedError

    def save(self) -> None:
        """Keeps the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what save() kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the state that of rank 0, and keeps it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called after ranks have met again, before callbacks."""


class ObjectState(State):
    """Python objects by name, which are its attributes.

    They stay those that were given, on rank 0 also after sync(). What is in lists, deques, dicts, sets and tensors is
    kept, and comes back in the same ones; what is in objects of other classes is not, as in Horovod.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        """The objects `kwargs`; `bcast_object` and `get_rank` as of State."""
        super().__init__(bcast_object, get_rank)
        self._hold(kwargs)

    def save(self) -> None:
        """Keeps which objects the attributes are, and what is in containers and tensors."""
        self._hold({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Sets the attributes to the objects that were kept, with what was in them."""
        self._contents.restore()
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Makes the objects those that rank 0 has kept, as they are there. Collective."""
        if self._saved_state:
            self._hold(self._bcast_object(self._saved_state))

    def _hold(self, objects: dict[str, Any]) -> None:
        self._saved_state = objects
        self._contents = _Contents(objects)
        for name, value in objects.items():
            setattr(self, name, value)

    def kept(self) -> Any:
        """As of State."""
        return self._saved_state

    def keep(self, state: Any) -> None:
        """As of State: `state` of kept()."""
        self._saved_state = {name: state.get(name, value) for name, value in self._saved_state.items()}
        self._contents = _Contents(self._saved_state)


class _Contents:
    """What was in the containers and tensors that `objects` leads to, which are written in place: others hold them."""

    def __init__(self, objects: Any) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}
        found = [objects]
        while found:
            value = found.pop()
            if id(value) in self._kept:
                continue
            if isinstance(value, dict):
                self._kept[id(value)] = value, dict(value)
                found.extend(value.values())
            elif isinstance(value, (list, deque, set, tuple)):
                self._kept[id(value)] = value, list(value)
                found.extend(value)
            elif isinstance(value, Tensor):
                self._kept[id(value)] = value, value.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        for value, kept in self._kept.values():
            if isinstance(value, Tensor):
                value.copy_(kept)
            elif not isinstance(value, tuple):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(kept)


def _job() -> str:
    """What tells jobs apart that share a folder."""
    return running().job or os.environ.get("TORCHELASTIC_RUN_ID", "")


def _write(folder: Path, commit: Any) -> None:
    """Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save(commit, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, folder / KEPT)
