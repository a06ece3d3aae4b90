"""Second order through the layer: by differences of backward, by symmetry, and what hvp leaves alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attngrad import MultiHeadAttention
from attngrad.layers import LayerGradients
from cases import PAIRS, SINGLES, Shape, label, make
from layer_tools import DTYPES, as_tuple, directions, randomise, worst

SHAPE = Shape((2,), 4, 2, 3, 5, 4, 4)
MANY = ("causal", "mask", "bias", "softcap", "sinks", "dropout")


def hessian_case(
    names: tuple[str, ...], inputs: int
) -> tuple[MultiHeadAttention, tuple[Any, ...], dict[str, Any], Any, Any]:
    """A layer, its inputs, its options, dy and dy_dot."""
    n = SHAPE if inputs > 1 else SHAPE._replace(s=SHAPE.t)
    layer = randomise(MultiHeadAttention(6, 4, 2, d_head=4, bias=True, rope=7.0, dtype=np.float64))
    rng = np.random.default_rng(4)
    x = tuple(rng.standard_normal((2, tokens, 6)) for tokens in (n.t, n.s, n.s)[:inputs])
    return layer, x, make(names, n).options, rng.standard_normal(x[0].shape), rng.standard_normal(x[0].shape)


def by_name(g: LayerGradients) -> dict[str, Any]:
    named = {f"input {i}": a for i, a in enumerate(g.inputs)} | dict(g.params) | {"bias": g.bias, "sinks": g.sinks}
    return {name: a for name, a in named.items() if a is not None}


@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("names", [*SINGLES, MANY], ids=label)
def test_hvp_gives_the_gradients_of_backward_and_their_central_difference(names, inputs):
    layer, x, options, dy, dy_dot = hessian_case(names, inputs)
    t = directions(layer, x, options)
    grads, grads_dot = layer.hvp(x, t["inputs_dot"], dy, dy_dot, **{n: t[n] for n in t if n != "inputs_dot"}, **options)
    start = {name: p.copy() for name, p in layer.params.items()}

    def gradients(h: float) -> dict[str, Any]:
        for name, p in layer.params.items():
            p[...] = start[name] + h * t["params_dot"][name]
        extra = {n: options[n] + h * t[f"{n}_dot"] for n in ("bias", "sinks") if n in options}
        layer.zero_grad()
        layer(*(a + h * b for a, b in zip(x, t["inputs_dot"], strict=True)), **{**options, **extra})
        found = as_tuple(layer.backward(dy + h * dy_dot))
        at = layer.attention_gradients
        assert at is not None
        return by_name(LayerGradients(found, {n: g.copy() for n, g in layer.grads.items()}, at.bias, at.sinks))

    assert worst(by_name(grads), gradients(0.0)) < 1e-12
    h = 1e-5
    plus, minus = gradients(h), gradients(-h)
    assert worst(by_name(grads_dot), {n: (plus[n] - minus[n]) / (2 * h) for n in plus}) < 1e-7


@pytest.mark.parametrize("names", [*SINGLES, *PAIRS[::4], MANY], ids=label)
def test_the_hessian_of_a_layer_is_symmetric(names):
    layer, x, options, dy, _ = hessian_case(names, 2)
    t, u = directions(layer, x, options), directions(layer, x, options, seed=77)

    def along(d: dict[str, Any]) -> dict[str, Any]:
        rest = {n: d[n] for n in d if n != "inputs_dot"}
        return by_name(layer.hvp(x, d["inputs_dot"], dy, **rest, **options)[1])

    def tangents(d: dict[str, Any]) -> dict[str, Any]:
        return by_name(LayerGradients(d["inputs_dot"], d["params_dot"], d.get("bias_dot"), d.get("sinks_dot")))

    left, right = ({n: np.sum(a * b) for n, a, b in zipped(along(d), tangents(e))} for d, e in ((t, u), (u, t)))
    size = max(sum(map(abs, left.values())), sum(map(abs, right.values())))
    assert size > 0
    assert abs(sum(left.values()) - sum(right.values())) < 1e-12 * size


def zipped(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    assert a.keys() == b.keys()
    return [(name, a[name], b[name]) for name in a]


def test_hvp_takes_none_and_missing_names_for_zero():
    layer, x, _, dy, _ = hessian_case((), 2)
    grads, grads_dot = layer.hvp(x, (None, None), dy)
    assert not any(a.any() for a in by_name(grads_dot).values())
    zeros = {name: np.zeros_like(p) for name, p in layer.params.items()}
    direction = np.random.default_rng(0).standard_normal(layer.params["w_k"].shape)
    sparse = layer.hvp(x, (None, None), dy, params_dot={"w_k": direction})[1]
    dense = layer.hvp(x, (0 * x[0], 0 * x[1]), dy, 0 * dy, {**zeros, "w_k": direction})[1]
    assert worst(by_name(sparse), by_name(dense)) < 1e-12
    assert by_name(grads).keys() == by_name(grads_dot).keys()


def test_hvp_leaves_the_layer_alone_and_checks_its_cotangents():
    layer, x, _, dy, _ = hessian_case((), 1)
    before = {name: g.copy() for name, g in layer.grads.items()}
    layer.hvp(x, x, dy)
    assert all(np.array_equal(layer.grads[name], before[name]) for name in before)
    with pytest.raises(ValueError, match=r"MultiHeadAttention\.hvp: dy_dot must have the shape"):
        layer.hvp(x, x, dy, dy[:1])
    with pytest.raises(TypeError, match=r"MultiHeadAttention\.hvp: dy must be a numpy.ndarray"):
        layer.hvp(x, x, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hvp_of_a_narrow_layer_is_close_to_that_of_a_wide_one(dtype):
    layer, x, _, dy, dy_dot = hessian_case((), 1)
    narrow = MultiHeadAttention(6, 4, 2, d_head=4, bias=True, rope=7.0, dtype=dtype)
    for name, p in narrow.params.items():
        p[...] = layer.params[name]
        layer.params[name][...] = p
    x, dy, dy_dot = (a.astype(dtype) for a in (x[0], dy, dy_dot))
    found = narrow.hvp((x,), (dy_dot,), dy, dy_dot)
    expected = layer.hvp(*((a.astype(np.float64),) for a in (x, dy_dot)), *(a.astype(np.float64) for a in (dy, dy_dot)))
    eps = float(ml_dtypes.finfo(dtype).eps)
    for got, right in zip(found, expected, strict=True):
        assert worst({n: a.astype(np.float64) for n, a in by_name(got).items()}, by_name(right)) < 64 * eps
        assert all(a.dtype == dtype for a in got.inputs)
