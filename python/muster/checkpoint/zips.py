"""The zip files that torch writes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

from muster.errors import CheckpointError

__all__ = ["check_zip"]


def check_zip(file: Path | IO[bytes], what: object) -> list[str]:
    """The names in a zip; none of anything else. Raises CheckpointError where its checksums are wrong, which torch does
    not compare; `what` is its name in words."""
    try:
        if not zipfile.is_zipfile(file):
            return []
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
            names = archive.namelist()
    except Exception as error:  # zipfile raises many
        raise CheckpointError(f"'{what}' is a damaged zip ({error}); use another copy") from error
    if wrong is not None:
        raise CheckpointError(
            f"the checksum of '{wrong}' in '{what}' is wrong: it is damaged; use another copy. (One that was saved "
            "after torch.serialization.set_crc32_options(False) has none: load it and save it again with them)"
        )
    return names
