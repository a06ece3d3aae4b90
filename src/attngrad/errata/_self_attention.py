"""Document 001, self-attention gradients with NumPy code: its formulas. Its code is judged in ``_code``."""

from __future__ import annotations

import numpy as np

from attngrad._options import Array
from attngrad.errata._case import Head, Projected, complex_step, rowsum, softmax, t
from attngrad.errata._claim import Claim, Entry, Reading, entry, figure, relative_error
from attngrad.errata._note import BEFORE_SCALE, scaled_softmax

# --- the gradient at the scores, as the document prints it -----------------------------------------------------------


def right_ds(h: Head) -> Array:
    """A o (dA - rowsum(A o dA)): what all of them should be."""
    return h.a * (h.da - rowsum(h.a * h.da))


def matrix_ds(h: Head) -> Array:
    """The formula printed three times."""
    return h.da * h.a - h.a @ t(h.da) @ h.a


def mean_ds(h: Head) -> Array:
    """What both classes compute."""
    ds = h.da * h.a
    return ds - np.mean(ds, axis=-1, keepdims=True)


def snippet_ds(h: Head) -> Array:
    """What the two-line snippet computes."""
    ds = h.da * h.a
    ds -= np.sum(ds, axis=-1, keepdims=True) * h.a
    return ds


def _disagreement(h: Head) -> str:
    names = {"the matrix formula": matrix_ds, "the mean in the code": mean_ds, "the row sum in the snippet": snippet_ds}
    return ", ".join(f"{name} [{figure(relative_error(f(h), h.ds))}]" for name, f in names.items())


# --- the softmax Jacobian --------------------------------------------------------------------------------------------


def _cases_of_j(h: Head) -> Array:
    same = np.eye(h.a.shape[-1], dtype=bool)
    a_j, a_k = h.a[..., :, None], h.a[..., None, :]
    return np.where(same, a_j * (1.0 - a_j), -a_j * a_k)


def _flat_j(h: Head) -> str:
    a = h.a[0]
    error = relative_error(a * (np.eye(len(a)) - a.T), h.jacobian[0])
    return f"on a 1-D NumPy array, where a.T is a, it is wrong entry by entry too [{figure(error)}]"


def _shares_of_diagonal_and_outer_product(h: Head) -> tuple[Array, Array]:
    diagonal = np.stack([d @ np.diag(a) for d, a in zip(h.da, h.a, strict=True)])
    return diagonal, np.stack([-d @ np.outer(a, a) for d, a in zip(h.da, h.a, strict=True)])


def _off_diagonal(j: Array) -> Array:
    return j * (1.0 - np.eye(j.shape[-1]))


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


def _sum_over_rows_ds(h: Head) -> Array:
    """A o (dA - sum_i A_i dA_i), A_i and dA_i being rows, as they are throughout the document."""
    return h.a * (h.da - np.sum(h.a * h.da, axis=0))


def _inner_products(h: Head) -> str:
    error = relative_error(h.a * (h.da - np.sum(h.a * h.da)), h.ds)
    return f"with A_i dA_i an inner product of rows it is wrong too [{figure(error)}]"


def _each_row_by_its_own_j(h: Head) -> Array:
    return np.einsum("ij,ijk->ik", h.da, _cases_of_j(h))


def _one_jacobian_for_all(h: Head) -> str:
    error = relative_error(h.da @ h.jacobian[0], h.ds)
    return f"with one J for all rows, that of the first, it is wrong [{figure(error)}]"


FORMULAS: tuple[Entry, ...] = (
    entry(
        "001-1",
        "definition, forward pass",
        "scaled dot-product attention",
        "S = Q K^T / sqrt(d), A = softmax(S), O = A V",
        Claim(Head.random, lambda h: scaled_softmax(h) @ h.v, lambda h: h.out()),
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
        Claim(Head.random, lambda h: h.dout @ h.v.T, lambda h: h.da),
    ),
    entry(
        "001-4",
        "backward pass, 3",
        "the Jacobian of the softmax",
        "dA_i/dS_i = A_i (I - A_i^T)",
        Claim(
            Head.random,
            lambda h: h.a[:1] @ (np.eye(h.a.shape[-1]) - h.a[:1].T),
            lambda h: h.jacobian[0],
            lambda h: np.diag(h.a[0]) - np.outer(h.a[0], h.a[0]),
            _flat_j,
            Reading(
                "a product entry by entry, the row A_i against the column A_i^T",
                lambda h: h.a[0][None, :] * (np.eye(h.a.shape[-1]) - h.a[0][:, None]),
                lambda h: h.jacobian[0],
            ),
        ),
        wrong="A row times a matrix is a row, not a Jacobian; and I - A_i^T takes a column from a matrix.",
        correct="dA_i/dS_i = diag(A_i) - A_i^T A_i, A_i a row",
    ),
    entry(
        "001-5",
        "backward pass, 3; summary, 4; derivation",
        "the gradient at the scores",
        "dS = dA o A - A dA^T A",
        Claim(
            Head.random,
            matrix_ds,
            lambda h: h.ds,
            right_ds,
            lambda h: (
                "rows of dS must sum to 0, for a shift of a row changes nothing; here they reach "
                f"{np.max(np.abs(rowsum(matrix_ds(h)))):.2g} where the right ones reach "
                f"{figure(np.max(np.abs(rowsum(right_ds(h)))))}"
            ),
        ),
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
        Claim(Head.random, lambda h: h.ds @ h.k / np.sqrt(h.k.shape[-1]), lambda h: h.dq),
    ),
    entry(
        "001-8",
        "backward pass, 5; summary, 3",
        "the gradient at K",
        "dK = Q^T dS / sqrt(d)",
        Claim(
            Head.random,
            lambda h: h.q.T @ h.ds / np.sqrt(h.k.shape[-1]),
            lambda h: h.dk,
            lambda h: h.ds.T @ h.q / np.sqrt(h.k.shape[-1]),
            reading=Reading("(dK)^T", lambda h: h.q.T @ h.ds / np.sqrt(h.k.shape[-1]), lambda h: h.dk.T),
        ),
        wrong="Transposed: d x n where dK is n x d. The document's own code and shape section have it right.",
        correct="dK = dS^T Q / sqrt(d)",
    ),
    entry(
        "001-9",
        "backward pass, 6; summary, 1; shapes, 2",
        "the gradient at V",
        "dV = A^T dO",
        Claim(Head.random, lambda h: h.a.T @ h.dout, lambda h: h.dv),
    ),
)


DERIVATION: tuple[Entry, ...] = (
    entry(
        "001-24",
        "derivation",
        "the softmax, entry by entry",
        "A_ij = exp(S_ij) / sum_k exp(S_ik)",
        Claim(
            Head.random,
            lambda h: np.exp(h.s) / rowsum(np.exp(h.s)),
            lambda h: h.a,
            evidence=lambda h: "computed as written it overflows, as in 002-5; but nothing here is computed with it",
        ),
    ),
    entry(
        "001-25",
        "derivation, 1",
        "the softmax derivative on the diagonal",
        "dA_ij/dS_ij = A_ij (1 - A_ij)",
        Claim(Head.random, lambda h: h.a * (1.0 - h.a), lambda h: np.diagonal(h.jacobian, axis1=-2, axis2=-1)),
    ),
    entry(
        "001-26",
        "derivation, 2",
        "the softmax derivative off the diagonal",
        "dA_ij/dS_ik = -A_ij A_ik, k != j",
        Claim(
            Head.random,
            lambda h: _off_diagonal(-h.a[:, :, None] * h.a[:, None, :]),
            lambda h: _off_diagonal(h.jacobian),
        ),
    ),
    entry(
        "001-27",
        "derivation",
        "the Jacobian by cases",
        "J_ijk = A_ij (1 - A_ij) if j = k, else -A_ij A_ik",
        Claim(Head.random, _cases_of_j, lambda h: h.jacobian),
    ),
    entry(
        "001-28",
        "derivation",
        "the chain rule with the Jacobian",
        "dS = dA J",
        Claim(
            Head.random,
            lambda h: h.da @ _cases_of_j(h),
            lambda h: h.ds,
            _each_row_by_its_own_j,
            _one_jacobian_for_all,
            Reading("row by row, dS_i = dA_i J_i", _each_row_by_its_own_j, lambda h: h.ds),
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
        Claim(
            Head.random,
            lambda h: (matrix_ds(h), mean_ds(h), snippet_ds(h)),
            lambda h: (h.ds, h.ds, h.ds),
            lambda h: (right_ds(h), right_ds(h), snippet_ds(h)),
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
        Claim(
            Head.random,
            lambda h: softmax(h.q @ h.k.T),
            lambda h: h.a,
            scaled_softmax,
            reading=BEFORE_SCALE,
        ),
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
        Claim(
            Head.random,
            _sum_over_rows_ds,
            lambda h: h.ds,
            right_ds,
            _inner_products,
            Reading("a sum over the keys of each row, rowsum(A o dA)", right_ds, lambda h: h.ds),
        ),
        wrong="A_i is row i in this document, so the sum over i runs down the queries. It must run along each row.",
        correct="dS = A o (dA - rowsum(A o dA))",
    ),
    entry(
        "001-35",
        "shapes, 2 (4)",
        "the gradient at K, the second time",
        "dK = dS^T Q / sqrt(d)",
        Claim(
            Head.random,
            lambda h: h.ds.T @ h.q / np.sqrt(h.k.shape[-1]),
            lambda h: h.dk,
            evidence=lambda h: "it contradicts 001-8, and is right",
        ),
    ),
    entry(
        "001-36",
        "shapes, 2 (5)",
        "the gradients at the projection weights",
        "dW^Q = X^T dQ, dW^K = X^T dK, dW^V = X^T dV",
        Claim(Projected, lambda h: (h.x.T @ h.dq, h.x.T @ h.dk, h.x.T @ h.dv), lambda h: h.d_weights),
    ),
    entry(
        "001-37",
        "shapes, 2 (6)",
        "the gradient at the input",
        "dX = dQ (W^Q)^T + dK (W^K)^T + dV (W^V)^T",
        Claim(
            Projected,
            lambda h: h.dq @ h.w_q.T + h.dk @ h.w_k.T + h.dv @ h.w_v.T,
            lambda h: h.d_x,
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
