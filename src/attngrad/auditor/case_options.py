"""The options of a case: as they were given, or made for it where True was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from attngrad.auditor.dims import AXES, Dims
from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail
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
    n = replace(n, **sizes)
    return n if n.hq % n.hk == 0 else replace(n, hk=n.hq)


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
