"""The formulas of the forward and the backward pass."""

from __future__ import annotations

from functools import partial

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._claim import relative_error
from attngrad.errata._formula import Formula, Statement
from attngrad.errata._records import Entry
from attngrad.formulas.case import Head, complex_step, rowsum, softmax
from attngrad.formulas.report import figure

head = partial(Statement, Head.random)

# --- the gradient at the scores, in the three forms of the document and in the right one ------------------------------

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


# --- what is found beside the verdicts --------------------------------------------------------------------------------


def _row_sums(h: Head) -> str:
    reach, right = (np.max(np.abs(rowsum(Formula(text).right(h)))) for text in (MATRIX_DS, RIGHT_DS))
    return (
        f"rows of dS must sum to 0, for a shift of a row changes nothing; here they reach {reach:.2g} where the right "
        f"ones reach {figure(right)}"
    )


def _flat_j(h: Head) -> str:
    a = h.a[0]
    error = relative_error(a * (np.eye(len(a)) - a.T), h.jacobian[0])
    return f"on a 1-D NumPy array, where a.T is a, it is wrong entry by entry too [{figure(error)}]"


ENTRIES: tuple[Entry, ...] = (
    head("back-pass-1", "definition, forward pass", "scaled dot-product attention").formula(
        "S = Q K^T / sqrt(d), A = softmax(S), O = A V",
        r"S = \frac{QK^T}{\sqrt{d_k}}, A = \text{softmax}(S), O = AV",
    ),
    head("back-pass-2", "backward pass, 1", "the gradient at the output is given").claim(
        "dL/dO = dL/dO",
        lambda h: h.dout,
        lambda h: complex_step(h.loss, h.out()),
    ),
    head("back-pass-3", "backward pass, 2; summary, 5; shapes, 2", "the gradient at the weights").formula(
        "dA = dO V^T",
        r"\frac{\partial L}{\partial A} = \frac{\partial L}{\partial O} \cdot V^T",
    ),
    head("back-pass-4", "backward pass, 3", "the Jacobian of the softmax").formula(
        "dA_i/dS_i = A_i (I - A_i^T)",
        r"\frac{\partial A_i}{\partial S_i} = A_i \cdot (I - A_i^T)",
        "dA_i/dS_i = diag(A_i) - A_i^T A_i",
        _flat_j,
        ("a product entry by entry, the row A_i against the column A_i^T", "dA_i/dS_i = A_i * (I - A_i^T)"),
        wrong="A row times a matrix is a row, not a Jacobian; and I - A_i^T takes a column from a matrix.",
        correct="dA_i/dS_i = diag(A_i) - A_i^T A_i, A_i a row",
    ),
    head("back-pass-5", "backward pass, 3; summary, 4; derivation", "the gradient at the scores").formula(
        "dS = dA o A - A dA^T A",
        MATRIX_DS,
        RIGHT_DS,
        _row_sums,
        wrong="A dA^T A mixes the rows, but the softmax acts on each alone: only the diagonal of A dA^T belongs.",
    ),
    head("back-pass-6", "backward pass, 4", "the gradient at the scaled product is dS").claim(
        "dL/d(Q K^T / sqrt(d)) = dS",
        lambda h: (
            np.sqrt(h.q.shape[-1])
            * complex_step(lambda z: h.loss(softmax(z / np.sqrt(h.q.shape[-1])) @ h.v), h.q @ h.k.T)
        ),
        lambda h: h.ds,
    ),
    head("back-pass-7", "backward pass, 5; summary, 2; shapes, 4", "the gradient at Q").formula(
        "dQ = dS K / sqrt(d)",
        r"\frac{\partial L}{\partial Q} = \frac{1}{\sqrt{d_k}} \frac{\partial L}{\partial S} \cdot K",
    ),
    head("back-pass-8", "backward pass, 5; summary, 3", "the gradient at K").formula(
        "dK = Q^T dS / sqrt(d)",
        r"\frac{\partial L}{\partial K} = \frac{1}{\sqrt{d_k}} Q^T \cdot \frac{\partial L}{\partial S}",
        "dK = dS^T Q / sqrt(d)",
        reading=("(dK)^T", "dK^T = Q^T dS / sqrt(d)"),
        wrong="Transposed: d x n where dK is n x d. The document's own code and shape section have it right.",
    ),
    head("back-pass-9", "backward pass, 6; summary, 1; shapes, 2", "the gradient at V").formula(
        "dV = A^T dO",
        r"\frac{\partial L}{\partial V} = A^T \cdot \frac{\partial L}{\partial O}",
    ),
)
