"""The sizes of a case, the axes of its arrays, what a candidate must support to take them; and the plans of the cases:
shapes and values at which wrong attention gradients show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.files import read_toml

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
    def work(self) -> int:
        """Multiplications of the forward pass."""
        return self.b * self.hq * self.t * self.s * (self.d + self.e)

    @property
    def large(self) -> bool:
        """Whether these are the sizes of blocks: longdouble would take seconds."""
        return self.work > 500_000

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """(B, Hq, T, S)."""
        return self.b, self.hq, self.t, self.s


Arrays = dict[str, NDArray]
Fill = Callable[[Arrays, float], None]
"""Changes the Gaussian values of a case; the number is how large a logit may be."""


def _large_logits(x: Arrays, logit: float) -> None:
    """q and k scaled alike, so that the largest |z| is ``logit``."""
    group = x["q"].shape[1] // x["k"].shape[1]
    z = x["q"] @ np.repeat(x["k"], group, axis=1).swapaxes(-1, -2) / math.sqrt(x["q"].shape[-1])
    factor = math.sqrt(logit / np.max(np.abs(z)))
    x["q"], x["k"] = x["q"] * factor, x["k"] * factor


def _huge_logits(x: Arrays, logit: float) -> None:
    """Past the overflow of exp, in float64 too; for 16 bits, which accumulate in 32, past that of float32."""
    x["q"][..., 0], x["k"][..., 0] = np.abs(x["q"][..., 0]) + 1.0, np.abs(x["k"][..., 0]) + 1.0
    _large_logits(x, 60.0 * logit if logit > 20.0 else 6.0 * logit)


def _equal_logits(x: Arrays, logit: float) -> None:
    x["k"] = np.broadcast_to(x["k"][:, :, :1], x["k"].shape).copy()


def _one_hot(x: Arrays, logit: float) -> None:
    """Query i looks at key i mod S nearly alone, with a second key close enough to leave a gradient."""
    keys, group = x["k"].shape[2], x["q"].shape[1] // x["k"].shape[1]
    chosen = x["k"][:, :, np.arange(x["q"].shape[2]) % keys]
    norm = np.sum(chosen * chosen, axis=-1, keepdims=True)
    x["q"] = np.repeat(chosen / norm, group, axis=1) * 0.25 * logit * math.sqrt(x["q"].shape[-1])


def _correlated(x: Arrays, logit: float) -> None:
    keys, group = x["k"].shape[2], x["q"].shape[1] // x["k"].shape[1]
    near = np.repeat(x["k"][:, :, np.arange(x["q"].shape[2]) % keys], group, axis=1)
    x["q"] = 0.8 * near + 0.6 * x["q"]


def _large_mean(x: Arrays, logit: float) -> None:
    name = "v" if "v" in x else "value"
    x[name] = x[name] + 8.0


def _strided(x: Arrays, logit: float) -> None:
    """A cotangent whose axes are in another order in memory, as after merging heads."""
    name = "dout" if "dout" in x else "dy"
    axes = (0, 2, 1, 3) if name == "dout" else (1, 0, 2)
    x[name] = np.ascontiguousarray(x[name].transpose(axes)).transpose(axes)


def _zero_stride(x: Arrays, logit: float) -> None:
    """One cotangent for all tokens, its stride over them zero, as after a sum over tokens."""
    name = "dout" if "dout" in x else "dy"
    first = x[name][..., :1, :].copy()
    strides = (*first.strides[:-2], 0, first.strides[-1])
    x[name] = np.lib.stride_tricks.as_strided(first, x[name].shape, strides)


def _self(x: Arrays, logit: float) -> None:
    x["key"], x["value"] = x["query"].copy(), x["query"].copy()


STRIDES = (_strided, _zero_stride)
"""Those that change no values: strides are laid out after rounding."""


class Plan(NamedTuple):
    """A case to be made: Gaussian values, changed by ``fill``; ``effort`` is the least that it is tried with."""

    name: str
    dims: Dims
    fill: Fill | None = None
    effort: int = 0


def _plans(level: str) -> tuple[Plan, ...]:
    """The plans of a level, as ``plans.toml`` has them; a fill by the name of its function here."""
    return tuple(
        Plan(name, Dims(*x["sizes"]), globals()[f"_{x['fill']}"] if "fill" in x else None, x.get("effort", 0))
        for name, x in read_toml("attngrad.auditor", "plans.toml")[level].items()
    )


COMPILED = (
    Dims(2, 3, 3, 5, 5, 4, 4),
    Dims(2, 4, 2, 5, 7, 4, 6),
    Dims(1, 1, 1, 320, 320, 64, 64),
    Dims(1, 1, 1, 9, 9, 128, 128),
)
"""The four shapes of what is compiled for each: square, every feature at once, and two where kernels branch."""

PLANS = {level: _plans(level) for level in INPUTS}
