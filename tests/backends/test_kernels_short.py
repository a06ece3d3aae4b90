"""The compiled kernels on short heads, and on few queries against many keys."""

from __future__ import annotations

import numpy as np
import pytest

import attngrad
from attngrad import reference
from attngrad.testing import relative_error
from cases import EVERYTHING, NARROW, SINGLES, Shape, label, make
from passes import assert_equal_to_the_reference, assert_within_the_rounding_bound, redraw
from tiers import first

SHORT = [
    Shape((2,), 2, 2, 10, 10, 16, 16),
    Shape((2,), 4, 2, 9, 33, 32, 48),
    Shape((1,), 2, 1, 40, 61, 64, 16),
    Shape((2,), 1, 1, 47, 64, 160, 160),
    Shape((1,), 2, 1, 96, 96, 64, 64),
]
NOTHING_SEEN = ("causal ragged", "masked rows", "window")


@pytest.mark.parametrize("shape", first(2, SHORT), ids=lambda n: f"{n.t}x{n.s}x{n.d}")
@pytest.mark.parametrize("names", [(), *SINGLES, EVERYTHING, NOTHING_SEEN], ids=label)
def test_short_heads_of_whole_vectors_are_written_in_place_rightly(isa, shape, names):
    c = make(names, shape)
    assert_equal_to_the_reference(c)
    for start in (-20, 20):  # vectors of queries that see nothing; queries that all see everything
        c.options |= {"causal": True, "offset": start}
        assert_equal_to_the_reference(c)


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("names", first(1, [NOTHING_SEEN, (), ("causal",)]), ids=label)
def test_short_heads_in_low_precision_keep_the_rounding_bound(isa, dtype, names):
    for shape in SHORT[:3]:
        c = make(names, shape).cast(dtype)
        assert_within_the_rounding_bound(c, dtype, *(redraw(c, dtype, np.random.default_rng(i)) for i in range(3)))


def test_a_short_head_whose_mask_hides_everything_is_zero(isa):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 3, 2, 40, 32)).astype(np.float32)
    mask = np.ones((3, 1, 40, 40), bool)
    mask[1] = False
    out, pullback = attngrad.vjp(q, q, q, mask=mask)
    for x in (out, *pullback(dout)[:3]):
        assert not x[1].any()
        assert x[::2].any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("d", [16, 24, 160])
def test_what_a_query_of_a_short_head_that_sees_nothing_holds_is_harmless(isa, d):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 20, d)).astype(np.float32)
    mask = np.arange(20)[:, None] != 3
    found = []
    for x in (np.nan, np.inf, 0.0):
        q[:, 3], dout[:, 3] = x, x
        out, pullback = attngrad.vjp(q, k, v, mask=mask)
        found.append((out, *pullback(dout)[:3]))
        assert not out[:, 3].any()
    for other in found[:2]:
        assert all(np.array_equal(a, b) for a, b in zip(other, found[2], strict=True))


# --- few queries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("causal ragged", "sinks"), ("bias", "masked rows")], ids=label)
def test_few_queries_with_large_logits_keep_the_rounding_bound(isa, names):
    c = make(names, Shape((2,), 4, 2, 2, 300, 16, 16))
    c.q = c.q * 300.0
    c.v = c.v + 100.0
    assert_within_the_rounding_bound(c.cast(np.float32), np.float32)
    out, lse = attngrad.attention(*c.qkv, return_lse=True, **c.options)  # the decoding path
    expected, expected_lse = reference.attention(*c.qkv, return_lse=True, **c.options)
    finite = np.isfinite(expected_lse)
    assert relative_error(out, expected) < 1e-12
    assert relative_error(lse[finite], expected_lse[finite]) < 1e-12


@pytest.mark.parametrize("t", [1, 3, 5])
@pytest.mark.parametrize("names", [(), ("causal ragged", "sinks"), EVERYTHING], ids=label)
def test_few_queries_of_many_heads_against_many_keys(isa, t, names):
    c = make(names, Shape((2,), 8, 2, t, 3300, 16, 7))
    assert_equal_to_the_reference(c)
    for x in (c, c.cast(np.float32)):
        out, lse = attngrad.attention(*x.qkv, return_lse=True, **x.options)  # the decoding path
        expected, expected_lse = reference.attention(*c.qkv, return_lse=True, **c.options)
        finite = np.isfinite(expected_lse)
        tolerance = 1e-12 if x is c else 1e-5
        assert relative_error(out, expected) < tolerance
        assert relative_error(lse[finite], expected_lse[finite]) < tolerance
