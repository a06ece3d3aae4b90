"""The four passes over checked operands, in linear memory, by the compiled kernels.

Each computes in the accumulation dtype: float32 for float16 and bfloat16, else the dtype of q. Gradients come back in
the dtype of their argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from attngrad import _native
from attngrad.backends.cpu.arrays import bits, contiguous, empty, narrow, plane, rows
from attngrad.backends.cpu.call import call, directions
from attngrad.backends.merge import widen
from attngrad.backends.protocol import FIRST_ORDER, SecondOrder
from attngrad.core.arrays import Array
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.operands import DIFFERENTIABLE, Gradients, Operands, Tangents
from attngrad.core.options import Options
from attngrad.core.spec import Spec
from attngrad.reference.dense import sum_to


class Saved(NamedTuple):
    """The residuals: out in the accumulation dtype, and the row statistics.

    The weights are ``exp(scores - row_max) * inv_row_sum``: a maximum and a sum, kept separate, keep digits that the
    log-sum-exp of large scores would lose. With neither bias nor sinks row_max is in units of log2, else in natural
    units. A fully masked row has inv_row_sum = 0.
    """

    out: Array
    row_max: Array
    inv_row_sum: Array


class SavedTangent(NamedTuple):
    """Residuals of the tangent of the forward pass: lse_dot = tangent_shift + tangent_mean, kept separate."""

    out_dot: Array
    tangent_shift: Array
    tangent_mean: Array


def residual_specs(x: Operands, o: Options) -> tuple[Spec, ...]:
    """Those of Saved; the first holds out."""
    wide, shape = ACCUMULATE.get(x.q.dtype, x.q.dtype), x.out_shape
    return Spec(shape, wide), Spec(shape[:-1], wide), Spec(shape[:-1], wide)


def forward(
    x: Operands, o: Options, *, save: bool = True, into: Sequence[Array] | None = None, natural: bool = False
) -> tuple[Array, Array, Sequence[Array]]:
    """``out`` in the dtype of q, ``lse`` in the accumulation dtype, and the residuals where they are to be saved.

    They are new arrays, nothing of which is shared; or those of ``into``, where the third may be the first.
    """
    if not save:
        out, lse = _new_results(x) if into is None else into
        call(x, o).forward(bits(out), None, lse, None, None)
        return out, lse, ()
    if into is None:
        into = (*_new_results(x), *_new_residuals(x))
    out, lse, wide, row_max, inv_row_sum = into
    problem = call(x, o, natural=natural)
    problem.forward(bits(out), None if wide is out else wide, lse, row_max, inv_row_sum)
    return out, lse, Saved(wide, row_max, inv_row_sum)


def backward(
    x: Operands,
    o: Options,
    residuals: Sequence[Array],
    dout: Array | None,
    dlse: Array | None = None,
    *,
    wanted: Collection[str] = DIFFERENTIABLE,
    into: Sequence[Array] = (),
    natural: bool = False,
) -> Gradients:
    """The VJP of <dout, out> + <dlse, lse>, of the inputs that are given and ``wanted``.

    ``into`` are contiguous arrays for dq, dk and dv, all of them wanted.
    """
    saved = residuals if isinstance(residuals, Saved) else Saved(*map(np.ascontiguousarray, residuals))
    bias = None if x.bias is None else plane(x.bias, x)
    g = _Sums(x, bias, into, wanted)
    call(x, o, bias=bias, natural=natural).backward(_cotangent(dout), contiguous(dlse), *saved, *g.arrays)
    with_sinks = x.sinks is not None and "sinks" in wanted
    return g.gradients(x, -(sink_share(x, saved) * _by_head(x, g.delta)) if with_sinks else None)  # (R6)


def forward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    into: Sequence[Array] | None = None,
    *,
    wanted: Collection[str] = FIRST_ORDER,
) -> tuple[Array, Array, Array, Array]:
    """``out, lse, out_dot, lse_dot``: the first and third in the dtype of q, the others in the accumulation dtype.

    ``into`` are arrays for the last two.
    """
    (out, lse), (out_dot, lse_dot) = _new_results(x), _new_results(x) if into is None else into
    call(x, o).forward_tangent(
        directions(x, t), bits(out), None, lse, None, None, bits(out_dot), None, lse_dot, None, None
    )
    return out, lse, out_dot, lse_dot


def backward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    dout: Array | None,
    dout_dot: Array | None = None,
    dlse: Array | None = None,
    dlse_dot: Array | None = None,
    *,
    wanted: Collection[str] = SecondOrder._fields,
) -> SecondOrder:
    """The VJP and its tangent along ``t``, ``dout_dot`` and ``dlse_dot``."""
    saved, moved = Saved(*_new_residuals(x)), SavedTangent(*_new_residuals(x))
    lse, lse_dot = np.empty_like(saved.row_max), np.empty_like(saved.row_max)
    bias = None if x.bias is None else plane(x.bias, x)
    problem, along = call(x, o, bias=bias), directions(x, t)
    problem.forward_tangent(along, None, saved.out, lse, *saved[1:], None, moved.out_dot, lse_dot, *moved[1:])
    g, g_dot = _Sums(x, bias), _Sums(x, bias)
    problem.backward_tangent(
        along,
        _cotangent(dout),
        contiguous(dlse),
        *saved,
        *g.arrays,
        _cotangent(dout_dot),
        contiguous(dlse_dot),
        *moved,
        *g_dot.arrays,
    )
    sink_rows = sink_rows_dot = None
    if x.sinks is not None:
        share, delta, delta_dot = sink_share(x, saved), _by_head(x, g.delta), _by_head(x, g_dot.delta)
        with np.errstate(all="ignore"):
            moves = -_by_head(x, lse_dot) if t.sinks is None else widen(t.sinks)[..., None] - _by_head(x, lse_dot)
            sink_rows, sink_rows_dot = -(share * delta), -(share * (moves * delta + delta_dot))  # (R6), (H9)
    return SecondOrder(saved.out, moved.out_dot, g.gradients(x, sink_rows), g_dot.gradients(x, sink_rows_dot), lse_dot)


def keep_mask(
    shape: tuple[int, ...], rate: float, seed: int, origin: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Array:
    """The dropout keep mask of scores of ``shape`` (..., Hq, T, S) whose first entry stands at ``origin``."""
    heads = shape[-3] if len(shape) > 2 else 1
    keep = np.empty((math.prod(shape[:-3]), heads, *shape[-2:]), np.bool_)
    _native.keep_mask(keep, seed, math.floor(rate * 2.0**32), *origin)
    return keep.reshape(shape)


def sink_share(x: Operands, saved: Saved) -> Array:
    """exp(sigma - lse), (leading, heads, T): 1 in a row that sees its sink alone."""
    sigma = widen(x.sinks)[..., None]
    row_max, inv_row_sum = _by_head(x, saved.row_max), _by_head(x, saved.inv_row_sum)
    with np.errstate(all="ignore"):
        alone, among = (sigma > -np.inf).astype(row_max.dtype), np.exp(sigma - row_max) * inv_row_sum
        share: Array = np.where(inv_row_sum == 0, alone, among)
    return share


def _new_results(x: Operands) -> tuple[Array, Array]:
    """out and lse, or their tangents."""
    dtype, shape = x.q.dtype, x.out_shape
    return empty(shape, dtype), empty(shape[:-1], ACCUMULATE.get(dtype, dtype))


def _new_residuals(x: Operands) -> tuple[Array, Array, Array]:
    """Those of ``residual_specs``, or their tangents."""
    wide, shape = ACCUMULATE.get(x.q.dtype, x.q.dtype), x.out_shape
    return empty(shape, wide), empty(shape[:-1], wide), empty(shape[:-1], wide)


def _by_head(x: Operands, numbers: Array) -> Array:
    """Numbers (..., Hq, T) as (leading, heads, T)."""
    return numbers.reshape(math.prod(x.q.shape[:-3]), x.heads, numbers.shape[-1])


def _cotangent(dout: Array | None) -> Array | None:
    return None if dout is None else bits(rows(dout))


class _Sums:
    """What a backward pass writes: dq, dk, dv, delta, dbias."""

    def __init__(
        self,
        x: Operands,
        bias: Array | None,
        into: Sequence[Array] = (),
        wanted: Collection[str] = DIFFERENTIABLE,
    ) -> None:
        dtype = x.q.dtype
        wide = ACCUMULATE.get(dtype, dtype)
        inputs = (("q", x.q), ("k", x.k), ("v", x.v))
        new: list[Any] = [empty(y.shape, dtype) if n in wanted and not into else None for n, y in inputs]
        self.dq, self.dk, self.dv = into or new
        for y in (self.dk, self.dv):
            if y is not None and not x.q.size:  # the kernel writes them where there are queries
                y.fill(0)
        self.delta = empty(x.q.shape[:-1], wide)
        self.dbias = None
        if bias is not None and "bias" in wanted:
            # the kernel writes it where every score has its own number, and adds to it elsewhere
            scores = (math.prod(x.q.shape[:-3]), x.heads, *x.scores_shape[-2:])
            whole = bias.shape == scores and scores[-1] > 1 and x.q.size
            self.dbias = empty(bias.shape, wide) if whole else np.zeros(bias.shape, wide)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        """As the kernels take them."""
        dq, dk, dv = (None if y is None else bits(y) for y in (self.dq, self.dk, self.dv))
        return dq, dk, dv, self.delta, self.dbias

    def gradients(self, x: Operands, sink_rows: Array | None) -> Gradients:
        """In the dtypes of the arguments; ``sink_rows`` (leading, heads, T) add up to the gradient of the sinks."""
        dsinks = None
        if sink_rows is not None:
            with np.errstate(all="ignore"):
                dsinks = sink_rows.sum(axis=(0, 2), dtype=sink_rows.dtype).astype(x.sinks.dtype, copy=False)
        dbias = self.dbias
        if dbias is not None:
            if dbias.size != x.bias.size:  # leading axes that plane() had to expand
                dbias = sum_to(dbias.reshape(*x.q.shape[:-3], *dbias.shape[1:]), x.bias.shape)
            dbias = narrow(dbias.reshape(x.bias.shape), x.bias.dtype)
        return Gradients(self.dq, self.dk, self.dv, dbias, dsinks)
