"""Errors that look like the rounding of a coarser dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attngrad.auditor.observation import Observation
from attngrad.auditor.pipeline import Pipeline
from attngrad.auditor.truth import LONG, epsilon
from attngrad.core.dtypes import TABLE
from attngrad.testing import rms_error


def low_precision(observations: Sequence[Observation]) -> str | None:
    """The coarser dtype whose rounding the errors look like; None where they do not look like rounding."""
    wrong = [(o, n) for o in observations for n, j in o.judgements.items() if not j.right]
    if not wrong or any(o.judgements[n].kind != "wrong" for o, n in wrong):
        return None
    for dtype in TABLE[1:]:
        eps = epsilon(dtype.numpy)[0]
        if all(_like_rounding(o, n, dtype.numpy, eps) for o, n in wrong) and _spread(wrong):
            return dtype.name
    return None


def _like_rounding(o: Observation, name: str, dtype: Any, eps: float) -> bool:
    """An error about as large as rounding to ``dtype`` everywhere leaves, or a part of it."""
    if eps < 2.0 * o.truth.eps:
        return False
    truth = o.truth.expected(name)
    with np.errstate(all="ignore"):
        coarse = getattr(Pipeline(o.truth.case.given, dtype), name)
    usual = rms_error(coarse, truth)
    return bool(usual / 1000.0 <= o.judgements[name].rms <= 6.0 * usual)


def _spread(wrong: Sequence[tuple[Observation, str]]) -> bool:
    """Whether errors are many, of both signs, and no constant multiple of the truth: noise, not a formula."""
    votes = []
    for o, name in wrong:
        truth = o.truth.expected(name)
        error = (o.results[name].astype(LONG) - truth).astype(np.float64).ravel()
        size = truth.astype(np.float64).ravel()
        if error.size < 12:
            continue
        many = np.mean(np.abs(error) > 0.05 * np.sqrt(np.mean(error**2))) > 0.5
        signs = 0.15 < np.mean(error > 0) < 0.85
        norms = float(np.linalg.norm(error) * np.linalg.norm(size))
        free = norms == 0 or abs(float(error @ size)) < 0.7 * norms
        votes.append(float(many and signs and free))
    return bool(votes) and float(np.mean(votes)) > 0.7
