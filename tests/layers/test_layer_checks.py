"""The layer starts as it should, and says what is wrong with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attngrad import MultiHeadAttention


def test_weights_are_xavier_uniform_and_biases_zero():
    layer = MultiHeadAttention(64, 4, num_kv_heads=2, d_head=24, bias=True, dtype=np.float64, rng=5)
    shapes = {"w_q": (64, 96), "w_k": (64, 48), "w_v": (64, 48), "w_o": (96, 64)}
    shapes |= {"b_q": (96,), "b_k": (48,), "b_v": (48,), "b_o": (64,)}
    assert {name: p.shape for name, p in layer.params.items()} == shapes
    for name in ("w_q", "w_k", "w_v", "w_o"):
        limit = np.sqrt(6 / sum(shapes[name]))
        assert 0.99 * limit < np.abs(layer.params[name]).max() <= limit
        assert abs(layer.params[name].var() / (limit**2 / 3) - 1) < 0.05
    assert not any(layer.params[f"b_{c}"].any() for c in "qkvo")


def test_the_same_rng_gives_the_same_layer_and_a_generator_goes_on():
    def params(rng: Any) -> Any:
        return MultiHeadAttention(8, 2, rng=rng).params["w_o"]

    assert np.array_equal(params(3), params(np.random.default_rng(3)))
    assert not np.array_equal(params(3), params(4))
    rng = np.random.default_rng(3)
    assert not np.array_equal(params(rng), params(rng))


def test_without_a_seed_every_layer_is_another():
    first, second = (MultiHeadAttention(8, 2, rng=None).params for _ in range(2))
    assert not np.array_equal(first["w_o"], second["w_o"])


def test_bias_may_be_a_numpy_bool():
    assert "b_q" in MultiHeadAttention(8, 2, bias=np.True_).params
    assert "b_q" not in MultiHeadAttention(8, 2, bias=np.False_).params


X = np.ones((2, 3, 8), np.float32)


def call(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: MultiHeadAttention(8, 2, bias=True)(*args, **kwargs)


def derive(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: MultiHeadAttention(8, 2, bias=True).jvp(*args, **kwargs)


def build(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: MultiHeadAttention(*args, **kwargs)


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "d_model": (build(0, 1), ValueError, "MultiHeadAttention: d_model must be positive; got 0"),
    "d_model kind": (build(8.0, 1), TypeError, "d_model must be an integer; got 8.0 (float)"),
    "heads do not divide": (build(8, 3), ValueError, "d_model must be divisible by num_heads, 3"),
    "kv heads": (build(8, 4, 3), ValueError, "num_kv_heads must divide num_heads, 4; got 3"),
    "odd rope": (build(6, 2, rope=10.0), ValueError, "d_head must be even where rope is given"),
    "rope sign": (build(8, 2, rope=-1.0), ValueError, "rope must be a positive base; got -1.0"),
    "rope kind": (build(8, 2, rope=True), TypeError, "rope must be a real number; got True (bool)"),
    "bias kind": (build(8, 2, bias=1), TypeError, "bias must be True or False; got 1 (int)"),
    "dtype": (build(8, 2, dtype=np.int32), TypeError, "dtype must be float64, float32, float16 or bfloat16; got int32"),
    "dtype kind": (build(8, 2, dtype="real"), TypeError, "dtype must be float64"),
    "dtype order": (build(8, 2, dtype=">f4"), TypeError, "dtype must be float64"),
    "rng": (build(8, 2, rng=-1), ValueError, "rng must be a seed >= 0"),
    "rng kind": (build(8, 2, rng="a"), TypeError, "rng must be an integer; got 'a' (str)"),
    "query": (call(None), TypeError, "MultiHeadAttention: query must be a numpy.ndarray; got None"),
    "ragged": (call([[1.0] * 8, [1.0]]), ValueError, "query must be a rectangular array; got a ragged list"),
    "tensor": (call(torch.ones(3, 8)), TypeError, "query must be a numpy.ndarray; got Tensor"),
    "dtype of query": (
        call(X.astype(float)),
        TypeError,
        "float32; got float64. Cast it with astype, or make the layer with dtype='float64'.",
    ),
    "axes": (call(X[0, 0]), ValueError, "query must have at least 2 axes"),
    "features": (call(X[..., :4]), ValueError, "query must have 8 features (axis -1), like w_q; got shape (2, 3, 4)"),
    "leading axes": (call(X, X[0]), ValueError, "key must have the leading axes of query, (2,); got shape (3, 8)"),
    "value tokens": (call(X, X, X[:, :2]), ValueError, "value must have 3 tokens (axis -2), like key"),
    "option": (call(X, casual=True), TypeError, "MultiHeadAttention: unknown option 'casual'. Did you mean 'causal'?"),
    "mask": (call(X, mask=np.ones((2, 3), bool)), ValueError, "mask must broadcast to (..., Hq, T, S) = (2, 2, 3, 3)"),
    "offset": (call(X, offset=1.5), TypeError, "offset must be an integer or an integer array"),
    "lse": (call(X, return_lse=True), ValueError, "return_lse must be False; got True"),
    "inputs": (
        derive(X, (X,)),
        TypeError,
        "inputs must be a tuple, one entry per input; got ndarray. For one input: (x,)",
    ),
    "no inputs": (derive((), ()), ValueError, "inputs must have an entry for query"),
    "inputs_dot": (derive((X, X), (X,)), ValueError, "inputs_dot must have an entry for query"),
    "shape of a tangent": (derive((X,), (X[0],)), ValueError, "query_dot must have the shape of query"),
    "params_dot kind": (derive((X,), (X,), [1]), TypeError, "params_dot must be a mapping"),
    "name": (
        derive((X,), (X,), {"wq": X}),
        ValueError,
        "params_dot must name parameters; got 'wq'. Did you mean 'w_q'?",
    ),
    "shape of w_q_dot": (derive((X,), (X,), {"w_q": X}), ValueError, "params_dot['w_q'] must have the shape of w_q"),
}


@pytest.mark.parametrize(("function", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_function_argument_rule_and_what_came(function, error, message):
    with pytest.raises(error) as caught:
        function()
    assert message in str(caught.value)


def test_a_parameter_replaced_by_a_wrong_one_is_named():
    layer = MultiHeadAttention(8, 2)
    layer.params["w_k"] = np.ones((8, 8))
    with pytest.raises(TypeError, match=r"params\['w_k'\] must have dtype float32; got float64"):
        layer(X)
    layer.params["w_k"] = np.ones((8, 6), np.float32)
    with pytest.raises(ValueError, match=r"params\['w_k'\] must have the shape of the layer, \(8, 8\)"):
        layer(X)


@pytest.mark.parametrize("name", ["b_q", "w_x"])
def test_a_parameter_that_the_layer_has_not_is_named_and_nothing_is_computed(name, tmp_path):
    layer = MultiHeadAttention(8, 2)
    layer.params[name] = np.ones(8, np.float32)
    calls = {
        "": lambda: layer(X),
        ".jvp": lambda: layer.jvp((X,), (X,)),
        ".save": lambda: layer.save(tmp_path / "x"),
        ".to_torch": layer.to_torch,
    }
    for function, wrong in calls.items():
        with pytest.raises(ValueError, match="params must have the names of grads, w_q, w_k, w_v, w_o; got") as caught:
            wrong()
        assert str(caught.value).startswith(f"MultiHeadAttention{function}: ")
        assert f"w_o, {name}. Biases are made with bias=True" in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_parameter_that_is_gone_is_named():
    layer = MultiHeadAttention(8, 2, bias=True)
    del layer.params["b_q"]
    with pytest.raises(ValueError, match=r"params must have the names of grads, w_q, .* b_o; got w_q, .* b_o"):
        layer(X)


def test_repr_tells_the_widths_of_key_and_value_where_they_are_others():
    module = torch.nn.MultiheadAttention(8, 2, kdim=6, vdim=10)
    layer = MultiHeadAttention.from_torch(module.state_dict(), 2)
    assert repr(layer).endswith("dtype=float32, kdim=6, vdim=10)")
    assert (layer.d_model, layer.kdim, layer.vdim) == (8, 6, 10)


def test_repr_tells_the_configuration():
    expected = (
        "MultiHeadAttention(d_model=8, num_heads=4, num_kv_heads=2, d_head=6, bias=True, rope=10.0, dtype=bfloat16)"
    )
    assert repr(MultiHeadAttention(8, 4, 2, 6, bias=True, rope=10.0, dtype=ml_dtypes.bfloat16)) == expected
