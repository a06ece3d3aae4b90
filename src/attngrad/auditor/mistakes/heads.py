"""Mistakes with heads: groups, and how heads are split and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Variant, way, where
from attngrad.auditor.pipeline import Override, Pipeline


def _where_grouped(step: Override) -> Override:
    return where(lambda p: p.group > 1, step)


def _each(step: Callable[[Pipeline, Any], Any]) -> tuple[Variant, ...]:
    """dK and dV made by ``step`` from those of the query heads, (B, Hq, S, ...)."""
    dk = _where_grouped(lambda p, base: step(p, p.dk_heads))
    dv = _where_grouped(lambda p, base: step(p, p.dv_heads))
    return way("in dK and dV", dk_made=dk, dv_made=dv), way("in dK", dk_made=dk), way("in dV", dv_made=dv)


def _grouped(p: Pipeline, x: Any) -> Any:
    """(B, Hk, group, S, ...)."""
    return x.reshape(x.shape[0], -1, p.group, *x.shape[2:])


_READ = {
    "k_heads": _where_grouped(lambda p, base: np.tile(p.k, (1, p.group, 1, 1))),
    "v_heads": _where_grouped(lambda p, base: np.tile(p.v, (1, p.group, 1, 1))),
}
_SUMMED = _each(lambda p, x: x.reshape(x.shape[0], p.group, -1, *x.shape[2:]).sum(axis=1))[0].steps
"""By h % Hk: how query heads read K and V, and how their gradients are summed."""


def _is(function: Callable[..., Any]) -> Override:
    return lambda p, base: function


_SPLIT, _MERGE = (
    _is(lambda x, heads: x.reshape(len(x), heads, x.shape[1], -1)),
    _is(lambda x: x.reshape(len(x), x.shape[2], -1)),
)
_INTERLEAVED_SPLIT, _INTERLEAVED_MERGE = (
    _is(lambda x, heads: x.reshape(*x.shape[:2], -1, heads).transpose(0, 3, 1, 2)),
    _is(lambda x: x.transpose(0, 2, 3, 1).reshape(len(x), x.shape[2], -1)),
)


VARIANTS = {
    "group-not-summed": _each(lambda p, x: x),
    "group-one-head-only": tuple(
        Variant(variant.steps, f"{which}, {variant.note}")
        for index, which in ((-1, "the last"), (0, "the first"))
        for variant in _each(lambda p, x, index=index: _grouped(p, x)[:, :, index])  # type: ignore[misc]
    ),
    "group-averaged": _each(lambda p, x: _grouped(p, x).sum(axis=2) / p.c(p.group)),
    "group-interleaved": (
        way("in both passes", **_READ, **_SUMMED),
        way("in reading K and V", **_READ),
        way("in summing dK and dV", **_SUMMED),
    ),
    "heads-split-without-transpose": (
        way("in both passes", split=_SPLIT, merge_back=_MERGE),
        way("in the forward pass", split=_SPLIT),
        way("in the backward pass", split_back=_SPLIT),
        way("everywhere", split=_SPLIT, split_back=_SPLIT),
        way("features interleaved", split=_INTERLEAVED_SPLIT, merge_back=_INTERLEAVED_MERGE),
        way("features interleaved, forward", split=_INTERLEAVED_SPLIT),
        way("features interleaved, backward", split_back=_INTERLEAVED_SPLIT),
    ),
    "heads-merged-without-transpose": (
        way("in both passes", merge=_MERGE, split_back=_SPLIT),
        way("in the forward pass", merge=_MERGE),
        way("in the backward pass", merge_back=_MERGE),
        way("everywhere", merge=_MERGE, merge_back=_MERGE),
        way("features interleaved", merge=_INTERLEAVED_MERGE, split_back=_INTERLEAVED_SPLIT),
        way("features interleaved, backward", merge_back=_INTERLEAVED_MERGE),
    ),
}
