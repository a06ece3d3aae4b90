"""Mistakes with heads: groups, and how heads are split and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Mistake, Variant, need, way
from attngrad.auditor.pipeline import Pipeline

Base = Callable[[], Any]


def _grouped(p: Pipeline, name: str) -> Any:
    """dk or dv of the query heads, (B, Hk, group, S, ...)."""
    need(p.group > 1)
    x = getattr(p, f"{name}_heads")
    return x.reshape(x.shape[0], -1, p.group, *x.shape[2:])


def _each(step: Callable[[Pipeline, str], Any]) -> tuple[Variant, ...]:
    def made(name: str) -> Callable[[Pipeline, Base], Any]:
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


def _by_modulo(name: str) -> Callable[[Pipeline, Base], Any]:
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


def _is(function: Any) -> Callable[[Pipeline, Base], Any]:
    return lambda p, base: function


MISTAKES = (
    Mistake(
        "group-not-summed",
        "dK and dV are not summed over the query heads of a group",
        "dK of shape (B, Hq, S, D)",
        "dK_g = sum over the heads h of group g,  shape (B, Hk, S, D)",
        "One key head serves several query heads; each adds to its gradient.",
        "Reshape to (B, Hk, group, S, D) and sum over the group.",
        _each(_unsummed),
        ("gqa",),
    ),
    Mistake(
        "group-one-head-only",
        "dK and dV come from one query head of each group",
        "dK_g = dK of the last head of the group",
        "dK_g = sum over the heads h of group g",
        "One key head serves several query heads; each adds to its gradient. Assigning in a loop over query "
        "heads keeps the last.",
        "Accumulate (+=) over the heads of a group.",
        tuple(
            Variant(variant.steps, f"{which}, {variant.note}")
            for index, which in ((-1, "the last"), (0, "the first"))
            for variant in _each(lambda p, name, index=index: _grouped(p, name)[:, :, index])  # type: ignore[misc]
        ),
        ("gqa",),
    ),
    Mistake(
        "group-averaged",
        "dK and dV are averaged over the query heads of a group",
        "dK_g = mean over the heads h of group g",
        "dK_g = sum over the heads h of group g",
        "The gradient of a broadcast is a sum.",
        "Replace the mean by a sum.",
        _each(lambda p, name: _grouped(p, name).sum(axis=2) / p.c(p.group)),
        ("gqa",),
    ),
    Mistake(
        "group-interleaved",
        "query head h reads key head h % Hk",
        "K_(h % Hk)",
        "K_(h // (Hq / Hk))",
        "The heads of a group stand side by side: repeat each key head, do not tile them all.",
        "Use np.repeat (torch.repeat_interleave), not np.tile, or index with h // group.",
        (
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
        ("gqa",),
    ),
    Mistake(
        "heads-split-without-transpose",
        "heads are split by a reshape without a transpose",
        "(B, T, H D) -> reshape (B, H, T, D)",
        "(B, T, H D) -> reshape (B, T, H, D) -> transpose (B, H, T, D)",
        "The reshape alone mixes tokens and heads: memory runs over tokens first.",
        "Reshape to (B, T, H, D), then transpose(0, 2, 1, 3).",
        (
            way("in both passes", split=_is(_plain_split), merge_back=_is(_plain_merge)),
            way("in the forward pass", split=_is(_plain_split)),
            way("in the backward pass", split_back=_is(_plain_split)),
            way("everywhere", split=_is(_plain_split), split_back=_is(_plain_split)),
            way("features interleaved", split=_is(_interleaved_split), merge_back=_is(_interleaved_merge)),
            way("features interleaved, forward", split=_is(_interleaved_split)),
            way("features interleaved, backward", split_back=_is(_interleaved_split)),
        ),
        ("layer",),
        "layer",
    ),
    Mistake(
        "heads-merged-without-transpose",
        "heads are merged by a reshape without a transpose",
        "(B, H, T, D) -> reshape (B, T, H D)",
        "(B, H, T, D) -> transpose (B, T, H, D) -> reshape (B, T, H D)",
        "The reshape alone mixes tokens and heads: memory runs over heads first.",
        "Transpose(0, 2, 1, 3) before the reshape.",
        (
            way("in both passes", merge=_is(_plain_merge), split_back=_is(_plain_split)),
            way("in the forward pass", merge=_is(_plain_merge)),
            way("in the backward pass", merge_back=_is(_plain_merge)),
            way("everywhere", merge=_is(_plain_merge), merge_back=_is(_plain_merge)),
            way("features interleaved", merge=_is(_interleaved_merge), split_back=_is(_interleaved_split)),
            way("features interleaved, backward", merge_back=_is(_interleaved_merge)),
        ),
        ("layer",),
        "layer",
    ),
)
