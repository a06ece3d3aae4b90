"""Mistakes with dropout."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Base, Variant, Wild, reading, way, where
from attngrad.auditor.pipeline import Override, Pipeline


def _kept(p: Pipeline) -> Any:
    """1 - rate."""
    return p.c(1.0 - p.dropout)


def _where_dropped(step: Override) -> Override:
    return where(lambda p: p.dropout, step)


_BARE = _where_dropped(lambda p, base: base() * _kept(p))


def _other_mask(p: Pipeline, returned: Mapping[str, Any]) -> Any:
    """The mask of the backward, found in the candidate's dv, key by key; None where it cannot be."""
    dv = returned.get("dv")
    tokens = p.q.shape[-2]
    if not p.dropout or dv is None or dv.shape != p.v.shape or p.group != 1 or tokens > 8:
        return None
    choices = np.array(list(product((0.0, 1.0), repeat=tokens))) / (1.0 - p.dropout)
    a, dout = p.weights.astype(np.float64), p.dout.astype(np.float64)
    sums = np.einsum("ci,bhij,bhie->bhjce", choices, a, dout)
    best = np.argmin(np.sum((sums - dv.astype(np.float64)[:, :, :, None]) ** 2, axis=-1), axis=-1)
    return np.moveaxis(choices[best], -1, -2)


def _fitted_mask(p: Pipeline, base: Base) -> Any:
    """The mask that was found; open where none could be."""
    return base() * p.c(Wild) if p.fitted is None else p.c(p.fitted)


VARIANTS = {
    "dropout-mask-not-reused": (
        way("no mask in the backward", keep_back=_where_dropped(lambda p, base: p.c(np.ones_like(base())))),
        way(
            "only its factor in the backward",
            keep_back=_where_dropped(lambda p, base: p.c(np.ones_like(base())) / _kept(p)),
        ),
        way("no mask in dV", **reading("dv_heads", keep_back=lambda p: None)),
        way("no mask in dA", **reading("dweights", keep_back=lambda p: None)),
        way("the mask of the next seed", keep_back=_where_dropped(lambda p, base: p.redo("keep", seed=p.seed + 1))),
        Variant({"keep_back": _where_dropped(_fitted_mask)}, "another mask in the backward", fit=_other_mask),
    ),
    "dropout-not-rescaled": (
        way("in both passes", keep=_BARE),
        way("in the forward pass", keep=_BARE, keep_back=_where_dropped(lambda p, base: base() / _kept(p))),
        way("in the backward pass", keep_back=_BARE),
    ),
}
