"""Where an entry of a trace stands: the letters of its formula, and the index into its array; and labels of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from attngrad.core.arrays import kind_of
from attngrad.core.checks import check_integer, fail
from attngrad.explain.rules import KEY_SIDE, is_flat

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

Tokens = tuple[tuple[str, ...], tuple[str, ...]]
"""The labels of queries, and those of keys."""
Place = int | tuple[int, ...]
"""An index into the leading axes, flat or one per axis."""


def locate(
    function: str, trace: Trace, name: str, row: int, column: int | None, head: int, batch: Place
) -> tuple[dict[str, int], tuple[int, ...]]:
    """The letters of an entry, checked, and its index."""
    x, rule = trace[name], trace.rules[name]
    shape = (*(1,) * (len(rule.letters) - x.ndim), *x.shape)  # a bias may have fewer axes
    extents = [int(n) for n in shape[-len(rule.letters) :]]
    given: list[tuple[str, Any]] = [("row", row)]
    if len(rule.letters) == 2:
        if column is None:
            fail(TypeError, function, "column", f"be given, for {name} is a matrix", "None")
        given.append(("column", column))
    elif column is not None:
        fail(TypeError, function, "column", f"be None, for {name} has one number per row", column)
    leading = trace.operands.q.shape[:-3]
    env = {"b": _batch(function, leading, batch), "h": 0}
    for letter, n, (argument, at) in zip(rule.letters, extents, given, strict=True):
        env[letter] = _wrap(function, argument, at, n)
    if rule.letters == "h":
        return env, (env["h"],)
    places = [int(n) for n in np.unravel_index(env["b"], leading or (1,))]
    if not is_flat(name):
        share = trace.group if name in KEY_SIDE else 1
        own = _wrap(function, "head", head, trace.operands.heads // share)
        env["h"] = own * share
        places.append(own)
        if rule.letters[-1] in "de":
            env["n"] = own * extents[-1] + env[rule.letters[-1]]
            env["p"] = (env[rule.letters[-1]] + extents[-1] // 2) % extents[-1]
    places += [env[c] for c in rule.letters]
    index = places[len(places) - x.ndim :]
    return env, tuple(0 if n == 1 else a for a, n in zip(index, x.shape, strict=True))


def _batch(function: str, shape: tuple[int, ...], batch: Place) -> int:
    if not isinstance(batch, tuple):
        return _wrap(function, "batch", batch, math.prod(shape))
    if len(batch) != len(shape):
        fail(ValueError, function, "batch", f"have {len(shape)} indices, one per leading axis", batch)
    places = tuple(_wrap(function, "batch", b, n) for b, n in zip(batch, shape, strict=True))
    return int(np.ravel_multi_index(places, shape)) if shape else 0


def _wrap(function: str, argument: str, value: object, n: int) -> int:
    """An index into n, negative ones from the end."""
    at = check_integer(function, argument, value)
    if not -n <= at < n:
        fail(ValueError, function, argument, f"be in [{-n}, {n})", at)
    return at % n


def check_tokens(function: str, tokens: Any, t: int, s: int) -> Tokens | None:
    """The labels of t queries and s keys, from one list for both or a pair of lists."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        _bad_tokens(function, t, s, kind_of(tokens))
    pair = tokens if len(tokens) == 2 and not any(isinstance(a, str) for a in tokens) else (tokens, tokens)
    for labels, n in zip(pair, (t, s), strict=True):
        if not isinstance(labels, Sequence) or not all(isinstance(label, str) for label in labels):
            _bad_tokens(function, t, s, "labels that are no strings")
        if len(labels) != n:
            rule = f"have {t} labels of queries and {s} of keys"
            fail(ValueError, function, "tokens", rule, f"{len(labels)} for {n}")
    return tuple(pair[0]), tuple(pair[1])


def _bad_tokens(function: str, t: int, s: int, got: str) -> NoReturn:
    rule = f"be a list of {t} strings" if t == s else f"be a pair of lists, {t} and {s} strings"
    fail(TypeError, function, "tokens", rule, got, "A text is split into tokens with text.split().")
