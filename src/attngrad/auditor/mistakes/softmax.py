"""Mistakes in the softmax and its derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import (
    Mistake,
    Variant,
    Wild,
    delta_from_weights,
    need,
    only,
    reading,
    way,
    weights_from_lse,
    without,
)
from attngrad.auditor.pipeline import Pipeline
from attngrad.reference.dense import matmul, rowsum, transpose, zero_hidden

Base = Callable[[], Any]
_RIGHT = "dS = A o (dA - rowsum(A o dA))"
_ROW_TERM = (
    "Every weight of a row depends on every score of it, through the sum in the denominator: the row term "
    "rowsum(A o dA) = rowsum(dO o O) carries this, weighted by A. "
)


def _hidden(p: Pipeline, ds: Any) -> Any:
    return zero_hidden(ds, p.visible_back)


def _product(p: Pipeline) -> Any:
    return p.weights_back * p.dweights


def _mean(x: Any, p: Pipeline) -> Any:
    return rowsum(x) / p.c(x.shape[-1])


def _without_weights(p: Pipeline, base: Base) -> Any:
    return _product(p) - rowsum(_product(p))[..., None]


def _matrix(p: Pipeline, base: Base) -> Any:
    a = p.weights_back
    return _hidden(p, _product(p) - matmul(matmul(a, transpose(p.dweights)), a))


def _columns(p: Pipeline, base: Base) -> Any:
    """The sum over the queries, kept as a row."""
    return _hidden(p, p.weights_back * (p.dweights - np.sum(_product(p), axis=-2, keepdims=True)))


def _row_as_column(p: Pipeline, base: Base) -> Any:
    """The right sum, broadcast along the wrong axis."""
    need(p.dweights.shape[-1] == p.dweights.shape[-2])
    return _hidden(p, p.weights_back * (p.dweights - rowsum(_product(p))[..., None, :]))


def _softmax_over(axis: int) -> Callable[[Pipeline, Base], Any]:
    def weights(p: Pipeline, base: Base) -> Any:
        s = np.where(p.visible, p.scores, p.c(-np.inf))
        top = np.max(s, axis=axis, keepdims=True)
        e = np.where(p.visible, np.exp(s - np.where(np.isneginf(top), p.c(0.0), top)), p.c(0.0))
        total = np.sum(e, axis=axis, keepdims=True)
        return e / np.where(total == 0, p.c(1.0), total)

    return weights


def _consistent(axis: int) -> Callable[[Pipeline, Base], Any]:
    """The right derivative of the softmax over the wrong axis."""

    def dscores(p: Pipeline, base: Base) -> Any:
        return _hidden(p, p.weights_back * (p.dweights - np.sum(_product(p), axis=axis, keepdims=True)))

    return dscores


def _base_2(p: Pipeline, base: Base) -> Any:
    return base() * p.c(1 / np.log(np.longdouble(2)))


def _exp2(p: Pipeline, base: Base) -> Any:
    """The backward takes 2^(s - lse) from an lse in base e."""
    lse = np.where(p.visible.any(-1), p.lse, p.c(0.0))[..., None]
    return _hidden(p, np.exp2(p.scores_unmasked - lse))


def _softmax_2(p: Pipeline, base: Base) -> Any:
    """Every exponential is 2^s."""
    top = np.max(np.where(p.visible, p.scores, p.c(-np.inf)), axis=-1, keepdims=True)
    e = np.where(p.visible, np.exp2(p.scores - np.where(np.isneginf(top), p.c(0.0), top)), p.c(0.0))
    total = rowsum(e)[..., None]
    return e / np.where(total == 0, p.c(1.0), total)


def _without_max(p: Pipeline, base: Base) -> Any:
    _, _, _, top = p.normaliser
    return base() - top


def _overflowing(p: Pipeline) -> Any:
    """The rows where exp(s), summed in the dtype of the candidate, is not finite."""
    with np.errstate(all="ignore"):
        total = np.sum(np.exp(p.scores.astype(p.candidate_dtype)), axis=-1)
    rows = ~np.isfinite(total.astype(np.float64))
    need(rows.any())
    return rows


def _overflown_weights(p: Pipeline, base: Base) -> Any:
    return np.where(_overflowing(p)[..., None], p.c(Wild), base())


def _overflown_lse(p: Pipeline, base: Base) -> Any:
    return np.where(_overflowing(p), p.c(Wild), base())


MISTAKES = (
    Mistake(
        "row-term-missing",
        "dS has no row term",
        "dS = dA o A",
        _RIGHT,
        _ROW_TERM + "Without it only the diagonal of the Jacobian's first part is left.",
        "Subtract rowsum(dA * A, keepdims) from dA before multiplying by A.",
        only(**without("dscores", "delta")),
    ),
    Mistake(
        "mean-for-row-sum",
        "a mean stands in place of the weighted row sum",
        "dS = dA o A - mean(dA o A)",
        _RIGHT,
        _ROW_TERM + "A mean is neither that sum nor weighted by A; it does nothing for numerical stability either.",
        "Subtract rowsum(dA * A, keepdims=True) from dA, then multiply by A.",
        (
            way("dS = dA o A - mean(dA o A)", dscores=lambda p, base: _product(p) - _mean(_product(p), p)[..., None]),
            way("dS = A o (dA - mean(dA))", **reading("dscores", delta=lambda p: _mean(p.dweights, p))),
            way("dS = A o (dA - mean(dA o A))", **reading("dscores", delta=lambda p: _mean(_product(p), p))),
            way("dS = dA o A - mean(dA)", dscores=lambda p, base: _product(p) - _mean(p.dweights, p)[..., None]),
        ),
    ),
    Mistake(
        "row-sum-unweighted",
        "the row sum is not weighted by A",
        "dS = A o (dA - rowsum(dA))",
        _RIGHT,
        _ROW_TERM + "The sum runs over dA alone.",
        "Sum dA * A over the row, not dA.",
        only(**reading("dscores", delta=lambda p: rowsum(p.dweights))),
    ),
    Mistake(
        "row-term-without-weights",
        "the row term is not multiplied by A",
        "dS = dA o A - rowsum(dA o A)",
        _RIGHT,
        _ROW_TERM + "Entry j gets its share A_ij of it, not all of it.",
        "Multiply the row sum by A before subtracting: dS = dA * A - rowsum(dA * A, keepdims) * A.",
        only(dscores=_without_weights),
    ),
    Mistake(
        "row-term-over-columns",
        "the row sum runs over the columns",
        "dS = A o (dA - colsum(A o dA))",
        _RIGHT,
        "Softmax normalises over the keys of a query, so the sum runs over keys (axis -1), not over queries.",
        "Sum over axis -1 with keepdims=True.",
        (way("summed over the queries", dscores=_columns), way("broadcast along the queries", dscores=_row_as_column)),
    ),
    Mistake(
        "row-term-matrix-product",
        "the row term is a matrix product",
        "dS = dA o A - A dA^T A",
        _RIGHT,
        "A dA^T A mixes the rows of different queries. The row term is the diagonal of A dA^T times A, row by row.",
        "Replace A dA^T A by rowsum(dA * A, keepdims) * A.",
        only(dscores=_matrix),
    ),
    Mistake(
        "dweights-for-dscores",
        "dL/dA is used for dL/dS",
        "dS = dA",
        _RIGHT,
        "The softmax lies between the scores and the weights; its derivative is left out.",
        "Apply the softmax backward to dA before forming dQ and dK.",
        only(dscores=lambda p, base: p.dweights),
    ),
    Mistake(
        "softmax-diagonal-only",
        "only the diagonal of the softmax Jacobian is used",
        "dS = dA o A o (1 - A)",
        _RIGHT,
        "a (1 - a) is the derivative of a weight by its own score; the derivatives by the other scores are missing.",
        "Use the whole row: dS = A * (dA - rowsum(dA * A, keepdims)).",
        only(dscores=lambda p, base: _hidden(p, _product(p) * (p.c(1.0) - p.weights_back))),
    ),
    Mistake(
        "softmax-wrong-axis",
        "softmax over the wrong axis",
        "A = softmax(S, axis=queries)",
        "A = softmax(S, axis=keys)",
        "Each query spreads one unit of weight over the keys: the rows of A sum to 1, not the columns.",
        "Take the softmax over the last axis, that of the keys.",
        (
            way("over the queries", weights=_softmax_over(-2), delta=delta_from_weights),
            way("over the queries, delta from out", weights=_softmax_over(-2)),
            way("over the queries, in both passes", weights=_softmax_over(-2), dscores=_consistent(-2)),
            way("over the heads", weights=_softmax_over(1), delta=delta_from_weights),
            way("over the heads, in both passes", weights=_softmax_over(1), dscores=_consistent(1)),
        ),
    ),
    Mistake(
        "lse-base-2",
        "the log-sum-exp is in base 2",
        "lse = log2(sum(exp(S)))",
        "lse = log(sum(exp(S)))",
        "Kernels that use exp2 keep lse in base 2; the two must not be mixed.",
        "Multiply by ln 2 before returning lse or before exp(S - lse); or use exp2 on both sides.",
        (
            way("in what is returned", lse=_base_2),
            way(
                "exp(S - lse) in the backward pass",
                weights_back=lambda p, base: weights_from_lse(p, p.visible_back, 1 / math.log(2)),
            ),
            way(
                "returned, and in the backward pass",
                lse=_base_2,
                weights_back=lambda p, base: weights_from_lse(p, p.visible_back),
            ),
            way("2^(S - lse) in the backward pass", weights_back=_exp2),
            way("softmax by 2^S", weights=_softmax_2),
            way("softmax by 2^S, delta from the weights", weights=_softmax_2, delta=delta_from_weights),
        ),
    ),
    Mistake(
        "lse-without-max",
        "the row maximum is not added back to the log-sum-exp",
        "lse = log(sum(exp(S - max)))",
        "lse = max + log(sum(exp(S - max)))",
        "The maximum is taken out so that exp cannot overflow; lse must have it back.",
        "Add the row maximum.",
        only(lse=_without_max),
    ),
    Mistake(
        "softmax-overflow",
        "softmax without the row maximum overflows",
        "A = exp(S) / rowsum(exp(S))",
        "A = exp(S - max) / rowsum(exp(S - max))",
        "exp overflows from 89 in float32 and from 710 in float64; inf / inf is NaN.",
        "Subtract the row maximum before exp.",
        (Variant({"weights": _overflown_weights, "lse": _overflown_lse}, wild=True),),
    ),
)
