"""Forward mode and second order through the kernels: what holds of derivatives, whatever the options."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attngrad
from attngrad import Gradients, reference
from attngrad.core.operands import Tangents
from attngrad.testing import relative_error
from cases import EVERYTHING, OPTIONS, Case, Shape, label, make
from passes import all_passes, assert_equal_to_the_reference, assert_within_the_rounding_bound

options = st.lists(st.sampled_from(list(OPTIONS)), unique=True, max_size=6).map(tuple)
shapes = st.builds(
    Shape,
    st.just((2,)),
    st.just(4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3, 17, 50, 100]),
    st.sampled_from([1, 2, 33, 64, 101]),
    st.integers(1, 20),
    st.integers(1, 20),
)


def inner(*pairs: tuple[Any, Any]) -> float:
    """The sum of <a, b>, where neither is None."""
    return float(sum(np.sum(a * b) for a, b in pairs if a is not None and b is not None))


def size(*pairs: tuple[Any, Any]) -> float:
    """What the terms of ``inner`` add up to without their signs."""
    return float(sum(np.sum(np.abs(a * b)) for a, b in pairs if a is not None and b is not None))


@settings(deadline=None, max_examples=60)
@given(options, shapes, st.integers(0, 1000))
def test_vjp_is_the_adjoint_of_jvp(names, shape, seed):
    c = make(names, shape, seed)
    _, (out_dot, lse_dot) = attngrad.jvp(c.qkv, c.t[:3], return_lse=True, **c.tangents, **c.options)
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    left = [(c.dout, out_dot), (c.dlse, lse_dot)]
    right = list(zip(pullback(c.dout, c.dlse), c.t, strict=True))
    assert abs(inner(*left) - inner(*right)) <= 1e-12 * max(size(*left), size(*right))


@settings(deadline=None, max_examples=60)
@given(options, shapes, st.integers(0, 1000))
def test_the_hessian_is_symmetric(names, shape, seed):
    c = make(names, shape, seed)
    u = make(names, shape, seed + 5000).t

    def along(t: Tangents) -> Gradients:
        _, grads_dot = attngrad.hvp(c.qkv, t[:3], c.dout, dlse=c.dlse, bias_dot=t.bias, sinks_dot=t.sinks, **c.options)
        return grads_dot

    left, right = list(zip(along(c.t), u, strict=True)), list(zip(along(u), c.t, strict=True))
    assert abs(inner(*left) - inner(*right)) <= 1e-12 * max(size(*left), size(*right))


@settings(deadline=None, max_examples=30)
@given(options, shapes, st.integers(0, 1000))
def test_the_tangent_of_dout_comes_back_as_the_jvp(names, shape, seed):
    """<dout_dot, out_dot> = <grads_dot along dout_dot alone, t>: what double backward rests on."""
    c = make(names, shape, seed)
    _, out_dot = attngrad.jvp(c.qkv, c.t[:3], **c.tangents, **c.options)
    _, grads_dot = attngrad.hvp(c.qkv, (None, None, None), c.dout, c.dout_dot, **c.options)
    left, right = [(c.dout_dot, out_dot)], list(zip(grads_dot, c.t, strict=True))
    assert abs(inner(*left) - inner(*right)) <= 1e-12 * max(size(*left), size(*right))


@pytest.mark.parametrize("given_ones", list(itertools.product([False, True], repeat=6)), ids=str)
@pytest.mark.parametrize("names", [(), EVERYTHING], ids=label)
def test_any_tangents_may_be_none(names, given_ones):
    c = make(names, Shape((1,), 2, 1, 20, 70, 6, 5))
    keep = dict(zip(("q", "k", "v", "bias", "sinks", "dout_dot"), given_ones, strict=True))
    c.t = Tangents(*(x if keep[name] else None for name, x in c.t._asdict().items()))
    if not keep["dout_dot"]:
        c.dout_dot = c.dlse_dot = None
    assert_equal_to_the_reference(c)


def shifted(names: tuple[str, ...], by: float) -> Case:
    """k_dot the same for all keys: s_dot is shifted by up to ``by`` times a few, the same for a whole row."""
    c = make(names, Shape((1,), 2, 2, 40, 250, 16, 16))
    c.t = c.t._replace(k=c.t.k + by)
    return c


@pytest.mark.parametrize("names", [(), ("causal",), ("bias", "sinks"), ("softcap", "dropout")], ids=label)
def test_a_large_common_shift_of_the_scores_costs_no_digits(names):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert_within_the_rounding_bound(shifted(names, 1e3).cast(dtype), dtype)
    c = shifted(names, 1e3)
    still = shifted(names, 0.0)
    if "softcap" in names or "sinks" in names:  # there the shift is not common to the row
        return
    out_dot = attngrad.jvp(c.qkv, c.t[:3], **c.tangents, **c.options)[1]
    expected = reference.jvp(still.qkv, still.t[:3], **still.tangents, **still.options)[1]
    assert relative_error(out_dot, expected) < 1e-12


def test_a_row_that_attends_to_one_key_alone_moves_with_its_value_alone():
    c = make((), Shape((1,), 1, 1, 8, 120, 4, 3)).cast(np.float32)
    mask = np.eye(8, 120, 5, dtype=bool)
    out, out_dot = attngrad.jvp(c.qkv, c.t[:3], mask=mask)
    assert np.array_equal(out[0, 0], c.v[0, 0, 5:13])
    assert np.array_equal(out_dot[0, 0], c.t.v[0, 0, 5:13])


def test_a_tangent_of_a_bias_of_minus_infinity_is_harmless_whatever_it_is():
    c = make(("bias -inf", "causal"), Shape((2,), 2, 1, 9, 70, 5, 4))
    hidden = np.isneginf(c.options["bias"])
    c.t = c.t._replace(bias=np.where(hidden, 0.0, c.t.bias))
    expected = all_passes(c)
    for value in (-np.inf, np.nan):
        c.t = c.t._replace(bias=np.where(hidden, value, c.t.bias))
        for name, x in all_passes(c).items():
            assert np.array_equal(x, expected[name]), name
