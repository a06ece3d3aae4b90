"""Mistakes with heads: groups, and how heads are split and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Base, Variant, need, way
from attngrad.auditor.pipeline import Override, Pipeline


def _each(step: Callable[[Pipeline, Any], Any]) -> tuple[Variant, ...]:
    """dK and dV made by ``step`` from those of the query heads, (B, Hq, S, ...)."""

    def made(name: str) -> Override:
        def gradient(p: Pipeline, base: Base) -> Any:
            need(p.group > 1)
            return step(p, getattr(p, f"{name}_heads"))

        return gradient

    dk, dv = made("dk"), made("dv")
    return way("in dK and dV", dk_made=dk, dv_made=dv), way("in dK", dk_made=dk), way("in dV", dv_made=dv)


def _grouped(p: Pipeline, x: Any) -> Any:
    """(B, Hk, group, S, ...)."""
    return x.reshape(x.shape[0], -1, p.group, *x.shape[2:])


def _tiled(x: Any, p: Pipeline) -> Any:
    need(p.group > 1)
    return np.tile(x, (1, p.group, 1, 1))


_READ: dict[str, Override] = {"k_heads": lambda p, base: _tiled(p.k, p), "v_heads": lambda p, base: _tiled(p.v, p)}
_SUMMED = _each(lambda p, x: x.reshape(x.shape[0], p.group, -1, *x.shape[2:]).sum(axis=1))[0].steps
"""By h % Hk: how query heads read K and V, and how their gradients are summed."""


def _plain_split(x: Any, heads: int) -> Any:
    batch, tokens, width = x.shape
    return x.reshape(batch, heads, tokens, width // heads)


def _plain_merge(x: Any) -> Any:
    batch, heads, tokens, width = x.shape
    return x.reshape(batch, tokens, heads * width)


def _interleaved_split(x: Any, heads: int) -> Any:
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, width // heads, heads).transpose(0, 3, 1, 2)


def _interleaved_merge(x: Any) -> Any:
    batch, heads, tokens, width = x.shape
    return x.transpose(0, 2, 3, 1).reshape(batch, tokens, heads * width)


def _is(function: Any) -> Override:
    return lambda p, base: function


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
        way("in both passes", split=_is(_plain_split), merge_back=_is(_plain_merge)),
        way("in the forward pass", split=_is(_plain_split)),
        way("in the backward pass", split_back=_is(_plain_split)),
        way("everywhere", split=_is(_plain_split), split_back=_is(_plain_split)),
        way("features interleaved", split=_is(_interleaved_split), merge_back=_is(_interleaved_merge)),
        way("features interleaved, forward", split=_is(_interleaved_split)),
        way("features interleaved, backward", split_back=_is(_interleaved_split)),
    ),
    "heads-merged-without-transpose": (
        way("in both passes", merge=_is(_plain_merge), split_back=_is(_plain_split)),
        way("in the forward pass", merge=_is(_plain_merge)),
        way("in the backward pass", merge_back=_is(_plain_merge)),
        way("everywhere", merge=_is(_plain_merge), merge_back=_is(_plain_merge)),
        way("features interleaved", merge=_is(_interleaved_merge), split_back=_is(_interleaved_split)),
        way("features interleaved, backward", merge_back=_is(_interleaved_merge)),
    ),
}
