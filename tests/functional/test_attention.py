"""The public functions: equal to the book, and the semantics that hold everywhere."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngrad
from attngrad import Gradients, reference
from attngrad.testing import relative_error
from cases import EVERYTHING, NARROW, PAIRS, SHAPES, SINGLES, Case, Shape, label, make
from passes import all_passes, assert_equal_to_the_reference, assert_within_the_rounding_bound

COMBINATIONS = [*SINGLES, *PAIRS, EVERYTHING]


@pytest.mark.parametrize("names", COMBINATIONS, ids=label)
def test_every_pass_equals_the_reference(names):
    assert_equal_to_the_reference(make(names))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_equals_the_reference(shape):
    assert_equal_to_the_reference(make(EVERYTHING, shape))


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("names", [*SINGLES, *PAIRS[::5], EVERYTHING], ids=label)
def test_low_precision_is_at_most_twice_as_far_off_as_the_naive_computation(names, dtype):
    assert_within_the_rounding_bound(make(names, Shape((2,), 4, 2, 9, 13, 7, 5)).cast(dtype), dtype)


@pytest.mark.parametrize("dtype", [np.float64, *NARROW.values()], ids=["float64", *NARROW])
def test_results_have_the_dtype_of_their_argument_and_lse_at_least_float32(dtype):
    c = make(EVERYTHING).cast(dtype)
    wide = np.dtype(np.float64 if dtype is np.float64 else np.float32)
    for name, x in all_passes(c).items():
        assert x.dtype == (wide if name.startswith("lse") else np.dtype(dtype)), name


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_float32_bias_and_sinks_go_with_16_bit_inputs(dtype):
    c = make(("bias", "sinks")).cast(dtype)
    c.options = {name: x.astype(np.float32) for name, x in c.options.items()}
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    grads = pullback(c.dout)
    assert grads.bias.dtype == grads.sinks.dtype == np.float32
    assert grads.q.dtype == np.dtype(dtype)


# --- semantics that hold everywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("softcap",), ("dropout",), ("bias",), ("segments",), ("causal",)], ids=label)
def test_a_row_that_sees_nothing_gives_zeros(extra):
    c = make(("masked rows", *extra))
    got = all_passes(c)
    for name in ("out", "out_dot", "dq", "dq_dot"):
        assert np.array_equal(got[name][..., 0, :], np.zeros_like(got[name][..., 0, :])), name
    assert np.array_equal(got["lse"][..., 0], np.full_like(got["lse"][..., 0], -np.inf))
    assert np.array_equal(got["lse_dot"][..., 0], np.zeros_like(got["lse_dot"][..., 0]))
    if "bias" in extra:
        assert not got["dbias"][..., 0, :].any()
    assert not any(np.isnan(x).any() for x in got.values())


def test_a_row_that_sees_only_its_sink_has_the_sink_as_its_lse():
    c = make(("masked rows", "sinks"))
    got = all_passes(c)
    sigma = np.broadcast_to(c.options["sinks"], (*c.shape.batch, c.shape.heads))
    assert np.array_equal(got["lse"][..., 0], sigma)
    assert np.array_equal(got["lse_dot"][..., 0], np.broadcast_to(c.t.sinks, sigma.shape))
    assert not got["out"][..., 0, :].any()
    assert not got["dq"][..., 0, :].any()


@pytest.mark.parametrize("module", [attngrad, attngrad.reference], ids=["kernels", "reference"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize(
    "size", [(3, 5, 2, 3), (10, 12, 16, 32), (131, 203, 9, 20)], ids=["odd", "short", "across tiles"]
)
def test_a_pullback_gives_the_gradients_that_are_wanted(module, dtype, size):
    c = make(("bias", "sinks", "causal"), Shape((2,), 2, 1, *size)).cast(dtype)
    pullback = module.vjp(*c.qkv, **c.options)[1]
    every = pullback(c.dout)
    for wrt in ("q", "k", "v", "bias", "sinks", ("q", "k", "v"), ["k", "bias"], {"v", "sinks"}):
        found = pullback(c.dout, wrt=wrt)
        for name, g, all_of_it in zip(every._fields, found, every, strict=True):
            wanted = name == wrt if isinstance(wrt, str) else name in wrt
            assert np.array_equal(g, all_of_it) if wanted else g is None, (wrt, name)


def test_everything_masked_gives_zeros_for_all_gradients():
    c = make(("bias",))
    out, pullback = attngrad.vjp(*c.qkv, mask=np.zeros((1, 1), bool), **c.options)
    assert not out.any()
    assert not any(g.any() for g in pullback(c.dout, c.dlse) if g is not None)


@pytest.mark.parametrize("names", [("masked rows",), ("bias -inf",)], ids=label)
def test_a_non_finite_dlse_of_a_row_that_sees_nothing_is_harmless(names):
    c = make(names)
    if "bias" in c.options:
        c.options["bias"][0] = -np.inf
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    dlse = c.dlse.copy()
    dlse[..., 0] = np.nan
    grads = pullback(c.dout, dlse)
    assert np.isfinite(grads.q).all()
    assert np.isfinite(grads.k).all()


@pytest.mark.parametrize(
    ("batch", "heads", "t", "s"),
    [((0,), 2, 3, 4), ((2,), 0, 3, 4), ((2,), 2, 0, 4), ((2,), 2, 3, 0), ((3, 0), 2, 1, 1)],
)
@pytest.mark.parametrize("names", [(), ("causal", "sinks", "softcap", "dropout", "bias")], ids=label)
def test_empty_arrays_give_empty_or_zero_results(batch, heads, t, s, names):
    c = make(names, Shape(batch, heads, heads, t, s, 3, 2))
    for name, x in all_passes(c).items():
        assert not x[np.isfinite(x)].any() or name.startswith(("lse", "dsinks")), name
    out, lse = attngrad.attention(*c.qkv, return_lse=True, **c.options)
    assert out.shape == (*batch, heads, t, 2)
    if s == 0 and not names:
        assert np.array_equal(lse, np.full((*batch, heads, t), -np.inf))


def test_causal_meets_the_last_key_by_default_and_the_first_with_offset_zero():
    zero = np.zeros((2, 1))
    k = np.zeros((4, 1))
    bottom_right = attngrad.attention_weights(zero, k, causal=True) > 0
    top_left = attngrad.attention_weights(zero, k, causal=True, offset=0) > 0
    assert bottom_right.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert top_left.tolist() == [[True, False, False, False], [True, True, False, False]]


def test_window_counts_keys_left_and_right_of_the_query():
    x = np.zeros((5, 1))
    seen = attngrad.attention_weights(x, x, window=(1, 2)) > 0
    assert seen[2].tolist() == [False, True, True, True, True]
    assert seen[0].tolist() == [True, True, True, False, False]
    both = attngrad.attention_weights(x, x, window=(1, 2), causal=True) > 0
    assert both[2].tolist() == [False, True, True, False, False]
    assert np.array_equal(attngrad.attention_weights(x, x, window=(None, None)) > 0, np.ones((5, 5), bool))
    assert np.array_equal(attngrad.attention_weights(x, x, window=(2**80, 2**80)) > 0, np.ones((5, 5), bool))


def test_offset_without_causal_or_window_has_no_effect():
    c = make()
    assert np.array_equal(attngrad.attention(*c.qkv, offset=-3), attngrad.attention(*c.qkv))


def test_a_ragged_offset_is_each_row_alone():
    c = make(("causal ragged", "bias", "sinks"), Shape((3,), 2, 1, 4, 6, 3, 2))
    offsets = c.options["offset"]
    out, pullback = attngrad.vjp(*c.qkv, **c.options)
    dq = pullback(c.dout).q
    for b, offset in enumerate(offsets):
        row = c.options | {"offset": int(offset), "bias": c.options["bias"][b]}
        alone, alone_pullback = attngrad.vjp(*(x[b] for x in c.qkv), **row)
        assert np.array_equal(out[b], alone)
        assert np.array_equal(dq[b], alone_pullback(c.dout[b]).q)


def test_packed_sequences_equal_each_sequence_alone():
    rng = np.random.default_rng(0)
    lengths = [3, 1, 4]
    q, k, v = (rng.standard_normal((2, 8, 4)) for _ in range(3))
    ids = attngrad.segments_from_lengths(lengths)
    packed = attngrad.attention(q, k, v, segments=(ids, ids), causal=True)
    starts = np.cumsum([0, *lengths])
    for a, b in itertools.pairwise(starts):
        alone = attngrad.attention(q[:, a:b], k[:, a:b], v[:, a:b], causal=True)
        assert relative_error(packed[:, a:b], alone) < 1e-14


def test_dropout_uses_the_mask_it_publishes():
    c = make()
    keep = attngrad.dropout_mask(c.shape.scores, 0.4, seed=11)
    weights = attngrad.attention_weights(*c.qkv[:2]) * keep / 0.6
    expected = weights @ np.repeat(c.v, 2, axis=-3)
    assert relative_error(attngrad.attention(*c.qkv, dropout=0.4, seed=11), expected) < 1e-14
    assert np.array_equal(
        attngrad.attention_weights(*c.qkv[:2], dropout=0.4, seed=11), attngrad.attention_weights(*c.qkv[:2])
    )


def test_nan_stays_in_the_rows_it_touches():
    c = make((), Shape((2,), 4, 2, 5, 6, 3, 2))
    q = c.q.copy()
    q[1, 2, 3, 0] = np.nan
    out, pullback = attngrad.vjp(q, c.k, c.v)
    clean, clean_pullback = attngrad.vjp(*c.qkv)
    touched = np.zeros(out.shape[:-1], bool)
    touched[1, 2, 3] = True
    assert np.isnan(out[touched]).all()
    assert np.array_equal(out[~touched], clean[~touched])
    grads, clean_grads = pullback(c.dout), clean_pullback(c.dout)
    assert np.array_equal(grads.q[~touched], clean_grads.q[~touched])
    assert np.array_equal(grads.k[0], clean_grads.k[0])  # another batch
    assert np.array_equal(grads.k[1, 0], clean_grads.k[1, 0])  # another key head: query head 2 reads key head 1
    assert np.isnan(grads.k[1, 1]).all()


def test_nan_in_a_key_reaches_the_queries_that_see_it_only():
    c = make((), Shape((2,), 2, 1, 5, 5, 3, 2))
    k = c.k.copy()
    k[0, 0, 3] = np.nan
    out = attngrad.attention(c.q, k, c.v, causal=True)
    clean = attngrad.attention(*c.qkv, causal=True)
    assert np.isnan(out[0, :, 3:]).all()
    assert np.array_equal(out[0, :, :3], clean[0, :, :3])
    assert np.array_equal(out[1], clean[1])


@pytest.mark.parametrize("module", [attngrad, reference], ids=["kernels", "reference"])
@pytest.mark.parametrize("extra", [(), ("softcap",), ("sinks",), ("dropout", "bias")], ids=label)
def test_nan_in_a_query_that_sees_nothing_is_harmless(module, extra):
    c = make(("masked rows", *extra))
    clean = all_passes(c, module)
    c.q[..., 0, :] = np.nan
    c.dout[..., 0, :] = np.nan
    with np.errstate(invalid="ignore"):
        dirty = all_passes(c, module)
    for name in ("dq", "dk", "dv", "dq_dot", "dk_dot", "dv_dot", "out", "lse"):
        assert np.array_equal(dirty[name], clean[name]), name


@pytest.mark.parametrize("dtype", [np.float64, *NARROW.values()], ids=["float64", *NARROW])
def test_a_finite_bias_near_the_lowest_number_is_no_mask(dtype):
    c = make(("bias", "sinks")).cast(dtype)
    low = ml_dtypes.finfo(dtype).min
    c.options["bias"][..., 0, :] = low
    c.options["sinks"][...] = low
    wide = c if np.dtype(dtype).itemsize > 2 else c.cast(np.float32)  # 16-bit inputs are computed in float32
    expected, expected_lse = reference.attention(*wide.qkv, return_lse=True, **wide.options)
    out, lse = attngrad.attention(*c.qkv, return_lse=True, **c.options)
    assert relative_error(out, expected) < 20 * float(ml_dtypes.finfo(dtype).eps)
    assert np.isfinite(lse.astype(np.float64)).all()
    assert relative_error(lse, expected_lse) < 20 * float(ml_dtypes.finfo(dtype).eps)


def test_infinite_logits_raise_no_warning_and_stay_in_their_row():
    c = make()
    q = c.q.copy()
    q[0, 0, 0, 0] = np.inf
    out = attngrad.attention(q, c.k, c.v)
    assert np.isfinite(out[1]).all()
    assert np.isfinite(out[0, 0, 1:]).all()


def test_inputs_are_never_written_to_and_may_be_read_only():
    c = make(EVERYTHING)
    arrays = [*c.qkv, c.dout, c.dlse, c.dout_dot, c.dlse_dot, *c.t]
    arrays += [x for x in c.options.values() if isinstance(x, np.ndarray)] + list(c.options["segments"])
    copies = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    all_passes(c)
    assert all(np.array_equal(x, copy) for x, copy in zip(arrays, copies, strict=True))


def test_strides_make_no_difference():
    c = make(EVERYTHING)
    expected = all_passes(c)

    def awkward(x: Any) -> Any:
        """The same values on a reversed, widened and transposed layout."""
        if not isinstance(x, np.ndarray):
            return x
        wide = np.zeros((*(2 * n for n in x.shape[::-1]),), x.dtype).T[tuple(slice(None, None, -2) for _ in x.shape)]
        wide[...] = x
        return wide

    options = {name: awkward(x) for name, x in c.options.items()}
    options["segments"] = tuple(awkward(x) for x in c.options["segments"])
    t = type(c.t)(*map(awkward, c.t))
    strided = Case(c.shape, options, *map(awkward, (*c.qkv, c.dout, c.dlse, c.dout_dot, c.dlse_dot)), t)
    for name, x in all_passes(strided).items():
        finite = np.isfinite(expected[name])
        assert relative_error(x[finite], expected[name][finite]) < 1e-14, name


def test_broadcast_cotangents_of_zero_stride_are_read():
    c = make()
    _, pullback = attngrad.vjp(*c.qkv)
    flat = np.broadcast_to(np.float64(0.5), c.dout.shape)
    assert np.array_equal(pullback(flat).q, pullback(flat.copy()).q)


# --- signatures -------------------------------------------------------------------------------------------------------


def test_return_lse_pairs_the_results_of_each_function():
    c = make()
    out, lse = attngrad.attention(*c.qkv, return_lse=True)
    (vjp_out, vjp_lse), _ = attngrad.vjp(*c.qkv, return_lse=True)
    (jvp_out, jvp_lse), (out_dot, lse_dot) = attngrad.jvp(c.qkv, c.t[:3], return_lse=True)
    weights, weights_lse = attngrad.attention_weights(*c.qkv[:2], return_lse=True)
    assert np.array_equal(out, vjp_out)
    assert relative_error(out, jvp_out) < 1e-14
    for other in (vjp_lse, jvp_lse, weights_lse):
        assert relative_error(lse, other) < 1e-14
    assert out_dot.shape == out.shape
    assert lse_dot.shape == lse.shape
    assert relative_error(weights.sum(-1), np.ones_like(lse)) < 1e-14


def test_a_pullback_may_be_called_twice_and_is_linear():
    c = make(("causal",))
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    once, again, double = pullback(c.dout), pullback(c.dout), pullback(2 * c.dout)
    assert np.array_equal(once.k, again.k)
    assert relative_error(double.k, 2 * once.k) < 1e-14


def test_a_pullback_takes_dlse_alone():
    c = make(("bias", "sinks"))
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    alone = pullback(None, dlse=c.dlse)
    with_zero = pullback(np.zeros_like(c.dout), c.dlse)
    assert all(np.array_equal(a, b) for a, b in zip(alone, with_zero, strict=True))
    assert not alone.v.any()
    grads, _ = attngrad.hvp(c.qkv, c.t[:3], None, dlse=c.dlse, **c.options)
    assert relative_error(grads.q, alone.q) < 1e-14


def test_gradients_are_none_for_what_was_not_given():
    c = make()
    _, pullback = attngrad.vjp(*c.qkv)
    grads = pullback(c.dout)
    assert isinstance(grads, Gradients)
    assert grads._fields == ("q", "k", "v", "bias", "sinks")
    assert grads.bias is None
    assert grads.sinks is None


def test_tangents_of_none_are_zero():
    c = make(("bias", "sinks"))
    zero = [np.zeros_like(x) for x in c.qkv]
    _, none_dot = attngrad.jvp(c.qkv, (None, c.t.k, None), **c.options)
    _, zero_dot = attngrad.jvp(
        c.qkv, (zero[0], c.t.k, zero[2]), bias_dot=0 * c.t.bias, sinks_dot=0 * c.t.sinks, **c.options
    )
    assert np.array_equal(none_dot, zero_dot)
    _, nothing = attngrad.jvp(c.qkv, (None, None, None), **c.options)
    assert not nothing.any()


@pytest.mark.parametrize("wrt", Gradients._fields)
def test_the_jacobian_has_the_shape_of_out_and_its_argument(wrt):
    c = make(("bias of a head", "sinks")).cast(np.float32)
    full = attngrad.jacobian(*c.qkv, wrt=wrt, **c.options)
    argument = c.options.get(wrt, getattr(c, wrt, None))
    assert full.shape == c.dout.shape + argument.shape
    assert full.dtype == np.float32
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    assert relative_error(np.tensordot(c.dout, full, c.dout.ndim), getattr(pullback(c.dout), wrt)) < 1e-5


def test_softmax_jacobian_rounds_to_the_dtype_of_the_scores():
    s = np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3)
    full = attngrad.softmax_jacobian(s)
    assert full.dtype == np.float16
    assert relative_error(full, reference.softmax_jacobian(s.astype(np.float64))) < 1e-3


def test_results_are_the_same_every_time():
    c = make(EVERYTHING, Shape((2,), 4, 2, 120, 150, 16, 8))
    first, second = all_passes(c), all_passes(c)
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_no_query_heads_give_zeros_for_the_keys():
    q, k = np.zeros((2, 0, 3, 4)), np.ones((2, 2, 5, 4))
    out, pullback = attngrad.vjp(q, k, k)
    grads, _ = attngrad.hvp((q, k, k), (None, k, None), out)
    for g in (pullback(out).k, grads.k):
        assert g.shape == k.shape
        assert not g.any()
    assert attngrad.jacobian(q, k, k, wrt="k").shape == (2, 0, 3, 4, 2, 2, 5, 4)


def test_segment_ids_of_any_integer_dtype_are_compared_exactly():
    x = np.eye(3)
    q_ids, k_ids = np.array([2**53 + 1] * 3), np.array([2**53, 2**53 + 1, 2**53 + 2], np.uint64)
    assert np.array_equal(attngrad.attention(x, x, x, segments=(q_ids, k_ids)), np.tile(x[1], (3, 1)))
    far = np.array([-(2**40), 7, 2**40])
    assert np.array_equal(attngrad.attention(x, x, x, segments=(far, far)), x)


def test_float16_results_that_overflow_become_infinite_without_a_warning():
    c = make(("bias of a head", "sinks")).cast(np.float16)
    c.v = np.sign(c.v) * np.float16(6e4)
    c.dout = np.sign(c.dout) * np.float16(1e3)
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    assert np.isinf(pullback(c.dout).bias).any()
    _, out_dot = attngrad.jvp((c.q, c.k, c.v), (np.sign(c.t.q) * np.float16(6e4), None, None), **c.options)
    assert np.isinf(out_dot).any()


def test_unaligned_arrays_are_read_rightly():
    c = make(EVERYTHING, Shape((1,), 2, 1, 20, 30, 5, 4))

    def shifted(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        raw = np.zeros(x.nbytes + 1, np.uint8)
        view = raw[1:].view(x.dtype).reshape(x.shape)
        view[...] = x
        assert x.itemsize == 1 or not view.flags.aligned
        return view

    expected = all_passes(c)
    options = {name: shifted(x) for name, x in c.options.items()}
    moved = Case(c.shape, options, *map(shifted, (*c.qkv, c.dout, c.dlse, c.dout_dot, c.dlse_dot)), c.t)
    for name, x in all_passes(moved).items():
        assert np.array_equal(x, expected[name]), name


def test_segments_from_lengths_numbers_the_sequences():
    assert attngrad.segments_from_lengths([2, 0, 3]).tolist() == [0, 0, 2, 2, 2]
    assert attngrad.segments_from_lengths([]).shape == (0,)
