"""The derivation of the gradient at the scores."""

from __future__ import annotations

from functools import partial

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._back_pass.formulas import MATRIX_DS, MEAN_DS, RIGHT_DS, ROW_SUM_DS, snippet_ds
from attngrad.errata._claim import Reading, relative_error
from attngrad.errata._equation_z import BEFORE_SCALE
from attngrad.errata._formula import Formula, Statement
from attngrad.errata._records import Entry
from attngrad.formulas.case import Head
from attngrad.formulas.report import figure

head = partial(Statement, Head.random)


def _disagreement(h: Head) -> str:
    forms = {"the matrix formula": MATRIX_DS, "the mean in the code": MEAN_DS, "the row sum in the snippet": ROW_SUM_DS}
    return ", ".join(f"{name} [{figure(Formula(text).error(h))}]" for name, text in forms.items())


def _one_jacobian_for_all(h: Head) -> str:
    error = relative_error(h.da @ h.jacobian[0], h.ds)
    return f"with one J for all rows, that of the first, it is wrong [{figure(error)}]"


def _off_diagonal(j: Array) -> Array:
    return j * (1.0 - np.eye(j.shape[-1]))


def _shares_of_diagonal_and_outer_product(h: Head) -> tuple[Array, Array]:
    diagonal = np.stack([d @ np.diag(a) for d, a in zip(h.da, h.a, strict=True)])
    return diagonal, np.stack([-d @ np.outer(a, a) for d, a in zip(h.da, h.a, strict=True)])


ENTRIES: tuple[Entry, ...] = (
    head("back-pass-24", "derivation", "the softmax, entry by entry").formula(
        "A_ij = exp(S_ij) / sum_k exp(S_ik)",
        r"A_{i,j} = \frac{e^{S_{i,j}}}{\sum_{k=1}^n e^{S_{i,k}}}",
        evidence=lambda h: (
            "computed as written it overflows, as in transformer-5; but nothing here is computed with it"
        ),
    ),
    head("back-pass-25", "derivation, 1", "the softmax derivative on the diagonal").formula(
        "dA_ij/dS_ij = A_ij (1 - A_ij)",
        r"\frac{\partial A_{i,j}}{\partial S_{i,j}} = A_{i,j}(1 - A_{i,j})",
    ),
    head("back-pass-26", "derivation, 2", "the softmax derivative off the diagonal").formula(
        "dA_ij/dS_ik = -A_ij A_ik, k != j",
        "(1 - I_jk) dA_ij/dS_ik = -(1 - I_jk) A_ij A_ik",
    ),
    head("back-pass-27", "derivation", "the Jacobian by cases").formula(
        "J_ijk = A_ij (1 - A_ij) if j = k, else -A_ij A_ik",
        "dA_ij/dS_ik = I_jk A_ij (1 - A_ij) - (1 - I_jk) A_ij A_ik",
    ),
    head("back-pass-28", "derivation", "the chain rule with the Jacobian").formula(
        "dS = dA J",
        r"\frac{\partial L}{\partial S} = \frac{\partial L}{\partial A} \cdot J",
        "dS_i = dA_i J_i",
        _one_jacobian_for_all,
        ("row by row, dS_i = dA_i J_i", "dS_i = dA_i J_i"),
        wrong="J as defined just above has three indices, a matrix J_i for each row; the product with the matrix dA "
        "is not dS.",
        correct="dS_i = dA_i J_i for each row i",
    ),
    head("back-pass-29", "two-line snippet", "the gradient at the scores, with the row sum").claim(
        "dS = dA * A; dS -= sum(dS, axis=-1, keepdims) * A",
        snippet_ds,
        lambda h: h.ds,
    ),
    head("back-pass-30", "explanation", "which line of the snippet is the diagonal").claim(
        "dA o A is the share of the diagonal of J, line 2 that of the other entries",
        lambda h: (h.da * h.a, snippet_ds(h) - h.da * h.a),
        lambda h: (
            h.da * np.diagonal(h.jacobian, axis1=-2, axis2=-1),
            np.einsum("ij,ijk->ik", h.da, _off_diagonal(h.jacobian)),
        ),
        lambda h: (h.da * h.a * (1.0 - h.a), snippet_ds(h) - h.da * h.a * (1.0 - h.a)),
        reading=Reading(
            "the shares of diag(A_i) and of -A_i^T A_i",
            lambda h: (h.da * h.a, snippet_ds(h) - h.da * h.a),
            _shares_of_diagonal_and_outer_product,
        ),
        wrong="The lines split diag(a) from a a^T, and a a^T has a diagonal too: that of J is A (1 - A).",
        correct="line 1 is diag(a), line 2 is -a a^T; the diagonal of J gives dA o A o (1 - A)",
    ),
    head("back-pass-31", "formula, both classes, snippet", "three dS in one document").formula(
        "dS = dA o A - X with X = A dA^T A, mean(dA o A), rowsum(dA o A) o A",
        f"{MATRIX_DS}, {MEAN_DS}, {ROW_SUM_DS}",
        f"{RIGHT_DS}, {RIGHT_DS}, {ROW_SUM_DS}",
        _disagreement,
        wrong="They are printed as one quantity and disagree; the snippet with the row sum is right.",
        correct="dS = A o (dA - rowsum(A o dA)) in all three places",
    ),
    head("back-pass-32", "interpretation", "the scores, on the way to the softmax").formula(
        "Scores = Q K^T; apply softmax to get attention weights",
        "A = softmax(Q K^T)",
        "A = softmax(Q K^T / sqrt(d))",
        reading=BEFORE_SCALE,
        wrong="The scale is missing from these two steps; it is there in the formula just below them.",
        correct="weights = softmax(Q K^T / sqrt(d))",
    ),
)
