"""The passes as pure functions over checked operands; what the public functions and the bridges call.

``forward`` and ``backward`` run on the compiled kernels, in linear memory; the other passes run on the dense reference.
Each computes in the accumulation dtype: float32 for float16 and bfloat16, else the dtype of q. Gradients come back in
the dtype of their argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from attngrad import _native, reference
from attngrad._arrays import ACCUMULATE, BFLOAT16, FLOAT16
from attngrad._dense import sum_to
from attngrad._options import Array, Gradients, Operands, Options, Tangents
from attngrad._threads import choose_isa

P = ParamSpec("P")
R = TypeVar("R")

_TYPES = {np.dtype(np.float64): 0, np.dtype(np.float32): 1, FLOAT16: 2, BFLOAT16: 3}

choose_isa()


class Saved(NamedTuple):
    """What the backward pass needs of the forward: out in the accumulation dtype, and the row statistics.

    The weights are ``exp(scores - top) * inverse`` (with neither bias nor sinks, top is in units of log2): a maximum
    and a sum apart keep digits that the log-sum-exp of large scores would lose. A row that sees no key has inverse = 0.
    """

    out: Array
    top: Array
    inverse: Array


# --- compiled passes ------------------------------------------------------------------------------------------------


def forward(x: Operands, o: Options) -> tuple[Array, Array]:
    """``out`` in the dtype of q, and ``lse`` in the accumulation dtype."""
    dtype = x.q.dtype
    out = _empty(x.out_shape, dtype)
    lse = _empty(x.out_shape[:-1], ACCUMULATE.get(dtype, dtype))
    _call(x, o).forward(_bits(out), None, lse, None, None)
    return out, lse


def forward_saving(x: Operands, o: Options) -> tuple[Array, Array, Saved]:
    """``out, lse`` as ``forward``, and what ``backward`` needs; nothing of it is shared with ``out``."""
    dtype = x.q.dtype
    wide = ACCUMULATE.get(dtype, dtype)
    rows = x.out_shape[:-1]
    out, lse = _empty(x.out_shape, dtype), _empty(rows, wide)
    saved = Saved(_empty(x.out_shape, wide), _empty(rows, wide), _empty(rows, wide))
    _call(x, o).forward(_bits(out), saved.out, lse, saved.top, saved.inverse)
    return out, lse, saved


def backward(x: Operands, o: Options, saved: Saved, dout: Array | None, dlse: Array | None = None) -> Gradients:
    """The VJP of <dout, out> + <dlse, lse>."""
    dtype = x.q.dtype
    wide = ACCUMULATE.get(dtype, dtype)
    dq = _empty(x.q.shape, dtype)
    allocate = _empty if dq.size else np.zeros  # the kernel writes them where there are queries
    dk, dv = allocate(x.k.shape, wide), allocate(x.v.shape, wide)
    delta = _empty(x.out_shape[:-1], wide)
    bias = None if x.bias is None else _plane(x.bias, x)
    dbias = None if bias is None else np.zeros(bias.shape, wide)
    dout = None if dout is None else _bits(_rows(dout))
    dlse = None if dlse is None else _contiguous(dlse)
    _call(x, o, bias).backward(dout, dlse, *saved, _bits(dq), dk, dv, delta, dbias)
    return Gradients(
        dq,
        _narrow(dk, dtype),
        _narrow(dv, dtype),
        None if dbias is None else _bias_gradient(x, dbias),
        None if x.sinks is None else _sinks_gradient(x, saved, delta),
    )


def keep_mask(
    shape: tuple[int, ...], rate: float, seed: int, origin: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Array:
    """The dropout keep mask of scores of ``shape`` (..., Hq, T, S) whose first entry stands at ``origin``."""
    heads = shape[-3] if len(shape) > 2 else 1
    keep = np.empty((math.prod(shape[:-3]), heads, *shape[-2:]), np.bool_)
    _native.keep_mask(keep, seed, math.floor(rate * 2.0**32), *origin)
    return keep.reshape(shape)


def _call(x: Operands, o: Options, bias: Array | None = None) -> _native.Call:
    """The operands and options as the kernels take them: four axes, features contiguous, nothing else copied."""
    q, k, v = _rows(x.q), _rows(x.k), _rows(x.v)
    kind = _TYPES[x.q.dtype]
    if kind == 3:
        q, k, v = _bits(q), _bits(k), _bits(v)
    left, right = o.window or (None, None)
    extra: dict[str, Any] = {}
    if x.mask is not None:
        extra["mask"] = _plane(x.mask, x)
    if x.bias is not None:
        bias = _plane(x.bias, x) if bias is None else bias
        extra |= {"bias": _bits(bias), "bias_type": _TYPES[x.bias.dtype]}
    if x.sinks is not None:
        extra["sinks"] = _contiguous(_widen(x.sinks))
    if x.segments is not None:
        extra["q_segments"], extra["k_segments"] = _segments(x)
    if o.dropout > 0.0 and o.seed is not None:
        extra |= {"dropout": o.dropout, "threshold": math.floor(o.dropout * 2.0**32), "seed": o.seed}
    offset = x.offset
    if not isinstance(offset, int):
        leading = x.q.shape[:-3]
        extra["offset_array"] = np.broadcast_to(offset, leading).reshape(-1).astype(np.int64)
        offset = 0
    return _native.Call(
        kind,
        q,
        k,
        v,
        o.scale,
        o.softcap or 0.0,
        o.causal,
        -1 if left is None else left,
        -1 if right is None else right,
        offset,
        **extra,
    )


def _empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """``numpy.empty``, from memory that earlier results have left where that saves page faults."""
    size = math.prod(shape) * dtype.itemsize
    if size < 1 << 16:
        return np.empty(shape, dtype)
    return _native.buffer(size).view(dtype).reshape(shape)


def _contiguous(x: Array) -> Array:
    """``x``, or a copy of it where it is not contiguous and aligned."""
    return np.require(x, requirements=["C_CONTIGUOUS", "ALIGNED"])


def _rows(x: Array) -> Array:
    """``x`` (..., H, T, D) with four axes and features contiguous; a copy only where the strides leave no other way."""
    if x.ndim != 4:
        x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) if x.ndim > 2 else x[None, None]
    size = x.itemsize
    if x.flags.c_contiguous and x.flags.aligned:
        return x
    strides = x.strides
    if (strides[3] != size and x.shape[3] > 1) or any(s % size for s in strides) or not x.flags.aligned:
        return _contiguous(x)
    return x


def _plane(x: Array, operands: Operands) -> Array:
    """A mask or bias that broadcasts to (..., Hq, T, S), with four axes, of which some have length 1."""
    leading = operands.q.shape[:-3]
    if x.ndim > 3 and len(leading) > 1:  # several leading axes, some perhaps broadcast: make them one
        x = np.broadcast_to(x, (*leading, *x.shape[-3:])).reshape(math.prod(leading), *x.shape[-3:])
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if any(s % x.itemsize for s in x.strides) or not x.flags.aligned:
        return _contiguous(x)
    return x


def _segments(x: Operands) -> tuple[Array, Array]:
    """The ids as contiguous int32 arrays (B, T) and (B, S); ids that do not fit are renumbered."""
    leading = x.q.shape[:-3]
    q_ids, k_ids = (
        np.broadcast_to(ids, (*leading, ids.shape[-1])).reshape(math.prod(leading), ids.shape[-1])
        for ids in x.segments or ()
    )
    if max(q_ids.itemsize, k_ids.itemsize) >= 4:
        exact = np.result_type(q_ids, k_ids)  # of int64 and uint64 it would be float64
        both = [ids.ravel().astype(exact if exact.kind in "iu" else object) for ids in (q_ids, k_ids)]
        _, numbers = np.unique(np.concatenate(both), return_inverse=True)
        q_ids, k_ids = numbers[: q_ids.size].reshape(q_ids.shape), numbers[q_ids.size :].reshape(k_ids.shape)
    return np.ascontiguousarray(q_ids, np.int32), np.ascontiguousarray(k_ids, np.int32)


def _bits(x: Array) -> Array:
    """bfloat16 as uint16, which the bindings take."""
    return x.view(np.uint16) if x.dtype == BFLOAT16 else x


def _narrow(x: Array, dtype: Any) -> Array:
    """A C-contiguous sum, rounded to ``dtype``."""
    if x.dtype == dtype:
        return x
    x = _contiguous(x)
    out = _empty(x.shape, dtype)
    _native.narrow(_TYPES[dtype], x, _bits(out))
    return out


def _bias_gradient(x: Operands, dbias: Array) -> Array:
    bias: Any = x.bias
    if dbias.size != bias.size:  # leading axes that _plane had to expand
        dbias = sum_to(dbias.reshape(*x.q.shape[:-3], *dbias.shape[1:]), bias.shape)
    return _narrow(dbias.reshape(bias.shape), bias.dtype)


def _sinks_gradient(x: Operands, saved: Saved, delta: Array) -> Array:
    """dsigma = - sum_i exp(sigma - lse_i) delta_i (R6)."""
    sinks: Any = x.sinks
    sigma = _widen(sinks)[..., None]
    rows = (math.prod(x.q.shape[:-3]), x.heads, delta.shape[-1])
    top, inverse = saved.top.reshape(rows), saved.inverse.reshape(rows)
    with np.errstate(all="ignore"):
        share = np.where(inverse == 0, sigma > -np.inf, np.exp(sigma - top) * inverse)  # a row of its sink alone: 1
        total = -(share * delta.reshape(rows)).sum(axis=(0, 2), dtype=delta.dtype)
        return total.astype(sinks.dtype, copy=False)


# --- dense passes ---------------------------------------------------------------------------------------------------


def _quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Infinities and NaN travel as IEEE arithmetic has it, without a warning from NumPy."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return wrapped


def _widen(x: Array | None) -> Any:
    """``x`` in the dtype it is computed in."""
    return x if x is None else x.astype(ACCUMULATE.get(x.dtype, x.dtype), copy=False)


def _operands(x: Operands) -> Operands:
    if x.q.dtype not in ACCUMULATE:
        return x
    return Operands(
        _widen(x.q), _widen(x.k), _widen(x.v), _widen(x.bias), _widen(x.sinks), x.mask, x.segments, x.offset
    )


def _tangents(t: Tangents) -> Tangents:
    return Tangents(*map(_widen, t))


def _gradients(x: Operands, grads: Gradients) -> Gradients:
    """Each gradient in the dtype of its argument."""
    arguments = (x.q, x.k, x.v, x.bias, x.sinks)
    return Gradients(
        *(None if g is None else g.astype(a.dtype, copy=False) for g, a in zip(grads, arguments, strict=True))
    )


@_quiet
def forward_tangent(x: Operands, o: Options, t: Tangents) -> tuple[Array, Array, Array, Array]:
    """``out, lse, out_dot, lse_dot``, in the accumulation dtype."""
    wide = _operands(x)
    f = reference.forward(wide, o)
    ft = reference.forward_tangent(wide, o, f, _tangents(t))
    return f.out, f.lse, ft.out_dot, ft.lse_dot


@_quiet
def backward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    dout: Array | None,
    dout_dot: Array | None = None,
    dlse: Array | None = None,
    dlse_dot: Array | None = None,
) -> tuple[Gradients, Gradients]:
    """The VJP and its tangent along ``t``, ``dout_dot`` and ``dlse_dot``."""
    wide, t = _operands(x), _tangents(t)
    dense = np.zeros(x.out_shape, wide.q.dtype) if dout is None else _widen(dout)
    f = reference.forward(wide, o)
    b = reference.backward(wide, o, f, dense, dlse)
    ft = reference.forward_tangent(wide, o, f, t)
    bt = reference.backward_tangent(wide, o, f, b, ft, t, dense, _widen(dout_dot), dlse_dot)
    return _gradients(x, b.grads), _gradients(x, bt.grads_dot)


@_quiet
def weights(x: Operands, o: Options) -> tuple[Array, Array]:
    """The dense ``weights`` and ``lse``, in the accumulation dtype."""
    f = reference.forward(_operands(x), o)
    return f.weights, f.lse


@_quiet
def jacobian(x: Operands, o: Options, wrt: str) -> Array:
    """The dense Jacobian, in the accumulation dtype."""
    return reference.dense_jacobian(_operands(x), o, wrt)


@_quiet
def softmax_jacobian(scores: Array) -> Array:
    """diag(a) - a a^T, in the accumulation dtype."""
    return reference.softmax_jacobian(_widen(scores))
