"""What is computed: the shape and options of a case, its inputs, and the pairs and FLOPs that it counts for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.dtypes import BFLOAT16

Rng = np.random.Generator

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
}
SHORT_DTYPES = {"float32": "", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}


class Dims(NamedTuple):
    """B batch, Hq and Hk heads, T queries, S keys, D features of q and k, E of v."""

    batch: int
    heads: int
    key_heads: int
    t: int
    s: int
    d: int
    e: int

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.key_heads

    @property
    def label(self) -> str:
        """B,H,T,D; a slash where query and key sides differ: Hq/Hk, T/S, D/E.

        >>> Dims(8, 32, 8, 1, 4096, 128, 128).label
        '8,32/8,1/4096,128'
        """
        pairs = ((self.heads, self.key_heads), (self.t, self.s), (self.d, self.e))
        return ",".join([str(self.batch), *(str(a) if a == b else f"{a}/{b}" for a, b in pairs)])


def dims(batch: int, heads: int, t: int, d: int, *, key_heads: int = 0, s: int = 0, e: int = 0) -> Dims:
    """Square unless said otherwise: key_heads, s and e default to heads, t and d."""
    return Dims(batch, heads, key_heads or heads, t, s or t, d, e or d)


@dataclass(frozen=True)
class Kind:
    """The options of a case. ``dbias``: the bias is differentiated too."""

    causal: bool = False
    window: int | None = None
    mask: Callable[[Rng, Dims], NDArray] | None = None
    bias: Callable[[Dims], tuple[int, int, int, int]] | None = None
    dbias: bool = False


def _random_mask(rng: Rng, n: Dims) -> NDArray:
    mask: NDArray = rng.random((1, 1, n.t, n.s)) < 0.5
    mask[..., 0] = True  # no row that sees nothing: peers disagree on those
    return mask


def _padding(rng: Rng, n: Dims) -> NDArray:
    lengths = rng.integers(max(n.s // 2, 1), n.s + 1, (n.batch, 1, 1, 1))
    padding: NDArray = np.arange(n.s) < lengths
    return padding


def _bias_bhts(n: Dims) -> tuple[int, int, int, int]:
    return n.batch, n.heads, n.t, n.s


def _bias_hts(n: Dims) -> tuple[int, int, int, int]:
    return 1, n.heads, n.t, n.s


KINDS: dict[str, Kind] = {
    "": Kind(),
    "causal": Kind(causal=True),
    "window 64": Kind(window=64),
    "window 256": Kind(window=256),
    "mask 50%": Kind(mask=_random_mask),
    "padding": Kind(mask=_padding),
    "bias BHTS": Kind(bias=_bias_bhts),
    "bias HTS": Kind(bias=_bias_hts),
    "dbias BHTS": Kind(bias=_bias_bhts, dbias=True),
    "dbias HTS": Kind(bias=_bias_hts, dbias=True),
}


TANGENTS = ("q_dot", "k_dot", "v_dot", "dout_dot")


class Inputs(NamedTuple):
    """The arrays of a case; mask and bias with four axes, some of length 1. Tangents that are None are zero."""

    q: NDArray
    k: NDArray
    v: NDArray
    dout: NDArray
    mask: NDArray | None = None
    bias: NDArray | None = None
    q_dot: NDArray | None = None
    k_dot: NDArray | None = None
    v_dot: NDArray | None = None
    dout_dot: NDArray | None = None

    def along(self, tangents: Sequence[str]) -> Inputs:
        """These inputs with the tangents named, and no others."""
        nothing: dict[str, Any] = {name: None for name in TANGENTS if name not in tangents}
        return self._replace(**nothing)

    def given(self, names: Sequence[str] = TANGENTS) -> dict[str, NDArray]:
        """The tangents that are not None, of ``names``, by the name of what they are a tangent of."""
        found = {name: getattr(self, name) for name in names}
        return {name.removesuffix("_dot"): x for name, x in found.items() if x is not None}


@dataclass(frozen=True)
class Case:
    """One line of the grid. ``level``: 0 quick, 1 default, 2 full."""

    group: str
    n: Dims
    kind: str = ""
    dtype: str = "float32"
    passes: tuple[str, ...] = ("forward", "forward + backward")
    level: int = 1

    @property
    def options(self) -> Kind:
        """What its kind stands for."""
        return KINDS[self.kind]

    @property
    def label(self) -> str:
        """Shape, kind and dtype, as the tables show them."""
        return " ".join(part for part in (self.n.label, self.kind, SHORT_DTYPES[self.dtype]) if part)

    def inputs(self, tangents: Sequence[str] = (), seed: int = 0) -> Inputs:
        """Gaussian inputs of the case's dtype, the same for the same seed, with the tangents asked for."""
        rng, n = np.random.default_rng(seed), self.n
        dtype = DTYPES[self.dtype]
        drawn = np.float64 if self.dtype == "float64" else np.float32

        def gaussian(*shape: int) -> NDArray:
            return rng.standard_normal(shape, drawn).astype(dtype, copy=False)

        q = gaussian(n.batch, n.heads, n.t, n.d)
        k, v = gaussian(n.batch, n.key_heads, n.s, n.d), gaussian(n.batch, n.key_heads, n.s, n.e)
        dout = gaussian(n.batch, n.heads, n.t, n.e)
        mask = None if self.options.mask is None else self.options.mask(rng, n)
        bias = None if self.options.bias is None else gaussian(*self.options.bias(n))
        x = Inputs(q, k, v, dout, mask, bias)
        return x._replace(**{name: gaussian(*getattr(x, name.removesuffix("_dot")).shape) for name in tangents})

    def key_range(self, rows: NDArray) -> tuple[NDArray, NDArray]:
        """The first and last key that causal and window leave to each query; the last query meets the last key."""
        position = rows + (self.n.s - self.n.t)
        left, cut = self.options.window, self.options.causal or self.options.window is not None
        first = np.zeros_like(position) if left is None else np.clip(position - left, 0, None)
        last = np.clip(position, -1, self.n.s - 1) if cut else np.full_like(position, self.n.s - 1)
        return first, last

    def visible(self, rows: NDArray) -> NDArray | None:
        """Which keys causal and window leave to the queries ``rows``, ``(rows, S)``; None where they leave all."""
        if not self.options.causal and self.options.window is None:
            return None
        first, last = self.key_range(rows)
        keys = np.arange(self.n.s)
        plane: NDArray = (keys >= first[:, None]) & (keys <= last[:, None])
        return plane

    def pairs(self) -> int:
        """Query-key pairs that causal and window leave visible, over batch and heads; masks do not lower the count."""
        first, last = self.key_range(np.arange(self.n.t))
        return self.n.batch * self.n.heads * int(np.clip(last - first + 1, 0, None).sum())

    def flops(self) -> int:
        """Of the forward pass: 2 (D + E) a visible pair, which is 4 B H T S D without causal or window and D = E.

        >>> Case("", dims(1, 8, 2048, 64)).flops() == 4 * 8 * 2048 * 2048 * 64
        True
        """
        return 2 * self.pairs() * (self.n.d + self.n.e)

    def bytes(self) -> int:
        """What the forward pass must read and write once: q, k, v and out."""
        n = self.n
        numbers = n.batch * (n.heads * n.t * (n.d + n.e) + n.key_heads * n.s * (n.d + n.e))
        return numbers * DTYPES[self.dtype].itemsize

    def tiny(self) -> Case:
        """A stand-in with the same options, dtype and proportions, for the tests."""
        n, group = self.n, min(self.n.group, 2)
        t, s = (min(x, 1 if x == 1 else 5 if n.t == n.s else 3 if x < max(n.t, n.s) else 7) for x in (n.t, n.s))
        d, e = (3, 3) if n.d == n.e else (3, 5)
        kind = "window 2" if self.options.window else self.kind
        return replace(self, n=Dims(min(n.batch, 2), 2 * group, 2, t, s, d, e), kind=kind)


KINDS["window 2"] = Kind(window=2)  # of the stand-ins
