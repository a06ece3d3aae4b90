"""Dense Jacobians, written out from the chain rule and not by vjp or jvp, so that they can judge both."""

from __future__ import annotations

import math
from typing import Unpack

from attngrad.core.arrays import Array
from attngrad.core.binding import bind, check_wrt, refuse_lse
from attngrad.core.checks import check_floating, fail
from attngrad.core.operands import Operands
from attngrad.core.options import OptionArguments, Options
from attngrad.reference.dense import (
    drop,
    eye,
    matmul,
    namespace,
    per_query_head,
    real_part,
    scalar,
    sum_to,
)
from attngrad.reference.passes import Forward, inputs, take
from attngrad.reference.table import evaluate


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
    visible = real_part(scores) != -namespace(scores).inf
    a = evaluate({"scores": scores, "visible": visible, "sigma": None}, ("weights",))["weights"]
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
    >>> from attngrad.reference import vjp
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
    values = evaluate(inputs(x, o), (*Forward._fields, "slope"))
    f = Forward(*take(values, Forward._fields))
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
    slope = xp.reshape(values["slope"], (n, t, 1, s))
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
