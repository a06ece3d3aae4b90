"""Arrays as they come to the JAX bridge: every dtype, no copies, empty axes, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attngrad
import attngrad.jax as bridge
from attngrad.backends import cpu


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("x64", [True, False])
def test_every_dtype_gives_what_the_numpy_functions_give(dtype, x64):
    with jax.enable_x64(x64):
        rng = np.random.default_rng(0)
        q, k, v, dout = (jnp.asarray(rng.standard_normal((2, 3, 5, 4)), dtype) for _ in range(4))
        bias = jnp.asarray(rng.standard_normal((3, 1, 5)), dtype)

        @jax.jit
        def both(q, k, v, bias, dout):
            def f(q, k, v, bias):
                return bridge.attention(q, k, v, bias=bias, causal=True, return_lse=True)

            (out, lse), pullback = jax.vjp(f, q, k, v, bias)
            return out, lse, *pullback((dout, jnp.ones_like(lse)))

        actual = both(q, k, v, bias, dout)
        arrays = [np.asarray(x) for x in (q, k, v, bias)]
        (out, lse), pullback = attngrad.vjp(*arrays[:3], bias=arrays[3], causal=True, return_lse=True)
        expected = (out, lse, *pullback(np.asarray(dout), np.ones_like(lse))[:4])
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(np.asarray(a), b)
        dots = jax.jvp(lambda q: bridge.attention(q, k, v, return_lse=True), (q,), (dout,))[1]
        assert [x.dtype for x in dots] == [out.dtype, lse.dtype]


def test_nothing_is_copied_on_the_way_in_and_out(monkeypatch):
    seen = []
    forward, backward = cpu.forward, cpu.backward
    monkeypatch.setattr(
        cpu, "forward", lambda x, o, save, into: seen.append((x, into)) or forward(x, o, save=save, into=into)
    )
    monkeypatch.setattr(cpu, "backward", lambda *a, into: seen.append((a[0], into)) or backward(*a, into=into))
    q = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8, 64, 32)))

    def same(arrays, expected):
        return [x.ctypes.data for x in arrays] == [x.unsafe_buffer_pointer() for x in expected]

    bridge.attention(q, q, q)
    assert same([seen[-1][0].q], [q])
    out = jax.block_until_ready(jax.jit(lambda q: bridge.attention(q, q, q))(q))
    assert same([seen[-1][0].q, seen[-1][1][0]], [q, out])
    grads = jax.block_until_ready(jax.jit(jax.grad(lambda *x: bridge.attention(*x).sum(), (0, 1, 2)))(q, q, q))
    assert same(seen[-1][0][:3], [q, q, q])
    assert same(seen[-1][1], grads)


def test_a_forward_pass_alone_saves_nothing(monkeypatch):
    forward = cpu.forward

    def checked(x, o, *, save, into=None):
        if save:
            raise ValueError("it saves")
        return forward(x, o, save=save, into=into)

    monkeypatch.setattr(cpu, "forward", checked)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)))
    out = jax.jit(lambda q: bridge.attention(q, q, q))(q)
    assert np.array_equal(np.asarray(out), attngrad.attention(*(np.asarray(q),) * 3))
    with pytest.raises(RuntimeError, match="it saves"):  # a pass for a gradient does save
        jax.block_until_ready(jax.jit(jax.grad(lambda q: bridge.attention(q, q, q).sum()))(q))


def test_empty_and_two_axis_inputs():
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)):
        grads = jax.jit(jax.grad(lambda q: bridge.attention(q, q, q).sum()))(jnp.ones(shape))
        assert grads.shape == shape
    q = jnp.ones((3, 4))
    out, lse = jax.jit(lambda q: bridge.attention(q, q, q, return_lse=True, sinks=jnp.zeros(1)))(q)
    assert out.shape == (3, 4)
    assert lse.shape == (3,)


def test_dir_shows_the_public_names_alone():
    assert dir(bridge) == sorted(bridge.__all__)
    assert "audit" in dir(bridge)
    assert all(getattr(bridge, name) for name in dir(bridge))


# --- errors ----------------------------------------------------------------------------------------------------------

Q = np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (TypeError, "q must be an array of JAX or NumPy", {"q": [1.0]}),
        (TypeError, "must have dtype float64", {"q": Q.astype(int), "k": Q.astype(int), "v": Q.astype(int)}),
        (TypeError, "k must have the dtype of q", {"k": Q.astype(np.float16)}),
        (ValueError, "k must have 4 features", {"k": Q[..., :2]}),
        (TypeError, "Did you mean 'causal'", {"casual": True}),
        (ValueError, "seed must be given", {"dropout": 0.5}),
        (TypeError, "seed must be an integer", {"dropout": 0.5, "seed": Q}),
        (TypeError, "segments must be a pair", {"segments": 1}),
        (TypeError, "mask must be boolean", {"mask": Q[0, :, :3]}),
        (ValueError, "sinks must have shape", {"sinks": Q[0, 0]}),
        (TypeError, "offset must have an integer dtype", {"offset": Q}),
        (ValueError, "layout must be one of", {"layout": "TBH"}),
        (TypeError, "return_lse must be True or False", {"return_lse": 1}),
    ],
)
def test_a_mistake_is_told_what_it_is(kind, message, options):
    arguments = {"q": Q, "k": Q, "v": Q} | options
    with pytest.raises(kind, match=message):
        bridge.attention(**arguments)
    with pytest.raises(kind, match=message):
        jax.eval_shape(lambda: bridge.attention(**arguments))


def test_a_key_for_a_seed_is_told_how_to_become_one():
    q, key = jnp.ones((2, 3, 4)), jax.random.key(1)
    with pytest.raises(TypeError, match=r"seed must be an integer; got a PRNG key. Pass seed=jax.random.bits"):
        bridge.attention(q, q, q, dropout=0.1, seed=key)
    assert bridge.attention(q, q, q, dropout=0.1, seed=jax.random.bits(key)).shape == q.shape


def test_the_numpy_functions_name_the_bridges():
    for x, name in ((jnp.ones((2, 3, 4)), "jax"), (torch.ones(2, 3, 4), "torch")):
        with pytest.raises(TypeError, match=rf"q must be a numpy.ndarray; got .*attngrad\.{name}\.attention takes it"):
            attngrad.attention(x, x, x)
