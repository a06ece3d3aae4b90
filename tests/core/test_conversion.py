"""Lists, integers and narrow cotangents are taken as NumPy users expect, and nothing is lost on the way in.

Every kind in every argument is in tests/robustness; here is what becomes of its dtype.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngrad
from attngrad import MultiHeadAttention

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
X = np.array([[1, 2, 0], [0, 1, 3], [2, 0, 1]])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)


@dtypes
@pytest.mark.parametrize("open_dtype", [X, X.astype(np.uint8), X.tolist(), X.astype(float).tolist()], ids=str)
def test_lists_and_integers_take_the_dtype_of_the_other_arrays(dtype: Any, open_dtype: Any):
    x = X.astype(dtype)
    expected, pullback = attngrad.vjp(x, x, x)
    for i in range(3):
        arrays: list[Any] = [x, x, x]
        arrays[i] = open_dtype
        out, pullback_of_lists = attngrad.vjp(*arrays)
        assert out.dtype == dtype
        assert np.array_equal(out, expected)
        for found, grad in zip(pullback_of_lists(x)[:3], pullback(x)[:3], strict=True):
            assert found.dtype == dtype
            assert np.array_equal(found, grad)


def test_where_no_array_is_floating_it_is_float64():
    for x in (X, X.tolist(), X.astype(np.int8)):
        assert attngrad.attention(x, x, X).dtype == np.float64
        assert attngrad.attention_weights(x, X).dtype == np.float64
        assert attngrad.softmax_jacobian(x).dtype == np.float64
    assert np.array_equal(attngrad.softmax_jacobian([0, 0]), [[0.25, -0.25], [-0.25, 0.25]])


def test_a_list_of_numpy_floats_keeps_their_dtype():
    x = X.astype(np.float32)
    assert attngrad.attention(list(x), x, x).dtype == np.float32
    assert attngrad.attention([list(row) for row in x], [*x], tuple(x)).dtype == np.float32
    with pytest.raises(TypeError, match="attention: k must have the dtype of q, float32; got float64"):
        attngrad.attention(x, [list(row) for row in x.astype(np.float64)], x)


@dtypes
def test_lists_of_bias_and_sinks_have_the_dtype_of_q_and_so_have_their_gradients(dtype: Any):
    x = X.astype(dtype)
    _, pullback = attngrad.vjp(x, x, x, bias=[[0, 1, 2]], sinks=[0.5])
    assert {g.dtype for g in pullback(x)} == {np.dtype(dtype)}


def test_integers_that_the_dtype_rounds_are_refused_and_floats_of_lists_are_rounded():
    for dtype, n in ((np.float16, 2049), (ml_dtypes.bfloat16, 257), (np.float32, 2**24 + 1)):
        x = np.ones((2, 2), dtype)
        name = np.dtype(dtype).name
        for found in (np.full((2, 2), n), np.full((2, 2), n).tolist()):
            with pytest.raises(ValueError, match=f"attention: k must hold integers that are exact in {name}; got {n}"):
                attngrad.attention(x, found, x)
        assert attngrad.attention(x, np.full((2, 2), n - 1), x).dtype == dtype
        assert attngrad.attention(x, [[float(n)] * 2] * 2, x).dtype == dtype


def test_numbers_of_a_list_that_overflow_are_refused_and_infinities_are_not():
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"pullback: dout must hold numbers that are finite in float32; got 1e\+300"):
        attngrad.vjp(x, x, x)[1]([[1.0, 1.0], [1.0, 1e300]])
    assert np.isinf(attngrad.attention(x, x, [[1.0, np.inf]] * 2)[:, 1]).all()


def test_a_narrow_cotangent_is_widened_and_a_wide_one_refused():
    x, narrow = X.astype(np.float64), (X / 8).astype(np.float32)
    _, pullback = attngrad.vjp(x, x, x)
    expected = pullback(narrow.astype(np.float64), narrow[0].astype(np.float64))
    for dout, dlse in ((narrow, narrow[0]), ((X / 8).tolist(), (X / 8)[0].tolist()), (narrow.astype("f2"), narrow[0])):
        for found, grad in zip(pullback(dout, dlse)[:3], expected[:3], strict=True):
            assert np.array_equal(found, grad)
    q = X.astype(np.float32)
    with pytest.raises(
        TypeError, match=r"dout must have dtype float32; got float64\. It has the dtype of out: cast it"
    ):
        attngrad.vjp(q, q, q)[1](x)


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=["float16", "bfloat16"])
def test_dlse_of_16_bit_inputs_may_be_in_16_bits(dtype: Any):
    x, dlse = X.astype(dtype), np.array([1, 2, 3], dtype)
    _, pullback = attngrad.vjp(x, x, x)
    assert np.array_equal(pullback(x, dlse).q, pullback(x, dlse.astype(np.float32)).q)
    other = next(d for d in DTYPES[2:] if d is not dtype)
    for dout in (x.astype(np.float32), x.astype(other)):  # neither 16-bit dtype holds the other
        with pytest.raises(TypeError, match=f"dout must have dtype {np.dtype(dtype)}"):
            pullback(dout)


def test_lists_are_read_in_every_pass_and_in_the_trace():
    x, rows = X.astype(np.float64), X.tolist()
    _, out_dot = attngrad.jvp((rows, rows, rows), (rows, None, rows))
    assert np.array_equal(out_dot, attngrad.jvp((x, x, x), (x, None, x))[1])
    _, grads_dot = attngrad.hvp((rows, rows, rows), (rows, None, rows), rows, rows, dlse=[1, 2, 3], dlse_dot=[0, 1, 0])
    _, expected = attngrad.hvp((x, x, x), (x, None, x), x, x, dlse=x[0] * 0 + [1, 2, 3], dlse_dot=np.eye(3)[1])
    assert np.array_equal(grads_dot.q, expected.q)
    assert np.array_equal(attngrad.trace(rows, rows, rows, rows)["dQ"], attngrad.trace(x, x, x, x)["dQ"])
    assert np.array_equal(attngrad.jacobian(rows, rows, rows), attngrad.jacobian(x, x, x))


def test_the_options_of_a_layer_may_be_lists():
    layer = MultiHeadAttention(4, 2, rope=100.0, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    options: dict[str, Any] = {"mask": [[True, True, False]] * 3, "bias": [1, 0, 2], "offset": [0, 1], "causal": True}
    arrays = {name: np.asarray(value) for name, value in options.items() if name != "causal"}
    arrays["bias"] = arrays["bias"].astype(float)
    expected = layer(x, causal=True, **arrays)
    assert np.array_equal(layer(x.tolist(), **options), expected)
    assert layer.backward(np.ones_like(x, dtype=int)).shape == x.shape
    t = layer.trace(x.tolist(), x.tolist(), **options)
    assert np.allclose(t["Y"], expected, rtol=1e-12)
    w_dot = np.eye(4, dtype=int)
    moved = layer.jvp((x,), (None,), {"w_o": w_dot.tolist()}, **options)[1]
    assert np.array_equal(moved, layer.jvp((x,), (None,), {"w_o": w_dot.astype(float)}, causal=True, **arrays)[1])
