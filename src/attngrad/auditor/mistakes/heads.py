"""Mistakes with heads: groups, and how heads are split and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Base, Variant, need, way
from attngrad.auditor.pipeline import Override, Pipeline


def _grouped(p: Pipeline, name: str) -> Any:
    """dk or dv of the query heads, (B, Hk, group, S, ...)."""
    need(p.group > 1)
    x = getattr(p, f"{name}_heads")
    return x.reshape(x.shape[0], -1, p.group, *x.shape[2:])


def _each(step: Callable[[Pipeline, str], Any]) -> tuple[Variant, ...]:
    def made(name: str) -> Override:
        return lambda p, base: step(p, name)

    return (
        way("in dK and dV", dk_made=made("dk"), dv_made=made("dv")),
        way("in dK", dk_made=made("dk")),
        way("in dV", dv_made=made("dv")),
    )


def _unsummed(p: Pipeline, name: str) -> Any:
    need(p.group > 1)
    return getattr(p, f"{name}_heads")


def _tiled(x: Any, p: Pipeline) -> Any:
    need(p.group > 1)
    return np.tile(x, (1, p.group, 1, 1))


def _by_modulo(name: str) -> Override:
    def gradient(p: Pipeline, base: Base) -> Any:
        need(p.group > 1)
        x = getattr(p, f"{name}_heads")
        return x.reshape(x.shape[0], p.group, -1, *x.shape[2:]).sum(axis=1)

    return gradient


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
    "group-not-summed": _each(_unsummed),
    "group-one-head-only": tuple(
        Variant(variant.steps, f"{which}, {variant.note}")
        for index, which in ((-1, "the last"), (0, "the first"))
        for variant in _each(lambda p, name, index=index: _grouped(p, name)[:, :, index])  # type: ignore[misc]
    ),
    "group-averaged": _each(lambda p, name: _grouped(p, name).sum(axis=2) / p.c(p.group)),
    "group-interleaved": (
        way(
            "in both passes",
            k_heads=lambda p, base: _tiled(p.k, p),
            v_heads=lambda p, base: _tiled(p.v, p),
            dk_made=_by_modulo("dk"),
            dv_made=_by_modulo("dv"),
        ),
        way(
            "in reading K and V",
            k_heads=lambda p, base: _tiled(p.k, p),
            v_heads=lambda p, base: _tiled(p.v, p),
        ),
        way("in summing dK and dV", dk_made=_by_modulo("dk"), dv_made=_by_modulo("dv")),
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
