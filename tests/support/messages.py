"""What Muster logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def messages_of_muster() -> Iterator[list[str]]:
    """What its log says in the meantime."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("muster")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
