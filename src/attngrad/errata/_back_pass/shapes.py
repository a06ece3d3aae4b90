"""The section on shapes, with the gradients of the projections."""

from __future__ import annotations

from functools import partial

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._back_pass.formulas import RIGHT_DS
from attngrad.errata._formula import Formula, Statement
from attngrad.errata._records import Entry
from attngrad.formulas.case import Head, Projected
from attngrad.formulas.report import figure

head, projected = partial(Statement, Head.random), partial(Statement, Projected)


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


def _inner_products(h: Head) -> str:
    error = Formula("dS = A o (dA - sum(A o dA))").error(h)
    return f"with A_i dA_i an inner product of rows it is wrong too [{figure(error)}]"


ENTRIES: tuple[Entry, ...] = (
    projected("back-pass-33", "shapes, 1", "the table of shapes").claim(
        "X n x d_model, W d_model x d, Q and K n x d, V n x d_v, S and A n x n, O n x d_v",
        _listed_variables,
        _shapes_of_variables,
        evidence=lambda h: "for one head; the classes keep the heads' weights side by side, d_model x d_model",
    ),
    head("back-pass-34", "shapes, 2 (3)", "the gradient at the scores, with a weighted sum").formula(
        "dS = A o (dA - sum_i A_i dA_i)",
        "dS = A o (dA - sum_i A_i o dA_i)",
        RIGHT_DS,
        _inner_products,
        ("a sum over the keys of each row, rowsum(A o dA)", RIGHT_DS),
        wrong="A_i is row i in this document, so the sum over i runs down the queries. It must run along each row.",
    ),
    head("back-pass-35", "shapes, 2 (4)", "the gradient at K, the second time").formula(
        "dK = dS^T Q / sqrt(d)",
        r"\frac{\partial \mathcal{L}}{\partial K} = "
        r"\frac{1}{\sqrt{d_k}} \frac{\partial \mathcal{L}}{\partial S}^T Q",
        evidence=lambda h: "it contradicts back-pass-8, and is right",
    ),
    projected("back-pass-36", "shapes, 2 (5)", "the gradients at the projection weights").formula(
        "dW^Q = X^T dQ, dW^K = X^T dK, dW^V = X^T dV",
        "dW^Q = X^T dQ, dW^K = X^T dK, dW^V = X^T dV",
    ),
    projected("back-pass-37", "shapes, 2 (6)", "the gradient at the input").formula(
        "dX = dQ (W^Q)^T + dK (W^K)^T + dV (W^V)^T",
        r"\frac{\partial \mathcal{L}}{\partial X} = \frac{\partial \mathcal{L}}{\partial Q} W^{Q^T} "
        r"+ \frac{\partial \mathcal{L}}{\partial K} W^{K^T} + \frac{\partial \mathcal{L}}{\partial V} W^{V^T}",
        evidence=lambda h: "for one head; several heads add up, and the section announces several",
    ),
    projected("back-pass-38", "shapes, 3", "the table of the gradients' shapes").claim(
        "every gradient has the shape of its variable",
        _listed_gradients,
        _shapes_of_gradients,
    ),
)
