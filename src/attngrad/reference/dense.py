"""The words that the book is written in: arithmetic that keeps its dtype, heads, masks; on any array-API namespace."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from array_api_compat import device

from attngrad.core import arrays
from attngrad.core.arrays import Array
from attngrad.core.dtypes import BFLOAT16
from attngrad.core.operands import Operands
from attngrad.core.options import Options


def namespace(x: Array) -> Any:
    """The array-API namespace of ``x``, at once for NumPy: for tiny arrays, finding it is a third of the time."""
    return numpy_namespace if type(x) is np.ndarray else arrays.namespace(x)


def is_bfloat16(x: Array) -> bool:
    """Whether ``x`` is a NumPy array of bfloat16, which array-API functions do not know."""
    return isinstance(x, np.ndarray) and x.dtype == BFLOAT16


def cast(x: Array, like: Array) -> Array:
    """``x`` in the dtype of ``like``."""
    return x if x.dtype == like.dtype else namespace(like).astype(x, like.dtype)


def convert(x: Array, like: Array) -> Array:
    """``x``, of NumPy or of the library of ``like``, in the dtype, library and on the device of ``like``."""
    return namespace(like).asarray(x, dtype=like.dtype, device=device(like))


def scalar(value: Any, like: Array) -> Array:
    """The number ``value`` as an array of the dtype and device of ``like``; bare, it would widen bfloat16.

    By ``full``, which makes it on the device: ``asarray`` would copy it there, and the host would wait for the copy.
    """
    if type(like) is np.ndarray:
        return np.asarray(value, like.dtype)
    return namespace(like).full((), value, dtype=like.dtype, device=device(like))


def eye(n: int, like: Array) -> Array:
    """The n x n identity, in the dtype and on the device of ``like``."""
    return namespace(like).eye(n, dtype=like.dtype, device=device(like))


def real_part(x: Array) -> Array:
    """The real part; what is real stays as it is."""
    xp = namespace(x)
    return xp.real(x) if not is_bfloat16(x) and xp.isdtype(x.dtype, "complex floating") else x


def matmul(a: Array, b: Array) -> Array:
    """a b, rounded to the dtype of ``a``."""
    return cast(namespace(a).matmul(a, b), a)


def sum_over(x: Array, axis: int | tuple[int, ...]) -> Array:
    """The sum over ``axis``, accumulated in float32 for bfloat16 (whose own sum rounds at every step)."""
    if is_bfloat16(x):
        return x.astype("float32").sum(axis=axis).astype(x.dtype)
    return namespace(x).sum(x, axis=axis, dtype=x.dtype)


def rowsum(x: Array) -> Array:
    """The sum over the last axis."""
    return sum_over(x, -1)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting from ``shape`` to ``x.shape``."""
    extra = len(x.shape) - len(shape)
    axes = tuple(range(extra)) + tuple(
        i + extra for i, n in enumerate(shape) if n == 1 and int(x.shape[i + extra]) != 1
    )
    return namespace(x).reshape(sum_over(x, axes) if axes else x, shape)


def transpose(x: Array) -> Array:
    """The last two axes exchanged."""
    return namespace(x).matrix_transpose(x)


def zeros_if_none(x: Array | None, like: Array) -> Array:
    """``x``, or zeros like ``like``."""
    return namespace(like).zeros_like(like) if x is None else x


def per_query_head(x: Array, group: int) -> Array:
    """Key heads repeated for the query heads that read them: head h reads key head h // group."""
    return x if group == 1 else namespace(x).repeat(x, group, axis=-3)


def per_key_head(x: Array, like: Array) -> Array:
    """The transpose of ``per_query_head``: the sum over the query heads of a group, in the shape of ``like``."""
    xp = namespace(x)
    if len(x.shape) == 2 or x.shape[-3] == like.shape[-3]:
        return x
    if x.shape[-3] == 0:
        return xp.zeros_like(like)
    heads = int(like.shape[-3])
    return sum_over(xp.reshape(x, (*x.shape[:-3], heads, int(x.shape[-3]) // heads, *x.shape[-2:])), -3)


def sink_rows(values: Array | None, q: Array) -> Array | None:
    """One value per query head, shaped to broadcast over (..., Hq, T); None where there are none."""
    if values is None:
        return None
    values = cast(values, q)
    return values if len(q.shape) == 2 else values[:, None]


def sum_sinks(rows: Array, sinks: Array) -> Array:
    """Rows (..., Hq, T) summed over everything but the head, in the shape and dtype of ``sinks``."""
    per_head = (1,) if len(rows.shape) == 1 else (*sinks.shape, 1)
    return cast(namespace(rows).reshape(sum_to(rows, per_head), sinks.shape), sinks)


def drop(weights: Array, keep: Array | None) -> Array:
    """weights o M."""
    return weights if keep is None else weights * keep


def zero_hidden(x: Array, visible: Array) -> Array:
    """``x`` where visible, else exactly zero, whatever stood there."""
    return namespace(x).where(visible, x, namespace(x).zeros_like(x))


def zero_fully_masked(x: Array, visible: Array) -> Array:
    """``x`` (..., T, features) with the rows of queries that see nothing exactly zero, whatever they hold."""
    xp = namespace(x)
    return xp.where(xp.any(visible, axis=-1)[..., None], x, xp.zeros_like(x))


def visibility(x: Operands, o: Options) -> Array:
    """Which key each query may attend to: broadcastable to (..., Hq, T, S)."""
    return seen(x.q, x.k, x.bias, x.mask, x.segments, x.offset, o.causal, o.window)


def seen(q: Array, k: Array, bias: Any, mask: Any, segments: Any, offset: Any, causal: bool, window: Any) -> Array:
    """``visibility`` by its parts."""
    xp, dev = namespace(q), device(q)
    heads_axis = len(q.shape) > 2
    t, s = int(q.shape[-2]), int(k.shape[-2])
    i = xp.arange(t, dtype=xp.int64, device=dev)[:, None]
    j = xp.arange(s, dtype=xp.int64, device=dev)[None, :]
    visible = xp.ones((t, s), dtype=xp.bool, device=dev)
    if not isinstance(offset, int):
        offset = xp.astype(offset, xp.int64)[..., None, None, None] if heads_axis else xp.astype(offset, xp.int64)
    position = i + offset  # of query i among the keys
    if causal:
        visible = visible & (j <= position)
    left, right = window or (None, None)
    if left is not None:
        visible = visible & (j >= position - left)
    if right is not None:
        visible = visible & (j <= position + right)
    if segments is not None:
        q_ids, k_ids = segments
        if heads_axis:
            q_ids, k_ids = q_ids[..., None, :], k_ids[..., None, :]  # ids are the same for all heads
        visible = visible & (q_ids[..., :, None] == k_ids[..., None, :])
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (real_part(bias) != -xp.inf)
    return visible
