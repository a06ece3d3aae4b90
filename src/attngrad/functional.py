"""The public functions: check once, call a pass, round to the dtype of q."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from attngrad import backends
from attngrad.backends import reference as dense
from attngrad.backends.cpu import keep_mask
from attngrad.backends.protocol import SecondOrder
from attngrad.core import option_checks
from attngrad.core.arrays import Array, ArrayLike, NDArray, kind_of
from attngrad.core.binding import (
    bind,
    bind_primals,
    bind_tangents,
    bind_wrt,
    check_cotangents,
    check_wrt,
    refuse_lse,
    require_cotangent,
)
from attngrad.core.calls import told_how
from attngrad.core.checks import check_floating, fail
from attngrad.core.conversion import read, settle
from attngrad.core.operands import Gradients
from attngrad.core.options import OptionArguments, ScoreArguments

_BACKEND = backends.find("numpy", "cpu")


def _round(x: Array, q: Array) -> NDArray:
    with np.errstate(over="ignore"):
        rounded: NDArray = x.astype(q.dtype, copy=False)
    return rounded


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = False, **options: Unpack[ScoreArguments]
) -> NDArray: ...
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], **options: Unpack[ScoreArguments]
) -> tuple[NDArray, NDArray]: ...
@overload
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[OptionArguments]) -> Any: ...
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[OptionArguments]) -> Any:
    """Attention, softmax(scale q k^T + ...) v, row by row over the keys that a query may see.

    ::

        out = softmax(cap(scale * q k^T) + bias, masked) v

    Args:
        q, k, v: ``(..., Hq, T, D)``, ``(..., Hk, S, D)``, ``(..., Hk, S, E)``; also ``(T, D)`` for one head and
            ``(H, T, D)`` for heads without a batch. Hk divides Hq: query head h reads key head h // (Hq // Hk).
            Shapes that fit are taken in this order without a word: from (batch, tokens, features) pass ``q[:, None]``,
            from (batch, tokens, heads, features) ``np.swapaxes(q, 1, 2)``. Lists and integers take the dtype of the
            other arrays, else float64.
        options: scale, causal, window, offset, mask, bias, softcap, sinks, dropout, seed, segments, return_lse;
            all combine. docs/options.md draws each.

    Returns:
        out ``(..., Hq, T, E)``; with ``return_lse=True`` the pair ``(out, lse)``. A query that may see nothing gives
        out = 0 and lse = -inf.

    >>> x = np.eye(3)
    >>> attention(x, x, x, scale=0.0, causal=True)
    array([[1.        , 0.        , 0.        ],
           [0.5       , 0.5       , 0.        ],
           [0.33333333, 0.33333333, 0.33333333]])
    """
    x, o, return_lse = bind("attention", q, k, v, options, convert=True)
    out, lse, _ = _BACKEND.forward(x, o, save=False)
    return (out, lse) if return_lse else out


@overload
def vjp(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = False, **options: Unpack[ScoreArguments]
) -> tuple[NDArray, Callable[..., Gradients]]: ...
@overload
def vjp(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], **options: Unpack[ScoreArguments]
) -> tuple[tuple[NDArray, NDArray], Callable[..., Gradients]]: ...
@overload
def vjp(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[OptionArguments]
) -> tuple[Any, Callable[..., Gradients]]: ...
def vjp(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[OptionArguments]
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and its pullback, ``grads = pullback(dout, dlse=None, wrt=None)``: reverse mode.

    The pullback gives the gradients of <dout, out> + <dlse, lse> as ``Gradients(q, k, v, bias, sinks)``. It may be
    called more than once; dout may be None where dlse is given; narrower ones are widened. ``wrt`` names the inputs
    whose gradients are wanted, one or several; the others are None and not computed. With a constant bias,
    ``wrt=("q", "k", "v")`` saves its n x n gradient. The pullback reads the arrays that were given (q, k, v and those
    among the options) again: do not write to them in between. Writing to out is harmless.

    >>> x = np.eye(2)
    >>> out, pullback = vjp(x, x, x, scale=0.0)
    >>> pullback(np.array([[1.0, 0.0], [0.0, 0.0]])).v
    array([[0.5, 0. ],
           [0.5, 0. ]])
    """
    x, o, return_lse = bind("vjp", q, k, v, options, convert=True)
    out, lse, residuals = _BACKEND.forward(x, o)

    def pullback(
        dout: ArrayLike | None, dlse: ArrayLike | None = None, *, wrt: str | Collection[str] | None = None
    ) -> Gradients:
        require_cotangent("pullback", dout, dlse)
        dout, dlse = check_cotangents("pullback", x, dout, dlse)
        return _BACKEND.backward(x, o, residuals, dout, dlse, wanted=bind_wrt("pullback", x, wrt))

    return ((out, lse) if return_lse else out), pullback


@told_how
def jvp(
    primals: tuple[ArrayLike, ArrayLike, ArrayLike],
    tangents: tuple[ArrayLike | None, ArrayLike | None, ArrayLike | None],
    *,
    bias_dot: ArrayLike | None = None,
    sinks_dot: ArrayLike | None = None,
    **options: Unpack[OptionArguments],
) -> tuple[Any, Any]:
    """Attention and its directional derivative, ``out, out_dot``: forward mode.

    None stands for a zero tangent, and costs nothing. With ``return_lse=True``: ``(out, lse), (out_dot, lse_dot)``.

    >>> x = np.eye(2)
    >>> out, out_dot = jvp((x, x, x), (None, None, x), scale=0.0)
    >>> out_dot
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    q, k, v = bind_primals("jvp", primals)
    x, o, return_lse = bind("jvp", q, k, v, options, convert=True)
    t = bind_tangents("jvp", x, tangents, bias_dot, sinks_dot)
    out, lse, out_dot, lse_dot = _BACKEND.forward_tangent(x, o, t)
    return ((out, lse), (out_dot, lse_dot)) if return_lse else (out, out_dot)


@told_how
def hvp(
    primals: tuple[ArrayLike, ArrayLike, ArrayLike],
    tangents: tuple[ArrayLike | None, ArrayLike | None, ArrayLike | None],
    dout: ArrayLike | None,
    dout_dot: ArrayLike | None = None,
    *,
    bias_dot: ArrayLike | None = None,
    sinks_dot: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
    dlse_dot: ArrayLike | None = None,
    **options: Unpack[OptionArguments],
) -> tuple[Gradients, Gradients]:
    """The gradients and their directional derivative, ``grads, grads_dot``: second order.

    grads is the VJP of dout (and dlse); grads_dot is its tangent along the tangents, dout_dot and dlse_dot. With
    dout_dot = None it is the Hessian of <dout, out>, applied to the tangents.

    >>> x = np.eye(2)
    >>> grads, grads_dot = hvp((x, x, x), (x, None, None), x)
    >>> grads_dot.q.shape
    (2, 2)
    """
    found = second_order(
        "hvp",
        primals,
        tangents,
        dout,
        dout_dot,
        bias_dot=bias_dot,
        sinks_dot=sinks_dot,
        dlse=dlse,
        dlse_dot=dlse_dot,
        **options,
    )
    return found.grads, found.grads_dot


def second_order(
    function: str,
    primals: tuple[ArrayLike, ArrayLike, ArrayLike],
    tangents: tuple[ArrayLike | None, ArrayLike | None, ArrayLike | None],
    dout: ArrayLike | None,
    dout_dot: ArrayLike | None = None,
    *,
    bias_dot: ArrayLike | None = None,
    sinks_dot: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
    dlse_dot: ArrayLike | None = None,
    **options: Unpack[OptionArguments],
) -> SecondOrder:
    """``hvp`` on behalf of ``function``, with out and out_dot in the accumulation dtype."""
    q, k, v = bind_primals(function, primals)
    x, o, return_lse = bind(function, q, k, v, options, convert=True)
    refuse_lse(function, return_lse)
    t = bind_tangents(function, x, tangents, bias_dot, sinks_dot)
    require_cotangent(function, dout, dlse)
    dout, dlse = check_cotangents(function, x, dout, dlse)
    dout_dot, dlse_dot = check_cotangents(function, x, dout_dot, dlse_dot, "_dot")
    return _BACKEND.backward_tangent(x, o, t, dout, dout_dot, dlse, dlse_dot)


def jacobian(q: ArrayLike, k: ArrayLike, v: ArrayLike, wrt: str = "q", **options: Unpack[OptionArguments]) -> NDArray:
    """The dense Jacobian of out, of shape ``out.shape + wrt.shape``; wrt is q, k, v, bias or sinks. For small sizes.

    >>> x = np.ones((1, 1))
    >>> jacobian(x, x, x, wrt="v")
    array([[[[1.]]]])
    """
    x, o, return_lse = bind("jacobian", q, k, v, options, convert=True)
    refuse_lse("jacobian", return_lse)
    check_wrt("jacobian", x, wrt)
    return _round(dense.jacobian(x, o, wrt), x.q)


@overload
def attention_weights(
    q: ArrayLike, k: ArrayLike, *, return_lse: Literal[False] = False, **options: Unpack[ScoreArguments]
) -> NDArray: ...
@overload
def attention_weights(
    q: ArrayLike, k: ArrayLike, *, return_lse: Literal[True], **options: Unpack[ScoreArguments]
) -> tuple[NDArray, NDArray]: ...
@overload
def attention_weights(q: ArrayLike, k: ArrayLike, **options: Unpack[OptionArguments]) -> Any: ...
def attention_weights(q: ArrayLike, k: ArrayLike, **options: Unpack[OptionArguments]) -> Any:
    """The dense A = softmax of the scores, ``(..., Hq, T, S)``: T x S numbers per head, so on request only.

    Dropout does not enter A: what multiplies v is ``A * dropout_mask(A.shape, rate, seed) / (1 - rate)``. With
    ``return_lse=True``: ``(weights, lse)``. With sinks, rows sum to 1 less the sink's share.

    >>> attention_weights(np.zeros((2, 1)), np.zeros((2, 1)), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    x, o, return_lse = bind("attention_weights", q, k, k, options, convert=True)
    weights, lse = dense.weights(x, o)
    return (_round(weights, x.q), lse) if return_lse else _round(weights, x.q)


def softmax_jacobian(scores: ArrayLike) -> NDArray:
    """diag(a) - a a^T with a = softmax(scores) over the last axis, batched: ``(..., S)`` gives ``(..., S, S)``.

    >>> softmax_jacobian(np.zeros(2))
    array([[ 0.25, -0.25],
           [-0.25,  0.25]])
    """
    given = read("softmax_jacobian", "scores", scores)
    found = settle("softmax_jacobian", "scores", given, np.dtype(np.float64))
    check_floating("softmax_jacobian", "scores", found)
    return _round(dense.softmax_jacobian(found), found)


def segments_from_lengths(lengths: Sequence[int] | NDArray) -> npt.NDArray[np.int32]:
    """Segment ids of packed sequences of the given lengths, for ``segments=(ids, ids)``.

    >>> segments_from_lengths([3, 0, 2])
    array([0, 0, 0, 2, 2], dtype=int32)
    """
    name = "segments_from_lengths"
    if isinstance(lengths, np.ma.MaskedArray):
        fail(TypeError, name, "lengths", "be integers", kind_of(lengths), "Pass lengths.compressed().")
    try:
        array = np.asarray(lengths)
    except ValueError:
        fail(ValueError, name, "lengths", "be one flat list of integers", "a ragged one", "One list a batch row.")
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        fail(TypeError, name, "lengths", "be integers", kind_of(lengths) if array.ndim == 0 else f"dtype {array.dtype}")
    if array.ndim != 1:
        fail(ValueError, name, "lengths", "have 1 axis", f"shape {array.shape}", "One list a batch row.")
    if array.min() < 0:
        fail(ValueError, name, "lengths", "be >= 0", int(array.min()))
    if array.max() >= 2**31 or array.sum(dtype=np.int64) >= 2**31:  # the second cannot overflow where the first fails
        total = sum(map(int, array))
        fail(ValueError, name, "lengths", "add up to fewer than 2**31 tokens", total, "One list a batch row.")
    return np.repeat(np.arange(array.size, dtype=np.int32), array.astype(np.int64))


def dropout_mask(shape: Sequence[int], rate: float, seed: int) -> npt.NDArray[np.bool_]:
    """The keep mask that attention uses for scores of ``shape`` (..., Hq, T, S): True = kept.

    What multiplies the weights is ``dropout_mask(...) / (1 - rate)``.

    >>> dropout_mask((2, 5), 0.5, seed=3)
    array([[ True, False,  True,  True, False],
           [False,  True, False,  True,  True]])
    """
    value = option_checks.dropout("dropout_mask", rate, None, name="rate")
    number = option_checks.seed("dropout_mask", seed, None)
    try:
        axes = tuple(operator.index(n) for n in shape)
    except TypeError:
        fail(TypeError, "dropout_mask", "shape", "be a sequence of integers", repr(shape))
    if len(axes) < 2 or min(axes) < 0:
        fail(ValueError, "dropout_mask", "shape", "be (..., heads, queries, keys) with no axis negative", axes)
    try:
        keep: npt.NDArray[np.bool_] = keep_mask(axes, value, number)
    except ValueError:  # too many axes, or entries: NumPy says which
        fail(ValueError, "dropout_mask", "shape", "be one that an array can have", axes)
    return keep
