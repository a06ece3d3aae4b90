"""The JAX bridge under vmap, scan and remat: what a loop gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attngrad.jax as bridge
from cases import EVERYTHING, SINGLES, Shape, label, make
from jax_tools import SMALL, close, problem


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_vmap_of_every_pass_equals_a_loop(names):
    ours, _, inputs = problem(make(names, Shape((2,), 4, 2, 2, 3, 2, 3)))
    mapped = tuple(jnp.stack([x, x * 0.5 + 0.1, x - 0.2]) for x in inputs)

    @jax.jit
    def passes(*x):
        t = tuple(jnp.where(jnp.isinf(y), 0.0, y) * 0.3 + 0.1 for y in x)
        out, out_dot = jax.jvp(ours, x, t)
        grads = jax.vjp(ours, *x)[1](out)
        grads_dot = jax.jvp(lambda *x: jax.vjp(ours, *x)[1](out), x, t)[1]
        return out, out_dot, grads, grads_dot

    def loop(samples):
        return jax.tree.map(lambda *parts: jnp.stack(parts), *(passes(*x) for x in samples))

    close(jax.vmap(passes)(*mapped), loop(zip(*mapped, strict=True)), 1e-13)
    # One input mapped, along another axis than the first; the others shared.
    moved = (inputs[0], jnp.moveaxis(mapped[1], 0, 2), *inputs[2:])
    dims = (None, 2, *(None,) * (len(inputs) - 2))
    close(jax.vmap(passes, dims)(*moved), loop((inputs[0], k, *inputs[2:]) for k in mapped[1]), 1e-13)


def test_vmap_over_masks_offsets_segments_and_seeds():
    q, k, v = (jnp.asarray(x) for x in make(()).qkv)
    rng = np.random.default_rng(0)
    cases = {
        "mask": (jnp.asarray(rng.random((3, 3, 5)) > 0.4), lambda m: {"mask": m}),
        "offset": (jnp.asarray([[0, 1], [2, 1], [3, 0]]), lambda n: {"offset": n, "causal": True}),
        "segments": (jnp.asarray(rng.integers(0, 2, (3, 5))), lambda n: {"segments": (n[:3], n)}),
        "seed": (jnp.asarray([1, 2, 3]), lambda n: {"seed": n, "dropout": 0.5}),
    }
    for values, options in cases.values():
        expected = jnp.stack([bridge.attention(q, k, v, **options(x)) for x in values])
        close(jax.vmap(lambda x, options=options: bridge.attention(q, k, v, **options(x)))(values), expected)
    a, b = (bridge.attention(q, k, v, dropout=0.5, seed=seed) for seed in (7, jnp.asarray(7)))
    assert jnp.array_equal(a, b)


def test_hessians_by_vmap_of_every_mode():
    ours, dense, inputs = problem(make(("causal", "bias of a head", "softcap"), SMALL))
    every = tuple(range(len(inputs)))

    def loss(f):
        return lambda *x: sum(jnp.sin(y).sum() for y in f(*x))

    expected = jax.jit(jax.hessian(loss(dense), every))(*inputs)
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacrev), (jax.jacrev, jax.jacfwd)):
        close(jax.jit(outer(inner(loss(ours), every), every))(*inputs), expected)


def test_a_call_inside_scan_remat_and_a_transposed_map():
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)))

    def layer(x, _):
        return x + bridge.attention(x, x, x, causal=True), None

    def loss(x, wrap):
        return jax.lax.scan(wrap(layer), x, None, length=3)[0].sum()

    expected = jax.grad(lambda x: sum((x := layer(x, None)[0]).sum() * (i == 2) for i in range(3)))(q)
    for wrap in (lambda f: f, jax.checkpoint):
        close(jax.jit(jax.grad(loss), static_argnums=1)(q, wrap), expected)
