"""Mistakes with softcap, bias and sinks."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Base, need, only, way, where
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference.dense import sum_over, sum_to


def _capped(p: Pipeline) -> Any:
    """cap(z)."""
    return p.c(p.softcap) * np.tanh(p.z / p.c(p.softcap))


def _averaged(p: Pipeline, base: Base) -> Any:
    total = base()
    need(total is not None and total.size < p.dscores.size)
    return total / p.c(p.dscores.size // total.size)


def _batch_kept(p: Pipeline, base: Base) -> Any:
    """Summed over all of them but the batch axis, as four axes."""
    sizes = (1,) * (4 - p.bias.ndim) + p.bias.shape
    return sum_to(p.dscores, (p.dscores.shape[0], *sizes[1:]))


def _where_biased(step: Override, most: int = 4) -> Override:
    """``step``, where there is a bias, of at most so many axes."""
    return where(lambda p: p.bias is not None and p.bias.ndim <= most, step)


VARIANTS = {
    "softcap-derivative-missing": only(slope_back=lambda p, base: np.ones_like(base())),
    "softcap-derivative-wrong": (
        way("S tanh(S)", slope_back=lambda p, base: _capped(p) * np.tanh(_capped(p))),
        way("S tanh(S/c)", slope_back=lambda p, base: _capped(p) * np.tanh(_capped(p) / p.c(p.softcap))),
        way("Z tanh(Z)", slope_back=lambda p, base: p.z * np.tanh(p.z)),
        way("Z tanh(Z/c)", slope_back=lambda p, base: p.z * np.tanh(p.z / p.c(p.softcap))),
        way("tanh(Z/c)", slope_back=lambda p, base: np.tanh(p.z / p.c(p.softcap))),
        way("1 - tanh(Z/c)", slope_back=lambda p, base: p.c(1.0) - np.tanh(p.z / p.c(p.softcap))),
        way("1 - tanh(S/c)^2", slope_back=lambda p, base: p.c(1.0) - np.tanh(_capped(p) / p.c(p.softcap)) ** 2),
        way("1 - tanh(Z)^2", slope_back=lambda p, base: p.c(1.0) - np.tanh(p.z) ** 2),
        way("1 - S^2", slope_back=lambda p, base: p.c(1.0) - _capped(p) ** 2),
        way("1 - (Z/c)^2", slope_back=lambda p, base: p.c(1.0) - (p.z / p.c(p.softcap)) ** 2),
    ),
    "bias-gradient-not-reduced": (
        way("over none", dbias=_where_biased(lambda p, base: p.dscores)),
        way("over the batch only", dbias=_where_biased(lambda p, base: sum_over(p.dscores, 0), most=3)),
        way("over all but the batch", dbias=_where_biased(_batch_kept)),
    ),
    "bias-gradient-averaged": only(dbias=_averaged),
    "bias-gradient-scaled": only(dbias=lambda p, base: p.c(p.scale_value) * base()),
    "sinks-gradient-sign": only(dsinks=lambda p, base: -base()),
}
