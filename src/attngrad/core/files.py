"""Files, written all or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

FilePath = str | os.PathLike[str]


def replace(path: FilePath, data: bytes) -> None:
    """Write ``data`` to a temporary file beside ``path``, then rename it over ``path``; errors name ``path``."""
    target = Path(path)
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        if error.filename is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):  # where the directory is missing, or none, there is nothing to remove
            temporary.unlink(missing_ok=True)
