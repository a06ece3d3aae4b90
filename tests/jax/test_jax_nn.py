"""The signature of jax.nn.dot_product_attention: its arguments, its results, its errors."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attngrad.jax as bridge
from jax_tools import close


def test_layouts_and_the_signature_of_jax_nn():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, h, 4))) for n, h in ((5, 4), (7, 2), (7, 2)))
    out, lse = bridge.attention(q, k, v, layout="BTNH", return_lse=True, causal=True)
    ours = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    expected, expected_lse = bridge.attention(*ours, return_lse=True, causal=True)
    assert jnp.array_equal(jnp.swapaxes(out, 1, 2), expected)
    assert jnp.array_equal(lse, expected_lse)

    bias, mask = (
        jnp.asarray(rng.standard_normal((1, 4, 5, 7))),
        jnp.asarray(rng.random((2, 1, 5, 7)) > 0.2).at[..., 0].set(True),
    )
    cases = (
        {},
        {"is_causal": True, "scale": 0.3},
        {"bias": bias, "mask": mask},
        {"bias": bias, "mask": mask, "is_causal": True},
        {"local_window_size": (3, 1)},
        {"local_window_size": 2},
        {"key_value_seq_lengths": jnp.asarray([3, 6], jnp.int32)},
    )
    for options in cases:
        theirs = jax.nn.dot_product_attention(q, k, v, **options)
        close(bridge.dot_product_attention(q, k, v, **options), theirs, 1e-6)  # theirs computes in float32
    single = bridge.dot_product_attention(q[0], k[0], v[0], is_causal=True)
    close(single, jax.nn.dot_product_attention(q[0], k[0], v[0], is_causal=True), 1e-6)
    out = bridge.dot_product_attention(q, k, v, query_seq_lengths=jnp.asarray([2, 5]))
    assert not out[0, 2:].any()


def nn_problem(queries=5, keys=7, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((2, n, h, 4)), dtype) for n, h in ((queries, 4), (keys, 2), (keys, 2)))


def test_the_signature_is_that_of_jax_nn():
    ours, theirs = (inspect.signature(f.dot_product_attention).parameters.values() for f in (bridge, jax.nn))
    ours = [p for p in ours if p.kind is not p.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_every_implementation_is_accepted_and_is_ours(implementation):
    q, k, v = nn_problem()
    expected = bridge.dot_product_attention(q, k, v, is_causal=True)
    assert jnp.array_equal(
        bridge.dot_product_attention(q, k, v, is_causal=True, implementation=implementation), expected
    )


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_the_residual_is_that_of_jax_nn(dtype):
    q, k, v = nn_problem(dtype=dtype)
    options = {"is_causal": True, "return_residual": True, "key_value_seq_lengths": jnp.asarray([3, 6], jnp.int32)}
    for x in ((q, k, v), (q[0], k[0], v[0])):
        if x[0].ndim == 3:
            options["key_value_seq_lengths"] = jnp.asarray([3], jnp.int32)
        found, expected = bridge.dot_product_attention(*x, **options), jax.nn.dot_product_attention(*x, **options)
        assert [(y.shape, y.dtype) for y in found] == [(y.shape, y.dtype) for y in expected]
        close(found, expected, 2e-2 if dtype == jnp.bfloat16 else 1e-6)


def test_the_residual_has_its_gradient():
    q, k, v = nn_problem()

    def loss(q, k):
        return (bridge.dot_product_attention(q, k, v, return_residual=True)[1] ** 2).sum()

    check_grads(loss, (q, k), 2, ["rev"])


def test_without_a_batch_masks_biases_and_lengths_may_have_its_axis():
    q, k, v = (x[0] for x in nn_problem())
    rng = np.random.default_rng(1)
    bias, mask = jnp.asarray(rng.standard_normal((1, 4, 5, 7))), jnp.asarray(rng.random((1, 1, 5, 7)) > 0.3)
    mask = mask.at[..., 0].set(True)
    for options in ({"bias": bias}, {"mask": mask}, {"mask": mask[0], "bias": bias[0, 0]}):
        close(bridge.dot_product_attention(q, k, v, **options), jax.nn.dot_product_attention(q, k, v, **options), 1e-6)
    out = bridge.dot_product_attention(q, k, v, query_seq_lengths=[2])
    assert out.shape == (5, 4, 4)
    assert out[:2].all()
    assert not out[2:].any()


@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.bfloat16), (jnp.float32, jnp.int32), (jnp.bfloat16, jnp.float32)])
def test_a_bias_of_another_dtype_is_added_as_in_jax_nn(dtypes):
    q, k, v = nn_problem(dtype=dtypes[0])
    bias = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (4, 5, 7)), dtypes[1])
    found = bridge.dot_product_attention(q, k, v, bias)
    assert found.dtype == dtypes[0]
    close(found, jax.nn.dot_product_attention(q, k, v, bias), 2e-2 if dtypes[0] == jnp.bfloat16 else 1e-6)


NN = jnp.zeros((2, 6, 4, 3))


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, "implementation must be None, 'xla' or 'cudnn'; got 'mosaic'",
         lambda f: f(NN, NN, NN, implementation="mosaic")),
        (TypeError, "return_residual must be True or False", lambda f: f(NN, NN, NN, return_residual=1)),
        (ValueError, "return_lse must be False beside return_residual",
         lambda f: f(NN, NN, NN, return_residual=True, return_lse=True)),
        (ValueError, r"query_seq_lengths must be integers of shape \(2,\)",
         lambda f: f(NN, NN, NN, query_seq_lengths=jnp.ones(2))),
        (ValueError, r"key_value_seq_lengths must be integers of shape \(2,\)",
         lambda f: f(NN, NN, NN, key_value_seq_lengths=jnp.ones(3, int))),
        (ValueError, r"N a multiple of K; got .*\(2, 6, 3, 3\).*tokens come before heads",
         lambda f: f(NN, NN[:, :, :3], NN[:, :, :3])),
        (ValueError, "query, key and value must be", lambda f: f(NN, NN[0], NN[0])),
        (ValueError, "have 3 or 4 axes", lambda f: f(NN[0, 0], NN, NN)),
        (TypeError, "unknown option 'causal'. Use 'is_causal'", lambda f: f(NN, NN, NN, causal=True)),
        (TypeError, "unknown option 'is_casual'. Did you mean 'is_causal'", lambda f: f(NN, NN, NN, is_casual=True)),
        (TypeError, "Did you mean 'implementation'", lambda f: f(NN, NN, NN, implementatoin=None)),
    ],
)  # fmt: skip
def test_errors_of_dot_product_attention_name_the_argument(kind, message, call):
    with pytest.raises(kind, match=f"dot_product_attention: .*{message}|dot_product_attention: {message}"):
        call(bridge.dot_product_attention)
