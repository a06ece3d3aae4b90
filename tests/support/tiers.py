"""Which tests run when.

``make test`` runs what is not marked: what a person waits for before a commit. ``make test-all`` runs what is marked
``thorough``, too: the rest of grids whose every claim ``make test`` has tried once, and what takes long.
``make test-full`` runs everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def thorough(values: Iterable[Any]) -> list[ParameterSet]:
    """These values of one parameter, left to ``make test-all``."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """The values of one parameter, of which all but the first few are left to ``make test-all``."""
    values = list(values)
    return [*values[:count], *thorough(values[count:])]


def only(kept: Iterable[tuple[Any, ...]], rows: Iterable[tuple[Any, ...]]) -> list[ParameterSet]:
    """Rows of several parameters, of which all but those kept are left to ``make test-all``."""
    kept, rows = list(kept), list(rows)
    if missing := [row for row in kept if row not in rows]:
        raise ValueError(f"only: kept must be among the rows; got {missing}")
    return [pytest.param(*row, marks=[] if row in kept else [pytest.mark.thorough]) for row in rows]
