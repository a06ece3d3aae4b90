"""Document 001, self-attention gradients with NumPy code: its formulas. Its code is judged in ``_code``."""

from __future__ import annotations

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._case import Head, Projected, complex_step, rowsum, softmax
from attngrad.errata._claim import Claim, Entry, Formula, Reading, entry, formula, relative_error
from attngrad.errata._note import BEFORE_SCALE
from attngrad.formulas.report import figure

# --- the gradient at the scores, in three forms ----------------------------------------------------------------------

MATRIX_DS = (
    r"\frac{\partial L}{\partial S} = \left(\frac{\partial L}{\partial A} \right) \odot A "
    r"- A \left(\frac{\partial L}{\partial A} \right)^T \cdot A"
)
"""The formula printed three times."""

MEAN_DS = "dS = dA * A - rowmean(dA * A)"
"""What both classes compute."""

ROW_SUM_DS = "dS = dA * A - rowsum(dA * A) * A"
"""What the two-line snippet computes."""

RIGHT_DS = "dS = A o (dA - rowsum(A o dA))"


def right_ds(h: Head) -> Array:
    """A o (dA - rowsum(A o dA)), heads and batch too: what all of them should be."""
    return h.a * (h.da - rowsum(h.a * h.da))


def mean_ds(h: Head) -> Array:
    """What both classes compute, heads and batch too."""
    ds = h.da * h.a
    return ds - np.mean(ds, axis=-1, keepdims=True)


def snippet_ds(h: Head) -> Array:
    """What the two-line snippet computes, as it runs."""
    ds = h.da * h.a
    ds -= np.sum(ds, axis=-1, keepdims=True) * h.a
    return ds


def _disagreement(h: Head) -> str:
    forms = {"the matrix formula": MATRIX_DS, "the mean in the code": MEAN_DS, "the row sum in the snippet": ROW_SUM_DS}
    return ", ".join(f"{name} [{figure(Formula(text).error(h))}]" for name, text in forms.items())


def _row_sums(h: Head) -> str:
    reach, right = (np.max(np.abs(rowsum(Formula(text).right(h)))) for text in (MATRIX_DS, RIGHT_DS))
    return (
        f"rows of dS must sum to 0, for a shift of a row changes nothing; here they reach {reach:.2g} where the right "
        f"ones reach {figure(right)}"
    )


# --- the softmax Jacobian --------------------------------------------------------------------------------------------


def _flat_j(h: Head) -> str:
    a = h.a[0]
    error = relative_error(a * (np.eye(len(a)) - a.T), h.jacobian[0])
    return f"on a 1-D NumPy array, where a.T is a, it is wrong entry by entry too [{figure(error)}]"


def _one_jacobian_for_all(h: Head) -> str:
    error = relative_error(h.da @ h.jacobian[0], h.ds)
    return f"with one J for all rows, that of the first, it is wrong [{figure(error)}]"


def _off_diagonal(j: Array) -> Array:
    return j * (1.0 - np.eye(j.shape[-1]))


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


def _inner_products(h: Head) -> str:
    error = Formula("dS = A o (dA - sum(A o dA))").error(h)
    return f"with A_i dA_i an inner product of rows it is wrong too [{figure(error)}]"


FORMULAS: tuple[Entry, ...] = (
    entry(
        "001-1",
        "definition, forward pass",
        "scaled dot-product attention",
        "S = Q K^T / sqrt(d), A = softmax(S), O = A V",
        formula(Head.random, r"S = \frac{QK^T}{\sqrt{d_k}}, A = \text{softmax}(S), O = AV"),
    ),
    entry(
        "001-2",
        "backward pass, 1",
        "the gradient at the output is given",
        "dL/dO = dL/dO",
        Claim(Head.random, lambda h: h.dout, lambda h: complex_step(h.loss, h.out())),
    ),
    entry(
        "001-3",
        "backward pass, 2; summary, 5; shapes, 2",
        "the gradient at the weights",
        "dA = dO V^T",
        formula(Head.random, r"\frac{\partial L}{\partial A} = \frac{\partial L}{\partial O} \cdot V^T"),
    ),
    entry(
        "001-4",
        "backward pass, 3",
        "the Jacobian of the softmax",
        "dA_i/dS_i = A_i (I - A_i^T)",
        formula(
            Head.random,
            r"\frac{\partial A_i}{\partial S_i} = A_i \cdot (I - A_i^T)",
            "dA_i/dS_i = diag(A_i) - A_i^T A_i",
            _flat_j,
            ("a product entry by entry, the row A_i against the column A_i^T", "dA_i/dS_i = A_i * (I - A_i^T)"),
        ),
        wrong="A row times a matrix is a row, not a Jacobian; and I - A_i^T takes a column from a matrix.",
        correct="dA_i/dS_i = diag(A_i) - A_i^T A_i, A_i a row",
    ),
    entry(
        "001-5",
        "backward pass, 3; summary, 4; derivation",
        "the gradient at the scores",
        "dS = dA o A - A dA^T A",
        formula(Head.random, MATRIX_DS, RIGHT_DS, _row_sums),
        wrong="A dA^T A mixes the rows, but the softmax acts on each alone: only the diagonal of A dA^T belongs.",
        correct="dS = A o (dA - rowsum(A o dA))",
    ),
    entry(
        "001-6",
        "backward pass, 4",
        "the gradient at the scaled product is dS",
        "dL/d(Q K^T / sqrt(d)) = dS",
        Claim(
            Head.random,
            lambda h: (
                np.sqrt(h.q.shape[-1])
                * complex_step(lambda z: h.loss(softmax(z / np.sqrt(h.q.shape[-1])) @ h.v), h.q @ h.k.T)
            ),
            lambda h: h.ds,
        ),
    ),
    entry(
        "001-7",
        "backward pass, 5; summary, 2; shapes, 4",
        "the gradient at Q",
        "dQ = dS K / sqrt(d)",
        formula(
            Head.random,
            r"\frac{\partial L}{\partial Q} = \frac{1}{\sqrt{d_k}} \frac{\partial L}{\partial S} \cdot K",
        ),
    ),
    entry(
        "001-8",
        "backward pass, 5; summary, 3",
        "the gradient at K",
        "dK = Q^T dS / sqrt(d)",
        formula(
            Head.random,
            r"\frac{\partial L}{\partial K} = \frac{1}{\sqrt{d_k}} Q^T \cdot \frac{\partial L}{\partial S}",
            "dK = dS^T Q / sqrt(d)",
            reading=("(dK)^T", "dK^T = Q^T dS / sqrt(d)"),
        ),
        wrong="Transposed: d x n where dK is n x d. The document's own code and shape section have it right.",
        correct="dK = dS^T Q / sqrt(d)",
    ),
    entry(
        "001-9",
        "backward pass, 6; summary, 1; shapes, 2",
        "the gradient at V",
        "dV = A^T dO",
        formula(Head.random, r"\frac{\partial L}{\partial V} = A^T \cdot \frac{\partial L}{\partial O}"),
    ),
)


DERIVATION: tuple[Entry, ...] = (
    entry(
        "001-24",
        "derivation",
        "the softmax, entry by entry",
        "A_ij = exp(S_ij) / sum_k exp(S_ik)",
        formula(
            Head.random,
            r"A_{i,j} = \frac{e^{S_{i,j}}}{\sum_{k=1}^n e^{S_{i,k}}}",
            evidence=lambda h: "computed as written it overflows, as in 002-5; but nothing here is computed with it",
        ),
    ),
    entry(
        "001-25",
        "derivation, 1",
        "the softmax derivative on the diagonal",
        "dA_ij/dS_ij = A_ij (1 - A_ij)",
        formula(Head.random, r"\frac{\partial A_{i,j}}{\partial S_{i,j}} = A_{i,j}(1 - A_{i,j})"),
    ),
    entry(
        "001-26",
        "derivation, 2",
        "the softmax derivative off the diagonal",
        "dA_ij/dS_ik = -A_ij A_ik, k != j",
        formula(Head.random, "(1 - I_jk) dA_ij/dS_ik = -(1 - I_jk) A_ij A_ik"),
    ),
    entry(
        "001-27",
        "derivation",
        "the Jacobian by cases",
        "J_ijk = A_ij (1 - A_ij) if j = k, else -A_ij A_ik",
        formula(Head.random, "dA_ij/dS_ik = I_jk A_ij (1 - A_ij) - (1 - I_jk) A_ij A_ik"),
    ),
    entry(
        "001-28",
        "derivation",
        "the chain rule with the Jacobian",
        "dS = dA J",
        formula(
            Head.random,
            r"\frac{\partial L}{\partial S} = \frac{\partial L}{\partial A} \cdot J",
            "dS_i = dA_i J_i",
            _one_jacobian_for_all,
            ("row by row, dS_i = dA_i J_i", "dS_i = dA_i J_i"),
        ),
        wrong="J as defined just above has three indices, a matrix J_i for each row; the product with the matrix dA "
        "is not dS.",
        correct="dS_i = dA_i J_i for each row i",
    ),
    entry(
        "001-29",
        "two-line snippet",
        "the gradient at the scores, with the row sum",
        "dS = dA * A; dS -= sum(dS, axis=-1, keepdims) * A",
        Claim(Head.random, snippet_ds, lambda h: h.ds),
    ),
    entry(
        "001-30",
        "explanation",
        "which line of the snippet is the diagonal",
        "dA o A is the share of the diagonal of J, line 2 that of the other entries",
        Claim(
            Head.random,
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
        ),
        wrong="The lines split diag(a) from a a^T, and a a^T has a diagonal too: that of J is A (1 - A).",
        correct="line 1 is diag(a), line 2 is -a a^T; the diagonal of J gives dA o A o (1 - A)",
    ),
    entry(
        "001-31",
        "formula, both classes, snippet",
        "three dS in one document",
        "dS = dA o A - X with X = A dA^T A, mean(dA o A), rowsum(dA o A) o A",
        formula(
            Head.random,
            f"{MATRIX_DS}, {MEAN_DS}, {ROW_SUM_DS}",
            f"{RIGHT_DS}, {RIGHT_DS}, {ROW_SUM_DS}",
            _disagreement,
        ),
        wrong="They are printed as one quantity and disagree; the snippet with the row sum is right.",
        correct="dS = A o (dA - rowsum(A o dA)) in all three places",
    ),
    entry(
        "001-32",
        "interpretation",
        "the scores, on the way to the softmax",
        "Scores = Q K^T; apply softmax to get attention weights",
        formula(Head.random, "A = softmax(Q K^T)", "A = softmax(Q K^T / sqrt(d))", reading=BEFORE_SCALE),
        wrong="The scale is missing from these two steps; it is there in the formula just below them.",
        correct="weights = softmax(Q K^T / sqrt(d))",
    ),
    entry(
        "001-33",
        "shapes, 1",
        "the table of shapes",
        "X n x d_model, W d_model x d, Q and K n x d, V n x d_v, S and A n x n, O n x d_v",
        Claim(
            Projected,
            _listed_variables,
            _shapes_of_variables,
            evidence=lambda h: "for one head; the classes keep the heads' weights side by side, d_model x d_model",
        ),
    ),
    entry(
        "001-34",
        "shapes, 2 (3)",
        "the gradient at the scores, with a weighted sum",
        "dS = A o (dA - sum_i A_i dA_i)",
        formula(
            Head.random,
            "dS = A o (dA - sum_i A_i o dA_i)",
            RIGHT_DS,
            _inner_products,
            ("a sum over the keys of each row, rowsum(A o dA)", RIGHT_DS),
        ),
        wrong="A_i is row i in this document, so the sum over i runs down the queries. It must run along each row.",
        correct="dS = A o (dA - rowsum(A o dA))",
    ),
    entry(
        "001-35",
        "shapes, 2 (4)",
        "the gradient at K, the second time",
        "dK = dS^T Q / sqrt(d)",
        formula(
            Head.random,
            r"\frac{\partial \mathcal{L}}{\partial K} = "
            r"\frac{1}{\sqrt{d_k}} \frac{\partial \mathcal{L}}{\partial S}^T Q",
            evidence=lambda h: "it contradicts 001-8, and is right",
        ),
    ),
    entry(
        "001-36",
        "shapes, 2 (5)",
        "the gradients at the projection weights",
        "dW^Q = X^T dQ, dW^K = X^T dK, dW^V = X^T dV",
        formula(Projected, "dW^Q = X^T dQ, dW^K = X^T dK, dW^V = X^T dV"),
    ),
    entry(
        "001-37",
        "shapes, 2 (6)",
        "the gradient at the input",
        "dX = dQ (W^Q)^T + dK (W^K)^T + dV (W^V)^T",
        formula(
            Projected,
            r"\frac{\partial \mathcal{L}}{\partial X} = \frac{\partial \mathcal{L}}{\partial Q} W^{Q^T} "
            r"+ \frac{\partial \mathcal{L}}{\partial K} W^{K^T} + \frac{\partial \mathcal{L}}{\partial V} W^{V^T}",
            evidence=lambda h: "for one head; several heads add up, and the section announces several",
        ),
    ),
    entry(
        "001-38",
        "shapes, 3",
        "the table of the gradients' shapes",
        "every gradient has the shape of its variable",
        Claim(Projected, _listed_gradients, _shapes_of_gradients),
    ),
)
