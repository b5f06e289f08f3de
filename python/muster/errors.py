"""The errors of Muster. Every one derives from Error, and from the built-in that a Python user would catch.

The C++ side raises the classes of the same names; bindings/errors.cpp turns one into the other.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "AuthError",
    "CheckpointError",
    "CommError",
    "Error",
    "InvalidArgument",
    "LayoutMismatch",
    "NonFinite",
    "NotBuilt",
    "PeerLost",
    "RemoteError",
    "Timeout",
]


class Error(Exception):
    """Base of all errors. The message says what happened, where (rank, bucket, parameter) and what to do."""


class InvalidArgument(Error, ValueError):
    """An argument, option or environment that cannot be honoured; found before any work is done."""


class LayoutMismatch(Error, ValueError):
    """Ranks disagree about what they communicate: size, dtype, operation, model or layout."""


class CommError(Error, RuntimeError):
    """Communication failed; also the base of PeerLost and Timeout. After it the communicator is unusable.

    ``parameters`` says what became of parameters and optimizer state in this process: "whole", those that the last
    step left, which can be saved and trained on; or "torn", which may be partly those before a step and partly those
    after it, so that training goes on from what was saved last.
    """

    parameters: Literal["whole", "torn"] = "whole"


class PeerLost(CommError, ConnectionError):
    """A peer died or left. ``rank`` is the worker that was lost, as the message says."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Timeout(CommError, TimeoutError):
    """A live peer did not arrive within the deadline."""


class RemoteError(Error, RuntimeError):
    """Another replica's step raised. The window is dropped everywhere and the strategy stays usable.

    ``rank`` is the worker whose step raised, ``replica`` its job-wide replica index, ``type`` and ``text`` the
    exception's type and message there.
    """

    def __init__(self, message: str, rank: int = -1, replica: int = -1, type: str = "", text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.replica = replica
        self.type = type
        self.text = text


class NonFinite(Error, FloatingPointError):
    """Gradients were not finite for ``max_skipped`` windows in a row."""


class CheckpointError(Error, OSError):
    """A checkpoint is missing, damaged or of another shape."""


class AuthError(Error, PermissionError):
    """A peer could not prove that it belongs to the job."""


class NotBuilt(Error, ImportError):
    """The capability was left out of this build; the message names what to rebuild with."""
