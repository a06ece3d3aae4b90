"""The cases that provoke: shapes, values and strides at which wrong attention gradients show.

Cotangents are random, never ones; values come with a large mean, which is what makes the row term matter; logits are
large, equal or one-hot; shapes are odd, T != S in both directions, one token, one key, groups of heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.binding import bind
from attngrad.core.checks import fail
from attngrad.core.dtypes import KERNEL_DTYPES
from attngrad.core.options import OPTION_NAMES

Rng = np.random.Generator

EFFORTS = ("quick", "default", "full")
FEATURES = {
    "gqa": "fewer key heads than query heads",
    "cross": "as many keys as queries only (T = S)",
    "widths": "values as wide as keys only (D = E)",
    "rectangular": "d_model other than heads times width",
}
"""What a candidate may leave out without being wrong, and what a case that needs it has."""


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


@dataclass(frozen=True)
class Case:
    """The inputs of one call, rounded to the dtype, and its options."""

    name: str
    dims: Dims
    arrays: Mapping[str, NDArray]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def given(self) -> dict[str, Any]:
        """What a pipeline starts from."""
        heads = {"num_heads": self.dims.hq, "num_kv_heads": self.dims.hk} if "query" in self.arrays else {}
        return {**self.arrays, **self.options, **heads}


# --- values ----------------------------------------------------------------------------------------------------------

Fill = Callable[[dict[str, NDArray], Rng, float], None]


def _gaussian(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    pass


def _scaled_to(x: dict[str, NDArray], logit: float) -> None:
    """q and k scaled alike, so that the largest |z| is ``logit``."""
    group = x["q"].shape[1] // x["k"].shape[1]
    z = x["q"] @ np.repeat(x["k"], group, axis=1).swapaxes(-1, -2) / math.sqrt(x["q"].shape[-1])
    factor = math.sqrt(logit / np.max(np.abs(z)))
    x["q"], x["k"] = x["q"] * factor, x["k"] * factor


def _large_logits(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    _scaled_to(x, logit)


def _huge_logits(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    """Past the overflow of exp, in float64 too."""
    x["q"][..., 0], x["k"][..., 0] = np.abs(x["q"][..., 0]) + 1.0, np.abs(x["k"][..., 0]) + 1.0
    _scaled_to(x, 60.0 * logit)


def _equal_logits(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    x["k"] = np.broadcast_to(x["k"][:, :, :1], x["k"].shape).copy()


def _one_hot(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    """Query i looks at key i mod S nearly alone, with a second key close enough to leave a gradient."""
    keys, group = x["k"].shape[2], x["q"].shape[1] // x["k"].shape[1]
    chosen = x["k"][:, :, np.arange(x["q"].shape[2]) % keys]
    norm = np.sum(chosen * chosen, axis=-1, keepdims=True)
    x["q"] = np.repeat(chosen / norm, group, axis=1) * 0.25 * logit * math.sqrt(x["q"].shape[-1])


def _correlated(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    keys, group = x["k"].shape[2], x["q"].shape[1] // x["k"].shape[1]
    near = np.repeat(x["k"][:, :, np.arange(x["q"].shape[2]) % keys], group, axis=1)
    x["q"] = 0.8 * near + 0.6 * x["q"]


def _large_mean(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    name = "v" if "v" in x else "value"
    x[name] = x[name] + 8.0


def _strided(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    """A cotangent whose axes are in another order in memory, as after merging heads."""
    name = "dout" if "dout" in x else "dy"
    axes = (0, 2, 1, 3) if name == "dout" else (1, 0, 2)
    x[name] = np.ascontiguousarray(x[name].transpose(axes)).transpose(axes)


def _zero_stride(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    """One cotangent for all tokens, its stride over them zero, as after a sum over tokens."""
    name = "dout" if "dout" in x else "dy"
    first = x[name][..., :1, :].copy()
    strides = (*first.strides[:-2], 0, first.strides[-1])
    x[name] = np.lib.stride_tricks.as_strided(first, x[name].shape, strides)


def _self(x: dict[str, NDArray], rng: Rng, logit: float) -> None:
    x["key"], x["value"] = x["query"].copy(), x["query"].copy()


@dataclass(frozen=True)
class _Plan:
    name: str
    dims: Dims
    fill: Fill = _gaussian
    effort: int = 0


_ATTENTION = (
    _Plan("plain", Dims(2, 2, 2, 5, 5, 4, 4)),
    _Plan("one token", Dims(1, 1, 1, 1, 1, 3, 3)),
    _Plan("one head, one batch", Dims(1, 1, 1, 4, 4, 3, 3)),
    _Plan("one feature", Dims(1, 2, 2, 3, 3, 1, 1), effort=1),
    _Plan("odd sizes", Dims(2, 3, 3, 7, 7, 5, 5)),
    _Plan("more keys than queries", Dims(1, 2, 2, 3, 7, 4, 4)),
    _Plan("more queries than keys", Dims(2, 2, 2, 7, 3, 3, 3)),
    _Plan("one query", Dims(2, 2, 2, 1, 6, 4, 4)),
    _Plan("one key", Dims(1, 2, 2, 4, 1, 3, 3)),
    _Plan("groups of heads", Dims(2, 4, 2, 4, 4, 3, 3)),
    _Plan("values wider than keys", Dims(2, 2, 2, 5, 5, 3, 5)),
    _Plan("values narrower than keys", Dims(1, 2, 2, 4, 4, 6, 2), effort=1),
    _Plan("groups, keys, widths at once", Dims(2, 6, 2, 3, 8, 3, 5)),
    _Plan("large logits", Dims(1, 2, 2, 6, 6, 4, 4), _large_logits),
    _Plan("huge logits", Dims(1, 2, 2, 5, 5, 4, 4), _huge_logits, effort=1),
    _Plan("equal logits", Dims(1, 2, 2, 5, 5, 4, 4), _equal_logits),
    _Plan("one-hot attention", Dims(1, 2, 2, 6, 6, 5, 5), _one_hot),
    _Plan("correlated q and k", Dims(1, 2, 2, 11, 11, 4, 4), _correlated),
    _Plan("values with a large mean", Dims(2, 2, 2, 6, 6, 4, 4), _large_mean),
    _Plan("strided cotangent", Dims(2, 3, 3, 4, 4, 4, 4), _strided),
    _Plan("cotangent of stride zero", Dims(1, 2, 2, 5, 5, 4, 4), _zero_stride),
    _Plan("long rows", Dims(1, 1, 1, 37, 37, 8, 8)),
    _Plan("longer rows", Dims(1, 2, 2, 67, 67, 16, 16), effort=1),
    _Plan("one key head for all", Dims(1, 4, 1, 5, 5, 4, 4), effort=1),
    _Plan("many keys", Dims(1, 1, 1, 5, 139, 8, 8), effort=1),
    _Plan("many queries", Dims(1, 1, 1, 139, 6, 8, 8), effort=1),
    _Plan("groups, large mean, long rows", Dims(1, 4, 2, 33, 41, 7, 9), _large_mean, 1),
    _Plan("larger logits, long rows", Dims(1, 2, 2, 35, 35, 8, 8), _large_logits, 1),
    _Plan("tile and a bit", Dims(1, 1, 1, 131, 131, 8, 8), effort=1),
    _Plan("wide features", Dims(1, 1, 1, 9, 9, 67, 67), effort=2),
    _Plan("many heads", Dims(3, 8, 4, 6, 11, 5, 3), effort=2),
)

_LAYER = (
    _Plan("three inputs", Dims(2, 2, 2, 4, 4, 3, 3, 6)),
    _Plan("self-attention", Dims(2, 2, 2, 5, 5, 3, 3, 6), _self),
    _Plan("one batch", Dims(1, 2, 2, 4, 4, 2, 2, 4)),
    _Plan("one token", Dims(2, 2, 2, 1, 1, 2, 2, 4)),
    _Plan("one head", Dims(3, 1, 1, 4, 4, 5, 5, 5)),
    _Plan("batch as long as the sequence", Dims(4, 2, 2, 4, 4, 2, 2, 4)),
    _Plan("odd sizes", Dims(3, 3, 3, 7, 7, 3, 3, 9)),
    _Plan("more keys than queries", Dims(2, 2, 2, 3, 6, 3, 3, 6)),
    _Plan("more queries than keys", Dims(2, 2, 2, 6, 3, 3, 3, 6)),
    _Plan("values with a large mean", Dims(2, 2, 2, 5, 5, 4, 4, 8), _large_mean),
    _Plan("strided cotangent", Dims(2, 2, 2, 4, 4, 4, 4, 8), _strided),
    _Plan("cotangent of stride zero", Dims(2, 2, 2, 4, 4, 4, 4, 8), _zero_stride, 1),
    _Plan("width of its own", Dims(2, 2, 2, 4, 4, 3, 3, 5)),
    _Plan("self-attention, one sequence", Dims(1, 4, 4, 9, 9, 4, 4, 16), _self, 1),
    _Plan("long sequence", Dims(2, 2, 2, 35, 35, 4, 4, 8), effort=1),
    _Plan("self-attention, long sequence", Dims(2, 4, 4, 41, 41, 8, 8, 32), _self, 1),
    _Plan("groups of heads", Dims(2, 4, 2, 5, 5, 2, 2, 8)),
)


# --- options ---------------------------------------------------------------------------------------------------------


def _random_mask(rng: Rng, n: Dims) -> NDArray:
    mask = rng.random(n.scores) > 0.35
    if n.t > 1:
        mask[..., n.t // 2, :] = False  # a query that may attend to nothing
    return mask


def _random_bias(rng: Rng, n: Dims) -> NDArray:
    shapes = [n.scores, (n.hq, n.t, n.s), (n.t, n.s), (n.hq, 1, n.s), (n.b, 1, 1, n.s)]
    return rng.standard_normal(shapes[int(rng.integers(len(shapes)))])


def _random_segments(rng: Rng, n: Dims) -> tuple[NDArray, NDArray]:
    return tuple(np.sort(rng.integers(0, 2, (n.b, m)), axis=-1) for m in (n.t, n.s))  # type: ignore[return-value]


_MADE: dict[str, Callable[[Rng, Dims], Any]] = {
    "mask": _random_mask,
    "bias": _random_bias,
    "sinks": lambda rng, n: rng.standard_normal(n.hq),
    "segments": _random_segments,
}


def check_options(options: object) -> dict[str, Any]:
    """The options of ``audit``: names of attngrad's, arrays as they are, or True for arrays made for each case."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        fail(TypeError, "audit", "options", "be a mapping or None", type(options).__name__, "Use {'causal': True}.")
    for name, value in options.items():
        if name not in OPTION_NAMES or name == "return_lse":
            known = ", ".join(n for n in OPTION_NAMES if n != "return_lse")
            fail(ValueError, "audit", "options", f"have only the names {known}", repr(name))
        if name in _MADE and value is False:
            fail(ValueError, "audit", f"options[{name!r}]", "be an array, or True for made-up ones", "False")
    chosen = {name: value for name, value in options.items() if value is not None}
    if chosen.get("dropout") and "seed" not in chosen:
        chosen["seed"] = 1
    return chosen


def _fixed(n: Dims, options: Mapping[str, Any]) -> Dims:
    """``n`` with the sizes that arrays among the options dictate."""
    sizes: dict[str, int] = {}
    for name in ("mask", "bias"):
        x = options.get(name)
        if isinstance(x, np.ndarray):
            axes = zip(("s", "t", "hq", "b"), reversed(x.shape), strict=False)
            sizes |= {axis: size for axis, size in axes if size != 1}
    if isinstance(options.get("sinks"), np.ndarray):
        sizes["hq"] = len(options["sinks"])
    if isinstance(options.get("segments"), (tuple, list)):
        ids, key_ids = options["segments"]
        sizes |= {"t": ids.shape[-1], "s": key_ids.shape[-1]}
        if ids.ndim > 1 and ids.shape[0] != 1:
            sizes["b"] = ids.shape[0]
    if isinstance(options.get("offset"), np.ndarray) and options["offset"].ndim:
        sizes["b"] = len(options["offset"])
    if not sizes:
        return n
    n = replace(n, **sizes)
    return n if n.hq % n.hk == 0 else replace(n, hk=n.hq)


def _made(options: Mapping[str, Any], rng: Rng, n: Dims, dtype: Any) -> dict[str, Any]:
    """The options of one case: arrays in the dtype, made where True was given."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        if name in _MADE and value is True:
            value = _MADE[name](rng, n)
        if isinstance(value, np.ndarray) and name in ("bias", "sinks"):
            value = value.astype(dtype)
        made[name] = value
    return made


# --- making ----------------------------------------------------------------------------------------------------------


def _arrays(level: str, n: Dims, rng: Rng, plain_output: bool) -> dict[str, NDArray]:
    def normal(*shape: int) -> NDArray:
        return rng.standard_normal(shape)

    if level == "attention":
        return {
            "q": normal(n.b, n.hq, n.t, n.d),
            "k": normal(n.b, n.hk, n.s, n.d),
            "v": normal(n.b, n.hk, n.s, n.e),
            "dout": normal(n.b, n.hq, n.t, n.e),
        }
    inner = n.inner
    model = n.model or inner
    fan = 1.0 / math.sqrt(model)
    arrays = {
        "query": normal(n.b, n.t, model),
        "key": normal(n.b, n.s, model),
        "value": normal(n.b, n.s, model),
        "w_q": 1.5 * fan * normal(model, inner),
        "w_k": 1.5 * fan * normal(model, n.kv_inner),
        "w_v": fan * normal(model, n.kv_inner),
        "w_o": fan * normal(inner, model),
        "dy": normal(n.b, n.t, inner if plain_output else model),
    }
    if plain_output:
        arrays["w_o"] = np.eye(inner)
    return arrays


def make(level: str, plan: _Plan, dtype: Any, rng: Rng, options: Mapping[str, Any], plain_output: bool = False) -> Case:
    """One case: values by the plan, rounded to the dtype, then strides, options and tangents."""
    n = _fixed(plan.dims, options)
    arrays = _arrays(level, n, rng, plain_output)
    late = plan.fill in (_strided, _zero_stride)  # strides are laid out after rounding
    logit = 60.0 if np.dtype(dtype).itemsize > 2 else 20.0
    if not late:
        plan.fill(arrays, rng, logit)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    if late:
        plan.fill(arrays, rng, logit)
    made = _made(options, rng, n, dtype)
    if level == "attention":
        moved: dict[str, NDArray] = arrays | {x: made[x] for x in ("bias", "sinks") if x in made}
        for name, x in moved.items():
            arrays[f"{name}_dot"] = rng.standard_normal(x.shape).astype(dtype)
    q, k = np.zeros((n.b, n.hq, n.t, n.d), dtype), np.zeros((n.b, n.hk, n.s, n.d), dtype)
    bind("audit", q, k, k, made, kernels=np.dtype(dtype) in KERNEL_DTYPES)  # which says what is wrong with an option
    return Case(plan.name, n, arrays, made)


def cases(
    level: str = "attention",
    *,
    options: Mapping[str, Any] | None = None,
    dtype: Any = np.float64,
    effort: str = "default",
    seed: int = 0,
    only: Callable[[Dims], Dims | None] | None = None,
    plain_output: bool = False,
) -> Iterator[Case]:
    """The cases of a level, an effort and a seed; ``only`` adapts or drops shapes (None)."""
    wanted = EFFORTS.index(effort)
    chosen = check_options(options)
    repeats = 3 if effort == "full" else 1
    for repeat in range(repeats):
        for number, plan in enumerate(_ATTENTION if level == "attention" else _LAYER):
            dims = plan.dims if only is None else only(plan.dims)
            if plan.effort > wanted or dims is None or (plan.fill is _huge_logits and np.dtype(dtype).itemsize <= 2):
                continue
            rng = np.random.default_rng((seed, repeat, number))
            name = plan.name if repeat == 0 else f"{plan.name}, again ({repeat + 1})"
            yield make(level, replace(plan, dims=dims, name=name), dtype, rng, chosen, plain_output)
