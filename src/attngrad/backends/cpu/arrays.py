"""Arrays as the compiled passes take them: four axes, features contiguous, 16-bit floats as bits; and their results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attngrad import _native
from attngrad.core.arrays import Array
from attngrad.core.dtypes import BFLOAT16
from attngrad.core.operands import Operands


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """``numpy.empty``, from memory that earlier results have left where that saves page faults."""
    size = math.prod(shape) * dtype.itemsize
    if size < 1 << 16:
        return np.empty(shape, dtype)
    try:
        return _native.buffer(size).view(dtype).reshape(shape)
    except (MemoryError, TypeError):  # more than there is, or than 64 bits can say
        raise MemoryError(f"attngrad: a result of shape {shape} and dtype {dtype} takes {size} bytes.") from None


def contiguous(x: Array | None) -> Any:
    """``x``, or a copy of it where it is not contiguous and aligned."""
    if x is None or (x.flags.c_contiguous and x.flags.aligned):
        return x
    return np.require(x, requirements=["C_CONTIGUOUS", "ALIGNED"])


def rows(x: Array) -> Array:
    """``x`` (..., H, T, D) with four axes and features contiguous; a copy only where the strides leave no other way."""
    if x.ndim != 4:
        x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) if x.ndim > 2 else x[None, None]
    flags = x.flags
    if flags.c_contiguous and flags.aligned:
        return x
    size, strides = x.itemsize, x.strides
    if (strides[3] != size and x.shape[3] > 1) or any(s % size for s in strides) or not flags.aligned:
        return contiguous(x)
    return x


def plane(x: Array, operands: Operands) -> Array:
    """A mask or bias that broadcasts to (..., Hq, T, S), with four axes, of which some have length 1."""
    leading = operands.q.shape[:-3]
    if x.ndim > 3 and len(leading) > 1:  # several leading axes, some perhaps broadcast: make them one
        x = np.broadcast_to(x, (*leading, *x.shape[-3:])).reshape(math.prod(leading), *x.shape[-3:])
    if x.ndim != 4:
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    flags = x.flags
    if flags.aligned and (flags.c_contiguous or not any(s % x.itemsize for s in x.strides)):
        return x
    return contiguous(x)


def segment_ids(x: Operands, segments: tuple[Array, Array]) -> tuple[Array, Array]:
    """The ids as contiguous int32 arrays (B, T) and (B, S); ids that do not fit are renumbered."""
    leading = x.q.shape[:-3]
    q_ids, k_ids = (
        np.broadcast_to(ids, (*leading, ids.shape[-1])).reshape(math.prod(leading), ids.shape[-1]) for ids in segments
    )
    if max(q_ids.itemsize, k_ids.itemsize) >= 4:
        exact = np.result_type(q_ids, k_ids)  # of int64 and uint64 it would be float64
        both = [ids.ravel().astype(exact if exact.kind in "iu" else object) for ids in (q_ids, k_ids)]
        _, numbers = np.unique(np.concatenate(both), return_inverse=True)
        q_ids, k_ids = numbers[: q_ids.size].reshape(q_ids.shape), numbers[q_ids.size :].reshape(k_ids.shape)
    return np.ascontiguousarray(q_ids, np.int32), np.ascontiguousarray(k_ids, np.int32)


def bits(x: Array) -> Array:
    """bfloat16 as uint16, which the bindings take."""
    return x.view(np.uint16) if x.dtype == BFLOAT16 else x


def narrow(x: Array, dtype: Any) -> Array:
    """A C-contiguous sum, rounded to ``dtype``."""
    if x.dtype == dtype:
        return x
    x = contiguous(x)
    out = empty(x.shape, dtype)
    _native.narrow(x, bits(out))
    return out
