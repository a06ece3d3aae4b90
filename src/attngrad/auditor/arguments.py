"""What a candidate takes, by its signature; and arguments that are its own, to be watched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor.cases import Case
from attngrad.core.arrays import NDArray
from attngrad.core.options import OPTION_NAMES

Caller = Callable[[Case], tuple[Callable[[], Any], dict[str, NDArray]]]
"""Prepares a call: what to run, and the arrays that it must not change, by name."""
QKV = ("q", "k", "v", "dout")


class Parameters(NamedTuple):
    """The parameters that must be given by position; those that can be by keyword; whether any can (``**``)."""

    required: tuple[str, ...] = QKV
    keywords: frozenset[str] = frozenset()
    everything: bool = False
    names: tuple[str, ...] = ()
    """All of them; with ``**``, those of the options."""


def parameters_of(candidate: Any) -> Parameters:
    """The parameters of a candidate; where it has no signature that could be read, (q, k, v, dout)."""
    try:
        found = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return Parameters()
    kinds = inspect.Parameter
    required: tuple[str, ...] = ()
    keywords, everything = set(), False
    for p in found:
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) and p.default is kinds.empty:
            required += (p.name,)
        elif p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            keywords.add(p.name)
        elif p.kind is kinds.VAR_POSITIONAL and not required:
            required = QKV
        elif p.kind is kinds.VAR_KEYWORD:
            everything = True
    names = tuple(OPTION_NAMES) if everything else tuple(p.name for p in found)
    return Parameters(required, frozenset(keywords), everything, names)


def fresh(x: NDArray) -> NDArray:
    """A writable copy with the same strides in kind: zero strides and axis order are part of the case."""
    if x.size and 0 in x.strides:
        shape = tuple(1 if s == 0 else n for n, s in zip(x.shape, x.strides, strict=True))
        small = np.array(x[tuple(slice(0, n) for n in shape)])
        strides = tuple(0 if s == 0 else t for s, t in zip(x.strides, small.strides, strict=True))
        return np.lib.stride_tricks.as_strided(small, x.shape, strides)
    return np.array(x, order="K")


def taken(options: Mapping[str, Any], names: frozenset[str], everything: bool) -> dict[str, Any]:
    """The options that a candidate takes, their arrays as copies of its own."""

    def own(x: Any) -> Any:
        return fresh(x) if isinstance(x, np.ndarray) else tuple(map(own, x)) if isinstance(x, tuple) else x

    return {name: own(x) for name, x in options.items() if everything or name in names}


def arrays_in(options: Mapping[str, Any]) -> dict[str, NDArray]:
    """The arrays among the options, those of a pair as ``segments[0]``."""
    found = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    pairs = ((name, x) for name, x in options.items() if isinstance(x, tuple))
    return found | {f"{name}[{i}]": y for name, x in pairs for i, y in enumerate(x) if isinstance(y, np.ndarray)}
