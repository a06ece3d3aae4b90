"""Two classical ways to write the gradient of attention, kept in their own notation and shown to equal the fast one.

Neither is fast: each forms matrices that the backward pass of ``reference`` never needs. They are here because they
are how the gradient is often derived, and because a second derivation is a second opinion.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def _softmax(x: Matrix) -> Matrix:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    a: Matrix = e / np.sum(e, axis=-1, keepdims=True)
    return a


# --- row by row: Omega as a stack of vector-Jacobian products -------------------------------------------------------


def omega_rows(q: Matrix, k: Matrix, v: Matrix, dout: Matrix, scale: float = 1.0) -> Matrix:
    """Omega = sum_i e_i e_i^T Lambda V^T dsigma(p_i), with p_i = scale K Q^T e_i, Lambda = dout.

    One head, ``(T, D), (S, D), (S, E), (T, E)``; dsigma(p) = diag(sigma(p)) - sigma(p) sigma(p)^T. Row i of Omega is
    the row e_i^T Lambda V^T times the Jacobian of the softmax at p_i, formed and multiplied out. It equals
    ``p o (dp - delta)``, formula (R4), which needs no Jacobian.

    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> omega = omega_rows(q, k, v, dout)
    >>> omega.shape, np.allclose(omega.sum(-1), 0.0)
    ((5, 5), True)
    """
    omega = np.zeros((q.shape[0], k.shape[0]), dtype=q.dtype)
    for i in range(q.shape[0]):
        a = _softmax(scale * (k @ q[i]))
        omega[i] = dout[i] @ v.T @ (np.diag(a) - np.outer(a, a))
    return omega


def per_row_gradients(
    q: Matrix, k: Matrix, v: Matrix, dout: Matrix, scale: float = 1.0
) -> tuple[Matrix, Matrix, Matrix]:
    """(scale Omega K, scale Omega^T Q, sum_i sigma(p_i) e_i^T Lambda): the gradient, with Omega formed once.

    >>> from attngrad import reference
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> np.allclose(per_row_gradients(q, k, v, dout), reference.vjp(q, k, v, scale=1.0)[1](dout)[:3])
    True
    """
    omega = omega_rows(q, k, v, dout, scale)
    dv = np.zeros_like(v)
    for i in range(q.shape[0]):
        dv += np.outer(_softmax(scale * (k @ q[i])), dout[i])
    return scale * omega @ k, scale * omega.T @ q, dv


# --- all heads in one row of blocks: the trace form -----------------------------------------------------------------


class TraceForm(NamedTuple):
    """The gradients of the multi-head layer in block form; per-head ones are stacked along axis 0.

    ``d_w_v_blocks`` is the unconstrained gradient of the whole block-diagonal W^v, (H d_model, H d_v); only its
    diagonal blocks, ``d_w_v``, are gradients of parameters: outside them W^v is zero by construction, not free.
    """

    d_w_o: Matrix
    d_w_v_blocks: Matrix
    d_w_v: Matrix
    d_scores: Matrix
    d_w_q: Matrix
    d_w_k: Matrix


def block_diagonal(blocks: Matrix) -> Matrix:
    """``diag(blocks[0], ..., blocks[H - 1])`` of blocks ``(H, m, n)``, of shape ``(H m, H n)``."""
    h, m, n = blocks.shape
    out = np.zeros((h, m, h, n), dtype=blocks.dtype)
    out[np.arange(h), :, np.arange(h), :] = blocks
    return out.reshape(h * m, h * n)


def reciprocal(x: Matrix) -> Matrix:
    """The operator Upsilon: 1/x, entry by entry."""
    return 1.0 / x


def selector(h: int, heads: int, n: int) -> Matrix:
    """P_h = (..., E, ...): the n x n identity in block column h, so that A = sum_h A_h P_h and A_h = A P_h^T."""
    out = np.zeros((n, heads, n))
    out[:, h, :] = np.eye(n)
    return out.reshape(n, heads * n)


def block_trace_form(
    query: Matrix,
    key: Matrix,
    value: Matrix,
    w_q: Matrix,
    w_k: Matrix,
    w_v: Matrix,
    w_o: Matrix,
    dy: Matrix,
) -> TraceForm:
    """The layer's weight gradients from df = tr(G^T dX), with the heads side by side in one row of blocks.

    query ``(T, d_model)``, key and value ``(S, d_model)``; w_q, w_k, w_v ``(H, d_model, d_head)``; w_o
    ``(H d_head, d_model)``; dy = G = df/dX ``(T, d_model)``. With A = (A_1, ..., A_H) the scores,
    S = exp A o Upsilon(exp(A) 1) their softmax, 1 the block diagonal of all-ones blocks, V' = diag(V W_h^V) and
    G' = G (W^O)^T (V')^T::

        df/dW^O   = Concat(head_1, ..., head_H)^T G
        df/dW^v   = (S_1 V, ..., S_H V)^T G (W^O)^T          then the diagonal blocks
        df/dA     = G' o S - ((G' o S o Upsilon(exp(A) 1)) 1^T) o exp A
        df/dW_h^Q = gamma Q^T df/dA P_h^T K W_h^K
        df/dW_h^K = gamma K^T P_h (df/dA)^T Q W_h^Q          gamma = 1/sqrt(d_head)

    The maximum of each block's rows is subtracted before exp: S does not change, and exp does not overflow.

    >>> rng = np.random.default_rng(0)
    >>> x, dy = rng.standard_normal((2, 5, 6))
    >>> w_q, w_k, w_v = rng.standard_normal((3, 2, 6, 3))
    >>> found = block_trace_form(x, x, x, w_q, w_k, w_v, rng.standard_normal((6, 6)), dy)
    >>> found.d_w_v.shape, found.d_w_o.shape
    ((2, 6, 3), (6, 6))
    """
    heads, _, d_head = w_q.shape
    n = key.shape[0]
    gamma = 1.0 / np.sqrt(d_head)
    scores = [gamma * (query @ w_q[h]) @ (key @ w_k[h]).T for h in range(heads)]
    a = np.concatenate([s - np.max(s, axis=-1, keepdims=True) for s in scores], axis=1)
    ones = block_diagonal(np.ones((heads, n, n)))
    inverse = reciprocal(np.exp(a) @ ones)
    s = np.exp(a) * inverse

    values = block_diagonal(np.stack([value @ w_v[h] for h in range(heads)]))
    concat = s @ values
    d_w_o = concat.T @ dy
    mixed = s @ block_diagonal(np.stack([value] * heads))
    d_w_v_blocks = mixed.T @ dy @ w_o.T
    blocks = d_w_v_blocks.reshape(heads, value.shape[1], heads, -1)
    d_w_v = blocks[np.arange(heads), :, np.arange(heads), :]

    g = dy @ w_o.T @ values.T
    d_scores = g * s - ((g * s * inverse) @ ones.T) * np.exp(a)
    picks = [selector(h, heads, n) for h in range(heads)]
    d_w_q = np.stack([gamma * query.T @ d_scores @ picks[h].T @ key @ w_k[h] for h in range(heads)])
    d_w_k = np.stack([gamma * key.T @ picks[h] @ d_scores.T @ query @ w_q[h] for h in range(heads)])
    return TraceForm(d_w_o, d_w_v_blocks, d_w_v, d_scores, d_w_q, d_w_k)
