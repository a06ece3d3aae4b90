"""Mistakes of the layer: projections, their gradients, and the order of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attngrad.auditor.layer_steps import outer, per_token
from attngrad.auditor.mistakes._entry import Mistake, Variant, need, only, way
from attngrad.auditor.pipeline import Pipeline
from attngrad.reference.dense import matmul, transpose

Base = Callable[[], Any]
_PARTS = {
    "dquery": ("dq_flat", "w_q", "dw_q"),
    "dkey": ("dk_flat", "w_k", "dw_k"),
    "dvalue": ("dv_flat", "w_v", "dw_v"),
}


def _learning_rate(p: Pipeline, returned: Mapping[str, Any]) -> float | None:
    """The step that input gradients by updated weights would show: dX = dQ (W - rate dW)^T."""
    along = size = 0.0
    for name, (flat, w, dw) in _PARTS.items():
        if name in returned and returned[name].shape == getattr(p, name).shape:
            gradient = getattr(p, dw)
            if gradient.shape == getattr(p, w).shape:
                moved = matmul(getattr(p, flat), transpose(gradient))
                off = per_token(getattr(p, flat), transpose(getattr(p, w))) - returned[name]
                along, size = along + float(np.sum(off * moved)), size + float(np.sum(moved * moved))
    return along / size if size > 0 and np.isfinite(along) else None


def _updated(flat: str, w: str, dw: str) -> Callable[[Pipeline, Base], Any]:
    def gradient(p: Pipeline, base: Base) -> Any:
        need(p.fitted)
        weight, step = getattr(p, w), getattr(p, dw)
        need(step.shape[-2:] == weight.shape)
        return per_token(getattr(p, flat), transpose(weight - p.c(p.fitted) * step))

    return gradient


def _unsummed(x: Any, dx: Any) -> Any:
    return per_token(transpose(x), dx)


def _dropped(*names: str) -> dict[str, Any]:
    def zero(p: Pipeline, base: Base) -> Any:
        return base() * p.c(0.0)

    return dict.fromkeys(names, zero)


def _without(names: tuple[str, ...]) -> Callable[[Pipeline, Base], Any]:
    def dx(p: Pipeline, base: Base) -> Any:
        total = base()
        for name in names:
            total = total - getattr(p, name)
        return total

    return dx


def _square(w: Any) -> Any:
    need(w.shape[0] == w.shape[1])
    return w


def _dmerged(p: Pipeline, base: Base) -> Any:
    return per_token(p.dy, _square(p.w_o))


def _plain_output(p: Pipeline, base: Base) -> Any:
    _square(p.w_o)
    return p.dy


MISTAKES = (
    Mistake(
        "weights-updated-first",
        "the weights are updated before the input gradients",
        "W -= rate dW;  dX = dQ W^T",
        "dX = dQ W^T;  W -= rate dW",
        "dX is a derivative at the weights of the forward pass. With the updated ones every layer below gets a wrong "
        "gradient, the more so the larger the step.",
        "Compute all input gradients first; leave the update to the optimiser.",
        (Variant({name: _updated(*parts) for name, parts in _PARTS.items()}, fit=_learning_rate),),
        ("layer",),
        "layer",
    ),
    Mistake(
        "batch-not-summed",
        "dW is not summed over the batch",
        "dW_b = X_b^T dQ_b,  shape (B, in, out)",
        "dW = sum over b of X_b^T dQ_b",
        "One W serves every sequence of the batch; each adds to its gradient.",
        "Flatten batch and tokens before the product, or sum over axis 0.",
        (
            way("one dW a sequence", weight_gradient=lambda p, base: _unsummed),
            way("the first sequence only", weight_gradient=lambda p, base: lambda x, dx: outer(x[:1], dx[:1])),
            way("the last sequence only", weight_gradient=lambda p, base: lambda x, dx: outer(x[-1:], dx[-1:])),
        ),
        ("layer",),
        "layer",
    ),
    Mistake(
        "batch-averaged",
        "dW is averaged over the batch",
        "dW = (1/B) sum over b of X_b^T dQ_b",
        "dW = sum over b of X_b^T dQ_b",
        "The gradient is a sum. A mean belongs into the loss, and then dY has its factor already.",
        "Remove the division.",
        (
            way("over sequences", weight_gradient=lambda p, base: lambda x, dx: outer(x, dx) / p.c(len(x))),
            way(
                "over sequences and tokens",
                weight_gradient=lambda p, base: lambda x, dx: outer(x, dx) / p.c(x.shape[0] * x.shape[1]),
            ),
            way("over tokens", weight_gradient=lambda p, base: lambda x, dx: outer(x, dx) / p.c(x.shape[1])),
        ),
        ("layer",),
        "layer",
    ),
    Mistake(
        "w-not-transposed",
        "W is not transposed in the input gradient",
        "dX = dQ W",
        "dX = dQ W^T",
        "Q = X W, so dX = dQ W^T. For a square W the shapes do not tell.",
        "Transpose W.",
        (
            way("W_q, W_k and W_v", input_gradient=lambda p, base: lambda dx, w: per_token(dx, _square(w))),
            way("W_o", dmerged=_dmerged),
            way(
                "all four",
                input_gradient=lambda p, base: lambda dx, w: per_token(dx, _square(w)),
                dmerged=_dmerged,
            ),
            *(
                way(w, **{name: lambda p, base, flat=flat, w=w: per_token(getattr(p, flat), _square(getattr(p, w)))})
                for name, (flat, w, _) in _PARTS.items()
            ),
        ),
        ("layer",),
        "layer",
    ),
    Mistake(
        "dw-transposed",
        "dW is transposed",
        "dW = dQ^T X",
        "dW = X^T dQ",
        "Q = X W with W of shape (in, out), and so dW.",
        "Exchange the factors, or transpose the product.",
        only(weight_gradient=lambda p, base: lambda x, dx: transpose(outer(x, dx))),
        ("layer",),
        "layer",
    ),
    Mistake(
        "input-gradient-dropped",
        "one of the input gradients of self-attention is dropped",
        "dX = dQ W_q^T + dK W_k^T",
        "dX = dQ W_q^T + dK W_k^T + dV W_v^T",
        "The same X makes queries, keys and values; its gradient is the sum of all three.",
        "Add the third term.",
        tuple(
            variant
            for names in (("dquery",), ("dkey",), ("dvalue",), ("dkey", "dvalue"), ("dquery", "dvalue"))
            for variant in (
                Variant(_dropped(*names), f"{' and '.join(names)} zero"),
                way(f"dx without {' and '.join(names)}", dx=_without(names)),
            )
        ),
        ("layer",),
        "layer",
    ),
    Mistake(
        "output-projection-skipped",
        "the backward skips the output projection",
        "dO = dY",
        "dO = dY W_o^T",
        "Y = O W_o, so the gradient passes through W_o before it reaches the heads.",
        "Multiply dY by W_o^T before splitting heads.",
        only(dmerged=_plain_output),
        ("layer",),
        "layer",
    ),
)
