"""The equation Z = QK^T: the chain rule stops before the softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._claim import relative_error
from attngrad.errata._formula import Formula, Statement
from attngrad.errata._records import Entry
from attngrad.formulas.case import Head, complex_step, softmax
from attngrad.formulas.report import figure

head = partial(Statement, Head.random)

BEFORE_SCALE = ("the scores before scale and softmax", "A = softmax(Q K^T / sqrt(d))")
"""Of a Q K^T that is called the scores, and to which the softmax is then applied."""

# The document's Z is Q K^T, without the scale; its derivatives have four indices, dZ_ij / dQ_ab and dZ_ij / dK_ab.


def _dz_dq(h: Head) -> Array:
    return complex_step(lambda q: q @ h.k.T, h.q)


def _dz_dk(h: Head) -> Array:
    return complex_step(lambda k: h.q @ k.T, h.k)


def _dz(h: Head) -> Array:
    return complex_step(lambda z: h.loss(softmax(h.scale * z) @ h.v), h.q @ h.k.T)


UNSCALED = {"dZ": _dz, "dZ/dQ": _dz_dq, "dZ/dK": _dz_dk}


def _block_of_dz_dk(h: Head) -> str:
    columns = np.stack([_dz_dk(h)[:, j, j, :] for j in range(len(h.k))])
    error = relative_error(np.broadcast_to(h.q, columns.shape), columns)
    return f"in the layout in which dZ/dQ is K it is Q [{figure(error)}], and the document insists on K, not K^T"


def _chain(h: Head) -> str:
    by_k, scale = Formula("dQ = dZ K", UNSCALED).error(h), Formula("dZ = dS / sqrt(d)", UNSCALED).error(h)
    return (
        f"with all four indices, and so with the document's K for dZ/dQ [{figure(by_k)}]; the scale is inside: "
        f"dL/dZ = dS / sqrt(d) [{figure(scale)}]"
    )


def _scale_still_missing(text: str) -> Callable[[Head], str]:
    return lambda h: f"with dL/dS in place of dL/dA the scale is still missing [{figure(Formula(text).error(h))}]"


ENTRIES: tuple[Entry, ...] = (
    head("equation-z-1", "first formula", "the attention weights").formula(
        "A = softmax(Q K^T / sqrt(d))",
        r"A = \text{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right)",
    ),
    head("equation-z-2", "second formula", "the scores before the softmax").formula(
        "Z = Q K^T represents the attention scores before applying softmax",
        "Z = QK^T",
        "Z = Q K^T / sqrt(d)",
        reading=BEFORE_SCALE,
        wrong="The softmax of the first formula is applied to Q K^T / sqrt(d): the scale is gone.",
        correct="Z / sqrt(d) is what the softmax is applied to",
    ),
    head("equation-z-3", "dZ/dQ", "the derivative of Z at Q is called K").formula(
        "dZ/dQ = K",
        r"\frac{\partial Z}{\partial Q} = K",
        "dZ_ij/dQ_ab = I_ia K_jb",
        reading=("row by row, dZ_i/dQ_i = K", "dZ_ij/dQ_ib = K_jb"),
        also=UNSCALED,
        wrong="A matrix by a matrix has four indices. K is its one nonzero block, and a shorthand for using it.",
        correct="dZ_ij/dQ_ab = [i = a] K_jb",
    ),
    head("equation-z-4", "chain rule", "the chain rule through Z").formula(
        "dL/dQ = dL/dZ dZ/dQ",
        r"\frac{\partial \mathcal{L}}{\partial Q} = "
        r"\frac{\partial \mathcal{L}}{\partial Z} \cdot \frac{\partial Z}{\partial Q}",
        evidence=_chain,
        also=UNSCALED,
    ),
    head("equation-z-5", "dQ; conclusion", "dL/dA stands where dL/dZ belongs, in dQ").formula(
        "dL/dQ = dL/dA K",
        r"\frac{\partial \mathcal{L}}{\partial Q} = \frac{\partial \mathcal{L}}{\partial A} \cdot K",
        "dQ = (A o (dA - rowsum(A o dA)) / sqrt(d)) K",
        _scale_still_missing("dQ = dS K"),
        wrong="dL/dA is the gradient after the softmax. Its Jacobian is skipped, and the scale with it.",
        correct="dL/dQ = dL/dZ K, dL/dZ = A o (dA - rowsum(A o dA)) / sqrt(d)",
    ),
    head("equation-z-6", "dZ/dK", "the derivative of Z at K is called Q^T").formula(
        "dZ/dK = Q^T",
        r"\frac{\partial Z}{\partial K} = Q^T",
        "dZ_ij/dK_ab = I_ja Q_ib",
        _block_of_dz_dk,
        ("the derivative of column j of Z at row j of K, transposed", "dZ_ij/dK_jb = Q_ib"),
        UNSCALED,
        wrong="Four indices again; and the block is Q, so the transpose fits neither dZ/dQ nor the document's own dK.",
        correct="dZ_ij/dK_ab = [j = a] Q_ib",
    ),
    head("equation-z-7", "dK; conclusion", "dL/dA stands where dL/dZ belongs, in dK").formula(
        "dL/dK = (dL/dA)^T Q",
        r"\frac{\partial \mathcal{L}}{\partial K} = "
        r"\left(\frac{\partial \mathcal{L}}{\partial A} \right)^T \cdot Q",
        "dK = (A o (dA - rowsum(A o dA)) / sqrt(d))^T Q",
        _scale_still_missing("dK = dS^T Q"),
        wrong="As in dQ: the softmax and the scale are skipped. The transpose and the factor Q are right.",
        correct="dL/dK = (dL/dZ)^T Q, dL/dZ = A o (dA - rowsum(A o dA)) / sqrt(d)",
    ),
)
