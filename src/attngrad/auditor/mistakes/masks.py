"""Mistakes with causality, windows, masks and dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Mistake, Variant, Wild, need, way
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference import steps
from attngrad.reference.dense import rowsum, zero_hidden

Base = Callable[[], Any]


def _softmax(p: Pipeline, scores: Any, visible: Any) -> Any:
    """Row softmax over what is ``visible``."""
    normaliser = steps.normaliser(np.where(visible, scores, p.c(-np.inf)), visible, p.sigma)
    return steps.weights(normaliser, steps.divisor(normaliser))


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


def _recomputed(p: Pipeline, visible: Any) -> Any:
    """The weights of the backward: exp(S - lse), with lse of the forward, over what it takes to be visible."""
    lse = np.where(np.isneginf(p.lse), p.c(0.0), p.lse)[..., None]
    return np.where(visible, np.exp(p.scores_unmasked - lse), p.c(0.0))


def _backward_only(**changed: Callable[[Pipeline], Any]) -> tuple[Variant, Variant]:
    """The forward as it should be, the backward with other visibility: by exp(S - lse), or by a softmax of its own."""

    def visible(p: Pipeline) -> Any:
        rules: dict[str, Any] = {"mask": p.mask, "offset": p.position, "causal": p.causal, "window": p.band}
        rules |= {name: rule(p) for name, rule in changed.items()}
        return steps.visible(p.q, p.k, p.bias, segments=p.segments, **rules)

    def seen(p: Pipeline, base: Base) -> Any:
        return visible(p)

    return (
        way(
            "in the backward pass, by exp(S - lse)",
            visible_back=seen,
            weights_back=lambda p, base: _recomputed(p, visible(p)),
        ),
        way(
            "in the backward pass, by another softmax",
            visible_back=seen,
            weights_back=lambda p, base: _softmax(p, p.scores_unmasked, visible(p)),
        ),
    )


_IGNORED: dict[str, Callable[[Pipeline], Any]] = {
    "causal": lambda p: False,
    "window": lambda p: None,
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
        return steps.normaliser(p.scores, np.ones_like(p.visible), p.sigma)

    return {"scores": scores, "normaliser": normaliser, **backward}


def _by_weights(p: Pipeline, base: Base) -> Any:
    return rowsum(p.weights_back * p.dweights)


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


def _one_minus_rate(p: Pipeline) -> Any:
    need(p.dropout)
    return p.c(1.0 - p.dropout)


def _all_kept(p: Pipeline, base: Base) -> Any:
    need(p.dropout)
    return np.ones_like(base())


def _next_seed(p: Pipeline, base: Base) -> Any:
    need(p.dropout)
    return steps.keep(p.q, p.k, p.dropout, p.seed + 1, p.origin)


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
            *_backward_only(offset=lambda p: p.position + 1),
            *_backward_only(offset=lambda p: p.position - 1),
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
        (way("", position=_other_alignment), *_backward_only(offset=lambda p: _other_alignment(p, lambda: None))),
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
            for names in (("causal", "window", "mask"), ("mask",), ("causal",), ("window",))
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
            way("delta from the weights", weights=_after_softmax, delta=_by_weights),
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
                delta=_by_weights,
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
    Mistake(
        "dropout-mask-not-reused",
        "the backward pass does not reuse the dropout mask",
        "dV = A^T dO,  dA = dO V^T",
        "dV = (A o M)^T dO,  dA = (dO V^T) o M",
        "The gradient is that of the function that was computed, with the very weights that were dropped.",
        "Keep the mask, or its seed, and apply it in the backward pass.",
        (
            way("no mask in the backward", keep_back=lambda p, base: p.c(_all_kept(p, base))),
            way(
                "only its factor in the backward",
                keep_back=lambda p, base: p.c(_all_kept(p, base)) / _one_minus_rate(p),
            ),
            way("no mask in dV", dv_heads=lambda p, base: np.swapaxes(p.weights_back, -1, -2) @ p.dout),
            way("no mask in dA", dweights=lambda p, base: p.dout @ np.swapaxes(p.v_heads, -1, -2)),
            way("the mask of the next seed", keep_back=_next_seed),
            Variant({"keep_back": _fitted_mask}, "another mask in the backward", fit=_other_mask),
        ),
        ("dropout",),
    ),
    Mistake(
        "dropout-not-rescaled",
        "the weights kept by dropout are not rescaled",
        "out = (A o keep) V",
        "out = (A o keep) V / (1 - rate)",
        "Dividing by 1 - rate keeps the expectation of the output; the backward has the same factor.",
        "Divide the keep mask by 1 - rate, in both passes.",
        (
            way("in both passes", keep=_bare),
            way("in the forward pass", keep=_bare, keep_back=lambda p, base: base() / _one_minus_rate(p)),
            way("in the backward pass", keep_back=_bare),
        ),
        ("dropout",),
    ),
)
