"""Mistakes with causality, windows and masks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Mistake, Variant, delta_from_weights, need, way, weights_from_lse
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference.dense import rowsum, zero_hidden

Base = Callable[[], Any]


def _softmax(p: Pipeline, scores: Any, visible: Any) -> Any:
    """Row softmax over what is ``visible``."""
    normaliser = p.redo("normaliser", scores=np.where(visible, scores, p.c(-np.inf)), visible=visible)
    return p.redo("weights", normaliser=normaliser, divisor=p.redo("divisor", normaliser=normaliser))


def _shifted(by: int) -> Callable[[Pipeline, Base], Any]:
    def position(p: Pipeline, base: Base) -> Any:
        need(p.causal)
        return base() + by

    return position


def _other_alignment(p: Pipeline, base: Base) -> Any:
    """Top-left for bottom-right, and back; the same thing where T = S."""
    need(p.causal or p.window is not None)
    lengths = p.k.shape[-2] - p.q.shape[-2]
    return 0 if p.offset is None or np.all(p.offset == lengths) else lengths


def _backward_only(**changed: Callable[[Pipeline], Any]) -> tuple[Variant, Variant]:
    """The forward as it should be, the backward with other visibility: by exp(S - lse), or by a softmax of its own."""

    def visible(p: Pipeline) -> Any:
        return p.redo("visible", **{name: rule(p) for name, rule in changed.items()})

    def seen(p: Pipeline, base: Base) -> Any:
        return visible(p)

    return (
        way(
            "in the backward pass, by exp(S - lse)",
            visible_back=seen,
            weights_back=lambda p, base: weights_from_lse(p, visible(p)),
        ),
        way(
            "in the backward pass, by another softmax",
            visible_back=seen,
            weights_back=lambda p, base: _softmax(p, p.scores_unmasked, visible(p)),
        ),
    )


_IGNORED: dict[str, Callable[[Pipeline], Any]] = {
    "causal": lambda p: False,
    "band": lambda p: None,
    "mask": lambda p: None,
}


def _sees_all(p: Pipeline, base: Base) -> Any:
    return np.ones_like(base())


def _after_softmax(p: Pipeline, base: Base) -> Any:
    return zero_hidden(_unmasked(p), p.visible)


def _unmasked(p: Pipeline) -> Any:
    return _softmax(p, p.scores_unmasked, np.ones_like(p.visible))


def _after_softmax_gradient(p: Pipeline, base: Base) -> Any:
    """The right derivative of the wrong function: the mask enters dA, as a factor."""
    da = zero_hidden(p.dweights, p.visible)
    full = _unmasked(p)
    return full * (da - rowsum(full * da)[..., None])


def _filled(value: float, **backward: Override) -> dict[str, Override]:
    """Masked scores that are ``value`` and take part in the softmax."""

    def scores(p: Pipeline, base: Base) -> Any:
        return np.where(p.visible, p.scores_unmasked, p.c(value))

    def normaliser(p: Pipeline, base: Base) -> Any:
        return p.redo("normaliser", visible=np.ones_like(p.visible))

    return {"scores": scores, "normaliser": normaliser, **backward}


def _blind(p: Pipeline) -> Any:
    blind = ~p.visible.any(axis=-1)
    need(blind.any())
    return blind[..., None]


def _uniform(p: Pipeline, base: Base) -> Any:
    a = base()
    return np.where(_blind(p), p.c(1.0) / p.c(a.shape[-1]), a)


def _seen_when_blind(p: Pipeline, base: Base) -> Any:
    return base() | _blind(p)


def _window_moved(left: int, right: int) -> Callable[[Pipeline, Base], Any]:
    def band(p: Pipeline, base: Base) -> Any:
        before, after = base() or (None, None)
        need((before is not None or not left) and (after is not None or not right))
        return (
            None if before is None else before + left,
            None if after is None else after + right,
        )

    return band


def _moved_windows() -> tuple[Variant, ...]:
    shifts = [pair for pair in product((0, 1, -1), repeat=2) if pair != (0, 0)]
    return tuple(Variant({"band": _window_moved(*pair)}, f"left {pair[0]:+d}, right {pair[1]:+d}") for pair in shifts)


MISTAKES = (
    Mistake(
        "causal-off-by-one",
        "the causal mask is off by one",
        "j < i  (or j <= i + 1)",
        "j <= i + offset",
        "A query sees itself and what came before, and nothing after.",
        "Mask where j > i + offset: np.triu(..., k=1 + offset) marks what is hidden.",
        (
            way("one key too many", position=_shifted(1)),
            way("one key too few", position=_shifted(-1)),
            *_backward_only(position=lambda p: p.position + 1),
            *_backward_only(position=lambda p: p.position - 1),
        ),
        ("causal",),
    ),
    Mistake(
        "causal-alignment",
        "the causal mask is aligned to the other corner",
        "j <= i  for  j <= i + S - T",
        "j <= i + offset",
        "For T != S the mask can start at the top left (offset 0) or end at the bottom right (offset S - T): with a "
        "cache of keys it is the latter. The two agree only for T = S.",
        "Add the offset S - T to the query's position; or state that offset 0 is meant, and audit with offset=0.",
        (way("", position=_other_alignment), *_backward_only(position=lambda p: _other_alignment(p, lambda: None))),
        ("causal",),
    ),
    Mistake(
        "mask-ignored",
        "the mask is ignored",
        "S without -inf",
        "S = -inf where a query may not attend",
        "Masked keys must get no weight.",
        "Set the scores to -inf where the mask forbids, before the softmax.",
        (way("in both passes", visible=_sees_all),),
        ("causal|window|mask|segments",),
    ),
    Mistake(
        "mask-ignored-in-backward",
        "the backward pass ignores the mask",
        "A = exp(S - lse) without the mask",
        "A = exp(S - lse) where visible, else 0",
        "A backward that computes the weights again must mask them again.",
        "Apply the mask to the recomputed scores, or zero the recomputed weights where it forbids.",
        tuple(
            variant
            for names in (("causal", "band", "mask"), ("mask",), ("causal",), ("band",))
            for variant in _backward_only(**{name: _IGNORED[name] for name in names})
        ),
        ("causal|window|mask",),
    ),
    Mistake(
        "mask-after-softmax",
        "the mask is applied after the softmax, without renormalising",
        "A = softmax(S) o mask",
        "A = softmax(S with -inf where masked)",
        "The rows of A no longer sum to 1: weight is lost to keys that may not be seen.",
        "Mask the scores before the softmax.",
        (
            way("", weights=_after_softmax),
            way("delta from the weights", weights=_after_softmax, delta=delta_from_weights),
            way("with the derivative of that", weights=_after_softmax, dscores=_after_softmax_gradient),
        ),
        ("causal|window|mask|segments",),
    ),
    Mistake(
        "masked-scores-zero",
        "masked scores are set to 0, not to -inf",
        "S = S o mask;  A = softmax(S)",
        "S = -inf where masked;  A = softmax(S)",
        "exp(0) is 1: a key that may not be seen gets a weight like any other. So does one whose score is -1e-9, a "
        "slip for -1e9.",
        "np.where(mask, S, -np.inf), not S * mask.",
        (
            Variant(_filled(0.0), "in both passes"),
            Variant(_filled(0.0, visible_back=_sees_all), "with a gradient at the masked scores"),
            Variant(_filled(-1e-9), "-1e-9 for -1e9"),
            Variant(_filled(-1e-9, visible_back=_sees_all), "-1e-9 for -1e9, with a gradient at the masked scores"),
        ),
        ("causal|window|mask|segments",),
    ),
    Mistake(
        "masked-row-not-zero",
        "a query that may attend to nothing gets the mean of V",
        "out_i = mean(V)  where nothing is visible",
        "out_i = 0, and no gradient",
        "With a large negative number for -inf the softmax of a fully masked row is uniform.",
        "Zero the weights (or out) of rows that see nothing.",
        (
            way("in both passes", weights=_uniform),
            way("with a gradient at its scores", weights=_uniform, visible_back=_seen_when_blind),
            way(
                "with a gradient, delta from the weights",
                weights=_uniform,
                visible_back=_seen_when_blind,
                delta=delta_from_weights,
            ),
            way(
                "in the forward pass", weights=_uniform, weights_back=lambda p, base: zero_hidden(p.weights, p.visible)
            ),
        ),
        ("mask|causal|window|segments",),
    ),
    Mistake(
        "window-off-by-one",
        "the window is off by one",
        "i - left < j < i + right  (or one more)",
        "i + offset - left <= j <= i + offset + right",
        "window=(left, right) counts the keys beside the query's own position, both ends included.",
        "Compare with <= on both sides.",
        _moved_windows(),
        ("window",),
    ),
)
