"""What the checks ask of an array: its kind and the kind of its dtype, for NumPy and any array-API namespace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attngrad.core.dtypes import BFLOAT16, KERNEL_DTYPES
from attngrad.core.spec import Spec

Array = Any
"""An array of NumPy or of any array-API namespace."""

NDArray = npt.NDArray[Any]
"""An array of NumPy, of any dtype."""

ArrayLike = NDArray | list[Any] | tuple[Any, ...]
"""An array of NumPy, or numbers in lists and tuples."""


def namespace(x: Any) -> Any:
    """The array-API namespace of ``x``, by array-api-compat."""
    from array_api_compat import array_namespace

    return array_namespace(x)


def is_array(x: object) -> bool:
    """Whether ``x`` is an array of NumPy or of an array-API namespace."""
    if isinstance(x, (np.ndarray, Spec)):
        return True
    if isinstance(x, (type, type(None), bool, int, float, complex, str, tuple, list, dict, np.generic)):
        return False
    from array_api_compat import is_array_api_obj

    return bool(is_array_api_obj(x))


def is_floating(x: Any, kernels: bool) -> bool:
    """Whether the dtype is one that the kernels (else: that the reference) compute in."""
    if isinstance(x, (np.ndarray, Spec)):
        if kernels:
            return x.dtype in KERNEL_DTYPES and x.dtype.isnative
        return x.dtype.kind in "fc" or bool(x.dtype == BFLOAT16)
    return bool(namespace(x).isdtype(x.dtype, ("real floating", "complex floating")))


def is_boolean(x: Any) -> bool:
    """Whether the dtype is boolean."""
    if isinstance(x, (np.ndarray, Spec)):
        return bool(x.dtype == np.bool_)
    return bool(namespace(x).isdtype(x.dtype, "bool"))


def is_integer(x: Any) -> bool:
    """Whether the dtype is an integer one."""
    if isinstance(x, (np.ndarray, Spec)):
        return x.dtype.kind in "iu"
    return bool(namespace(x).isdtype(x.dtype, "integral"))


def kind_of(x: object) -> str:
    """How an error names what came: its value where that is short, and its type."""
    name = type(x).__name__
    if x is None:
        return "None"
    if isinstance(x, (bool, int, float, complex, str, np.generic)):
        return f"{x!r} ({name})"
    return name
