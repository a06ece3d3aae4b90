"""What the layer keeps, returns and leaves alone; its options; its 16-bit arithmetic; its start."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attngrad import MultiHeadAttention, reference
from attngrad.layers.rope import rotation
from attngrad.testing import relative_error, rms_error
from layer_tools import DTYPES, randomise, worst

# --- what the layer keeps --------------------------------------------------------------------------------------------


def step(layer: MultiHeadAttention, x: Any, dy: Any, between: Callable[[], None] = lambda: None) -> tuple[Any, ...]:
    layer.zero_grad()
    layer(x)
    between()
    dx = layer.backward(dy)
    return dx, {name: g.copy() for name, g in layer.grads.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_uses_the_weights_of_the_forward_after_an_update(dtype):
    layer = randomise(MultiHeadAttention(8, 2, bias=True, rope=10.0, dtype=dtype))
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, 3, 8)).astype(dtype) for _ in range(2))
    dx, grads = step(layer, x, dy)

    def update() -> None:
        for p in layer.params.values():
            p *= dtype(-3)

    again, grads_again = step(layer, x, dy, update)
    assert np.array_equal(again, dx)
    assert all(np.array_equal(grads_again[name], grads[name]) for name in grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_uses_the_inputs_of_the_forward_after_a_write(dtype):
    layer = randomise(MultiHeadAttention(8, 2, dtype=dtype))
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, 3, 8)).astype(dtype) for _ in range(2))
    dx, grads = step(layer, x, dy)
    residual = x.copy()
    layer.zero_grad()
    residual += layer(residual)
    assert np.array_equal(layer.backward(dy), dx)
    assert all(np.array_equal(layer.grads[name], grads[name]) for name in grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_add_up_until_zero_grad_and_inputs_gradients_do_not(dtype):
    layer = randomise(MultiHeadAttention(8, 2, bias=True, dtype=dtype))
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, 3, 8)).astype(dtype) for _ in range(2))
    layer(x)
    first = layer.backward(dy)
    once = {name: g.copy() for name, g in layer.grads.items()}
    held = dict(layer.grads)
    assert np.array_equal(layer.backward(dy), first)
    assert all(np.array_equal(layer.grads[name], 2 * once[name]) for name in once)
    layer.zero_grad()
    assert all(g is layer.grads[name] and not g.any() for name, g in held.items())


def test_only_the_last_forward_is_kept():
    layer = MultiHeadAttention(8, 2, dtype=np.float64)
    rng = np.random.default_rng(0)
    x, other, dy = (rng.standard_normal((3, 8)) for _ in range(3))
    dx, _ = step(layer, other, dy)
    layer(x)
    layer(other)
    assert np.array_equal(layer.backward(dy), dx)


def test_backward_before_forward_or_after_a_failed_one_says_what_to_do():
    layer = MultiHeadAttention(8, 2)
    x = np.zeros((3, 8), np.float32)
    with pytest.raises(RuntimeError, match="Call the layer first"):
        layer.backward(x)
    layer(x)
    with pytest.raises(TypeError, match="Did you mean 'causal'"):
        layer(x, casual=True)
    with pytest.raises(RuntimeError, match="Call the layer first"):
        layer.backward(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])  # noqa: S301
def test_a_copy_computes_as_the_layer_and_has_not_seen_its_last_forward(dtype, copied):
    layer = randomise(MultiHeadAttention(8, 4, 2, bias=True, rope=10.0, dtype=dtype))
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(dtype)
    layer(x)
    dx = layer.backward(x)
    other = copied(layer)
    with pytest.raises(RuntimeError, match="Call the layer first"):
        other.backward(x)
    assert repr(other) == repr(layer)
    assert all(np.array_equal(other.grads[name], g) for name, g in layer.grads.items())
    assert np.array_equal(other(x), layer(x))
    assert np.array_equal(other.backward(x), dx)
    other.params["w_q"][...] = 0.0
    assert layer.params["w_q"].any()


def test_a_copy_leaves_the_layer_its_last_forward():
    layer = MultiHeadAttention(8, 2)
    x = np.ones((3, 8), np.float32)
    layer(x)
    pickle.dumps(layer)
    assert layer.backward(x).shape == x.shape


def test_a_wrong_dy_leaves_the_gradients_as_they_are():
    layer = MultiHeadAttention(8, 2)
    layer(np.ones((3, 8), np.float32))
    with pytest.raises(ValueError, match=r"dy must have the shape of the output, \(3, 8\)"):
        layer.backward(np.ones((1, 8), np.float32))
    assert not any(g.any() for g in layer.grads.values())


def test_value_alone_folds_the_key_gradient_into_the_query():
    layer = randomise(MultiHeadAttention(8, 2, dtype=np.float64))
    rng = np.random.default_rng(0)
    x, value, dy = (rng.standard_normal((3, 8)) for _ in range(3))
    layer(x, x, value)
    dquery, dkey, dvalue = layer.backward(dy)
    layer(x, value=value)
    folded = layer.backward(dy)
    assert relative_error(folded[0], dquery + dkey) < 1e-14
    assert relative_error(folded[1], dvalue) < 1e-14


def test_inputs_may_be_read_only_and_are_not_written_to():
    layer = randomise(MultiHeadAttention(8, 2, bias=True, rope=10.0))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 3, 8), dtype=np.float32) for _ in range(5)]
    kept = [a.copy() for a in arrays]
    for a in arrays:
        a.flags.writeable = False
    layer(*arrays[:3])
    layer.backward(arrays[3])
    layer.jvp(tuple(arrays[:3]), (arrays[4], None, arrays[3]))
    assert all(np.array_equal(a, b) for a, b in zip(arrays, kept, strict=True))


def test_results_are_writable_and_share_no_memory_with_the_layer():
    layer = randomise(MultiHeadAttention(8, 1, dtype=np.float64))
    x = np.random.default_rng(0).standard_normal((3, 8))
    y = layer(x)
    dx = layer.backward(x)
    y[...] = 0.0
    dx[...] = 0.0
    assert layer.backward(x).any()
    assert layer(x).any()


def test_strides_do_not_matter():
    layer = randomise(MultiHeadAttention(6, 3, rope=10.0, dtype=np.float64))
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((2, 4, 6))
    wide = np.repeat(dense, 3, axis=1)[:, ::3]
    turned = np.ascontiguousarray(dense.transpose(2, 0, 1)).transpose(1, 2, 0)
    expected, grads = step(layer, dense, dense)
    for x in (wide, turned, np.asfortranarray(dense), dense[::-1][::-1]):
        assert np.array_equal(x, dense)
        dx, found = step(layer, x, x)
        assert relative_error(dx, expected) < 1e-14
        assert worst(found, grads) < 1e-14


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (0,), (2, 1, 2)])
def test_leading_axes_are_independent_sequences(leading):
    layer = randomise(MultiHeadAttention(6, 3, bias=True, rope=10.0, dtype=np.float64))
    x = np.random.default_rng(0).standard_normal((*leading, 4, 6))
    y = layer(x, causal=True)
    dx = layer.backward(x)
    assert y.shape == dx.shape == x.shape
    grads = {name: np.zeros_like(g) for name, g in layer.grads.items()}
    for index in np.ndindex(leading):
        single = randomise(MultiHeadAttention(6, 3, bias=True, rope=10.0, dtype=np.float64))
        assert relative_error(single(x[index], causal=True), y[index]) < 1e-13
        assert relative_error(single.backward(x[index]), dx[index]) < 1e-13
        grads = {name: g + single.grads[name] for name, g in grads.items()}
    assert worst(layer.grads, grads) < 1e-12


@pytest.mark.parametrize(("t", "s"), [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys_give_empty_or_zero_results(t, s):
    layer = MultiHeadAttention(6, 3, bias=True, rope=10.0, dtype=np.float64)
    query, key = np.ones((2, t, 6)), np.ones((2, s, 6))
    y = layer(query, key)
    dquery, dkey = layer.backward(np.ones_like(y))
    assert (y.shape, dquery.shape, dkey.shape) == (query.shape, query.shape, key.shape)
    assert not y.any()
    assert not dquery.any()
    assert not dkey.any()


# --- options ---------------------------------------------------------------------------------------------------------


def test_dropout_repeats_with_its_seed_and_changes_with_another():
    layer = randomise(MultiHeadAttention(8, 2, dtype=np.float64))
    x = np.random.default_rng(0).standard_normal((2, 5, 8))
    y = layer(x, dropout=0.5, seed=3)
    dx = layer.backward(x)
    assert np.array_equal(layer(x, dropout=0.5, seed=3), y)
    assert np.array_equal(layer.backward(x), dx)
    assert not np.allclose(layer(x, dropout=0.5, seed=4), y)
    assert not np.allclose(layer(x), y)


def test_a_masked_key_has_no_effect_and_no_gradient():
    layer = randomise(MultiHeadAttention(8, 2, bias=True, dtype=np.float64))
    rng = np.random.default_rng(0)
    x, key = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 4, 8))
    seen = np.array([[True, True, False, True], [True, False, False, True]])
    y = layer(x, key, mask=seen[:, None, None, :])
    _, dkey = layer.backward(x)
    assert not dkey[~seen].any()
    assert dkey[seen].all()
    key[~seen] = 1e6
    assert relative_error(layer(x, key, mask=seen[:, None, None, :]), y) < 1e-14


# --- 16 bits ---------------------------------------------------------------------------------------------------------


SIXTEEN = {np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}  # unit roundoff


def naive(layer: MultiHeadAttention, x: Any, dy: Any, **options: Any) -> dict[str, Any]:
    """The layer with every intermediate rounded to the dtype, gradients too."""
    p, dtype = layer.params, layer.dtype
    rows = x.reshape(-1, x.shape[-1])

    def split(a: Any) -> Any:
        return a.reshape(*x.shape[:-1], -1, layer.d_head).swapaxes(-2, -3)

    def merge(a: Any) -> Any:
        return a.swapaxes(-2, -3).reshape(len(rows), -1)

    def total(a: Any) -> Any:
        running = np.zeros(a.shape[1], dtype)
        for row in a:
            running = (running + row).astype(dtype)
        return running

    turn = rotation(layer.rope, layer.d_head, x.shape[-2], 0, dtype)
    q, k, v = (split((rows @ p[f"w_{c}"]).astype(dtype) + p[f"b_{c}"]) for c in "qkv")
    heads, pullback = reference.vjp(turn.apply(q), turn.apply(k), v, **options)
    out, flat_dy = merge(heads), dy.reshape(len(rows), -1)
    y = (out @ p["w_o"]).astype(dtype) + p["b_o"]
    g = pullback(split((flat_dy @ p["w_o"].T).astype(dtype)))
    d = {"q": merge(turn.invert(g.q)), "k": merge(turn.invert(g.k)), "v": merge(g.v)}
    dx = sum(((d[c] @ p[f"w_{c}"].T).astype(dtype) for c in "kv"), start=(d["q"] @ p["w_q"].T).astype(dtype))
    grads = {f"w_{c}": (rows.T @ d[c]).astype(dtype) for c in "qkv"} | {"w_o": (out.T @ flat_dy).astype(dtype)}
    grads |= {f"b_{c}": total(d[c]) for c in "qkv"} | {"b_o": total(flat_dy)}
    return {"y": y.reshape(x.shape), "dx": dx.reshape(x.shape), **grads}


def results(layer: MultiHeadAttention, x: Any, dy: Any, **options: Any) -> dict[str, Any]:
    y = layer(x, **options)
    return {"y": y, "dx": layer.backward(dy), **layer.grads}


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sixteen_bits_err_less_than_twice_the_naive_computation(dtype):
    rng = np.random.default_rng(0)
    layer = randomise(MultiHeadAttention(32, 4, bias=True, rope=100.0, dtype=dtype))
    exact = MultiHeadAttention(32, 4, bias=True, rope=100.0, dtype=np.float64)
    for name, p in layer.params.items():
        exact.params[name][...] = p
    x, dy = (rng.standard_normal((4, 16, 32)).astype(dtype) for _ in range(2))
    truth = results(exact, x.astype(np.float64), dy.astype(np.float64), causal=True)
    ours, rough = results(layer, x, dy, causal=True), naive(layer, x, dy, causal=True)
    for name, expected in truth.items():
        assert rms_error(ours[name], expected) < 2 * rms_error(rough[name], expected), name
        assert relative_error(ours[name], expected) < 3 * SIXTEEN[dtype], name
    # the sums over tokens are where float32 accumulation shows
    assert rms_error(ours["b_o"], truth["b_o"]) < 1e-2 * rms_error(rough["b_o"], truth["b_o"])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sixteen_bit_layers_return_their_dtype_and_accumulate_in_float32(dtype):
    layer = MultiHeadAttention(8, 2, bias=True, dtype=dtype)
    x = np.ones((2, 3, 8), dtype)
    y, y_dot = layer.jvp((x,), (x,), {"w_q": np.ones((8, 8), np.float32), "w_k": np.ones((8, 8), dtype)})
    assert {y.dtype, y_dot.dtype, layer(x).dtype, layer.backward(x).dtype} == {np.dtype(dtype)}
    assert {p.dtype for p in layer.params.values()} == {np.dtype(dtype)}
    assert {g.dtype for g in layer.grads.values()} == {np.dtype(np.float32)}
    layer.zero_grad()
    small = (x * 2.0**-7).astype(dtype)
    layer(x)
    for _ in range(600):
        layer.backward(small)
    assert np.array_equal(layer.grads["b_o"], np.full(8, 600 * 6 * 2.0**-7, np.float32))  # a 16-bit sum would stall


def test_overflow_in_sixteen_bits_is_silent_and_shows_in_the_result():
    layer = MultiHeadAttention(8, 2, dtype=np.float16)
    layer.params["w_o"][...] = 6e4
    y = layer(np.full((2, 8), 100.0, np.float16))
    assert not np.isfinite(y).all()
