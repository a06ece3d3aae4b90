"""Mistakes of the layer: projections, their gradients, and the order of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Base, Variant, need, only, way
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.auditor.steps import outer, per_token
from attngrad.reference.dense import matmul, transpose

_PARTS = {
    "dquery": ("dq_flat", "w_q", "dw_q"),
    "dkey": ("dk_flat", "w_k", "dw_k"),
    "dvalue": ("dv_flat", "w_v", "dw_v"),
}


_SUMS = {**{name: (name,) for name in _PARTS}, "dx": tuple(_PARTS), "dmemory": ("dkey", "dvalue")}
"""Which parts an input gradient is the sum of."""


def _learning_rate(p: Pipeline, returned: Mapping[str, Any]) -> float | None:
    """The step that input gradients by updated weights would show: dX = dQ (W - rate dW)^T."""
    along = size = 0.0
    for name, parts in _SUMS.items():
        rows = [_PARTS[part] for part in parts]
        same = name in returned and returned[name].shape == getattr(p, parts[0]).shape
        if same and all(getattr(p, dw).shape == getattr(p, w).shape for _, w, dw in rows):
            moved = sum(matmul(getattr(p, flat), transpose(getattr(p, dw))) for flat, _, dw in rows)
            off = sum(per_token(getattr(p, flat), transpose(getattr(p, w))) for flat, w, _ in rows) - returned[name]
            along, size = along + float(np.sum(off * moved)), size + float(np.sum(moved * moved))
    return along / size if size > 0 and np.isfinite(along) else None


def _updated(flat: str, w: str, dw: str) -> Override:
    def gradient(p: Pipeline, base: Base) -> Any:
        need(p.fitted)
        weight, step = getattr(p, w), getattr(p, dw)
        need(step.shape[-2:] == weight.shape)
        return per_token(getattr(p, flat), transpose(weight - p.c(p.fitted) * step))

    return gradient


def _dw(note: str, gradient: Callable[[Pipeline, Any, Any], Any]) -> tuple[Variant, ...]:
    """dW of x and dx made by ``gradient``: all four, those of the inputs, or that of the output."""

    def of(x: str, dx: str) -> Override:
        return lambda p, base: gradient(p, getattr(p, x), getattr(p, dx))

    told = f"{note}, " if note else ""
    inputs = {"dw_q": of("query", "dq_flat"), "dw_k": of("key", "dk_flat"), "dw_v": of("value", "dv_flat")}
    return (
        way(note, weight_gradient=lambda p, base: lambda x, dx: gradient(p, x, dx)),
        way(f"{told}in dW_q, dW_k and dW_v", **inputs),
        way(f"{told}in dW_o", dw_o=of("merged", "dy")),
    )


def _reshaped(rows: Callable[[Any], Any]) -> Callable[[Pipeline, Any, Any], Any]:
    """dW with the features of x laid out as rows by ``rows`` and a reshape, which takes memory as it lies."""
    return lambda p, x, dx: per_token(
        np.ascontiguousarray(rows(x)).reshape(x.shape[-1], -1), dx.reshape(-1, dx.shape[-1])
    )


def _untransposed(p: Pipeline, base: Base) -> Any:
    return lambda dx, w: per_token(dx, _square(w))


def _without(names: tuple[str, ...]) -> Override:
    return lambda p, base: reduce(lambda total, name: total - getattr(p, name), names, base())


def _square(w: Any) -> Any:
    need(w.shape[0] == w.shape[1])
    return w


def _through(dx: Any, w: Any) -> Any:
    """dX without W, which its shape allows only where W is square."""
    _square(w)
    return dx


def _dmerged(p: Pipeline, base: Base) -> Any:
    return per_token(p.dy, _square(p.w_o))


def _plain_output(p: Pipeline, base: Base) -> Any:
    _square(p.w_o)
    return p.dy


VARIANTS = {
    "weights-updated-first": (Variant({name: _updated(*parts) for name, parts in _PARTS.items()}, fit=_learning_rate),),
    "batch-not-summed": (
        *_dw("one dW a sequence", lambda p, x, dx: per_token(transpose(x), dx)),
        *_dw("the first sequence only", lambda p, x, dx: outer(x[:1], dx[:1])),
        *_dw("the last sequence only", lambda p, x, dx: outer(x[-1:], dx[-1:])),
    ),
    "batch-averaged": (
        *_dw("over sequences", lambda p, x, dx: outer(x, dx) / p.c(len(x))),
        *_dw("over sequences and tokens", lambda p, x, dx: outer(x, dx) / p.c(x.shape[0] * x.shape[1])),
        *_dw("over tokens", lambda p, x, dx: outer(x, dx) / p.c(x.shape[1])),
    ),
    "w-not-transposed": (
        way("W_q, W_k and W_v", input_gradient=_untransposed),
        way("W_o", dmerged=_dmerged),
        way("all four", input_gradient=_untransposed, dmerged=_dmerged),
        *(
            way(w, **{name: lambda p, base, flat=flat, w=w: per_token(getattr(p, flat), _square(getattr(p, w)))})
            for name, (flat, w, _) in _PARTS.items()
        ),
    ),
    "dx-without-w": (
        way("W_q, W_k and W_v", input_gradient=lambda p, base: lambda dx, w: _through(dx, w)),
        *(
            way(w, **{name: lambda p, base, flat=flat, w=w: _through(getattr(p, flat), getattr(p, w))})
            for name, (flat, w, _) in _PARTS.items()
        ),
    ),
    "dw-transposed": _dw("", lambda p, x, dx: transpose(outer(x, dx))),
    "dw-batch-reshape": (
        *_dw("transposed, then reshaped", _reshaped(lambda x: x.transpose(0, 2, 1))),
        *_dw("reshaped alone", _reshaped(lambda x: x)),
        *_dw("all axes reversed, then reshaped", _reshaped(lambda x: x.transpose(2, 1, 0))),
    ),
    "input-gradient-dropped": tuple(
        variant
        for names in (("dquery",), ("dkey",), ("dvalue",), ("dkey", "dvalue"), ("dquery", "dvalue"))
        for variant in (
            way(f"{' and '.join(names)} zero", **dict.fromkeys(names, lambda p, base: base() * p.c(0.0))),
            way(f"dx without {' and '.join(names)}", dx=_without(names)),
        )
    ),
    "output-projection-skipped": only(dmerged=_plain_output),
}
