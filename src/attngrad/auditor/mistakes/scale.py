"""Mistakes with the scale 1/sqrt(D)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Mistake, Variant, only, way
from attngrad.auditor.pipeline import Override, Pipeline

Scale = Callable[[Pipeline, Any], Any]


def _everywhere(wrong: Scale, *, single: bool) -> tuple[Variant, ...]:
    """The wrong scale in both passes, in one of them, or (``single``) in one gradient."""

    def step(p: Pipeline, base: Callable[[], Any]) -> Any:
        return wrong(p, base())

    both: dict[str, Override] = {"scale_dq": step, "scale_dk": step}
    found = [
        way("in both passes", scale_value=step),
        way("in the forward pass", scale_z=step),
        way("in dQ and dK", **both),
    ]
    if single:
        found += [way("in dQ", scale_dq=step), way("in dK", scale_dk=step)]
    return tuple(found)


def _one(p: Pipeline, base: Callable[[], Any]) -> float:
    return 1.0


_WHY = "Z = scale Q K^T, so the chain rule puts the same factor into the scores, into dQ and into dK, once each."

MISTAKES = (
    Mistake(
        "scale-missing",
        "the scale 1/sqrt(D) is missing",
        "dQ = dS K,  dK = dS^T Q",
        "dQ = scale dS K,  dK = scale dS^T Q,  scale = 1/sqrt(D)",
        _WHY,
        "Multiply Q K^T, dQ and dK by scale, once each.",
        _everywhere(lambda p, s: 1.0, single=False),
    ),
    Mistake(
        "scale-twice",
        "the scale is applied twice",
        "dQ = scale^2 dS K,  dK = scale^2 dS^T Q",
        "dQ = scale dS K,  dK = scale dS^T Q",
        _WHY + " It comes twice where dS is scaled already, or q is scaled in place and again in the product.",
        "Keep one of the two factors.",
        _everywhere(lambda p, s: s * s, single=True),
    ),
    Mistake(
        "scale-by-d",
        "the scale is 1/D instead of 1/sqrt(D)",
        "Z = Q K^T / D",
        "Z = Q K^T / sqrt(D)",
        "The standard deviation of a dot product of D terms grows with sqrt(D), and that is what the scale undoes.",
        "Divide by sqrt(D).",
        _everywhere(lambda p, s: 1 / np.longdouble(p.q.shape[-1]), single=True),
    ),
    Mistake(
        "scale-by-sqrt-d",
        "multiplied by sqrt(D) instead of divided by it",
        "Z = sqrt(D) Q K^T",
        "Z = Q K^T / sqrt(D)",
        "The factor is inverted.",
        "Divide by sqrt(D).",
        _everywhere(lambda p, s: np.sqrt(np.longdouble(p.q.shape[-1])), single=True),
    ),
    Mistake(
        "scale-missing-in-dq",
        "the scale is missing in dQ",
        "dQ = dS K",
        "dQ = scale dS K",
        _WHY,
        "Multiply dQ by scale, as dK is.",
        only(scale_dq=_one),
    ),
    Mistake(
        "scale-missing-in-dk",
        "the scale is missing in dK",
        "dK = dS^T Q",
        "dK = scale dS^T Q",
        _WHY,
        "Multiply dK by scale, as dQ is.",
        only(scale_dk=_one),
    ),
)
