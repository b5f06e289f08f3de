"""Copies of batches to CUDA devices, which go on while a device works on the batch before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muster.batch import pinned

__all__ = ["Arrival", "CopyStreams"]


class Arrival:
    """Tensors that are on their way from the host to a CUDA device, over a stream of their own.

    A copy follows what the device's current stream had to do when it was begun, and not what that gets to do until
    `join`. Its memory is that stream's: what is let go of is used again in its order, so that a host that runs ahead of
    the device needs no more of it. Owned by the thread that iterates.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        """What copies go over."""
        self._end: torch.cuda.Event | None = None
        self._begun_on: torch.cuda.Stream | None = None
        self._copied: list[Tensor] = []
        """Until they are joined: their memory is not used again before."""

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; nobody may read it before `join`."""
        source = pinned(tensor)
        # Of this device alone: a stream's own context would leave one on the process's current device, too.
        with torch.cuda.device(self.stream.device):
            copied = torch.empty_like(source, device=self.stream.device)
            self._begun_on = torch.cuda.current_stream()
            self.stream.wait_stream(self._begun_on)
            with torch.cuda.stream(self.stream):
                copied.copy_(source, non_blocking=True)
                self._end = self.stream.record_event()
        self._copied.append(copied)
        return copied

    def join(self) -> None:
        """Lets the device's current stream use them from here on; the host does not wait."""
        if self._end is None or self._begun_on is None:
            return
        torch.cuda.current_stream(self.stream.device).wait_event(self._end)
        self._begun_on.wait_event(self._end)
        self._copied.clear()

    def __del__(self) -> None:
        # One that nobody has joined is of a pass that was left. The allocator then waits for the copies itself.
        for copied in self._copied:
            copied.record_stream(self.stream)


class CopyStreams:
    """A stream for copies to each CUDA device that is asked for."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, devices: Sequence[torch.device]) -> list[Arrival | None]:
        """An Arrival for each device; None where it is none of CUDA's."""
        return [self._begin(device) if device.type == "cuda" else None for device in devices]

    def _begin(self, device: torch.device) -> Arrival:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return Arrival(self._streams[device])
