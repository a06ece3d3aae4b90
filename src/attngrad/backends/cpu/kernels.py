"""The passes as pure functions over checked operands; what the public functions and the bridges call.

``forward``, ``backward`` and their tangents run on the compiled kernels, in linear memory; what is dense by nature
(weights, Jacobians) runs on the reference. Each computes in the accumulation dtype: float32 for float16 and bfloat16,
else the dtype of q. Gradients come back in the dtype of their argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from attngrad import _native, reference
from attngrad.backends.cpu.threads import choose_isa
from attngrad.core.arrays import Array
from attngrad.core.dtypes import ACCUMULATE, BFLOAT16, CODES
from attngrad.core.options import Gradients, Operands, Options, Tangents
from attngrad.reference.dense import sum_to
from attngrad.reference.jacobians import dense_jacobian

P = ParamSpec("P")
R = TypeVar("R")

choose_isa()


class Saved(NamedTuple):
    """What the backward pass needs of the forward: out in the accumulation dtype, and the row statistics.

    The weights are ``exp(scores - top) * inverse`` (with neither bias nor sinks, top is in units of log2): a maximum
    and a sum apart keep digits that the log-sum-exp of large scores would lose. A row that sees no key has inverse = 0.
    """

    out: Array
    top: Array
    inverse: Array


class SavedTangent(NamedTuple):
    """What the tangent of the backward pass needs of the tangent of the forward: lse_dot = shift + mean, kept apart."""

    out_dot: Array
    shift: Array
    mean: Array


# --- compiled passes ------------------------------------------------------------------------------------------------


def forward(x: Operands, o: Options, into: Sequence[Array] | None = None) -> tuple[Array, Array]:
    """``out`` in the dtype of q, and ``lse`` in the accumulation dtype; new arrays, or the two of ``into``."""
    out, lse = _new_results(x) if into is None else into
    _call(x, o).forward(_bits(out), None, lse, None, None)
    return out, lse


def forward_saving(x: Operands, o: Options, into: Sequence[Array] | None = None) -> tuple[Array, Array, Saved]:
    """``out, lse`` as ``forward``, and what ``backward`` needs.

    They are new arrays, nothing of which is shared; or the five of ``into``, where the first may be the third as well.
    """
    out, lse, *kept = (*_new_results(x), *_new_saved(x)) if into is None else into
    saved = Saved(*kept)
    _call(x, o).forward(_bits(out), None if saved.out is out else saved.out, lse, saved.top, saved.inverse)
    return out, lse, saved


def backward(
    x: Operands,
    o: Options,
    saved: Saved,
    dout: Array | None,
    dlse: Array | None = None,
    *,
    wrt: Collection[str] = Gradients._fields,
    into: Sequence[Array] = (),
) -> Gradients:
    """The VJP of <dout, out> + <dlse, lse>, of the inputs that are given and named in ``wrt``.

    ``into`` are contiguous arrays for dq, dk and dv, all of them wanted.
    """
    bias = None if x.bias is None else _plane(x.bias, x)
    g = _Sums(x, bias, into, wrt)
    _call(x, o, bias).backward(_cotangent(dout), _numbers(dlse), *saved, *g.arrays)
    with_sinks = x.sinks is not None and "sinks" in wrt
    return g.gradients(x, -(_sink_share(x, saved) * g.rows(x)) if with_sinks else None)  # (R6)


def forward_tangent(
    x: Operands, o: Options, t: Tangents, into: Sequence[Array] | None = None
) -> tuple[Array, Array, Array, Array]:
    """``out, lse, out_dot, lse_dot``: the first and third in the dtype of q, the others in the accumulation dtype.

    ``into`` are arrays for the last two.
    """
    (out, lse), (out_dot, lse_dot) = _new_results(x), _new_results(x) if into is None else into
    _call(x, o).forward_tangent(
        _directions(x, t), _bits(out), None, lse, None, None, _bits(out_dot), None, lse_dot, None, None
    )
    return out, lse, out_dot, lse_dot


class SecondOrder(NamedTuple):
    """out and out_dot in the accumulation dtype, the gradients, and their tangents."""

    out: Array
    out_dot: Array
    grads: Gradients
    grads_dot: Gradients


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
    found = second_order(x, o, t, dout, dout_dot, dlse, dlse_dot)
    return found.grads, found.grads_dot


def second_order(
    x: Operands,
    o: Options,
    t: Tangents,
    dout: Array | None,
    dout_dot: Array | None = None,
    dlse: Array | None = None,
    dlse_dot: Array | None = None,
) -> SecondOrder:
    """``backward_tangent``, with what the forward pass and its tangent gave on the way."""
    saved, moved = Saved(*_new_saved(x)), SavedTangent(*_new_saved(x))
    lse, lse_dot = np.empty_like(saved.top), np.empty_like(saved.top)
    bias = None if x.bias is None else _plane(x.bias, x)
    call, directions = _call(x, o, bias), _directions(x, t)
    call.forward_tangent(
        directions, None, saved.out, lse, *saved[1:], None, moved.out_dot, lse_dot, moved.shift, moved.mean
    )
    g, g_dot = _Sums(x, bias), _Sums(x, bias)
    call.backward_tangent(
        directions,
        _cotangent(dout),
        _numbers(dlse),
        *saved,
        *g.arrays,
        _cotangent(dout_dot),
        _numbers(dlse_dot),
        *moved,
        *g_dot.arrays,
    )
    sink_rows = sink_rows_dot = None
    if x.sinks is not None:
        share, delta, delta_dot = _sink_share(x, saved), g.rows(x), g_dot.rows(x)
        with np.errstate(all="ignore"):
            shift = -_by_head(x, lse_dot) if t.sinks is None else _widen(t.sinks)[..., None] - _by_head(x, lse_dot)
            sink_rows, sink_rows_dot = -(share * delta), -(share * (shift * delta + delta_dot))  # (R6), (H9)
    return SecondOrder(saved.out, moved.out_dot, g.gradients(x, sink_rows), g_dot.gradients(x, sink_rows_dot))


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
    kind = CODES[x.q.dtype]
    if x.q.dtype == BFLOAT16:
        q, k, v = _bits(q), _bits(k), _bits(v)
    left, right = o.window or (None, None)
    extra: dict[str, Any] = {}
    if x.mask is not None:
        extra["mask"] = _plane(x.mask, x)
    if x.bias is not None:
        bias = _plane(x.bias, x) if bias is None else bias
        extra |= {"bias": _bits(bias), "bias_type": CODES[x.bias.dtype]}
    if x.sinks is not None:
        extra["sinks"] = _contiguous(_widen(x.sinks))
    if x.segments is not None:
        extra["q_segments"], extra["k_segments"] = _segments(x)
    if o.dropout > 0.0 and o.seed is not None:
        extra |= {"dropout": o.dropout, "threshold": math.floor(o.dropout * 2.0**32), "seed": o.seed}
        extra["origin"] = x.origin
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
    try:
        return _native.buffer(size).view(dtype).reshape(shape)
    except (MemoryError, TypeError):  # more than there is, or than 64 bits can say
        raise MemoryError(f"attngrad: a result of shape {shape} and dtype {dtype} takes {size} bytes.") from None


def _new_results(x: Operands) -> tuple[Array, Array]:
    """out and lse, or their tangents."""
    dtype, shape = x.q.dtype, x.out_shape
    return _empty(shape, dtype), _empty(shape[:-1], ACCUMULATE.get(dtype, dtype))


def _new_saved(x: Operands) -> tuple[Array, Array, Array]:
    """What Saved or SavedTangent hold."""
    wide, shape = ACCUMULATE.get(x.q.dtype, x.q.dtype), x.out_shape
    return _empty(shape, wide), _empty(shape[:-1], wide), _empty(shape[:-1], wide)


def _contiguous(x: Array) -> Array:
    """``x``, or a copy of it where it is not contiguous and aligned."""
    return np.require(x, requirements=["C_CONTIGUOUS", "ALIGNED"])


def _rows(x: Array) -> Array:
    """``x`` (..., H, T, D) with four axes and features contiguous; a copy only where the strides leave no other way."""
    if x.ndim != 4:
        x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) if x.ndim > 2 else x[None, None]
    flags = x.flags
    if flags.c_contiguous and flags.aligned:
        return x
    size, strides = x.itemsize, x.strides
    if (strides[3] != size and x.shape[3] > 1) or any(s % size for s in strides) or not flags.aligned:
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
    _native.narrow(CODES[dtype], x, _bits(out))
    return out


class _Sums:
    """What a backward pass writes: dq, dk, dv, delta, dbias."""

    def __init__(
        self,
        x: Operands,
        bias: Array | None,
        into: Sequence[Array] = (),
        wrt: Collection[str] = Gradients._fields,
    ) -> None:
        dtype = x.q.dtype
        wide = ACCUMULATE.get(dtype, dtype)
        inputs = (("q", x.q), ("k", x.k), ("v", x.v))
        new: list[Any] = [_empty(y.shape, dtype) if n in wrt and not into else None for n, y in inputs]
        self.dq, self.dk, self.dv = into or new
        for y in (self.dk, self.dv):
            if y is not None and not x.q.size:  # the kernel writes them where there are queries
                y.fill(0)
        self.delta = _empty(x.q.shape[:-1], wide)
        self.dbias = None
        if bias is not None and "bias" in wrt:
            # the kernel writes it where every score has its own number, and adds to it elsewhere
            scores = (math.prod(x.q.shape[:-3]), x.heads, *x.scores_shape[-2:])
            whole = bias.shape == scores and scores[-1] > 1 and x.q.size
            self.dbias = _empty(bias.shape, wide) if whole else np.zeros(bias.shape, wide)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        """As the kernels take them."""
        dq, dk, dv = (None if y is None else _bits(y) for y in (self.dq, self.dk, self.dv))
        return dq, dk, dv, self.delta, self.dbias

    def rows(self, x: Operands) -> Array:
        """delta as (leading, heads, T)."""
        return _by_head(x, self.delta)

    def gradients(self, x: Operands, sink_rows: Array | None) -> Gradients:
        """In the dtypes of the arguments; ``sink_rows`` (leading, heads, T) add up to the gradient of the sinks."""
        sinks: Any = x.sinks
        dsinks = None
        if sink_rows is not None:
            with np.errstate(all="ignore"):
                dsinks = sink_rows.sum(axis=(0, 2), dtype=sink_rows.dtype).astype(sinks.dtype, copy=False)
        dbias = None if self.dbias is None else _bias_gradient(x, self.dbias)
        return Gradients(self.dq, self.dk, self.dv, dbias, dsinks)


def _bias_gradient(x: Operands, dbias: Array) -> Array:
    bias: Any = x.bias
    if dbias.size != bias.size:  # leading axes that _plane had to expand
        dbias = sum_to(dbias.reshape(*x.q.shape[:-3], *dbias.shape[1:]), bias.shape)
    return _narrow(dbias.reshape(bias.shape), bias.dtype)


def _by_head(x: Operands, rows: Array) -> Array:
    """Numbers (..., Hq, T) as (leading, heads, T)."""
    return rows.reshape(math.prod(x.q.shape[:-3]), x.heads, rows.shape[-1])


def _sink_share(x: Operands, saved: Saved) -> Array:
    """exp(sigma - lse), (leading, heads, T): 1 in a row that sees its sink alone."""
    sigma = _widen(x.sinks)[..., None]
    top, inverse = _by_head(x, saved.top), _by_head(x, saved.inverse)
    with np.errstate(all="ignore"):
        share: Array = np.where(inverse == 0, (sigma > -np.inf).astype(top.dtype), np.exp(sigma - top) * inverse)
    return share


def _cotangent(dout: Array | None) -> Array | None:
    return None if dout is None else _bits(_rows(dout))


def _numbers(rows: Array | None) -> Array | None:
    return None if rows is None else _contiguous(rows)


def _directions(x: Operands, t: Tangents) -> _native.Directions:
    """The tangents as the kernels take them."""
    q, k, v = (None if d is None else _bits(_rows(d)) for d in t[:3])
    bias = None if t.bias is None else _plane(t.bias, x)
    kind = 1 if bias is None else CODES[bias.dtype]
    sinks = None if t.sinks is None else _contiguous(_widen(t.sinks))
    return _native.Directions(q, k, v, None if bias is None else _bits(bias), kind, sinks)


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
    return x._replace(q=_widen(x.q), k=_widen(x.k), v=_widen(x.v), bias=_widen(x.bias), sinks=_widen(x.sinks))


@_quiet
def weights(x: Operands, o: Options) -> tuple[Array, Array]:
    """The dense ``weights`` and ``lse``, in the accumulation dtype."""
    f = reference.forward(_operands(x), o)
    return f.weights, f.lse


@_quiet
def jacobian(x: Operands, o: Options, wrt: str) -> Array:
    """The dense Jacobian, in the accumulation dtype."""
    return dense_jacobian(_operands(x), o, wrt)


@_quiet
def softmax_jacobian(scores: Array) -> Array:
    """diag(a) - a a^T, in the accumulation dtype."""
    return reference.softmax_jacobian(_widen(scores))
