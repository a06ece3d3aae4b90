"""Mappings of names to arrays: read, flattened and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attngrad.core import checks
from attngrad.core.arrays import NDArray, kind_of
from attngrad.core.checks import check_floating, fail
from attngrad.core.conversion import require_numpy

Tree = Mapping[str, Any]
"""Names to arrays, or to such mappings."""


def _leaves(function: str, argument: str, tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        fail(TypeError, function, argument, "be a mapping of names to arrays", kind_of(tree))
    for name, x in tree.items():
        if isinstance(x, Mapping):
            yield from _leaves(function, argument, x, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", x


def flat(function: str, argument: str, tree: Tree) -> dict[str, NDArray]:
    """The arrays by their dotted names."""
    arrays: dict[str, NDArray] = {}
    for name, x in _leaves(function, argument, tree):
        if name in arrays:
            fail(ValueError, function, argument, "have distinct names, inner mappings dotted", f"{name!r} twice")
        require_numpy(function, **{f"{argument}[{name!r}]": x})
        check_floating(function, f"{argument}[{name!r}]", x)
        arrays[name] = x
    return arrays


def require_writable(function: str, argument: str, arrays: Mapping[str, NDArray]) -> None:
    """All of them, before the first is written to."""
    for name, x in arrays.items():
        if not x.flags.writeable:
            fail(ValueError, function, f"{argument}[{name!r}]", "be writable", "a read-only array", "Copy it.")


def number(function: str, name: str, x: object, low: float, high: float = math.inf) -> float:
    """A real number in [low, high)."""
    value = checks.check_real(function, name, x)
    if not low <= value < high:
        fail(ValueError, function, name, f"be >= {low:g}" if high == math.inf else f"be in [{low:g}, {high:g})", value)
    return value
