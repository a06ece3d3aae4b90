"""The table of dtypes: what the kernels store, and what they compute in. What names dtypes derives from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Dtype(NamedTuple):
    """One dtype of the kernels: its name in NumPy, torch and JAX; its number in problem.hpp; its tag in files."""

    name: str
    code: int
    numpy: np.dtype[Any]
    compute: np.dtype[Any]
    safetensors: str


_FLOAT64, _FLOAT32 = np.dtype(np.float64), np.dtype(np.float32)
FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

TABLE = (
    Dtype("float64", 0, _FLOAT64, _FLOAT64, "F64"),
    Dtype("float32", 1, _FLOAT32, _FLOAT32, "F32"),
    Dtype("float16", 2, FLOAT16, _FLOAT32, "F16"),
    Dtype("bfloat16", 3, BFLOAT16, _FLOAT32, "BF16"),
)

NAMES = tuple(d.name for d in TABLE)
SENTENCE = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
"""As errors say it."""

KERNEL_DTYPES = frozenset(d.numpy for d in TABLE)
"""The dtypes that the public functions take."""
ACCUMULATE = {d.numpy: d.compute for d in TABLE if d.compute != d.numpy}
"""The dtype that a storage dtype is computed in, where that is not itself."""
