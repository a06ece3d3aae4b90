"""Mistakes in the softmax and its derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import (
    Base,
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
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference.dense import matmul, rowsum, transpose, zero_hidden


def _product(p: Pipeline) -> Any:
    return p.weights_back * p.dweights


def _mean(x: Any, p: Pipeline) -> Any:
    return rowsum(x) / p.c(x.shape[-1])


def _minus(row: Callable[[Pipeline], Any]) -> dict[str, Override]:
    """dS = A o (dA - row), with a row of any shape."""
    return reading("dscores", dweights=lambda p: p.dweights - row(p), delta=lambda p: np.zeros_like(p.delta))


def _minus_sum(axis: int) -> dict[str, Override]:
    """The right derivative of the softmax over this axis."""
    return _minus(lambda p: np.sum(_product(p), axis=axis, keepdims=True))


def _row_as_column(p: Pipeline) -> Any:
    """The right sum, broadcast along the wrong axis."""
    need(p.dweights.shape[-1] == p.dweights.shape[-2])
    return rowsum(_product(p))[..., None, :]


def _matrix(p: Pipeline, base: Base) -> Any:
    a = p.weights_back
    return zero_hidden(_product(p) - matmul(matmul(a, transpose(p.dweights)), a), p.visible_back)


def _jacobian(second: Callable[[Any, Any], Any]) -> Override:
    """dS with something else in place of a a^T dA, the same for all entries of a row."""
    return lambda p, base: _product(p) - second(p.weights_back, p.dweights)[..., None]


def _slope_product(product: Callable[[Any, Any], Any]) -> dict[str, Override]:
    """dS by a matrix product of dA and A o (1 - A), which only square matrices allow."""

    def dscores(p: Pipeline, base: Base) -> Any:
        a = p.weights_back
        need(a.shape[-1] == a.shape[-2])
        return product(p.dweights, a * (p.c(1.0) - a))

    return {"dscores": dscores}


def _softmax_over(axis: int, exp: Callable[[Any], Any] = np.exp) -> Override:
    def weights(p: Pipeline, base: Base) -> Any:
        s = np.where(p.visible, p.scores, p.c(-np.inf))
        top = np.max(s, axis=axis, keepdims=True)
        e = np.where(p.visible, exp(s - np.where(np.isneginf(top), p.c(0.0), top)), p.c(0.0))
        total = np.sum(e, axis=axis, keepdims=True)
        return e / np.where(total == 0, p.c(1.0), total)

    return weights


def _from_lse(factor: float = 1.0, exp: Callable[[Any], Any] | None = None) -> Override:
    """The weights of the backward, exp(s - lse), from an lse times ``factor``."""
    return lambda p, base: weights_from_lse(p, p.visible_back, factor, exp)


def _base_2(p: Pipeline, base: Base) -> Any:
    return base() * p.c(1 / np.log(np.longdouble(2)))


def _without_max(p: Pipeline, base: Base) -> Any:
    return base() - p.normaliser[3]


def _overflowing(p: Pipeline) -> Any:
    """The rows where exp(s), summed in the dtype of the candidate, is not finite."""
    with np.errstate(all="ignore"):
        total = np.sum(np.exp(p.scores.astype(p.candidate_dtype)), axis=-1)
    rows = ~np.isfinite(total.astype(np.float64))
    need(rows.any())
    return rows


def _overflown(axes: tuple[Any, ...]) -> Override:
    """Open in these rows, whose ``axes`` are those of a step."""
    return lambda p, base: np.where(_overflowing(p)[axes], p.c(Wild), base())


def _with_epsilon(epsilon: float) -> dict[str, Override]:
    """A = e / (sum + epsilon), the maximum taken out of e."""

    def weights(p: Pipeline, base: Base) -> Any:
        s = np.where(p.visible, p.scores, p.c(-np.inf))
        top = np.max(s, axis=-1, keepdims=True)
        e = np.where(p.visible, np.exp(s - np.where(np.isneginf(top), p.c(0.0), top)), p.c(0.0))
        return e / (np.sum(e, axis=-1, keepdims=True) + p.c(epsilon))

    return {"weights": weights}


VARIANTS = {
    "row-term-missing": only(**without("dscores", "delta")),
    "mean-for-row-sum": (
        way("dS = dA o A - mean(dA o A)", dscores=lambda p, base: _product(p) - _mean(_product(p), p)[..., None]),
        way("dS = A o (dA - mean(dA))", **reading("dscores", delta=lambda p: _mean(p.dweights, p))),
        way("dS = A o (dA - mean(dA o A))", **reading("dscores", delta=lambda p: _mean(_product(p), p))),
        way("dS = dA o A - mean(dA)", dscores=lambda p, base: _product(p) - _mean(p.dweights, p)[..., None]),
        way(
            "delta = mean(dO o O)", delta=lambda p, base: p.redo("delta", dout_seen=p.dout_seen / p.c(p.out.shape[-1]))
        ),
    ),
    "row-sum-unweighted": only(**reading("dscores", delta=lambda p: rowsum(p.dweights))),
    "row-term-without-weights": only(dscores=lambda p, base: _product(p) - rowsum(_product(p))[..., None]),
    "row-term-over-columns": (
        way("summed over the queries", **_minus_sum(-2)),
        way("broadcast along the queries", **_minus(_row_as_column)),
    ),
    "row-term-matrix-product": only(dscores=_matrix),
    "jacobian-inner-product": (
        way("a @ a.T, a number", dscores=_jacobian(lambda a, da: rowsum(a * a) * rowsum(da))),
        way("a * a, a row", dscores=_jacobian(lambda a, da: rowsum(a * a * da))),
    ),
    "dweights-for-dscores": only(dscores=lambda p, base: p.dweights),
    "softmax-diagonal-only": only(
        dscores=lambda p, base: zero_hidden(_product(p) * (p.c(1.0) - p.weights_back), p.visible_back)
    ),
    "softmax-derivative-matrix-product": (
        way("dS = dA (A o (1 - A))", **_slope_product(matmul)),
        way("dS = (A o (1 - A)) dA", **_slope_product(lambda da, slope: matmul(slope, da))),
        way("dS = (A o (1 - A))^T dA", **_slope_product(lambda da, slope: matmul(transpose(slope), da))),
        way("dS = dA (A o (1 - A))^T", **_slope_product(lambda da, slope: matmul(da, transpose(slope)))),
    ),
    "softmax-wrong-axis": (
        way("over the queries", weights=_softmax_over(-2), delta=delta_from_weights),
        way("over the queries, delta from out", weights=_softmax_over(-2)),
        way("over the queries, in both passes", weights=_softmax_over(-2), **_minus_sum(-2)),
        way("over the heads", weights=_softmax_over(1), delta=delta_from_weights),
        way("over the heads, in both passes", weights=_softmax_over(1), **_minus_sum(1)),
    ),
    "lse-base-2": (
        way("in what is returned", lse=_base_2),
        way("exp(S - lse) in the backward pass", weights_back=_from_lse(1 / math.log(2))),
        way("returned, and in the backward pass", lse=_base_2, weights_back=_from_lse()),
        way("2^(S - lse) in the backward pass", weights_back=_from_lse(exp=np.exp2)),
        way("softmax by 2^S", weights=_softmax_over(-1, np.exp2)),
        way("softmax by 2^S, delta from the weights", weights=_softmax_over(-1, np.exp2), delta=delta_from_weights),
    ),
    "lse-without-max": (
        way("in what is returned", lse=_without_max),
        way("and exp(S - lse) in the backward pass", lse=_without_max, weights_back=_from_lse()),
    ),
    "epsilon-in-denominator": tuple(
        way(f"A = e / (sum + 1e-{digits})", **_with_epsilon(10.0**-digits)) for digits in (*range(3, 13), 15)
    ),
    "softmax-overflow": (Variant({"weights": _overflown((..., None)), "lse": _overflown((...,))}, wild=True),),
}
