"""The sizes of a case, the axes of its arrays, and what a candidate must support to take them."""

from __future__ import annotations

from dataclasses import dataclass

FEATURES = {
    "gqa": "groups of query heads (gqa)",
    "cross": "T != S (cross)",
    "widths": "D != E (widths)",
    "rectangular": "d_model other than heads times width (rectangular)",
}
"""What a candidate may leave out without being wrong, and what a case that needs it has."""

AXES = {
    "q": ("b", "hq", "t", "d"),
    "k": ("b", "hk", "s", "d"),
    "v": ("b", "hk", "s", "e"),
    "dout": ("b", "hq", "t", "e"),
    "query": ("b", "t", "model"),
    "key": ("b", "s", "model"),
    "value": ("b", "s", "model"),
    "w_q": ("model", "inner"),
    "w_k": ("model", "kv_inner"),
    "w_v": ("model", "kv_inner"),
    "w_o": ("inner", "model"),
    "dy": ("b", "t", "model"),
    "mask": ("b", "hq", "t", "s"),
    "bias": ("b", "hq", "t", "s"),
    "sinks": ("hq",),
    "offset": ("b",),
}
"""The axes of inputs and options, as fields of Dims; a tangent has those of what it is a tangent of."""
INPUTS = {"attention": tuple(AXES)[:4], "layer": tuple(AXES)[4:12]}


@dataclass(frozen=True)
class Dims:
    """Batch, query heads, key heads, queries, keys, features of q and k, features of v; d_model for the layer."""

    b: int = 1
    hq: int = 1
    hk: int = 1
    t: int = 5
    s: int = 5
    d: int = 4
    e: int = 4
    model: int | None = None

    @property
    def features(self) -> frozenset[str]:
        """What a candidate must support to take these shapes."""
        found = {
            "gqa": self.hq != self.hk,
            "cross": self.t != self.s,
            "widths": self.d != self.e,
            "rectangular": self.model is not None and self.model != self.hq * self.d,
        }
        return frozenset(name for name, there in found.items() if there)

    @property
    def inner(self) -> int:
        """The columns of w_q: heads times width."""
        return self.hq * self.d

    @property
    def kv_inner(self) -> int:
        """The columns of w_k and w_v."""
        return self.hk * self.d

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """(B, Hq, T, S)."""
        return self.b, self.hq, self.t, self.s
