"""The claims on one head: what the formulas are judged on, the figures beside them, and the checks that are code."""

from __future__ import annotations

from functools import partial

import numpy as np

from attngrad import reference
from attngrad.core.arrays import Array
from attngrad.errata._claim import Claim, Reading, relative_error
from attngrad.errata._formula import Also
from attngrad.formulas.case import Head, Projected, along, complex_step, rowsum, softmax

CASES = {"head": Head.random, "unit scale": Head.unit, "projected": Projected}
"""What a formula is judged on, by the name in ``claims.toml``."""

# --- the letters of the documents -------------------------------------------------------------------------------------

# The Z of equation-z is Q K^T, without the scale; its derivatives have four indices, dZ_ij / dQ_ab and dZ_ij / dK_ab.


def _dz_dk(h: Head) -> Array:
    return complex_step(lambda k: h.q @ k.T, h.k)


def _dz(h: Head) -> Array:
    return complex_step(lambda z: h.loss(softmax(h.scale * z) @ h.v), h.q @ h.k.T)


def _only(x: str) -> Also:
    """The tangent of the output in explicit-formula, where one of the inputs moves alone."""
    return {"O_dot": lambda h: along(lambda moved: h.out(**{x: moved}), (getattr(h, x), getattr(h, f"{x}_dot")))}


LETTERS: dict[str, Also] = {
    "usual": {},
    "unscaled": {"dZ": _dz, "dZ/dQ": lambda h: complex_step(lambda q: q @ h.k.T, h.q), "dZ/dK": _dz_dk},
    "Q moves": _only("q"),
    "K moves": _only("k"),
    "V moves": _only("v"),
}

# --- the gradient at the scores, in the forms of back-pass and in the right one ---------------------------------------


def right_ds(h: Head) -> Array:
    """A o (dA - rowsum(A o dA)), heads and batch too: what all of them should be."""
    return h.a * (h.da - rowsum(h.a * h.da))


def matrix_ds(h: Head) -> Array:
    """The formula printed three times."""
    return h.da * h.a - h.a @ h.da.T @ h.a


def mean_ds(h: Head) -> Array:
    """What both classes compute, heads and batch too."""
    ds = h.da * h.a
    return ds - np.mean(ds, axis=-1, keepdims=True)


def snippet_ds(h: Head) -> Array:
    """What the two-line snippet computes, as it runs."""
    ds = h.da * h.a
    ds -= np.sum(ds, axis=-1, keepdims=True) * h.a
    return ds


# --- what is found beside the verdicts --------------------------------------------------------------------------------


def _q_in_dz_dk(h: Head) -> float:
    columns = np.stack([_dz_dk(h)[:, j, j, :] for j in range(len(h.k))])
    return relative_error(np.broadcast_to(h.q, columns.shape), columns)


def _flat_jacobian(h: Head) -> float:
    a = h.a[0]
    return relative_error(a * (np.eye(len(a)) - a.T), h.jacobian[0])


def _boxed(h: Head, scale: float) -> float:
    """The error of the boxed formula for this scale where the scale is 1/sqrt(d), as it usually is."""
    usual = Head(h.q, h.k, h.v, h.dout, h.q.shape[-1] ** -0.5, np.random.default_rng(0))
    return relative_error(reference.per_row_gradients(h.q, h.k, h.v, h.dout, scale), (usual.dq, usual.dk, usual.dv))


FIGURES = {
    "q-in-dz-dk": _q_in_dz_dk,
    "flat-jacobian": _flat_jacobian,
    "row-sum": lambda h: f"{np.max(np.abs(rowsum(matrix_ds(h)))):.2g}",
    "right-row-sum": lambda h: np.max(np.abs(rowsum(right_ds(h)))),
    "first-jacobian": lambda h: relative_error(h.da @ h.jacobian[0], h.ds),
    "usual-scale": lambda h: relative_error(h.out(), reference.attention(h.q, h.k, h.v)),
    "boxed-as-it-stands": lambda h: _boxed(h, 1.0),
    "boxed-with-scale": lambda h: _boxed(h, h.q.shape[-1] ** -0.5),
}

# --- the claims of back-pass that are code, prose or shapes -----------------------------------------------------------


def _scaled_product(h: Head) -> Array:
    """The gradient at Q K^T / sqrt(d)."""
    root = np.sqrt(h.q.shape[-1])
    return root * complex_step(lambda z: h.loss(softmax(z / root) @ h.v), h.q @ h.k.T)


def _lines_of_the_snippet(h: Head) -> tuple[Array, Array]:
    return h.da * h.a, snippet_ds(h) - h.da * h.a


def _shares_of_the_diagonal_and_the_rest(h: Head) -> tuple[Array, Array]:
    diagonal = h.da * np.diagonal(h.jacobian, axis1=-2, axis2=-1)
    return diagonal, np.einsum("ij,ijk->ik", h.da, h.jacobian * (1.0 - np.eye(len(h.k))))


def _shares_of_diagonal_and_outer_product(h: Head) -> tuple[Array, Array]:
    diagonal = np.stack([d @ np.diag(a) for d, a in zip(h.da, h.a, strict=True)])
    return diagonal, np.stack([-d @ np.outer(a, a) for d, a in zip(h.da, h.a, strict=True)])


def _shapes_of_variables(h: Projected) -> Array:
    variables = (h.x, h.w_q, h.w_k, h.w_v, h.q, h.k, h.v, h.s, h.a, h.out())
    return np.array([x.shape for x in variables])


def _shapes_of_gradients(h: Projected) -> Array:
    return np.array([x.shape for x in (h.dout, h.da, h.dv, h.ds, h.dq, h.dk, *h.d_weights, h.d_x)])


def _listed_variables(h: Projected) -> Array:
    (n, m), (_, d), (_, e) = h.x.shape, h.w_q.shape, h.w_v.shape
    return np.array([(n, m), (m, d), (m, d), (m, e), (n, d), (n, d), (n, e), (n, n), (n, n), (n, e)])


def _listed_gradients(h: Projected) -> Array:
    (n, m), (_, d), (_, e) = h.x.shape, h.w_q.shape, h.w_v.shape
    return np.array([(n, e), (n, n), (n, e), (n, n), (n, d), (n, d), (m, d), (m, d), (m, e), (n, m)])


head = partial(Claim, Head.random)

CHECKS = {
    "back-pass-2": head(lambda h: h.dout, lambda h: complex_step(h.loss, h.out())),
    "back-pass-6": head(_scaled_product, lambda h: h.ds),
    "back-pass-29": head(snippet_ds, lambda h: h.ds),
    "back-pass-30": head(
        _lines_of_the_snippet,
        _shares_of_the_diagonal_and_the_rest,
        lambda h: (h.da * h.a * (1.0 - h.a), snippet_ds(h) - h.da * h.a * (1.0 - h.a)),
        reading=Reading(
            "the shares of diag(A_i) and of -A_i^T A_i", _lines_of_the_snippet, _shares_of_diagonal_and_outer_product
        ),
    ),
    "back-pass-33": Claim(Projected, _listed_variables, _shapes_of_variables),
    "back-pass-38": Claim(Projected, _listed_gradients, _shapes_of_gradients),
}
