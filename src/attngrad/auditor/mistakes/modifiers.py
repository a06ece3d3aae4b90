"""Mistakes with softcap, bias and sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Mistake, need, only, way
from attngrad.auditor.pipeline import Pipeline
from attngrad.reference.dense import sum_over, sum_to

Base = Callable[[], Any]


def _capped(p: Pipeline) -> Any:
    """cap(z)."""
    return p.c(p.softcap) * np.tanh(p.z / p.c(p.softcap))


def _averaged(p: Pipeline, base: Base) -> Any:
    total = base()
    need(total is not None and total.size < p.dscores.size)
    return total / p.c(p.dscores.size // total.size)


def _unreduced(p: Pipeline, base: Base) -> Any:
    need(p.bias is not None)
    return p.dscores


def _partly_reduced(p: Pipeline, base: Base) -> Any:
    """Summed over the batch axis alone, or over heads alone."""
    need(p.bias is not None and p.bias.ndim < 4)
    return sum_over(p.dscores, 0)


def _batch_kept(p: Pipeline, base: Base) -> Any:
    """Summed over all of them but the batch axis, as four axes."""
    need(p.bias is not None)
    sizes = (1,) * (4 - p.bias.ndim) + p.bias.shape
    return sum_to(p.dscores, (p.dscores.shape[0], *sizes[1:]))


MISTAKES = (
    Mistake(
        "softcap-derivative-missing",
        "the derivative of the softcap is missing",
        "dZ = dS",
        "dZ = dS o (1 - tanh(Z/c)^2)",
        "S = c tanh(Z/c): the chain rule has its derivative between dS and dZ.",
        "Multiply dS by 1 - (S/c)^2, with S = c tanh(Z/c) before bias and mask.",
        only(slope_back=lambda p, base: np.ones_like(base())),
        ("softcap",),
    ),
    Mistake(
        "softcap-derivative-wrong",
        "the derivative of the softcap is another function",
        "dZ = dS o s tanh(s)",
        "dZ = dS o (1 - tanh(Z/c)^2)",
        "The derivative of tanh is 1 - tanh^2, taken at Z/c.",
        "Multiply dS by 1 - (S/c)^2, with S = c tanh(Z/c) before bias and mask.",
        (
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
        ("softcap",),
    ),
    Mistake(
        "bias-gradient-not-reduced",
        "dBias is not summed over the axes that bias was broadcast along",
        "dBias = dS",
        "dBias = dS summed to the shape of bias",
        "One entry of bias adds to many scores, so its gradient is the sum over all of them.",
        "Sum dS over the broadcast axes.",
        (
            way("over none", dbias=_unreduced),
            way("over the batch only", dbias=_partly_reduced),
            way("over all but the batch", dbias=_batch_kept),
        ),
        ("bias",),
    ),
    Mistake(
        "bias-gradient-averaged",
        "dBias is a mean over the broadcast axes",
        "dBias = mean(dS)",
        "dBias = sum(dS)",
        "The gradient of a broadcast is a sum.",
        "Replace the mean by a sum.",
        only(dbias=_averaged),
        ("bias",),
    ),
    Mistake(
        "bias-gradient-scaled",
        "dBias has the scale",
        "dBias = scale dS",
        "dBias = dS",
        "The bias is added after the scale: S = scale Q K^T + bias.",
        "Take dBias from dS before the scale.",
        only(dbias=lambda p, base: p.c(p.scale_value) * base()),
        ("bias",),
    ),
    Mistake(
        "sinks-gradient-sign",
        "the gradient of the sinks has the wrong sign",
        "dsigma = sum(exp(sigma - lse) delta)",
        "dsigma = -sum(exp(sigma - lse) delta)",
        "A sink takes weight away from the values: the row term enters with a minus.",
        "Negate it.",
        only(dsinks=lambda p, base: -base()),
        ("sinks",),
    ),
)
