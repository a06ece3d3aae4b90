"""The file of a layer: its parameters as safetensors, its configuration as JSON in the file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail
from attngrad.core.dtypes import SENTENCE, TABLE
from attngrad.core.files import FilePath, replace

_KEY = "attngrad"
_DTYPES = {d.safetensors: d.numpy for d in TABLE}


def write(path: FilePath, tensors: Mapping[str, NDArray], config: Mapping[str, object]) -> None:
    """Write all or nothing."""
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(x) for name, x in tensors.items()}, {_KEY: json.dumps(config)})
    replace(path, data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are distinct."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in the header")
    return found


def read(function: str, path: FilePath, kind: str) -> tuple[dict[str, NDArray], dict[str, Any]]:
    """The tensors and the configuration of a file that ``write`` wrote for a layer of this ``kind``."""
    import safetensors

    deserialize: Any = safetensors.deserialize  # untyped
    file = Path(path)
    if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe or a device may have no end
        fail(ValueError, function, "the file", "be a regular file", "another kind")
    data = file.read_bytes()
    remedy = f"Write one with {kind}.save."
    try:
        entries = deserialize(data)
    except safetensors.SafetensorError as error:
        fail(ValueError, function, "the file", "be safetensors, and complete", f"'{error}'", remedy)
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            rule = f"be {SENTENCE}"
            fail(ValueError, function, f"tensor {name!r}", rule, entry["dtype"], remedy)
        # safetensors.numpy.load knows no bfloat16; the bytes are the same
        tensors[name] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=_unique)
    except ValueError as error:
        fail(ValueError, function, "the file", "be safetensors, and complete", f"'{error}'", remedy)
    metadata = header.get("__metadata__") or {}
    try:
        config = json.loads(metadata.get(_KEY, "{}"))
    except (ValueError, RecursionError):
        config = {}
    if not isinstance(config, dict) or config.get("layer") != kind:
        got = f"metadata {str(metadata)[:200]}"
        fail(ValueError, function, "the file", f"be of a {kind}, by its metadata {_KEY!r}", got, remedy)
    return tensors, config
