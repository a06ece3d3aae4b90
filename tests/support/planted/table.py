"""Each mistake of an attention: the id it should be found by, the options it needs, and what goes beside it."""

from __future__ import annotations

from planted.in_attention import attention

MASK, CAUSAL, DROP = {"mask": True}, {"causal": True}, {"dropout": 0.3, "seed": 5}
# plant: (id, options)
PLANTS = {
    "scale missing": ("scale-missing", None),
    "scale missing backward": ("scale-missing", None),
    "scale twice": ("scale-twice", {"scale": 0.3}),
    "scale twice backward": ("scale-twice", None),
    "scale 1/d": ("scale-by-d", None),
    "scale 1/d backward": ("scale-by-d", None),
    "scale 1/sqrt(h d)": ("scale-by-model", None),
    "scale 1/sqrt(t)": ("scale-by-length", None),
    "scale sqrt(d)": ("scale-by-sqrt-d", None),
    "scale sqrt(d) backward": ("scale-by-sqrt-d", None),
    "scale ignored backward": ("scale-ignored", {"scale": 0.3}),
    "scale missing dq": ("scale-missing-in-dq", None),
    "scale missing dk": ("scale-missing-in-dk", None),
    "no row term": ("row-term-missing", None),
    "mean": ("mean-for-row-sum", None),
    "mean of dO o O": ("mean-for-row-sum", None),
    "mean of dA": ("mean-for-row-sum", None),
    "row term without A": ("row-term-without-weights", None),
    "row sum unweighted": ("row-sum-unweighted", None),
    "columns": ("row-term-over-columns", None),
    "matrix": ("row-term-matrix-product", None),
    "jacobian": ("jacobian-inner-product", None),
    "dA for dS": ("dweights-for-dscores", None),
    "diagonal": ("softmax-diagonal-only", None),
    "slope product": ("softmax-derivative-matrix-product", None),
    "softmax axis": ("softmax-wrong-axis", None),
    "dv": ("dv-not-transposed", None),
    "dk": ("dk-not-transposed", None),
    "dk transposed": ("dk-transposed", None),
    "dq transposed": ("dq-with-transpose", None),
    "own operand": ("own-operand-in-product", None),
    "K for V": ("keys-for-values", None),
    "exchange dq dk": ("dq-dk-exchanged", None),
    "exchange dk dv": ("dk-dv-exchanged", None),
    "causal one more": ("causal-off-by-one", CAUSAL),
    "causal one less": ("causal-off-by-one", CAUSAL),
    "alignment": ("causal-alignment", {"causal": True, "offset": 0}),
    "offset sign": ("causal-offset-sign", CAUSAL),
    "mask ignored": ("mask-ignored", MASK),
    "mask ignored backward": ("mask-ignored-in-backward", CAUSAL),
    "mask after": ("mask-after-softmax", MASK),
    "mask zero": ("masked-scores-zero", CAUSAL),
    "mean of V": ("masked-row-not-zero", MASK),
    "window": ("window-off-by-one", {"window": (2, 1)}),
    "group unsummed": ("group-not-summed", None),
    "group last": ("group-one-head-only", None),
    "group mean": ("group-averaged", None),
    "tiled groups": ("group-interleaved", None),
    "dropout no mask": ("dropout-mask-not-reused", DROP),
    "dropout other mask": ("dropout-mask-not-reused", DROP),
    "dropout not rescaled": ("dropout-not-rescaled", DROP),
    "no cap derivative": ("softcap-derivative-missing", {"softcap": 2.0}),
    "s tanh(s)": ("softcap-derivative-wrong", {"softcap": 2.0}),
    "dbias unreduced": ("bias-gradient-not-reduced", {"bias": True}),
    "dbias by batch": ("bias-gradient-not-reduced", {"bias": True}),
    "dbias mean": ("bias-gradient-averaged", {"bias": True}),
    "dbias scaled": ("bias-gradient-scaled", {"bias": True}),
    "chunk delta": ("delta-from-chunk", None),
    "block softmax": ("softmax-within-block", None),
    "no rescale": ("softmax-within-block", None),
    "lse base 2": ("lse-base-2", None),
    "lse without max": ("lse-without-max", None),
    "epsilon": ("epsilon-in-denominator", None),
    "overflow": ("softmax-overflow", None),
    "unseen tail": ("tile-tail", None),
    "tail zero": ("tile-tail", None),
    "tail stale": ("tile-tail", None),
    "overwritten dq": ("overwritten-not-accumulated", None),
    "overwritten dkv": ("overwritten-not-accumulated", None),
    "low precision": ("low-precision", None),
}
RETURNS = {"lse base 2": ("out", "lse", "dq", "dk", "dv"), "lse without max": ("out", "lse", "dq", "dk", "dv")}


def plant(*bugs):
    """The candidate of these plants, its options, and the ids that should be named."""
    ids = {PLANTS[bug][0] for bug in bugs}
    options = {}
    for bug in bugs:
        options |= PLANTS[bug][1] or {}
    names = next((RETURNS[bug] for bug in bugs if bug in RETURNS), None)
    if names and "bias" in options:
        names = (*names, "dbias")
    return attention(*bugs, names=names), options or None, ids


# --- pairs -----------------------------------------------------------------------------------------------------------

_ALTERNATIVES = (
    [p for p in PLANTS if p.startswith("scale ")],
    ["no row term", "mean", "mean of dA", "mean of dO o O", "row term without A", "row sum unweighted", "columns",
     "matrix", "dA for dS", "jacobian", "diagonal", "slope product", "chunk delta", "block softmax"],
    ["softmax axis", "mask after", "mask zero", "mean of V", "overflow", "mask ignored", "epsilon", "block softmax",
     "no rescale"],
    ["group unsummed", "group last", "group mean", "tiled groups"],
    ["dropout no mask", "dropout other mask", "dropout not rescaled"],
    ["no cap derivative", "s tanh(s)"],
    ["dbias unreduced", "dbias by batch", "dbias mean", "dbias scaled"],
    ["causal one more", "causal one less", "no rescale"],
    ["alignment", "offset sign"],
    ["lse base 2", "lse without max", "softmax axis", "mask ignored backward", "block softmax", "no rescale"],
    ["dk", "dk transposed", "own operand", "overwritten dkv", "exchange dk dv"],
    ["dq transposed", "own operand", "overwritten dq", "exchange dq dk", "tail zero", "tail stale"],
    ["dv", "overwritten dkv", "exchange dk dv"],
    ["exchange dq dk", "exchange dk dv"],
    ["mask ignored", "mask ignored backward", "mask after", "mask zero", "mean of V", "causal one more",
     "causal one less", "alignment", "offset sign", "window", "no rescale"],
)  # fmt: skip
"""Plants that stand in each other's place: of these only one can be made at a time."""


def pairs():
    """Every two plants that can be made together."""
    names = [p for p in PLANTS if p != "low precision"]
    clash = {frozenset((a, b)) for group in _ALTERNATIVES for a in group for b in group}
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if frozenset((a, b)) not in clash]
