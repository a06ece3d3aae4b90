r"""An explicit formula for the gradient of standard attention: right throughout, for scale 1.

The document sums e_i (...)^T over the rows i; p_i = K Q^T e_i, \sigma is the softmax, d\sigma its Jacobian, and
\Lambda = dL/dAtt = dout; \tilde{Q} is a tangent. <X, Y>_F is written sum(X o Y) here, and tr as trace. Its three inputs
share one shape; the formulas hold for T != S and D != E too, as here.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from attngrad import reference
from attngrad.errata._claim import relative_error
from attngrad.errata._formula import Also, Formula, Statement
from attngrad.errata._records import Entry
from attngrad.formulas.case import Head, along
from attngrad.formulas.report import figure

head = partial(Statement, Head.unit)

BOXED = (
    r"d_Q \sL(\theta) \equiv \Omega(\theta) K, d_K \sL(\theta) \equiv \Omega(\theta)^t Q, "
    r"d_V \sL(\theta) \equiv \sum_{i=1}^{n} \sigma(p_i) e_i^t \Lambda(\theta)"
)

# The partial derivatives of the output, each along one tangent.
_MOVED_Q = r"\sum_{i=1}^{n} e_i [d \sigma(p_i) \cdot K\tilde{Q}^t e_i]^t V"
_MOVED_K = r"\sum_{i=1}^{n} e_i [d \sigma(p_i) \cdot \tilde{K}Q^t e_i]^t V"
_MOVED_V = r"\sum_{i=1}^{n} e_i \sigma(p_i)^t \tilde{V}"


def _only(letter: str) -> Also:
    """The document's tangent of the output, where one of the inputs moves alone."""
    x = letter.lower()
    return {"O_dot": lambda h: along(lambda moved: h.out(**{x: moved}), (getattr(h, x), getattr(h, f"{x}_dot")))}


def _other_scale(h: Head) -> str:
    error = relative_error(h.out(), reference.attention(h.q, h.k, h.v))
    return f"for scale 1; attention with 1/sqrt(d) is another function [{figure(error)}]"


def _scaled(h: Head) -> str:
    """What becomes of the boxed formula where the scale is 1/sqrt(d), as it usually is."""
    scale = h.q.shape[-1] ** -0.5
    usual = Head(h.q, h.k, h.v, h.dout, scale, np.random.default_rng(0))
    truth = (usual.dq, usual.dk, usual.dv)
    printed = relative_error(Formula(BOXED).right(h), truth)
    adapted = relative_error(reference.per_row_gradients(h.q, h.k, h.v, h.dout, scale), truth)
    return (
        f"for scale 1; for 1/sqrt(d) it is wrong as it stands [{figure(printed)}], and right with "
        f"p_i = K Q^T e_i / sqrt(d) and (Omega K, Omega^T Q) / sqrt(d) [{figure(adapted)}]"
    )


def _chain(id_: str, letter: str, says: str, *lines: str) -> Entry:
    """Every line of the trace computation for Q, K or V: <d Att, P>, P being dout, and what it is said to equal."""
    text = " = ".join((r"\text{sum}(\tilde{O} \odot dO)", *(rf"\sum_{{i=1}}^{{n}} {line}" for line in lines)))
    title = f"every line of the trace computation for {letter}"
    return head(id_, f"d_{letter} L", title).formula(says, text, also=_only(letter))


ENTRIES: tuple[Entry, ...] = (
    head("explicit-formula-1", "definition", "attention, row by row, without a scale").formula(
        "Att = sigma(Q K^T) V = sum_i e_i sigma(K Q^T e_i)^T V",
        r"\Attn(Q, K, V) = \sigma(QK^t) V = \sum_{i=1}^{n} e_i \sigma((e_i^t Q K^t)^t)^t V "
        r"= \sum_{i=1}^{n} e_i \sigma(K Q^t e_i)^t V",
        evidence=_other_scale,
    ),
    head("explicit-formula-2", "total derivative", "the total derivative is the sum of the partial ones").formula(
        "dAtt = d_Q Att Q~ + d_K Att K~ + d_V Att V~",
        rf"\tilde{{O}} = {_MOVED_Q} + {_MOVED_K} + {_MOVED_V}",
    ),
    head("explicit-formula-3", "partial derivatives", "the partial derivative along Q~").formula(
        "d_Q Att Q~ = sum_i e_i [dsigma(p_i) K Q~^T e_i]^T V",
        rf"\tilde{{O}} = {_MOVED_Q}",
        also=_only("Q"),
    ),
    head("explicit-formula-4", "partial derivatives", "the partial derivative along K~").formula(
        "d_K Att K~ = sum_i e_i [dsigma(p_i) K~ Q^T e_i]^T V",
        rf"\tilde{{O}} = {_MOVED_K}",
        also=_only("K"),
    ),
    head("explicit-formula-5", "partial derivatives", "the partial derivative along V~").formula(
        "d_V Att V~ = sum_i e_i sigma(p_i)^T V~",
        rf"\tilde{{O}} = {_MOVED_V}",
        also=_only("V"),
    ),
    _chain(
        "explicit-formula-6",
        "Q",
        "<d_Q Att Q~, P> = ... = sum_i <Q~, e_i e_i^T P V^T dsigma(p_i) K>",
        r"\text{sum}(e_i [d \sigma(p_i) \cdot K\tilde{Q}^t e_i]^t V \odot dO)",
        r"\text{sum}(e_i e_i^t \tilde{Q} K^t d \sigma(p_i)^t V \odot dO)",
        r"\tr\left( V^t d \sigma(p_i) K \tilde{Q}^t e_i e_i^t dO \right)",
        r"\tr\left( \tilde{Q}^t e_i e_i^t dO V^t d \sigma(p_i) K \right)",
        r"\text{sum}(\tilde{Q} \odot e_i e_i^t dO V^t d \sigma(p_i) K)",
    ),
    head("explicit-formula-7", "d_Q L", "the gradient at Q").formula(
        "d_Q L = sum_i e_i e_i^T Lambda V^T dsigma(p_i) K",
        r"d_Q \sL(\theta) \equiv \sum_{i=1}^{n} e_i e_i^t \Lambda(\theta) V^t d \sigma(p_i) K",
    ),
    _chain(
        "explicit-formula-8",
        "K",
        "<d_K Att K~, P> = ... = sum_i <K~, dsigma(p_i)^T V P^T e_i e_i^T Q>",
        r"\text{sum}(e_i [d \sigma(p_i) \cdot \tilde{K} Q^t e_i]^t V \odot dO)",
        r"\text{sum}(e_i e_i^t Q \tilde{K}^t d \sigma(p_i)^t V \odot dO)",
        r"\tr\left( V^t d \sigma(p_i) \tilde{K} Q^t e_i e_i^t dO \right)",
        r"\tr\left( Q^t e_i e_i^t dO V^t d \sigma(p_i) \tilde{K} \right)",
        r"\tr\left( \tilde{K}^t d\sigma(p_i)^t V dO^t e_i e_i^t Q \right)",
        r"\text{sum}(\tilde{K} \odot d\sigma(p_i)^t V dO^t e_i e_i^t Q)",
    ),
    head("explicit-formula-9", "d_K L", "the gradient at K").formula(
        "d_K L = sum_i dsigma(p_i)^T V Lambda^T e_i e_i^T Q",
        r"d_K \sL(\theta) \equiv \sum_{i=1}^{n} d\sigma(p_i)^t V \Lambda(\theta)^t e_i e_i^t Q",
    ),
    _chain(
        "explicit-formula-10",
        "V",
        "<d_V Att V~, P> = ... = sum_i <V~, sigma(p_i) e_i^T P>",
        r"\text{sum}(e_i \sigma(p_i)^t \tilde{V} \odot dO)",
        r"\text{sum}(\tilde{V} \odot \sigma(p_i) e_i^t dO)",
    ),
    head("explicit-formula-11", "d_V L", "the gradient at V").formula(
        "d_V L = sum_i sigma(p_i) e_i^T Lambda",
        r"d_V \sL(\theta) \equiv \sum_{i=1}^{n} \sigma(p_i) e_i^t \Lambda(\theta)",
    ),
    head("explicit-formula-12", "boxed result", "the whole gradient, with one Omega for Q and K").formula(
        "dL = (Omega K, Omega^T Q, sum_i sigma(p_i) e_i^T Lambda)",
        BOXED,
        evidence=_scaled,
    ),
    head("explicit-formula-13", "boxed result", "Omega is the gradient at the scores").formula(
        "Omega = sum_i e_i e_i^T Lambda V^T dsigma(p_i)",
        r"\Omega(\theta) = \sum_{i=1}^{n} e_i e_i^t \Lambda(\theta) V^t d \sigma(p_i)",
    ),
    head("explicit-formula-14", "matrix form", "Omega, one row below the other").formula(
        "row i of Omega = e_i^T Lambda V^T dsigma(p_i)",
        r"\Omega_i = e_i^t \Lambda(\theta) V^t d \sigma(p_i)",
    ),
    head("explicit-formula-15", "expanded form", "Omega with the softmax Jacobian written out").formula(
        "row i of Omega = e_i^T Lambda V^T (diag(sigma(p_i)) - sigma(p_i) sigma(p_i)^T)",
        r"\Omega_i = e_i^t \Lambda(\theta) V^t (\Delta \sigma(p_i) - \sigma(p_i) \sigma(p_i)^t)",
    ),
)
