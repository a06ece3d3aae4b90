"""The passes as pure functions over checked operands; what the public functions and the bridges call.

Each computes in the accumulation dtype: float32 for float16 and bfloat16, else the dtype of q. Gradients come back in
the dtype of their argument; ``out`` comes back in the accumulation dtype, for the backward pass needs it unrounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from attngrad import _native, reference
from attngrad._arrays import ACCUMULATE
from attngrad._options import Array, Gradients, Operands, Options, Tangents

P = ParamSpec("P")
R = TypeVar("R")


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


def _dense_dout(x: Operands, dout: Array | None) -> Any:
    return np.zeros(x.out_shape, ACCUMULATE.get(x.q.dtype, x.q.dtype)) if dout is None else _widen(dout)


@_quiet
def forward(x: Operands, o: Options) -> tuple[Array, Array]:
    """``out, lse``, both in the accumulation dtype."""
    f = reference.forward(_operands(x), o)
    return f.out, f.lse


@_quiet
def backward(x: Operands, o: Options, dout: Array | None, dlse: Array | None = None) -> Gradients:
    """The VJP of <dout, out> + <dlse, lse>."""
    wide = _operands(x)
    f = reference.forward(wide, o)
    return _gradients(x, reference.backward(wide, o, f, _dense_dout(x, dout), dlse).grads)


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
    dense = _dense_dout(x, dout)
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


def keep_mask(
    shape: tuple[int, ...], rate: float, seed: int, origin: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Array:
    """The dropout keep mask of scores of ``shape`` (..., Hq, T, S) whose first entry stands at ``origin``."""
    heads = shape[-3] if len(shape) > 2 else 1
    keep = np.empty((math.prod(shape[:-3]), heads, *shape[-2:]), np.bool_)
    _native.keep_mask(keep, seed, math.floor(rate * 2.0**32), *origin)
    return keep.reshape(shape)
