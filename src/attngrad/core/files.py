"""Files that are written all or nothing, and those of data that the package brings along."""

from __future__ import annotations

import contextlib
import os
import secrets
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

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


def read_toml(package: str, name: str) -> dict[str, Any]:
    """The file ``name`` of data that ``package`` brings along."""
    return tomllib.loads((resources.files(package) / name).read_text(encoding="utf-8"))


def require_same_ids(what: str, told: Iterable[str], made: Iterable[str]) -> None:
    """What is told in a file of data and what is made in Python must be the same ids."""
    differ = set(told) ^ set(made)
    if differ:
        raise KeyError(f"{what} differ in {sorted(differ)}.")
