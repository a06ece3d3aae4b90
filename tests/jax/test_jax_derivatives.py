"""The JAX bridge: every derivative to the second order, and what comes of a third."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.test_util import check_grads

import attngrad
import attngrad.jax as bridge
import jax_dense
from attngrad.backends import cpu
from cases import EVERYTHING, make
from jax_tools import SMALL, close, directions, finite, grid, problem


@grid
def test_check_grads_of_order_two_in_reverse_and_one_in_forward_mode(names):
    ours, _, inputs = problem(finite(make(names, SMALL)))
    check_grads(ours, inputs, order=2, modes=["rev"])
    check_grads(ours, inputs, order=1, modes=["fwd"])


@grid
def test_every_second_derivative_equals_that_of_a_dense_attention(names):
    ours, dense, inputs = problem(make(names))
    t = directions(inputs)
    every = tuple(range(len(inputs)))

    def derivatives(f):
        """First derivatives, the loss, and the Hessian of the loss along t, forward over reverse."""

        def loss(*x):
            out, lse = f(*x)
            return (jnp.sin(out) * out).sum() + jnp.cos(lse).sum()

        def run(*x):
            out, pullback = jax.vjp(f, *x)
            return (
                {"value": out, "jvp": jax.jvp(f, x, t)[1], "vjp": pullback(directions(out))},
                jax.jvp(jax.grad(loss, every), x, t)[1],
            )

        return loss, run

    loss, run = derivatives(ours)

    def others(*x):
        slope = lambda *x: sum((g * c).sum() for g, c in zip(jax.grad(loss, every)(*x), t, strict=True))  # noqa: E731
        return {
            "reverse over reverse": jax.grad(slope, every)(*x),
            "reverse over forward": jax.grad(lambda *x: jax.jvp(loss, x, t)[1], every)(*x),
        }

    expected, hessian = jax.jit(derivatives(dense)[1])(*inputs)
    for wrap in (jax.jit, lambda f: f) if names in ((), EVERYTHING) else (jax.jit,):
        actual, forward_over_reverse = wrap(run)(*inputs)
        close(actual, expected)
        close(forward_over_reverse, hessian)
        for found in wrap(others)(*inputs).values():
            close(found, hessian)


def test_check_grads_notices_a_wrong_gradient(monkeypatch):
    right = cpu.backward

    def wrong(*args, **kwargs):
        grads = right(*args, **kwargs)
        return grads._replace(k=grads.k * 1.01)

    monkeypatch.setattr(cpu, "backward", wrong)
    ours, _, inputs = problem(make((), SMALL))
    with pytest.raises(AssertionError):
        check_grads(ours, inputs, order=1, modes=["rev"])


# --- beyond second order --------------------------------------------------------------------------------------------


def third(f):
    for _ in range(2):
        f = (lambda g: lambda x: jnp.sin(jax.grad(g)(x)).sum())(f)
    return jax.grad(f)


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_third_order_and_forward_over_forward_are_errors_that_name_the_reference(compile_):
    q, k, v = (jnp.asarray(x) for x in make((), SMALL).qkv)

    def loss(x):
        return jnp.sin(bridge.attention(x, k, v, softcap=1.3)).sum()

    with pytest.raises(NotImplementedError, match=r"third derivative is not available.*attngrad\.reference"):
        compile_(third(loss))(q)
    with pytest.raises(NotImplementedError, match=r"forward mode over forward mode is .*attngrad\.reference"):
        compile_(jax.jacfwd(jax.jacfwd(loss)))(q)


def test_the_reference_has_the_third_order():
    case = make(("masked rows", "softcap"), SMALL)
    q, k, v = (jnp.asarray(x) for x in case.qkv)
    options = {"mask": jnp.asarray(case.options["mask"]), "softcap": 1.3}
    by_reference = jax.jit(third(lambda x: jnp.sin(attngrad.reference.attention(x, k, v, **options)).sum()))(q)
    by_dense = jax.jit(third(lambda x: jnp.sin(jax_dense.attention(x, k, v, **options)[0]).sum()))(q)
    close(by_reference, by_dense)
