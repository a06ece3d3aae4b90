"""One table of cases: it feeds every pass and every backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from attngrad.core.operands import Tangents


class Shape(NamedTuple):
    """Letters as in docs/notation.md."""

    batch: tuple[int, ...] = (2,)
    heads: int = 4
    key_heads: int = 2
    t: int = 3
    s: int = 5
    d: int = 2
    e: int = 3

    @property
    def scores(self) -> tuple[int, ...]:
        return (*self.batch, self.heads, self.t, self.s)


SHAPES = {
    "grouped": Shape(),
    "plain": Shape((1,), 2, 2, 4, 4, 3, 3),
    "more queries than keys": Shape((2,), 2, 1, 5, 3, 3, 2),
    "one query": Shape((2,), 2, 2, 1, 6, 3, 3),
    "one key": Shape((1,), 3, 3, 4, 1, 2, 5),
    "no batch": Shape((), 3, 1, 4, 5, 3, 2),
    "two leading axes": Shape((2, 3), 2, 1, 3, 4, 2, 3),
    "one feature": Shape((1,), 1, 1, 3, 3, 1, 1),
    "odd": Shape((1,), 3, 1, 7, 9, 5, 11),
}

Rng = np.random.Generator
Builder = Callable[[Rng, Shape], dict[str, Any]]


def _masked_rows(rng: Rng, n: Shape) -> dict[str, Any]:
    mask = rng.random(n.scores) > 0.4
    mask[..., 0, :] = False  # a query that may attend to nothing
    return {"mask": mask}


def _minus_inf_bias(rng: Rng, n: Shape) -> dict[str, Any]:
    bias = rng.standard_normal((n.t, n.s))
    bias[rng.random((n.t, n.s)) < 0.3] = -np.inf
    return {"bias": bias}


def _segments(rng: Rng, n: Shape) -> dict[str, Any]:
    q_ids = np.sort(rng.integers(0, 3, (*n.batch, n.t)), axis=-1)
    k_ids = np.sort(rng.integers(0, 3, (*n.batch, n.s)), axis=-1)
    return {"segments": (q_ids, k_ids)}


def _ragged(rng: Rng, n: Shape) -> dict[str, Any]:
    return {"causal": True, "offset": rng.integers(-1, max(n.s, 2), n.batch)}


OPTIONS: dict[str, Builder] = {
    "scale": lambda rng, n: {"scale": -0.7},
    "causal": lambda rng, n: {"causal": True},
    "causal top-left": lambda rng, n: {"causal": True, "offset": 0},
    "causal ragged": _ragged,
    "window": lambda rng, n: {"window": (1, 1)},
    "window left": lambda rng, n: {"window": (2, None), "offset": 1},
    "mask": lambda rng, n: {"mask": rng.random((n.t, n.s)) > 0.3},
    "masked rows": _masked_rows,
    "bias": lambda rng, n: {"bias": rng.standard_normal(n.scores)},
    "bias of a head": lambda rng, n: {"bias": rng.standard_normal((n.heads, 1, n.s))},
    "bias -inf": _minus_inf_bias,
    "softcap": lambda rng, n: {"softcap": 1.3},
    "sinks": lambda rng, n: {"sinks": rng.standard_normal(n.heads)},
    "dropout": lambda rng, n: {"dropout": 0.35, "seed": int(rng.integers(2**63))},
    "segments": _segments,
}

SINGLES: list[tuple[str, ...]] = [(), *((name,) for name in OPTIONS)]
PAIRS: list[tuple[str, ...]] = list(itertools.combinations(OPTIONS, 2))
EVERYTHING = ("scale", "causal ragged", "window", "masked rows", "bias", "softcap", "sinks", "dropout", "segments")
SHARED_BIAS = ("causal", "bias of a head", "dropout", "sinks")
NARROW = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass
class Case:
    """Inputs, cotangents and tangents of one case, all Gaussian, all float64."""

    shape: Shape
    options: dict[str, Any]
    q: Any
    k: Any
    v: Any
    dout: Any
    dlse: Any
    dout_dot: Any
    dlse_dot: Any
    t: Tangents = field(default_factory=Tangents)

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v

    @property
    def tangents(self) -> dict[str, Any]:
        """The keyword tangents of jvp and hvp."""
        return {"bias_dot": self.t.bias, "sinks_dot": self.t.sinks}

    def cast(self, dtype: Any) -> Case:
        """The same case in another dtype (float32 for what accompanies 16-bit inputs in float32: dlse)."""
        wide = np.float32 if np.dtype(dtype).itemsize == 2 else dtype

        def to(x: Any, kind: Any = dtype) -> Any:
            return None if x is None else x.astype(kind)

        options = {name: to(value) if name in ("bias", "sinks") else value for name, value in self.options.items()}
        return Case(
            self.shape,
            options,
            *(to(x) for x in (*self.qkv, self.dout)),
            to(self.dlse, wide),
            to(self.dout_dot),
            to(self.dlse_dot, wide),
            Tangents(*(to(x) for x in self.t)),
        )


def make(names: tuple[str, ...] = (), shape: Shape = SHAPES["grouped"], seed: int = 0) -> Case:
    """The case of these options (later ones win where two set the same) and this shape."""
    rng = np.random.default_rng([seed, *(list(OPTIONS).index(name) for name in names)])
    n = shape
    options: dict[str, Any] = {}
    for name in names:
        options |= OPTIONS[name](rng, n)
    q = rng.standard_normal((*n.batch, n.heads, n.t, n.d))
    k = rng.standard_normal((*n.batch, n.key_heads, n.s, n.d))
    v = rng.standard_normal((*n.batch, n.key_heads, n.s, n.e))
    out = (*n.batch, n.heads, n.t, n.e)

    def like(x: Any) -> Any:
        return None if x is None else rng.standard_normal(x.shape)

    t = Tangents(like(q), like(k), like(v), like(options.get("bias")), like(options.get("sinks")))
    return Case(
        n,
        options,
        q,
        k,
        v,
        rng.standard_normal(out),
        rng.standard_normal(out[:-1]),
        rng.standard_normal(out),
        rng.standard_normal(out[:-1]),
        t,
    )


def label(names: tuple[str, ...]) -> str:
    """The test id of a combination."""
    return " + ".join(names) or "no option"
