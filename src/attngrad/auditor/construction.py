"""Objects to run: a class is constructed by what the names of its parameters mean, an object is copied."""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any

import numpy as np

from attngrad.auditor import names
from attngrad.auditor.plans import Dims


def sizes_of(candidate: Any) -> dict[str, str]:
    """The sizes that a class is constructed with: what a parameter means, by its name."""
    try:
        found = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return {"d_model": "model", "num_heads": "heads"}
    kinds = inspect.Parameter
    meant: dict[str, str] = {}
    unknown = []
    for p in found:
        means = names.weight(p.name) if p.default is kinds.empty else None
        means = means or names.known(p.name, "sizes")
        if p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            if p.kind is kinds.VAR_POSITIONAL and not meant:
                unknown += ["", ""]
        elif means is None and p.default is kinds.empty:
            unknown.append(p.name)
            meant[p.name] = ""
        elif means is not None and (p.default is kinds.empty or _is_set(means, p.default)):
            meant[p.name] = means
    free = iter([m for m in ("model", "heads") if m not in meant.values()])
    for name in unknown:
        meant[name] = next(free, "unknown")
    return meant


def _is_set(means: str, default: Any) -> bool:
    """Whether a parameter with this default must be given another value."""
    if means == "config":
        return True
    return (means not in ("length", "batch", "seed", "rng", "dtype", "off") and default is not None) or (
        means == "off" and bool(default)
    )


class Config:
    """What a class reads its sizes from, whatever it calls them: ``config.n_embd``, ``args.n_kv_heads``."""

    def __init__(self, n: Dims, dtype: Any) -> None:
        self._sizes, self._dtype, self._asked = n, dtype, set[str]()

    def __getattr__(self, name: str) -> Any:
        means = None if name.startswith("_") else names.known(name, "sizes")
        if means is None:
            raise AttributeError(f"the auditor's config has no {name!r}: hand over an object in place of the class")
        self._asked.add(means)
        return _value(means, self._sizes, self._dtype)


def asked_of(candidate: Any, n: Dims) -> set[str]:
    """The sizes that a class asks for, from its parameters or from its config."""
    found = set(sizes_of(candidate).values())
    if "config" in found:
        config = Config(n, np.float64)
        with contextlib.suppress(Exception):
            candidate(*[config if m == "config" else _value(m, n, np.float64) for m in positional(candidate)])
        found |= config._asked
    return found


def construct(candidate: Any, n: Dims, dtype: Any) -> Any:
    """An object to run: a new one of a class, a copy of an object."""
    if not inspect.isclass(candidate):
        return copy.deepcopy(candidate)
    return candidate(*[_value(means, n, dtype) for means in positional(candidate)], **_keywords(candidate, n, dtype))


def positional(candidate: Any) -> list[str]:
    """What is given by position: all that is required."""
    try:
        found = inspect.signature(candidate).parameters
    except (TypeError, ValueError):
        return ["model", "heads"]
    kinds = inspect.Parameter
    sizes = sizes_of(candidate)
    star = [m for name, m in sizes.items() if name not in found]
    return [
        sizes[p.name]
        for p in found.values()
        if p.default is kinds.empty and p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ] + (["model", "heads"] if star or any(p.kind is kinds.VAR_POSITIONAL for p in found.values()) else [])


def _keywords(candidate: Any, n: Dims, dtype: Any) -> dict[str, Any]:
    try:
        found = inspect.signature(candidate).parameters
    except (TypeError, ValueError):
        return {}
    kinds = inspect.Parameter
    return {
        name: _value(means, n, dtype)
        for name, means in sizes_of(candidate).items()
        if name in found and (found[name].default is not kinds.empty or found[name].kind is kinds.KEYWORD_ONLY)
    }


def _value(means: str, n: Dims, dtype: Any) -> Any:
    model = n.model or n.inner
    values: dict[str, Any] = {"model": model, "heads": n.hq, "kv_heads": n.hk, "width": n.d, "value_width": n.d}
    values |= {"inner": n.inner, "length": max(n.t, n.s), "batch": n.b, "off": 0, "seed": 0, "dtype": dtype}
    if means == "config":
        return Config(n, dtype)
    if means.startswith("w_"):
        return np.zeros(
            (n.inner, model) if means == "w_o" else (model, 3 * n.inner if means == "w_qkv" else n.inner), dtype
        )
    if means == "rng":
        return np.random.default_rng(0)
    if means not in values:
        raise TypeError(f"its constructor takes something that the auditor cannot give ({means})")
    return values[means]
