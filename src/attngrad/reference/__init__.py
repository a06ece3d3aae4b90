r"""The book: attention and its derivatives, dense, one function a pass, each reading like its formulas.

It runs in any precision (float16 to longdouble, complex128 for the complex step) and on any array-API namespace, and
it is the oracle of every test. ``attention``, ``vjp``, ``jvp``, ``hvp``, ``jacobian``, ``attention_weights`` and
``softmax_jacobian`` have the signatures of the public functions; ``forward``, ``backward``, ``forward_tangent`` and
``backward_tangent`` give every intermediate by name. Formulas carry the numbers of docs/notation.md: F forward,
R reverse, T tangent (forward mode), H second order.

Precision: every named intermediate is rounded to the dtype of q; sums and products accumulate as the array library
has it, and 16-bit ones in float32. This is what "the naive computation in that dtype" means in the tests.

Letters: T queries, S keys, D features of q and k, E of v, Hq query heads, Hk key heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Unpack

from attngrad.core.arrays import Array, namespace
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
from attngrad.core.checks import check_floating, fail
from attngrad.core.operands import Gradients, Operands, Tangents
from attngrad.core.options import OptionArguments, Options
from attngrad.reference.dense import (
    cast,
    drop,
    eye,
    fill_zeros,
    keep_factor,
    matmul,
    per_key_head,
    per_query_head,
    real_part,
    rowsum,
    scalar,
    sink_rows,
    sum_sinks,
    sum_to,
    transpose,
    visibility,
    zero_blind,
    zero_hidden,
    zeros_if_none,
)
from attngrad.reference.forms import block_trace_form, omega_rows, per_row_gradients

__all__ = [
    "attention",
    "attention_weights",
    "backward",
    "backward_tangent",
    "block_trace_form",
    "forward",
    "forward_tangent",
    "hvp",
    "jacobian",
    "jvp",
    "omega_rows",
    "per_row_gradients",
    "softmax_jacobian",
    "vjp",
]


# --- score modifiers: value, first and second derivative side by side -----------------------------------------------


class SoftCap:
    """cap(z) = c tanh(z/c), and its derivatives 1 - tanh^2 and -2/c tanh (1 - tanh^2); the identity where c is None."""

    def __init__(self, cap: float | None) -> None:
        self.cap = cap

    def value(self, z: Array) -> Array:
        if self.cap is None:
            return z
        return scalar(self.cap, z) * self._tanh(z)

    def first(self, z: Array) -> Array:
        xp = namespace(z)
        if self.cap is None:
            return xp.ones_like(z)
        # 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|): no difference that cancels where tanh saturates
        x = z / scalar(self.cap, z)
        e = xp.exp(scalar(-2.0, z) * xp.where(real_part(x) < 0, -x, x))
        u = scalar(1.0, z) / (scalar(1.0, z) + e)
        return scalar(4.0, z) * (e * u) * u

    def second(self, z: Array) -> Array:
        if self.cap is None:
            return namespace(z).zeros_like(z)
        return scalar(-2.0 / self.cap, z) * self._tanh(z) * self.first(z)

    def _tanh(self, z: Array) -> Array:
        return namespace(z).tanh(z / scalar(self.cap, z))


# --- forward --------------------------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """The intermediates of the forward pass. ``keep`` is M, None without dropout; ``sink`` is exp(sigma - lse)."""

    z: Array
    scores: Array
    lse: Array
    weights: Array
    out: Array
    visible: Array
    keep: Any
    sink: Any


def forward(x: Operands, o: Options) -> Forward:
    """Attention, with every intermediate.

    ::

        z      = scale * q k^T                              (F1)
        scores = cap(z) + bias, -inf where masked           (F2)
        lse_i  = log( sum_j exp(scores_ij) + exp(sigma) )   (F3)
        p      = exp(scores - lse)                          (F4)
        out    = (p o M) v                                  (F5)

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("attention", q, k, v, {"causal": True}, kernels=False)
    >>> f = forward(x, o)
    >>> np.allclose(f.weights.sum(-1), 1.0), np.allclose(f.out, f.weights @ v)
    (True, True)
    """
    xp = namespace(x.q)
    k, v = per_query_head(x.k, x.group), per_query_head(x.v, x.group)
    minus_inf = scalar(-xp.inf, x.q)

    z = scalar(o.scale, x.q) * matmul(x.q, transpose(k))  # (F1)
    scores = SoftCap(o.softcap).value(z)  # (F2)
    if x.bias is not None:
        scores = scores + cast(x.bias, x.q)
    visible = visibility(x, o)
    scores = xp.where(visible, scores, minus_inf)

    # (F3), with the row maximum taken out so that exp cannot overflow. The sink is one more key, whose value is zero;
    # without a sink that key scores -inf.
    sigma = sink_rows(x)
    extra = xp.broadcast_to(minus_inf if sigma is None else sigma, scores.shape[:-1])
    top = xp.max(real_part(xp.concat([scores, extra[..., None]], axis=-1)), axis=-1)
    top = cast(xp.where(top == -xp.inf, xp.zeros_like(top), top), x.q)
    e = xp.where(visible, xp.exp(scores - top[..., None]), scalar(0.0, x.q))
    total = rowsum(e) + xp.exp(extra - top)
    nothing = total == 0
    divisor = xp.where(nothing, xp.ones_like(total), total)
    lse = xp.where(nothing, minus_inf, top + xp.log(divisor))

    # (F4): e / total is exp(scores - lse) without rounding lse first, and zero where a row sees nothing.
    weights = e / divisor[..., None]
    sink = None if sigma is None else xp.exp(extra - top) / divisor
    keep = keep_factor(x, o)
    out = matmul(drop(weights, keep), v)  # (F5)
    return Forward(z, scores, lse, weights, out, visible, keep, sink)


# --- reverse mode ---------------------------------------------------------------------------------------------------


class Backward(NamedTuple):
    """The intermediates of the backward pass; ``dscores`` is Omega."""

    dweights: Array
    delta: Array
    dscores: Array
    dz: Array
    grads: Gradients


def backward(x: Operands, o: Options, f: Forward, dout: Array, dlse: Array | None = None) -> Backward:
    """The VJP: the gradient of <dout, out> + <dlse, lse>.

    ::

        dv     = (p o M)^T dout                          (R1)
        dp     = (dout v^T) o M                          (R2)
        delta  = rowsum(dout o out) - dlse               (R3)
        ds     = p o (dp - delta)                        (R4)   Omega
        dbias  = ds summed over the axes bias was broadcast along  (R5)
        dsigma = - sum_i exp(sigma - lse_i) delta_i      (R6)
        dz     = ds o cap'(z)                            (R7)
        dq     = scale * dz k                            (R8)
        dk     = scale * dz^T q                          (R9)

    dk and dv are summed over the query heads of a group.

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("vjp", q, k, v, {"causal": True}, kernels=False)
    >>> b = backward(x, o, forward(x, o), dout)
    >>> np.allclose(b.dscores.sum(-1), 0.0), np.allclose(b.grads.q, o.scale * b.dscores @ k)
    (True, True)
    """
    k, v = per_query_head(x.k, x.group), per_query_head(x.v, x.group)
    q, dout = zero_blind(x.q, f.visible), zero_blind(dout, f.visible)
    scale = scalar(o.scale, x.q)

    # out = (p o M) v
    dv = matmul(transpose(drop(f.weights, f.keep)), dout)  # (R1)
    dp = drop(matmul(dout, transpose(v)), f.keep)  # (R2)
    delta = rowsum(dout * f.out)  # (R3)
    if dlse is not None:
        delta = delta - dlse
    # p = exp(scores - lse)
    ds = zero_hidden(f.weights * (dp - delta[..., None]), f.visible)  # (R4)
    # scores = cap(z) + bias
    dbias = None if x.bias is None else cast(sum_to(ds, x.bias.shape), x.bias)  # (R5)
    dsigma = None if x.sinks is None else sum_sinks(x, -(f.sink * delta))  # (R6)
    dz = zero_hidden(ds * SoftCap(o.softcap).first(f.z), f.visible)  # (R7)
    # z = scale * q k^T
    dq = scale * matmul(dz, k)  # (R8)
    dk = scale * matmul(transpose(dz), q)  # (R9)
    grads = Gradients(dq, per_key_head(dk, x.k), per_key_head(dv, x.v), dbias, dsigma)
    return Backward(dp, delta, ds, dz, grads)


# --- forward mode ---------------------------------------------------------------------------------------------------


class ForwardTangent(NamedTuple):
    """The tangents of the forward pass."""

    z_dot: Array
    scores_dot: Array
    lse_dot: Array
    weights_dot: Array
    out_dot: Array


def forward_tangent(x: Operands, o: Options, f: Forward, t: Tangents) -> ForwardTangent:
    """The JVP: how out and lse move when the inputs move along ``t``.

    ::

        z_dot   = scale * (q_dot k^T + q k_dot^T)                    (T1)
        s_dot   = cap'(z) o z_dot + bias_dot                         (T2)
        lse_dot = rowsum(p o s_dot) + exp(sigma - lse) sigma_dot     (T3)
        p_dot   = p o (s_dot - lse_dot)                              (T4)
        out_dot = (p_dot o M) v + (p o M) v_dot                      (T5)

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("jvp", q, k, v, {}, kernels=False)
    >>> t = bind_tangents("jvp", x, (None, None, dout), None, None, kernels=False)
    >>> f = forward(x, o)
    >>> np.allclose(forward_tangent(x, o, f, t).out_dot, f.weights @ dout)
    True
    """
    t = fill_zeros(x, t)
    k, v = per_query_head(x.k, x.group), per_query_head(x.v, x.group)
    k_dot, v_dot = per_query_head(t.k, x.group), per_query_head(t.v, x.group)

    z_dot = scalar(o.scale, x.q) * (matmul(t.q, transpose(k)) + matmul(x.q, transpose(k_dot)))  # (T1)
    s_dot = SoftCap(o.softcap).first(f.z) * z_dot  # (T2)
    if t.bias is not None:
        s_dot = s_dot + cast(t.bias, x.q)
    s_dot = zero_hidden(s_dot, f.visible)
    lse_dot = rowsum(f.weights * s_dot)  # (T3)
    if t.sinks is not None:
        lse_dot = lse_dot + f.sink * sink_rows(x, t.sinks)
    p_dot = f.weights * (s_dot - lse_dot[..., None])  # (T4)
    out_dot = matmul(drop(p_dot, f.keep), v) + matmul(drop(f.weights, f.keep), v_dot)  # (T5)
    return ForwardTangent(z_dot, s_dot, lse_dot, p_dot, out_dot)


# --- second order ---------------------------------------------------------------------------------------------------


class BackwardTangent(NamedTuple):
    """The tangents of the backward pass."""

    dweights_dot: Array
    delta_dot: Array
    dscores_dot: Array
    dz_dot: Array
    grads_dot: Gradients


def backward_tangent(
    x: Operands,
    o: Options,
    f: Forward,
    b: Backward,
    ft: ForwardTangent,
    t: Tangents,
    dout: Array,
    dout_dot: Array | None = None,
    dlse_dot: Array | None = None,
) -> BackwardTangent:
    """The HVP: the tangent of the VJP along ``t`` and ``dout_dot``, ``dlse_dot``.

    ::

        delta_dot  = rowsum(dout_dot o out + dout o out_dot) - dlse_dot              (H1)
        dp_dot     = (dout_dot v^T + dout v_dot^T) o M                               (H2)
        ds_dot     = p_dot o (dp - delta) + p o (dp_dot - delta_dot)                 (H3)
        dz_dot     = ds_dot o cap'(z) + ds o cap''(z) o z_dot                        (H4)
        dq_dot     = scale * (dz_dot k + dz k_dot)                                   (H5)
        dk_dot     = scale * (dz_dot^T q + dz^T q_dot)                               (H6)
        dv_dot     = (p_dot o M)^T dout + (p o M)^T dout_dot                         (H7)
        dbias_dot  = ds_dot summed as dbias                                          (H8)
        dsigma_dot = - sum_i exp(sigma - lse_i) ((sigma_dot - lse_dot_i) delta_i + delta_dot_i)   (H9)

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("hvp", q, k, v, {}, kernels=False)
    >>> t = bind_tangents("hvp", x, (None, None, None), None, None, kernels=False)
    >>> f = forward(x, o)
    >>> b, ft = backward(x, o, f, dout), forward_tangent(x, o, f, t)
    >>> along = backward_tangent(x, o, f, b, ft, t, dout, dout_dot=dout)      # the gradient is linear in dout
    >>> np.allclose(along.grads_dot.k, b.grads.k)
    True
    """
    t = fill_zeros(x, t)
    k, v = per_query_head(x.k, x.group), per_query_head(x.v, x.group)
    k_dot, v_dot = per_query_head(t.k, x.group), per_query_head(t.v, x.group)
    scale, cap = scalar(o.scale, x.q), SoftCap(o.softcap)
    q, q_dot = zero_blind(x.q, f.visible), zero_blind(t.q, f.visible)
    dout, dout_dot = zero_blind(dout, f.visible), zero_blind(zeros_if_none(dout_dot, dout), f.visible)

    delta_dot = rowsum(dout_dot * f.out + dout * ft.out_dot)  # (H1)
    if dlse_dot is not None:
        delta_dot = delta_dot - dlse_dot
    dp_dot = drop(matmul(dout_dot, transpose(v)) + matmul(dout, transpose(v_dot)), f.keep)  # (H2)
    ds_dot = ft.weights_dot * (b.dweights - b.delta[..., None]) + f.weights * (dp_dot - delta_dot[..., None])  # (H3)
    ds_dot = zero_hidden(ds_dot, f.visible)
    dz_dot = ds_dot * cap.first(f.z) + b.dscores * cap.second(f.z) * ft.z_dot  # (H4)
    dz_dot = zero_hidden(dz_dot, f.visible)
    dq_dot = scale * (matmul(dz_dot, k) + matmul(b.dz, k_dot))  # (H5)
    dk_dot = scale * (matmul(transpose(dz_dot), q) + matmul(transpose(b.dz), q_dot))  # (H6)
    dv_dot = matmul(transpose(drop(ft.weights_dot, f.keep)), dout)  # (H7)
    dv_dot = dv_dot + matmul(transpose(drop(f.weights, f.keep)), dout_dot)
    dbias_dot = None if x.bias is None else cast(sum_to(ds_dot, x.bias.shape), x.bias)  # (H8)
    dsigma_dot = None  # (H9)
    if x.sinks is not None:
        shift = -ft.lse_dot if t.sinks is None else sink_rows(x, t.sinks) - ft.lse_dot
        dsigma_dot = sum_sinks(x, -(f.sink * (shift * b.delta + delta_dot)))
    grads = Gradients(dq_dot, per_key_head(dk_dot, x.k), per_key_head(dv_dot, x.v), dbias_dot, dsigma_dot)
    return BackwardTangent(dp_dot, delta_dot, ds_dot, dz_dot, grads)


# --- the same signatures as the public functions --------------------------------------------------------------------


def attention(q: Array, k: Array, v: Array, **options: Unpack[OptionArguments]) -> Any:
    """``attngrad.attention``, dense, on any array.

    >>> import numpy as np
    >>> x = np.eye(2, dtype=np.longdouble)
    >>> attention(x, x, x, scale=1.0).dtype == np.longdouble
    True
    """
    x, o, return_lse = bind("attention", q, k, v, options, kernels=False)
    f = forward(x, o)
    return (f.out, f.lse) if return_lse else f.out


def vjp(q: Array, k: Array, v: Array, **options: Unpack[OptionArguments]) -> tuple[Any, Callable[..., Gradients]]:
    """``attngrad.vjp``, dense, on any array: ``out, pullback``.

    >>> import numpy as np
    >>> out, pullback = vjp(*np.random.default_rng(0).standard_normal((3, 5, 2)).astype(np.longdouble))
    >>> pullback(out).k.dtype == np.longdouble
    True
    """
    x, o, return_lse = bind("vjp", q, k, v, options, kernels=False)
    f = forward(x, o)

    def pullback(
        dout: Array | None, dlse: Array | None = None, *, wrt: str | Collection[str] | None = None
    ) -> Gradients:
        require_cotangent("pullback", dout, dlse)
        check_cotangents("pullback", x, dout, dlse, kernels=False)
        wanted = bind_wrt("pullback", x, wrt)
        grads = backward(x, o, f, zeros_if_none(dout, f.out), dlse).grads
        return Gradients(*(g if name in wanted else None for name, g in zip(grads._fields, grads, strict=True)))

    return ((f.out, f.lse) if return_lse else f.out), pullback


def jvp(
    primals: tuple[Array, Array, Array],
    tangents: tuple[Array | None, Array | None, Array | None],
    *,
    bias_dot: Array | None = None,
    sinks_dot: Array | None = None,
    **options: Unpack[OptionArguments],
) -> tuple[Any, Any]:
    """``attngrad.jvp``, dense, on any array: ``out, out_dot``.

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> out, out_dot = jvp((q, k, v), (None, None, v))
    >>> np.allclose(out_dot, out)                                             # linear in v
    True
    """
    x, o, return_lse = bind("jvp", *bind_primals("jvp", primals), options, kernels=False)
    t = bind_tangents("jvp", x, tangents, bias_dot, sinks_dot, kernels=False)
    f = forward(x, o)
    ft = forward_tangent(x, o, f, t)
    return ((f.out, f.lse), (ft.out_dot, ft.lse_dot)) if return_lse else (f.out, ft.out_dot)


def hvp(
    primals: tuple[Array, Array, Array],
    tangents: tuple[Array | None, Array | None, Array | None],
    dout: Array | None,
    dout_dot: Array | None = None,
    *,
    bias_dot: Array | None = None,
    sinks_dot: Array | None = None,
    dlse: Array | None = None,
    dlse_dot: Array | None = None,
    **options: Unpack[OptionArguments],
) -> tuple[Gradients, Gradients]:
    """``attngrad.hvp``, dense, on any array: ``grads, grads_dot``.

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> grads, grads_dot = hvp((q, k, v), (None, None, v), dout)
    >>> np.allclose(grads_dot.q, grads.q)                                     # linear in v
    True
    """
    x, o, return_lse = bind("hvp", *bind_primals("hvp", primals), options, kernels=False)
    refuse_lse("hvp", return_lse)
    t = bind_tangents("hvp", x, tangents, bias_dot, sinks_dot, kernels=False)
    require_cotangent("hvp", dout, dlse)
    check_cotangents("hvp", x, dout, dlse, kernels=False)
    check_cotangents("hvp", x, dout_dot, dlse_dot, "_dot", kernels=False)
    f = forward(x, o)
    dout = zeros_if_none(dout, f.out)
    b = backward(x, o, f, dout, dlse)
    ft = forward_tangent(x, o, f, t)
    return b.grads, backward_tangent(x, o, f, b, ft, t, dout, dout_dot, dlse_dot).grads_dot


def attention_weights(q: Array, k: Array, **options: Unpack[OptionArguments]) -> Any:
    """``attngrad.attention_weights``, on any array: the dense A.

    >>> import numpy as np
    >>> attention_weights(np.zeros((2, 1)), np.zeros((2, 1)), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    x, o, return_lse = bind("attention_weights", q, k, k, options, kernels=False)
    f = forward(x, o)
    return (f.weights, f.lse) if return_lse else f.weights


def softmax_jacobian(scores: Array) -> Array:
    """diag(a) - a a^T with a = softmax(scores) over the last axis, batched: J_jk = a_j (delta_jk - a_k).

    >>> import numpy as np
    >>> softmax_jacobian(np.zeros(2))
    array([[ 0.25, -0.25],
           [-0.25,  0.25]])
    """
    check_floating("softmax_jacobian", "scores", scores, kernels=False)
    if len(scores.shape) == 0:
        fail(ValueError, "softmax_jacobian", "scores", "have at least 1 axis", "a 0-d array")
    xp = namespace(scores)
    top = real_part(scores)
    top = xp.max(top, axis=-1, keepdims=True) if scores.shape[-1] else top
    e = xp.exp(scores - cast(xp.where(top == -xp.inf, xp.zeros_like(top), top), scores))
    total = rowsum(e)[..., None]
    a = e / xp.where(total == 0, xp.ones_like(total), total)
    return a[..., :, None] * (eye(scores.shape[-1], scores) - a[..., None, :])


def jacobian(q: Array, k: Array, v: Array, wrt: str = "q", **options: Unpack[OptionArguments]) -> Array:
    """The dense Jacobian of out, of shape ``out.shape + wrt.shape``; wrt is q, k, v, bias or sinks.

    Written out from the chain rule, not by vjp or jvp, so that it can judge both::

        d out_ie / d scores_ij  = p_ij (M_ij v_je - out_ie)              =: R_iej
        d out_ie / d q_id       = scale * sum_j R_iej cap'(z_ij) k_jd
        d out_ie / d k_jd       = scale * R_iej cap'(z_ij) q_id
        d out_ie / d v_jf       = p_ij M_ij (e == f)
        d out_ie / d bias_ij    = R_iej
        d out_ie / d sigma      = - exp(sigma - lse_i) out_ie

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> J = jacobian(q, k, v, wrt="k")
    >>> J.shape, np.allclose(np.einsum("ie,iejd->jd", dout, J), vjp(q, k, v)[1](dout).k)
    ((5, 3, 5, 3), True)
    """
    x, o, return_lse = bind("jacobian", q, k, v, options, kernels=False)
    refuse_lse("jacobian", return_lse)
    check_wrt("jacobian", x, wrt)
    return dense_jacobian(x, o, wrt)


def dense_jacobian(x: Operands, o: Options, wrt: str) -> Array:
    """``jacobian`` of checked operands."""
    q, k, v, argument = x.q, x.k, x.v, getattr(x, wrt)
    xp = namespace(q)
    f = forward(x, o)
    if x.heads == 0:
        return xp.zeros((*f.out.shape, *argument.shape), dtype=q.dtype)
    # Flatten the leading axes and heads into n, and let `reads` say which key head m each n reads.
    (t, s), e_ = x.scores_shape[-2:], int(v.shape[-1])
    n = math.prod(x.scores_shape[:-2])
    m = n // x.group
    reads = xp.repeat(eye(m, q), x.group, axis=0)
    v_n = xp.reshape(per_query_head(v, x.group), (n, 1, s, e_))
    k_n = xp.reshape(per_query_head(k, x.group), (n, s, int(k.shape[-1])))
    kept = xp.reshape(drop(xp.ones_like(f.weights), f.keep), (n, t, s, 1))
    p = xp.reshape(f.weights, (n, t, s, 1))
    r = p * (kept * v_n - xp.reshape(f.out, (n, t, 1, e_)))  # (n, T, S, E)
    r = xp.permute_dims(r, (0, 1, 3, 2))  # (n, T, E, S)
    slope = xp.reshape(SoftCap(o.softcap).first(f.z), (n, t, 1, s))
    scale = scalar(o.scale, q)
    if wrt == "q":
        d_q = scale * matmul(r * slope, k_n[:, None])  # (n, T, E, D)
        same = xp.reshape(eye(n * t, q), (n, t, 1, n, t, 1))
        dense = same * d_q[:, :, :, None, None, :]
    elif wrt == "k":
        d_k = scale * (r * slope)[..., None] * xp.reshape(q, (n, t, 1, 1, int(q.shape[-1])))  # (n, T, E, S, D)
        dense = d_k[:, :, :, None] * reads[:, None, None, :, None, None]
    elif wrt == "v":
        pm = xp.reshape(drop(f.weights, f.keep), (n, t, 1, s, 1))
        d_v = pm * eye(e_, q)[None, None, :, None, :]  # (n, T, E, S, E)
        dense = d_v[:, :, :, None] * reads[:, None, None, :, None, None]
    elif wrt == "bias":
        same = xp.reshape(eye(n * t, q), (n, t, 1, n, t, 1))
        full = same * r[:, :, :, None, None, :]  # (n, T, E, n, T, S)
        full = xp.reshape(full, (*f.out.shape, *x.scores_shape))
        dense = sum_to(full, (*f.out.shape, *[1] * (len(x.scores_shape) - len(argument.shape)), *argument.shape))
    else:
        by_head = xp.reshape(-(f.sink[..., None] * f.out), (math.prod(q.shape[:-3]), x.heads, t, e_, 1))
        dense = by_head * xp.reshape(eye(x.heads, q), (1, x.heads, 1, 1, x.heads))
    return xp.reshape(dense, (*f.out.shape, *argument.shape))
