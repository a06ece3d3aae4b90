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

from attngrad.auditor.case_options import Rng, check_options, fixed, made
from attngrad.auditor.dims import AXES, INPUTS, Dims
from attngrad.auditor.plans import PLANS, STRIDES, Plan
from attngrad.core.arrays import NDArray
from attngrad.core.binding import bind
from attngrad.core.dtypes import KERNEL_DTYPES

EFFORTS = ("quick", "default", "full")


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
        for number, plan in enumerate(PLANS[level]):
            dims = plan.dims if only is None else only(plan.dims)
            if plan.effort > wanted or dims is None or (plan.overflows and np.dtype(dtype).itemsize <= 2):
                continue
            rng = np.random.default_rng((seed, repeat, number))
            name = plan.name if repeat == 0 else f"{plan.name}, again ({repeat + 1})"
            yield make(level, plan._replace(dims=dims, name=name), dtype, rng, chosen, plain_output)
