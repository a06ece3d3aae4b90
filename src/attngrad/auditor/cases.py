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

from attngrad.auditor.plans import AXES, INPUTS, PLANS, STRIDES, Dims, Plan
from attngrad.core.arrays import NDArray
from attngrad.core.binding import bind
from attngrad.core.checks import fail
from attngrad.core.dtypes import KERNEL_DTYPES
from attngrad.core.options import OPTION_NAMES

Rng = np.random.Generator


def _random_mask(rng: Rng, n: Dims) -> NDArray:
    mask = rng.random(n.scores) > 0.35
    if n.t > 1:
        mask[..., n.t // 2, :] = False  # a query that may attend to nothing
    return mask


def _random_bias(rng: Rng, n: Dims) -> NDArray:
    shapes = [n.scores, (n.hq, n.t, n.s), (n.t, n.s), (n.hq, 1, n.s), (n.b, 1, 1, n.s)]
    return rng.standard_normal(shapes[int(rng.integers(len(shapes)))])


_MADE: dict[str, Callable[[Rng, Dims], Any]] = {
    "mask": _random_mask,
    "bias": _random_bias,
    "sinks": lambda rng, n: rng.standard_normal(n.hq),
    "segments": lambda rng, n: tuple(np.sort(rng.integers(0, 2, (n.b, m)), axis=-1) for m in (n.t, n.s)),
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


def fixed(n: Dims, options: Mapping[str, Any]) -> Dims:
    """``n`` with the sizes that arrays among the options dictate."""
    sizes: dict[str, int] = {}
    for name in ("mask", "bias"):
        x = options.get(name)
        if isinstance(x, np.ndarray):
            axes = zip(reversed(AXES[name]), reversed(x.shape), strict=False)
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
    alike = n.hk == n.hq
    n = replace(n, **sizes)
    return replace(n, hk=n.hq) if alike or n.hq % n.hk else n


def made(options: Mapping[str, Any], rng: Rng, n: Dims, dtype: Any) -> dict[str, Any]:
    """The options of one case: arrays in the dtype, made where True was given."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _MADE and value is True:
            value = _MADE[name](rng, n)
        if isinstance(value, np.ndarray) and name in ("bias", "sinks"):
            value = value.astype(dtype)
        found[name] = value
    return found


Spelling = Callable[[Mapping[str, Any]], dict[str, Any]]
EFFORTS = ("quick", "default", "full")


@dataclass(frozen=True)
class Case:
    """The inputs of one call, rounded to the dtype, and its options."""

    name: str
    dims: Dims
    arrays: Mapping[str, NDArray]
    options: Mapping[str, Any] = field(default_factory=dict)
    spelling: Spelling | None = None
    """How a candidate of another convention is given the options."""
    by_sequence: bool = False
    """Whether causal and window count from the corner of each sequence, as where sequences come end to end."""

    @property
    def spelt(self) -> Case:
        """The case as the candidate is given it."""
        return self if self.spelling is None else replace(self, options=self.spelling(self.options), spelling=None)

    def __str__(self) -> str:
        return self.name

    @property
    def given(self) -> dict[str, Any]:
        """What a pipeline starts from."""
        heads = {"num_heads": self.dims.hq, "num_kv_heads": self.dims.hk} if "query" in self.arrays else {}
        packed = {"by_sequence": True} if self.by_sequence else {}
        return {**self.arrays, **self.options, **heads, **packed}


Caller = Callable[[Case], tuple[Callable[[], Any], dict[str, NDArray]]]
"""Prepares a call: what to run, and the arrays that it must not change, by name."""


def _arrays(level: str, n: Dims, rng: Rng, plain_output: bool) -> dict[str, NDArray]:
    """Gaussian inputs, weights scaled by their fan-in; with ``plain_output``, no output projection."""
    n = replace(n, model=n.model or n.inner)
    fan = 1.0 / math.sqrt(n.model or 1)
    factors = {"w_q": 1.5 * fan, "w_k": 1.5 * fan, "w_v": fan, "w_o": fan}
    arrays = {
        name: factors.get(name, 1.0) * rng.standard_normal([getattr(n, axis) for axis in AXES[name]])
        for name in INPUTS[level]
        if name != "dy" or not plain_output
    }
    if plain_output:
        arrays |= {"w_o": np.eye(n.inner), "dy": rng.standard_normal((n.b, n.t, n.inner))}
    return arrays


def make(level: str, plan: Plan, dtype: Any, rng: Rng, options: Mapping[str, Any], plain_output: bool = False) -> Case:
    """One case: values by the plan, rounded to the dtype, then strides, options and tangents."""
    n = fixed(plan.dims, options)
    arrays = _arrays(level, n, rng, plain_output)
    logit = 60.0 if np.dtype(dtype).itemsize > 2 else 20.0
    if plan.fill is not None and plan.fill not in STRIDES:
        plan.fill(arrays, logit)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    if plan.fill in STRIDES:
        plan.fill(arrays, logit)
    chosen = made(options, rng, n, dtype)
    if level == "attention":
        moved: dict[str, NDArray] = arrays | {x: chosen[x] for x in ("bias", "sinks") if x in chosen}
        for name, x in moved.items():
            arrays[f"{name}_dot"] = rng.standard_normal(x.shape).astype(dtype)
    q, k = np.zeros((n.b, n.hq, n.t, n.d), dtype), np.zeros((n.b, n.hk, n.s, n.d), dtype)
    bind("audit", q, k, k, chosen, kernels=np.dtype(dtype) in KERNEL_DTYPES)  # which says what is wrong with an option
    return Case(plan.name, n, arrays, chosen)


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
    for repeat in range(3 if effort == "full" else 1):
        made: set[Any] = set()
        for number, plan in enumerate(PLANS[level]):
            dims = plan.dims if only is None else only(plan.dims)
            if plan.effort > wanted or dims is None or (repeat and dims.large) or (dims, plan.fill) in made:
                continue
            made.add((dims, plan.fill))
            rng = np.random.default_rng((seed, repeat, number))
            name = plan.name if repeat == 0 else f"{plan.name}, again ({repeat + 1})"
            yield make(level, plan._replace(dims=dims, name=name), dtype, rng, chosen, plain_output)
