"""The affine maps of a layer, with their derivatives, and the split of features into heads.

Letters: N tokens of all leading axes together, I and J features in and out, H heads of d features.
"""

from __future__ import annotations

import functools

import numpy as np

from attngrad.core.arrays import NDArray


def _flat(x: NDArray) -> NDArray:
    """``(..., I)`` as ``(N, I)``: one product of matrices in place of one per batch entry."""
    return x.reshape(-1, x.shape[-1])


def affine(x: NDArray, w: NDArray, b: NDArray | None = None) -> NDArray:
    """``y = x w + b``, of ``(..., I)``, ``(I, J)``, ``(J,)``.

    >>> affine(np.ones((2, 3)), np.ones((3, 1)), np.ones(1))
    array([[4.],
           [4.]])
    """
    y = _flat(x) @ w
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], w.shape[1])


def affine_vjp(x: NDArray, w: NDArray, dy: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """``dx, dw, db`` of ``y = x w + b``: dx = dy w^T, dw = x^T dy, db = the sum of dy over tokens."""
    return affine(dy, w.T), _flat(x).T @ _flat(dy), _flat(dy).sum(axis=0)


def affine_jvp(
    x: NDArray, w: NDArray, x_dot: NDArray | None, w_dot: NDArray | None, b_dot: NDArray | None = None
) -> NDArray | None:
    """``y_dot = x_dot w + x w_dot + b_dot``; a tangent that is None is zero, and so is the result."""
    terms = []
    if x_dot is not None:
        terms.append(affine(x_dot, w))
    if w_dot is not None:
        terms.append(affine(x, w_dot))
    if b_dot is not None:
        terms.append(np.broadcast_to(b_dot, (*x.shape[:-1], w.shape[1])))
    return functools.reduce(np.add, terms) if terms else None


def affine_hvp(
    x: NDArray, w: NDArray, dy: NDArray, x_dot: NDArray | None, w_dot: NDArray | None, dy_dot: NDArray | None
) -> tuple[NDArray, NDArray, NDArray]:
    """``dx_dot, dw_dot, db_dot``, the tangents of ``affine_vjp``; a tangent that is None is zero.

    dx_dot = dy_dot w^T + dy w_dot^T, dw_dot = x_dot^T dy + x^T dy_dot, db_dot = the sum of dy_dot over tokens.
    """
    dx_dot = affine_jvp(dy, w.T, dy_dot, None if w_dot is None else w_dot.T)
    rows_dot = None if dy_dot is None else _flat(dy_dot)
    dw_dot = affine_jvp(_flat(x).T, _flat(dy), None if x_dot is None else _flat(x_dot).T, rows_dot)
    db_dot = None if rows_dot is None else rows_dot.sum(axis=0)
    return (
        np.zeros_like(x) if dx_dot is None else dx_dot,
        np.zeros_like(w) if dw_dot is None else dw_dot,
        np.zeros_like(w[0]) if db_dot is None else db_dot,
    )


def split(x: NDArray, features: int) -> NDArray:
    """``(..., T, H d)`` as heads ``(..., H, T, d)``, a view; head h is columns h d to (h + 1) d."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // features, features).swapaxes(-2, -3)


def merge(heads: NDArray) -> NDArray:
    """``split`` undone: ``(..., H, T, d)`` as ``(..., T, H d)``.

    >>> x = np.arange(12.0).reshape(3, 4)
    >>> bool((merge(split(x, 2)) == x).all())
    True
    """
    h, t, d = heads.shape[-3:]
    return heads.swapaxes(-2, -3).reshape(*heads.shape[:-3], t, h * d)
