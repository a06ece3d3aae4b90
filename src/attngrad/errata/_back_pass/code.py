"""What the two classes compute, line by line."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._back_pass.layer import Layer
from attngrad.errata._claim import Claim, relative_error
from attngrad.errata._heads import mean_ds, right_ds
from attngrad.formulas.case import complex_step, softmax

layer = partial(Claim, Layer)

LEARNING_RATE = 0.001

# --- names -----------------------------------------------------------------------------------------------------------


class _Projections:
    """Stores a weight under one name and reads it under another."""

    def __init__(self, weight: Array) -> None:
        self.wQ = weight
        self.dWQ = np.zeros_like(self.WQ)  # type: ignore[attr-defined]


def _misnamed_cotangent(dO: Array) -> Array:  # noqa: N803
    """Takes dO, with the letter, and reshapes d0, with the digit."""
    d0 = d0.reshape(dO.shape[0], -1)  # type: ignore[misc] # noqa: F821
    return np.asarray(d0)


# --- heads and projections -------------------------------------------------------------------------------------------


def _reshaped(c: Layer, x: Array) -> Array:
    return x.reshape(c.n.batch, -1, c.n.heads, c.n.depth).transpose(0, 2, 1, 3)


def _joined(c: Layer, x: Array, tokens: int = -1) -> Array:
    return x.transpose(0, 2, 1, 3).reshape(c.n.batch, tokens, c.n.model)


def forward(c: Layer) -> Array:
    q, k, v = (_reshaped(c, np.dot(x, w)) for x, w in zip(c.inputs, c.weights, strict=True))
    return _joined(c, softmax(np.matmul(q, k.transpose(0, 1, 3, 2)) / np.sqrt(c.n.depth)) @ v)


def _projections(c: Layer) -> tuple[Array, Array, Array]:
    """True dQ, dK, dV, heads merged."""
    return c.merge(c.head.dq), c.merge(c.head.dk), c.merge(c.head.dv)


def _weight_gradients(c: Layer) -> tuple[Array, ...]:
    return tuple(np.einsum("bni,bnj->ij", x, d) for x, d in zip(c.inputs, _projections(c), strict=True))


def _input_gradients(c: Layer, learning_rate: float) -> tuple[Array, ...]:
    """dX = dQ W^T with the weights as they are after a step of ``learning_rate``."""
    moved = [w - learning_rate * d for w, d in zip(c.weights, _weight_gradients(c), strict=True)]
    return tuple(d @ w.T for d, w in zip(_projections(c), moved, strict=True))


def _at_the_next_layer(c: Layer) -> tuple[Array, Array]:
    """Y = Concat(heads) W^O, and the gradient at Concat(heads)."""
    merged = c.merged(c.inputs, c.weights)
    return merged @ c.w_o, complex_step(lambda x: np.sum(c.dy * (x @ c.w_o)), merged)


def _gradients_at_q_and_k(c: Layer) -> tuple[Array, Array]:
    ds, root = c.head.ds, np.sqrt(c.n.depth)
    return np.matmul(ds, c.head.k) / root, np.matmul(ds.transpose(0, 1, 3, 2), c.head.q) / root


def _equal_weights(c: Layer) -> float:
    """The error of the mean where every key weighs the same."""
    even = np.full_like(c.head.a, 1.0 / c.n.keys)
    ds = even * c.head.da
    return relative_error(ds - ds.mean(-1, keepdims=True), ds - even * ds.sum(-1, keepdims=True))


FIGURES = {
    "equal-weights": _equal_weights,
    "axes": lambda c: str(np.dot(c.x_q[:, : c.n.batch].T, c.x_q[:, : c.n.batch]).ndim),
    "learning-rate-0.1": lambda c: relative_error(_input_gradients(c, 0.1), c.d_inputs),
}

CHECKS = {
    "back-pass-10": layer(
        lambda c: _Projections(c.w_q).dWQ,
        lambda c: np.zeros((c.n.model, c.n.model)),
        lambda c: np.zeros_like(SimpleNamespace(WQ=c.w_q).WQ),
    ),
    "back-pass-11": layer(forward, lambda c: c.merged(c.inputs, c.weights)),
    "back-pass-12": layer(
        lambda c: np.softmax(c.head.s, axis=-1),  # type: ignore[attr-defined]
        lambda c: c.head.a,
        lambda c: softmax(c.head.s),
    ),
    "back-pass-13": layer(
        lambda c: _misnamed_cotangent(c.dy),
        lambda c: c.dy.reshape(c.n.batch, -1),
        lambda c: c.dy.reshape(c.dy.shape[0], -1),
    ),
    "back-pass-14": layer(lambda c: np.matmul(c.head.dout, c.head.v.transpose(0, 1, 3, 2)), lambda c: c.head.da),
    "back-pass-15": layer(
        lambda c: np.matmul(c.head.a.transpose(0, 1, 2, 3), c.head.dout),
        lambda c: c.head.dv,
        lambda c: np.matmul(c.head.a.transpose(0, 1, 3, 2), c.head.dout),
    ),
    "back-pass-16": layer(lambda c: mean_ds(c.head), lambda c: c.head.ds, lambda c: right_ds(c.head)),
    "back-pass-17": layer(_gradients_at_q_and_k, lambda c: (c.head.dq, c.head.dk)),
    "back-pass-18": layer(
        lambda c: (_joined(c, c.head.dk, c.dy.shape[1]), _joined(c, c.head.dv, c.dy.shape[1])),
        lambda c: (c.merge(c.head.dk), c.merge(c.head.dv)),
        lambda c: (_joined(c, c.head.dk, c.x_k.shape[1]), _joined(c, c.head.dv, c.x_v.shape[1])),
    ),
    "back-pass-19": layer(
        lambda c: tuple(np.dot(x.T, d) for x, d in zip(c.inputs, _projections(c), strict=True)),
        lambda c: c.d_weights,
        _weight_gradients,
    ),
    "back-pass-20": layer(
        lambda c: _input_gradients(c, LEARNING_RATE), lambda c: c.d_inputs, lambda c: _input_gradients(c, 0.0)
    ),
    "back-pass-22": layer(
        lambda c: (c.merged(c.inputs, c.weights), c.dy),
        _at_the_next_layer,
        lambda c: (forward(c) @ c.w_o, c.dy @ c.w_o.T),
    ),
}
