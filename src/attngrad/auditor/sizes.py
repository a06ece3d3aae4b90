"""The sizes that a candidate takes: ``{"tokens": "multiple of 16", "features": (32, 64, 128)}``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from attngrad.auditor.plans import Dims
from attngrad.core.checks import fail

Adapt = Callable[[Dims], Dims | None]
Rule = Callable[[int], bool]
_AXES = {
    "tokens": ("t", "s"),
    "queries": ("t",),
    "keys": ("s",),
    "features": ("d", "e"),
    "heads": ("hq",),
    "kv_heads": ("hk",),
    "batch": ("b",),
}
_LARGEST = 4096
_WORDS: dict[str, Callable[[int], Rule]] = {
    r"(?:a )?multiples? of (\d+)": lambda n: lambda size: size % n == 0,
    r"(?:a )?powers? of (2|two)": lambda _: lambda size: size & (size - 1) == 0,
    r"at least (\d+)|>= ?(\d+)": lambda n: lambda size: size >= n,
    r"at most (\d+)|<= ?(\d+)": lambda n: lambda size: size <= n,
    r"(\d+)": lambda n: lambda size: size == n,
}


def _rule(name: str, given: Any) -> Rule:
    """Whether a size is allowed."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if isinstance(given, (tuple, list, range, set)) and given and all(isinstance(x, int) and x > 0 for x in given):
        allowed = frozenset(given)
        return lambda size: size in allowed
    if not isinstance(given, str):
        fail(TypeError, "audit", f"sizes[{name!r}]", "be sizes, or words like 'multiple of 16'", repr(given))
    rules = []
    for part in re.split(r",| and ", given):
        for pattern, make in _WORDS.items():
            if found := re.fullmatch(pattern, part.strip()):
                number = next(x for x in found.groups() if x)
                rules.append(make(int(number) if number.isdigit() else 2))
                break
        else:
            words = "be sizes, 'multiple of 16', 'power of 2', 'at least 16' or 'at most 256', or several with commas"
            fail(ValueError, "audit", f"sizes[{name!r}]", words, repr(given))
    return lambda size: all(rule(size) for rule in rules)


def sizes_of(sizes: object) -> Adapt | None:
    """How the sizes of a case become those that are allowed: the next larger one, or the largest.

    >>> adapt = sizes_of({"tokens": "multiple of 16", "features": (32, 64)})
    >>> adapt(Dims(1, 2, 2, 5, 17, 33, 80))
    Dims(b=1, hq=2, hk=2, t=16, s=32, d=64, e=64, model=None)
    """
    if sizes is None:
        return None
    if not isinstance(sizes, Mapping):
        fail(TypeError, "audit", "sizes", "be a mapping or None", type(sizes).__name__, 'Use {"tokens": 64}.')
    for name in sizes:
        if name not in _AXES:
            fail(ValueError, "audit", "sizes", f"have only the names {', '.join(_AXES)}", repr(name))
    rules = {axis: _rule(name, given) for name, given in sizes.items() for axis in _AXES[name]}
    for axis, rule in rules.items():
        if not any(map(rule, range(1, _LARGEST + 1))):
            name = next(n for n in sizes if axis in _AXES[n])
            fail(ValueError, "audit", f"sizes[{name!r}]", f"allow some size up to {_LARGEST}", repr(sizes[name]))

    def adapt(n: Dims) -> Dims | None:
        square = n.model == n.inner
        for axis, rule in rules.items():
            size = getattr(n, axis)
            nearest = next(m for m in chain(range(size, _LARGEST + 1), range(size - 1, 0, -1)) if rule(m))
            n = replace(n, **{axis: nearest, **({"hk": nearest} if axis == "hq" and n.hk == n.hq else {})})
        n = n if n.hq % n.hk == 0 else replace(n, hk=n.hq)
        return replace(n, model=n.inner) if square else n

    return adapt


def both(first: Adapt | None, then: Adapt | None) -> Adapt | None:
    """One after the other, until nothing changes any more; None where they do not agree on sizes."""
    if first is None or then is None:
        return first or then

    def adapt(n: Dims) -> Dims | None:
        for _ in range(3):
            a = first(n)
            b = None if a is None else then(a)
            if b is None or b == n:
                return b
            n = b
        return None

    return adapt
