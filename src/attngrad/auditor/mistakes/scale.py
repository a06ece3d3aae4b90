"""Mistakes with the scale 1/sqrt(D)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Variant, only, way
from attngrad.auditor.pipeline import Pipeline


def _everywhere(wrong: Callable[[Pipeline, Any], Any], *, single: bool) -> tuple[Variant, ...]:
    """The wrong scale in both passes, in one of them, or (``single``) in one gradient."""

    def step(p: Pipeline, base: Callable[[], Any]) -> Any:
        return wrong(p, base())

    found = [
        way("in both passes", scale_value=step),
        way("in the forward pass", scale_z=step),
        way("in dQ and dK", scale_dq=step, scale_dk=step),
    ]
    if single:
        found += [way("in dQ", scale_dq=step), way("in dK", scale_dk=step)]
    return tuple(found)


VARIANTS = {
    "scale-missing": _everywhere(lambda p, s: 1.0, single=False),
    "scale-twice": _everywhere(lambda p, s: s * s, single=True),
    "scale-by-d": _everywhere(lambda p, s: 1 / np.longdouble(p.q.shape[-1]), single=True),
    "scale-by-length": (
        *_everywhere(lambda p, s: 1 / np.sqrt(np.longdouble(p.q.shape[-2])), single=False),
        *_everywhere(lambda p, s: 1 / np.sqrt(np.longdouble(p.k.shape[-2])), single=False),
    ),
    "scale-by-model": (
        *_everywhere(lambda p, s: 1 / np.sqrt(np.longdouble(p.q.shape[-3] * p.q.shape[-1])), single=False),
        *_everywhere(lambda p, s: 1 / np.sqrt(np.longdouble(p.query.shape[-1])), single=False),
    ),
    "scale-by-sqrt-d": _everywhere(lambda p, s: np.sqrt(np.longdouble(p.q.shape[-1])), single=True),
    "scale-ignored": _everywhere(lambda p, s: 1 / np.sqrt(np.longdouble(p.q.shape[-1])), single=True),
    "scale-missing-in-dq": only(scale_dq=lambda p, base: 1.0),
    "scale-missing-in-dk": only(scale_dk=lambda p, base: 1.0),
}
