"""The helpers that most tests stand on see a wrong result, whichever it is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import attngrad
import passes
from cases import EVERYTHING, make

CASE = make(EVERYTHING)
NAMES = list(passes.all_passes(CASE))


def spoiled(monkeypatch, name, change):
    """``all_passes`` gives a changed result of this name for the kernels, and what is right for the reference."""
    right = passes.all_passes

    def wrong(c, module=attngrad):
        found = right(c, module)
        return found | {name: change(found[name])} if module is attngrad else found

    monkeypatch.setattr(passes, "all_passes", wrong)


def one_entry(x):
    y = x.copy()
    finite = np.argwhere(np.isfinite(y))
    place = tuple(finite[len(finite) // 2])
    y[place] = float(y[place]) + 1e-3 * float(np.abs(y[np.isfinite(y)].astype(float)).max() + 1)
    return y


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_entry_of_any_result_is_seen_in_float64(monkeypatch, name):
    passes.assert_equal_to_the_reference(CASE)
    spoiled(monkeypatch, name, one_entry)
    with pytest.raises(AssertionError, match=name):
        passes.assert_equal_to_the_reference(CASE)


@pytest.mark.parametrize("change", [lambda x: x[..., :0], lambda x: np.full_like(x, np.nan)], ids=["shape", "nan"])
def test_a_wrong_shape_and_nan_are_seen(monkeypatch, change):
    spoiled(monkeypatch, "dq", change)
    with pytest.raises(AssertionError, match="dq"):
        passes.assert_equal_to_the_reference(CASE)


def test_a_result_that_is_missing_is_seen(monkeypatch):
    right = passes.all_passes
    without = SimpleNamespace(vjp=attngrad.vjp, jvp=attngrad.jvp, hvp=attngrad.hvp)

    def fewer(c, module=without):
        return {n: x for n, x in right(c, module).items() if module is not without or n != "dbias"}

    monkeypatch.setattr(passes, "all_passes", fewer)
    with pytest.raises(AssertionError):
        passes.assert_equal_to_the_reference(CASE)


@pytest.mark.parametrize("name", NAMES)
def test_an_error_above_the_rounding_bound_is_seen_in_float32(monkeypatch, name):
    narrow = CASE.cast(np.float32)
    passes.assert_within_the_rounding_bound(narrow, np.float32)
    spoiled(monkeypatch, name, lambda x: x * np.asarray(1 + 1e-4, x.dtype) + np.asarray(1e-4, x.dtype))
    with pytest.raises(AssertionError, match=name):
        passes.assert_within_the_rounding_bound(narrow, np.float32)
