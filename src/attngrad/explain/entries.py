"""Where one entry of a trace stands: from a row, a column, a head and a batch entry to the letters of its formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attngrad.core.checks import check_integer, fail
from attngrad.explain.rules import KEY_SIDE, is_flat

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace


def index(t: Trace, name: str, env: Mapping[str, int]) -> tuple[int, ...]:
    """The index into the array of a step."""
    rule, shape = t.rules[name], t[name].shape
    if rule.letters == "h":
        return (env["h"],)
    head = env["h"] // (t.group if name in KEY_SIDE else 1)
    leading = tuple(int(n) for n in np.unravel_index(env["b"], t.operands.q.shape[:-3] or (1,)))
    full = (*leading, *(() if is_flat(name) else (head,)), *(env[c] for c in rule.letters))
    index = full[len(full) - len(shape) :]
    return tuple(0 if n == 1 else a for a, n in zip(index, shape, strict=True))


def locate(
    t: Trace, function: str, name: str, row: int, column: int | None, head: int, batch: int | tuple[int, ...]
) -> tuple[dict[str, int], float]:
    """The letters of an entry, checked, and its value."""
    x, rule = t[name], t.rules[name]
    shape = (*(1,) * (len(rule.letters) - x.ndim), *x.shape)  # a bias may have fewer axes
    extents = [int(n) for n in shape[-len(rule.letters) :]]
    given: list[tuple[str, Any]] = [("row", row)]
    if len(rule.letters) == 2:
        if column is None:
            fail(TypeError, function, "column", f"be given, for {name} is a matrix", "None")
        given.append(("column", column))
    elif column is not None:
        fail(TypeError, function, "column", f"be None, for {name} has one number a row", column)
    env = {"b": _batch(t, function, batch), "h": 0}
    for letter, n, (argument, at) in zip(rule.letters, extents, given, strict=True):
        env[letter] = _wrap(function, argument, at, n)
    if rule.letters != "h" and not is_flat(name):
        heads = t.operands.heads // (t.group if name in KEY_SIDE else 1)
        own = _wrap(function, "head", head, heads)
        env["h"] = own * (t.group if name in KEY_SIDE else 1)
        if rule.letters[-1] in "de":
            env["n"] = own * extents[-1] + env[rule.letters[-1]]
            env["p"] = (env[rule.letters[-1]] + extents[-1] // 2) % extents[-1]
    return env, float(x[index(t, name, env)])


def _batch(t: Trace, function: str, batch: int | tuple[int, ...]) -> int:
    shape = t.operands.q.shape[:-3]
    if isinstance(batch, tuple):
        if len(batch) != len(shape):
            fail(ValueError, function, "batch", f"have {len(shape)} indices, one a leading axis", batch)
        places = tuple(_wrap(function, "batch", b, n) for b, n in zip(batch, shape, strict=True))
        return int(np.ravel_multi_index(places, shape)) if shape else 0
    return _wrap(function, "batch", batch, math.prod(shape))


def _wrap(function: str, argument: str, value: object, n: int) -> int:
    """An index into n, negative ones from the end."""
    at = check_integer(function, argument, value)
    if not -n <= at < n:
        fail(ValueError, function, argument, f"be in [{-n}, {n})", at)
    return at % n
