"""The compiled kernels: every instruction set, every option, sizes across tiles."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import attngrad
from attngrad import reference
from attngrad.backends import cpu
from attngrad.backends import reference as dense
from attngrad.backends.cpu import arrays
from attngrad.core.binding import bind
from attngrad.core.options import OPTION_NAMES
from attngrad.testing import relative_error
from cases import EVERYTHING, NARROW, OPTIONS, PAIRS, SHARED_BIAS, SINGLES, Shape, label, make
from passes import all_passes, assert_equal_to_the_reference, assert_within_the_rounding_bound, redraw
from tiers import first

ACROSS_TILES = Shape((1,), 2, 1, 131, 203, 9, 20)


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING, SHARED_BIAS], ids=label)
def test_float64_equals_the_reference_across_tiles(isa, names):
    assert_equal_to_the_reference(make(names, ACROSS_TILES))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_softcap_that_is_reached_passes_nothing_on_however_large_the_tangent(isa, dtype):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 5, 8)).astype(dtype) for _ in range(4))
    q[...] = np.abs(q) + 1
    k[...] = (np.abs(k) + 1) * 1e6
    huge = np.full_like(q, 1e12)
    (_, pullback), (_, dots) = (
        attngrad.vjp(q, k, v, softcap=1.5),
        attngrad.jvp((q, k, v), (huge, None, None), softcap=1.5),
    )
    assert not pullback(dout).q.any()
    assert not dots.any()


@pytest.mark.thorough
@pytest.mark.parametrize("names", PAIRS, ids=label)
def test_pairs_of_options_equal_the_reference(isa, names):
    assert_equal_to_the_reference(make(names))


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("names", [(), ("causal",), ("window", "bias"), EVERYTHING], ids=label)
def test_low_precision_keeps_the_rounding_bound_across_tiles(isa, names, dtype):
    c = make(names, Shape((1,), 2, 1, 61, 150, 24, 20)).cast(dtype)
    assert_within_the_rounding_bound(c, dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("names", [(), ("causal",), ("window", "bias"), EVERYTHING], ids=label)
def test_results_in_16_bits_are_those_in_float32_rounded_once(isa, names, dtype):
    c = make(names, Shape((1,), 2, 1, 500, 70, 33, 16)).cast(dtype)  # several chunks of queries are summed
    wide = all_passes(c.cast(np.float32))
    for name, x in all_passes(c).items():
        assert np.array_equal(x, wide[name].astype(x.dtype), equal_nan=True), name


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("names", first(1, [(), ("causal",), ("softcap", "bias")]), ids=label)
def test_large_logits_and_values_with_a_mean_keep_the_rounding_bound(names, dtype):
    large, shifted = (make(names, Shape((1,), 2, 2, 40, 110, 16, 16)) for _ in range(2))
    large.q = large.q * 2.5e3  # logits up to about 1e4
    shifted.v = shifted.v + 100.0
    rng = np.random.default_rng(0)
    for c in (large.cast(dtype), shifted.cast(dtype)):  # few scores matter: one draw might miss the rule by chance
        assert_within_the_rounding_bound(c, dtype, *(redraw(c, dtype, rng) for _ in range(11)))


@pytest.mark.parametrize("d", [1, 3, 8, 17, 33, 80, 257, 512])
def test_any_number_of_features(isa, d):
    e = {1: 5, 3: 1, 17: 16, 512: 31}.get(d, d)
    assert_equal_to_the_reference(make(("causal",), Shape((1,), 2, 1, 29, 37, d, e)))


@pytest.mark.parametrize("t", [1, 2, 7, 16, 47, 48, 49, 96, 97, 145])
@pytest.mark.parametrize("s", [1, 15, 63, 64, 65, 96, 193])
@pytest.mark.parametrize("names", [("causal",), ("window", "masked rows", "softcap")], ids=label)
def test_sizes_around_the_tiles(t, s, names):
    assert_equal_to_the_reference(make(names, Shape((2,), 2, 1, t, s, 4, 3)))


BIAS_SHAPES = [
    (1, 1, 1, 203),
    (1, 1, 131, 1),
    (1, 2, 1, 1),
    (2, 1, 1, 203),
    (1, 1, 131, 203),
    (2, 2, 131, 203),
    (203,),
    (1,),
]


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("batch", first(1, [(2,), (1, 2), (2, 1)]), ids=str)
def test_a_bias_may_broadcast_along_any_axes(shape, batch):
    c = make(("causal",), ACROSS_TILES._replace(batch=batch))
    shape = (1,) * (len(batch) - 1) + shape if len(shape) == 4 else shape
    c.options["bias"] = np.random.default_rng(1).standard_normal(shape)
    if np.broadcast_shapes(shape, c.shape.scores) != c.shape.scores:
        c.options["bias"] = c.options["bias"][..., :1, :, :, :]
    assert_equal_to_the_reference(c)


def test_tiles_that_are_wholly_masked_are_skipped_rightly():
    c = make((), Shape((1,), 2, 1, 200, 400, 5, 6))
    mask = np.zeros((200, 400), bool)
    mask[:, 100:110] = True
    mask[150:, 300:] = True
    c.options["mask"] = mask
    assert_equal_to_the_reference(c)
    ids = attngrad.segments_from_lengths([120, 80])
    key_ids = attngrad.segments_from_lengths([250, 150])
    c.options = {"segments": (ids, key_ids), "causal": True}
    assert_equal_to_the_reference(c)


def test_a_mask_of_odd_bytes_is_still_a_mask():
    c = make((), ACROSS_TILES)
    raw = np.random.default_rng(0).integers(0, 3, (131, 203), np.uint8)
    c.options["mask"] = (raw * 100).view(np.bool_)
    expected = attngrad.attention(*c.qkv, mask=raw > 0)
    assert np.array_equal(attngrad.attention(*c.qkv, **c.options), expected)


def test_all_options_are_in_the_table():
    """A new option must enter the table that feeds these tests."""
    covered = set().union(*(builder(np.random.default_rng(0), Shape()) for builder in OPTIONS.values()))
    assert covered | {"return_lse"} == set(OPTION_NAMES)


def test_what_the_kernels_are_given_is_aligned():
    """x86 forgives an unaligned read, so the results alone would not tell."""
    raw = np.zeros(2 * 3 * 4 * 8 + 1, np.uint8)[1:].view(np.float64).reshape(1, 2, 3, 4)
    assert not raw.flags.aligned
    for prepared in (arrays.rows(raw), arrays.contiguous(raw)):
        assert prepared.flags.aligned


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
def test_a_shard_sees_its_part_of_the_global_dropout_mask(dtype):
    c = make(("dropout",), Shape((3,), 4, 2, 40, 60, 8, 6)).cast(dtype)
    x, o, _ = bind("test", *c.qkv, c.options)
    whole, _ = dense.weights(x, o)
    keep = attngrad.dropout_mask(whole.shape, o.dropout, o.seed) / (1 - o.dropout)
    b, h, i, j = slice(1, 3), slice(2, 4), slice(7, 31), slice(13, 58)
    part = x._replace(q=c.q[b, h, i], k=c.k[b, 1:2, j], v=c.v[b, 1:2, j], origin=(1, 2, 7, 13))
    weights, _ = dense.weights(part, o)
    expected = (weights * keep[b, h, i, j]) @ part.v
    assert relative_error(cpu.forward(part, o)[0], expected) < (1e-12 if dtype is np.float64 else 1e-5)
    assert relative_error(reference.forward(part, o).out, expected) < (1e-12 if dtype is np.float64 else 1e-5)
