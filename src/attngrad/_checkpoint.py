"""The file of a layer: its parameters as safetensors, its configuration as JSON in the file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attngrad._arrays import BFLOAT16
from attngrad._files import FilePath, replace
from attngrad._options import fail

NDArray = npt.NDArray[Any]

_KEY = "attngrad"
_DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}


def write(path: FilePath, tensors: Mapping[str, NDArray], config: Mapping[str, object]) -> None:
    """Write all or nothing."""
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(x) for name, x in tensors.items()}, {_KEY: json.dumps(config)})
    replace(path, data)


def read(function: str, path: FilePath, kind: str) -> tuple[dict[str, NDArray], dict[str, Any]]:
    """The tensors and the configuration of a file that ``write`` wrote for a layer of this ``kind``."""
    import safetensors

    deserialize: Any = safetensors.deserialize  # untyped
    data = Path(path).read_bytes()
    remedy = f"Write one with {kind}.save."
    try:
        entries = deserialize(data)
    except safetensors.SafetensorError as error:
        fail(ValueError, function, "the file", "be safetensors, and complete", f"'{error}'", remedy)
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            rule = "be float64, float32, float16 or bfloat16"
            fail(ValueError, function, f"tensor {name!r}", rule, entry["dtype"], remedy)
        # safetensors.numpy.load knows no bfloat16; the bytes are the same
        tensors[name] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        config = json.loads(header.get("__metadata__", {}).get(_KEY, "{}"))
    except json.JSONDecodeError:
        config = {}
    if not isinstance(config, dict) or config.get("layer") != kind:
        got = f"metadata {header.get('__metadata__', {})}"
        fail(ValueError, function, "the file", f"be of a {kind}, by its metadata {_KEY!r}", got, remedy)
    return tensors, config
