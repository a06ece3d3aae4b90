"""Mistakes with dropout."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Base, Variant, Wild, need, reading, way
from attngrad.auditor.pipeline import Pipeline


def _one_minus_rate(p: Pipeline) -> Any:
    need(p.dropout)
    return p.c(1.0 - p.dropout)


def _all_kept(p: Pipeline, base: Base) -> Any:
    need(p.dropout)
    return np.ones_like(base())


def _next_seed(p: Pipeline, base: Base) -> Any:
    need(p.dropout)
    return p.redo("keep", seed=p.seed + 1)


def _bare(p: Pipeline, base: Base) -> Any:
    return base() * _one_minus_rate(p)


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
    need(p.dropout)
    return base() * p.c(Wild) if p.fitted is None else p.c(p.fitted)


VARIANTS = {
    "dropout-mask-not-reused": (
        way("no mask in the backward", keep_back=lambda p, base: p.c(_all_kept(p, base))),
        way(
            "only its factor in the backward",
            keep_back=lambda p, base: p.c(_all_kept(p, base)) / _one_minus_rate(p),
        ),
        way("no mask in dV", **reading("dv_heads", keep_back=lambda p: None)),
        way("no mask in dA", **reading("dweights", keep_back=lambda p: None)),
        way("the mask of the next seed", keep_back=_next_seed),
        Variant({"keep_back": _fitted_mask}, "another mask in the backward", fit=_other_mask),
    ),
    "dropout-not-rescaled": (
        way("in both passes", keep=_bare),
        way("in the forward pass", keep=_bare, keep_back=lambda p, base: base() / _one_minus_rate(p)),
        way("in the backward pass", keep_back=_bare),
    ),
}
