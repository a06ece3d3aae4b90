"""Mistakes with causality, windows and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Base, Variant, Wild, delta_from_weights, need, way, weights_from_lse, where
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference.dense import rowsum, zero_hidden


def _softmax(p: Pipeline, scores: Any, visible: Any) -> Any:
    """Row softmax over what is ``visible``."""
    normaliser = p.redo("normaliser", scores=np.where(visible, scores, p.c(-np.inf)), visible=visible)
    return p.redo("weights", normaliser=normaliser, divisor=p.redo("divisor", normaliser=normaliser))


def _shifted(by: int) -> Override:
    return where(lambda p: p.causal, lambda p, base: base() + by)


def _other_alignment(p: Pipeline, base: Base) -> Any:
    """Top-left for bottom-right, and back; the same thing where T = S."""
    need(p.causal or p.window is not None)
    corner = p.redo("position", offset=None)
    return 0 if p.offset is None or np.all(p.offset == corner) else corner


def _backward_only(**changed: Callable[[Pipeline], Any]) -> tuple[Variant, ...]:
    """The forward as it should be, the backward with other visibility.

    Its weights are exp(S - lse), or those of a softmax of its own, or right, and dS alone is masked.
    """

    def visible(p: Pipeline) -> Any:
        return p.redo("visible", **{name: rule(p) for name, rule in changed.items()})

    def by(words: str, weights: Callable[[Pipeline, Any], Any]) -> Variant:
        return way(
            words,
            visible_back=lambda p, base: visible(p),
            weights_back=lambda p, base: weights(p, visible(p)),
        )

    return (
        by("in the backward pass, by exp(S - lse)", weights_from_lse),
        by("in the backward pass, by another softmax", lambda p, seen: _softmax(p, p.scores_unmasked, seen)),
        way("in dS alone", dscores=lambda p, base: zero_hidden(base(), visible(p))),
    )


def _sees_all(p: Pipeline, base: Base) -> Any:
    return np.ones_like(base())


def _unmasked(p: Pipeline) -> Any:
    return _softmax(p, p.scores_unmasked, np.ones_like(p.visible))


def _after_softmax(p: Pipeline, base: Base) -> Any:
    return zero_hidden(_unmasked(p), p.visible)


def _after_softmax_gradient(p: Pipeline, base: Base) -> Any:
    """The right derivative of the wrong function: the mask enters dA, as a factor."""
    da = zero_hidden(p.dweights, p.visible)
    full = _unmasked(p)
    return full * (da - rowsum(full * da)[..., None])


def _filled(value: float, **backward: Override) -> dict[str, Override]:
    """Masked scores that are ``value`` and take part in the softmax."""
    return {
        "scores": lambda p, base: np.where(p.visible, p.scores_unmasked, p.c(value)),
        "normaliser": lambda p, base: p.redo("normaliser", visible=np.ones_like(p.visible)),
        **backward,
    }


def _fully_masked(p: Pipeline) -> Any:
    masked = ~p.visible.any(axis=-1)
    need(masked.any())
    return masked[..., None]


def _uniform(p: Pipeline, base: Base) -> Any:
    a = base()
    return np.where(_fully_masked(p), p.c(1.0) / p.c(a.shape[-1]), a)


def _seen_when_blind(p: Pipeline, base: Base) -> Any:
    return base() | _fully_masked(p)


def _moved(window: Any, left: int, right: int) -> Any:
    before, after = window or (None, None)
    need((before is not None or not left) and (after is not None or not right))
    return None if before is None else before + left, None if after is None else after + right


def _window_moved(left: int, right: int) -> Override:
    return lambda p, base: _moved(base(), left, right)


_MOVES = tuple(move for move in product((0, 1, -1), repeat=2) if any(move))

VARIANTS = {
    "causal-off-by-one": (
        way("one key too many", position=_shifted(1)),
        way("one key too few", position=_shifted(-1)),
        *_backward_only(position=lambda p: p.position + 1)[:2],  # dS alone is zero there
        *_backward_only(position=lambda p: p.position - 1),
    ),
    "causal-alignment": (
        way("", position=_other_alignment),
        *_backward_only(position=lambda p: _other_alignment(p, lambda: None)),
    ),
    "causal-offset-sign": (
        way("in both passes", position=where(lambda p: p.causal, lambda p, base: -base())),
        *_backward_only(position=lambda p: -p.position),
    ),
    "mask-ignored": (way("in both passes", visible=_sees_all),),
    "mask-ignored-in-backward": tuple(
        variant
        for names in (("causal", "band", "mask"), ("mask",), ("causal",), ("band",))
        for variant in _backward_only(**dict.fromkeys(names, lambda p: None))  # options that are not looked at
    ),
    "mask-after-softmax": (
        way("", weights=_after_softmax),
        way("delta from the weights", weights=_after_softmax, delta=delta_from_weights),
        way("with the derivative of that", weights=_after_softmax, dscores=_after_softmax_gradient),
    ),
    "masked-scores-zero": (
        Variant(_filled(0.0), "in both passes"),
        Variant(_filled(0.0, visible_back=_sees_all), "with a gradient at the masked scores"),
        Variant(_filled(-1e-9), "-1e-9 for -1e9"),
        Variant(_filled(-1e-9, visible_back=_sees_all), "-1e-9 for -1e9, with a gradient at the masked scores"),
    ),
    "masked-row-not-zero": (
        way("in both passes", weights=_uniform),
        way("with a gradient at its scores", weights=_uniform, visible_back=_seen_when_blind),
        way(
            "with a gradient, delta from the weights",
            weights=_uniform,
            visible_back=_seen_when_blind,
            delta=delta_from_weights,
        ),
        way("NaN, as 0/0", weights=lambda p, base: np.where(_fully_masked(p), p.c(np.nan), base())),
        way(
            "NaN, as 0/0, with a gradient at its scores",
            weights=lambda p, base: np.where(_fully_masked(p), p.c(np.nan), base()),
            visible_back=_seen_when_blind,
        ),
        Variant(
            {
                "weights": lambda p, base: np.where(_fully_masked(p), p.c(Wild), base()),
                "visible_back": _seen_when_blind,
            },
            "weights by scores that should be hidden",
            wild=True,
        ),
        way("in the forward pass", weights=_uniform, weights_back=lambda p, base: zero_hidden(p.weights, p.visible)),
    ),
    "window-off-by-one": (
        *(way(f"left {left:+d}, right {right:+d}", band=_window_moved(left, right)) for left, right in _MOVES),
        *(
            replace(variant, note=f"left {left:+d}, right {right:+d}, {variant.note}")
            for left, right in _MOVES
            for variant in _backward_only(band=lambda p, left=left, right=right: _moved(p.band, left, right))  # type: ignore[misc]
        ),
    ),
}
