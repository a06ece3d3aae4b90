"""How the rows of the table become tests, and how results are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from bad_inputs import TABLE
from bad_inputs.calls import Call, Results
from bad_inputs.row import Row


def rows(*sections: str) -> Any:
    found = [row for section in sections for row in TABLE[section]]
    return pytest.mark.parametrize("row", found, ids=[row.name for row in found])


def rows_with(name: str, values: Iterable[str], *sections: str, concerns: Callable[[str, Row], bool]) -> Any:
    """The rows of these sections, each beside those ``values`` of the argument ``name`` that it concerns."""
    pairs = [(row, value) for section in sections for row in TABLE[section] for value in values if concerns(value, row)]
    assert pairs
    return pytest.mark.parametrize(("row", name), pairs, ids=[f"{row.name}-{value}" for row, value in pairs])


@contextmanager
def unwritten(call: Call) -> Iterator[None]:
    """The bytes of every array of the call stay what they are."""
    memory = [np.asarray(x) for x in call.arrays()]
    before = [x.tobytes() for x in memory if x.size < 1e6]
    yield
    assert before == [x.tobytes() for x in memory if x.size < 1e6]


def assert_right(found: Results, expected: Results) -> None:
    """To 1e-10 of the largest number, and finite where that is."""
    assert found.keys() == expected.keys()
    for name, x in found.items():
        y = expected[name]
        assert type(x) is np.ndarray, name
        assert x.shape == y.shape, name
        assert np.array_equal(np.isfinite(x), np.isfinite(y)), name
        here = np.isfinite(y)
        error = np.abs(x[here] - y[here]).max(initial=0.0)
        assert error <= 1e-10 * np.abs(y[here]).max(initial=0.0) + 1e-322, name  # a few of the smallest subnormals
