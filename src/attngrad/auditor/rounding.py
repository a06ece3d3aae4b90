"""How far rounding may carry each single entry: a running first-order error analysis beside the pipeline.

The RMS over a whole result hides one wrong entry among many. Here every entry has a scale of its own: eps times the
terms that it is summed from, carried through every step. An entry whose error is many times its scale stands out,
however small it is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attngrad.auditor.pipeline import RESULTS, Pipeline, Undefined
from attngrad.auditor.steps import merge_heads, split_heads
from attngrad.reference.dense import per_key_head, per_query_head, sum_to, transpose
from attngrad.reference.modifiers import IDENTITY

_PROJECTIONS = {
    "projected": {"q": ("query", "w_q"), "k": ("key", "w_k"), "v": ("value", "w_v"), "y": ("out", "w_o")},
    "weight_gradient": {"dw_q": ("query", "dq"), "dw_k": ("key", "dk"), "dw_v": ("value", "dv"), "dw_o": ("out", "dy")},
    "input_gradient": {"dquery": ("dq", "w_q"), "dkey": ("dk", "w_k"), "dvalue": ("dv", "w_v"), "dout": ("dy", "w_o")},
}
"""The products of the layer, by the method that has their errors: the two factors."""
_FLAT = {"out": "merged", "dq": "dq_flat", "dk": "dk_flat", "dv": "dv_flat"}
"""What is computed by heads, and its name with these side by side."""
_HEADS = {"q": "num_heads", "k": "num_kv_heads", "v": "num_kv_heads", "dout": "num_heads"}
"""What is split into heads, and how many."""


class EntryErrors:
    """The error scale of every entry of every result of ``p``, computed in float64 with unit roundoff ``eps``."""

    def __init__(self, p: Pipeline, eps: float, tiny: float) -> None:
        self.p, self.eps, self.tiny = p, eps, tiny
        self._values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._values:
            self._values[name] = self._found(name)
        return self._values[name]

    def _found(self, name: str) -> Any:
        kind = next((kind for kind, rows in _PROJECTIONS.items() if name in rows), None)
        if kind is None:
            return getattr(self, f"_{name}")()
        if name not in _HEADS:
            return getattr(self, kind)(*_PROJECTIONS[kind][name])
        if not self.p.has("query"):  # only the layer computes these
            return np.zeros(self.size(name).shape)
        return split_heads(getattr(self, kind)(*_PROJECTIONS[kind][name]), getattr(self.p, _HEADS[name]))

    def size(self, name: str) -> Any:
        """|value| of a step; scales are of sums in the shapes that they should have."""
        if self.p.reshaped(name):
            raise Undefined
        return np.abs(np.asarray(getattr(self.p, name), dtype=np.float64))

    def product(self, a: Any, ea: Any, b: Any, eb: Any) -> Any:
        """The error of a b, given those of a and b."""
        n = math.sqrt(a.shape[-1]) + 2.0
        return ea @ b + a @ eb + self.eps * n * (a @ b) + self.tiny

    # the layer

    def flat(self, name: str) -> tuple[Any, Any]:
        """The sizes of a factor of the layer, heads side by side, and its errors: none of what is given."""
        x = self.size(_FLAT.get(name, name))
        return x, merge_heads(getattr(self, name)) if name in _FLAT else np.zeros(x.shape)

    def projected(self, x: str, w: str) -> Any:
        """Of X W."""
        return self.product(*self.flat(x), *self.flat(w))

    def input_gradient(self, d: str, w: str) -> Any:
        """Of dX = dQ W^T, and the like."""
        return self.product(*self.flat(d), *map(transpose, self.flat(w)))

    def weight_gradient(self, x: str, d: str) -> Any:
        """Of dW = X^T dQ, and the like."""
        a, ea, b, eb = (m.reshape(-1, m.shape[-1]) for m in (*self.flat(x), *self.flat(d)))
        return self.product(transpose(a), transpose(ea), b, eb)

    def _dx(self) -> Any:
        sizes = self.size("dquery") + self.size("dkey") + self.size("dvalue")
        return self.dquery + self.dkey + self.dvalue + 2.0 * self.eps * sizes

    # forward

    def per_head(self, x: Any) -> Any:
        """One for each query head."""
        return per_query_head(x, self.p.group)

    def _z(self) -> Any:
        scale = abs(float(self.p.scale_value))
        k, ek = self.per_head(self.size("k")), self.per_head(self.k)
        raw = self.product(self.size("q"), self.q, transpose(k), transpose(ek))
        return scale * raw + 2.0 * self.eps * self.size("z") + self.tiny

    def _scores(self) -> Any:
        s = np.abs(np.asarray(self.p.scores_unmasked, dtype=np.float64))
        bias = 0.0 if self.p.bias is None else np.abs(np.nan_to_num(np.asarray(self.p.bias, np.float64), neginf=0.0))
        return self.z + self.eps * (4.0 * s + bias)

    def _seen(self) -> Any:
        """What has a weight, or should have; a mistake may see more than the mask allows."""
        return self.p.visible | self.p.visible_back | (self.p.weights != 0)

    def _relative(self) -> Any:
        """The relative error of a weight: of its score, of the normaliser, and of the exponential's argument."""
        s = np.abs(np.asarray(self.p.scores_unmasked, dtype=np.float64))
        top = np.max(np.where(self.p.visible, s, 0.0), axis=-1, keepdims=True, initial=0.0)
        if self.p.sinks is not None:
            top = np.maximum(top, np.abs(np.asarray(self.p.sinks, np.float64))[:, None, None])
        width = math.sqrt(s.shape[-1]) + math.log(s.shape[-1] + 1.0) + 8.0
        worst = np.max(np.where(self.p.visible, self.scores, 0.0), axis=-1, keepdims=True, initial=0.0)
        return self.scores + worst + self.eps * (s + 2.0 * top + width)

    def _lse(self) -> Any:
        return np.max(np.where(self.p.visible, self.relative, 0.0), axis=-1, initial=0.0) + 4.0 * self.eps

    def _weights(self) -> Any:
        return self.grown("weights")

    def _weights_back(self) -> Any:
        return self.grown("weights_back")

    def grown(self, name: str) -> Any:
        """Of weights, those of a mistaken backward among them, which may be larger than one."""
        grown, a = np.expm1(np.minimum(self.relative, 30.0)), self.size(name)
        return np.where(self.seen, np.minimum(a * grown, np.maximum(a, 1.0)) + self.tiny, 0.0)

    def kept(self, name: str) -> tuple[Any, Any]:
        """The weights after dropout, and their error."""
        m = 1.0 if self.p.keep is None else np.asarray(self.p.keep, np.float64)
        return self.size(name) * m, getattr(self, name) * m + 2.0 * self.eps * self.size(name) * m

    def _out(self) -> Any:
        a, ea = self.kept("weights")
        return self.product(a, ea, self.per_head(self.size("v")), self.per_head(self.v))

    # reverse

    def _dweights(self) -> Any:
        v, ev = self.per_head(self.size("v")), self.per_head(self.v)
        error = self.product(self.size("dout"), self.dout, transpose(v), transpose(ev))
        m = 1.0 if self.p.keep is None else np.asarray(self.p.keep, np.float64)
        return (error + 2.0 * self.eps * self.size("dweights")) * m + self.tiny

    def _delta(self) -> Any:
        """Of rowsum(dout o out) and of rowsum(p o dp), whichever a candidate computes."""
        dout, out = self.size("dout"), self.size("out")
        n = self.eps * (math.sqrt(dout.shape[-1]) + 2.0)
        by_out = np.sum(dout * self.out + self.dout * out + n * dout * out, axis=-1)
        a, dp = self.size("weights"), self.size("dweights")
        n = self.eps * (math.sqrt(a.shape[-1]) + 2.0)
        by_weights = np.sum(a * self.dweights + self.weights * dp + n * a * dp, axis=-1)
        return by_out + by_weights + self.tiny

    def _dscores(self) -> Any:
        a, dp, delta = self.size("weights_back"), self.size("dweights"), self.size("delta")[..., None]
        difference = np.abs(np.asarray(self.p.dweights - self.p.delta[..., None], np.float64))
        inner = self.dweights + self.delta[..., None] + self.eps * (dp + delta)
        return np.where(self.seen, self.weights_back * (difference + inner) + a * inner + self.tiny, 0.0)

    def _dbias(self) -> Any:
        n = self.eps * (math.sqrt(self.p.dscores.size) + 2.0)
        return sum_to(self.dscores + n * self.size("dscores"), self.p.bias.shape)

    def _dsinks(self) -> Any:
        share, delta = self.size("sink"), self.size("delta")
        relative = np.expm1(np.minimum(self.lse + self.eps, 30.0))
        return np.sum(share * (relative + 8.0 * self.eps) * delta + share * self.delta, axis=(0, 2)) + self.tiny

    def _dz(self) -> Any:
        rounded = 0.0 if self.p.modifier is IDENTITY else 8.0 * self.eps
        slope = self.size("curvature") * self.z + rounded
        return self.dscores * self.size("slope") + self.size("dscores") * slope + self.tiny

    def _dq(self) -> Any:
        k, ek = self.per_head(self.size("k")), self.per_head(self.k)
        scale = abs(float(self.p.scale_value))
        return scale * self.product(self.size("dz"), self.dz, k, ek) + 2.0 * self.eps * self.size("dq") + self.tiny

    def _dk(self) -> Any:
        heads = self.product(transpose(self.size("dz")), transpose(self.dz), self.size("q"), self.q)
        scale = abs(float(self.p.scale_value))
        return scale * per_key_head(heads, self.p.k) * 2.0 + 4.0 * self.eps * self.size("dk") + self.tiny

    def _dv(self) -> Any:
        a, ea = self.kept("weights_back")
        return (
            2.0 * per_key_head(self.product(transpose(a), transpose(ea), self.size("dout"), self.dout), self.p.v)
            + self.tiny
        )


class TermErrors(EntryErrors):
    """The same with weights that are right to two units: what the terms of a sum leave where they cancel.

    No more than that: how far rounded scores move the weights is what the straightforward computation shows by itself.
    """

    def _relative(self) -> Any:
        return np.full(self.size("z").shape, 2.0 * self.eps)


ENTRYWISE = frozenset(name for name in RESULTS if f"_{name}" in vars(EntryErrors)).union(*_PROJECTIONS.values())
"""The results that have an error scale for every entry."""
