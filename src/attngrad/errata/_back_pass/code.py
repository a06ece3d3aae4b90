"""What the two classes compute, line by line."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._back_pass.formulas import mean_ds, right_ds
from attngrad.errata._back_pass.layer import Layer
from attngrad.errata._claim import relative_error
from attngrad.errata._formula import Statement
from attngrad.errata._records import Entry
from attngrad.formulas.case import complex_step, softmax
from attngrad.formulas.report import figure

layer = partial(Statement, Layer)

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


def _softmax_of_numpy(c: Layer) -> Array:
    return np.asarray(np.softmax(c.head.s, axis=-1))  # type: ignore[attr-defined]


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


def _axes_where_batch_is_length(c: Layer) -> str:
    x = c.x_q[:, : c.n.batch]
    return f"where batch and length happen to agree the result has {np.dot(x.T, x).ndim} axes"


def _input_gradients(c: Layer, learning_rate: float) -> tuple[Array, ...]:
    """dX = dQ W^T with the weights as they are after a step of ``learning_rate``."""
    moved = [w - learning_rate * d for w, d in zip(c.weights, _weight_gradients(c), strict=True)]
    return tuple(d @ w.T for d, w in zip(_projections(c), moved, strict=True))


def _at_the_next_layer(c: Layer) -> tuple[Array, Array]:
    """Y = Concat(heads) W^O, and the gradient at Concat(heads)."""
    merged = c.merged(c.inputs, c.weights)
    return merged @ c.w_o, complex_step(lambda x: np.sum(c.dy * (x @ c.w_o)), merged)


def _uniform_weights(c: Layer) -> str:
    even = np.full_like(c.head.a, 1.0 / c.n.keys)
    ds = even * c.head.da
    mean, exact = ds - ds.mean(-1, keepdims=True), ds - even * ds.sum(-1, keepdims=True)
    return f"right only where every key weighs the same [{figure(relative_error(mean, exact))}]"


ENTRIES: tuple[Entry, ...] = (
    layer("back-pass-10", "class 1:10, 15", "a weight is stored as wQ and read as WQ").claim(
        "self.wQ = ...; self.dWQ = zeros_like(self.WQ)",
        lambda c: _Projections(c.w_q).dWQ,
        lambda c: np.zeros((c.n.model, c.n.model)),
        lambda c: np.zeros_like(SimpleNamespace(WQ=c.w_q).WQ),
        wrong="The class cannot be constructed as printed. The second class spells the name right.",
        correct="self.WQ = ...",
    ),
    layer("back-pass-11", "classes 1 and 2", "heads split, scaled by 1/sqrt(depth), merged").claim(
        "x.reshape(B, -1, H, depth).transpose(0, 2, 1, 3), and back",
        forward,
        lambda c: c.merged(c.inputs, c.weights),
        evidence=lambda c: "with a softmax of our own; three inputs, so for cross-attention too",
    ),
    layer("back-pass-12", "class 1:48, 2:43", "NumPy has no softmax").claim(
        "A = np.softmax(S, axis=-1)",
        _softmax_of_numpy,
        lambda c: c.head.a,
        lambda c: softmax(c.head.s),
        wrong="Neither class can run its forward pass.",
        correct="e = np.exp(S - S.max(-1, keepdims=True)); A = e / e.sum(-1, keepdims=True)",
    ),
    layer("back-pass-13", "class 1:66-76", "the argument is dO, the body reads d0").claim(
        "def backward(self, dO, ...): d0 = d0.reshape(...)",
        lambda c: _misnamed_cotangent(c.dy),
        lambda c: c.dy.reshape(c.n.batch, -1),
        lambda c: c.dy.reshape(c.dy.shape[0], -1),
        wrong="A letter O and a digit 0: the backward pass stops at its third line. The second class has dO.",
        correct="dO = dO.reshape(...)",
    ),
    layer("back-pass-14", "class 1:75, 2:65", "the gradient at the weights, in code").claim(
        "dA = matmul(dO, V.transpose(0, 1, 3, 2))",
        lambda c: np.matmul(c.head.dout, c.head.v.transpose(0, 1, 3, 2)),
        lambda c: c.head.da,
    ),
    layer("back-pass-15", "class 1:76, 2:66", "the gradient at V, in code").claim(
        "dV = matmul(A.transpose(0, 1, 2, 3), dO)",
        lambda c: np.matmul(c.head.a.transpose(0, 1, 2, 3), c.head.dout),
        lambda c: c.head.dv,
        lambda c: np.matmul(c.head.a.transpose(0, 1, 3, 2), c.head.dout),
        wrong="transpose(0, 1, 2, 3) leaves every axis where it is, so this is A dO; the formula has A^T dO.",
        correct="dV = matmul(A.transpose(0, 1, 3, 2), dO)",
    ),
    layer("back-pass-16", "class 1:79-80, 2:69-70", "the gradient at the scores, in code").claim(
        "dS = dA * A; dS = dS - mean(dS, axis=-1, keepdims)",
        lambda c: mean_ds(c.head),
        lambda c: c.head.ds,
        lambda c: right_ds(c.head),
        _uniform_weights,
        wrong="No stability measure but another function: what is subtracted is A times the row sum.",
        correct="dS = dA * A; dS -= A * dS.sum(-1, keepdims=True)",
    ),
    layer("back-pass-17", "class 1:83-84, 2:73-74", "the gradients at Q and K, in code").claim(
        "dQ = matmul(dS, K) / sqrt(depth), dK = matmul(dS^T, Q) / sqrt(depth)",
        lambda c: (
            np.matmul(c.head.ds, c.head.k) / np.sqrt(c.n.depth),
            np.matmul(c.head.ds.transpose(0, 1, 3, 2), c.head.q) / np.sqrt(c.n.depth),
        ),
        lambda c: (c.head.dq, c.head.dk),
        evidence=lambda c: "given a right dS, which the classes do not have; dK contradicts back-pass-8",
    ),
    layer(
        "back-pass-18", "class 1:68, 87-89, 2:58, 77-79", "keys and values are given the length of the queries"
    ).claim(
        "n = dO.shape[1]; dK.reshape(batch, n, d_model)",
        lambda c: (_joined(c, c.head.dk, c.dy.shape[1]), _joined(c, c.head.dv, c.dy.shape[1])),
        lambda c: (c.merge(c.head.dk), c.merge(c.head.dv)),
        lambda c: (_joined(c, c.head.dk, c.x_k.shape[1]), _joined(c, c.head.dv, c.x_v.shape[1])),
        wrong="The class takes a query and a key of its own; where they differ in length the backward stops.",
        correct="dK.reshape(batch, key.shape[1], d_model), and dV likewise",
    ),
    layer("back-pass-19", "class 1:92-94, 2:82-84", "the gradients at the weights, on arrays of three axes").claim(
        "dWQ = np.dot(query.T, dQ), and dWK, dWV",
        lambda c: tuple(np.dot(x.T, d) for x, d in zip(c.inputs, _projections(c), strict=True)),
        lambda c: c.d_weights,
        _weight_gradients,
        _axes_where_batch_is_length,
        wrong="query.T turns all three axes round, so batch meets tokens. Both should be summed over.",
        correct='dWQ = einsum("bni,bnj->ij", query, dQ)',
    ),
    layer("back-pass-20", "class 1:97-104, 2:87-94", "the weights move before the input gradients are formed").claim(
        "WQ -= lr * dWQ; ...; dQ_input = np.dot(dQ, WQ.T)",
        lambda c: _input_gradients(c, LEARNING_RATE),
        lambda c: c.d_inputs,
        lambda c: _input_gradients(c, 0.0),
        lambda c: (
            f"at the learning rate of the example, {LEARNING_RATE}; at 0.1 "
            f"[{figure(relative_error(_input_gradients(c, 0.1), c.d_inputs))}]"
        ),
        wrong="The input's gradient needs the weights of the forward pass, not those of the next step.",
        correct="form dQ_input, dK_input and dV_input first, then update",
    ),
    layer("back-pass-22", "classes 1 and 2", "there is no output projection W^O").claim(
        "output = the heads, merged; and dO enters the heads as it comes",
        lambda c: (c.merged(c.inputs, c.weights), c.dy),
        _at_the_next_layer,
        lambda c: (forward(c) @ c.w_o, c.dy @ c.w_o.T),
        wrong="Multi-head attention ends with Y = Concat(heads) W^O. Without it the heads never mix, "
        "and there is one gradient too few.",
        correct="Y = O W^O; backward: dW^O = O^T dY, dO = dY (W^O)^T",
    ),
)
