"""What the tests of the JAX bridge share: a case as a function of its differentiable inputs, ours and dense."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attngrad.jax as bridge
import jax_dense
from attngrad.testing import relative_error
from cases import EVERYTHING, SINGLES, Case, Shape, label

SMALL = Shape((2,), 2, 1, 2, 3, 2, 1)
GRID = [*SINGLES, EVERYTHING, ("causal", "bias", "sinks")]


def grid(test):
    return pytest.mark.parametrize("names", GRID, ids=label)(test)


def problem(case: Case):
    """The differentiable inputs, and attention as a function of them, ours and dense."""
    options = dict(case.options)
    names = ["q", "k", "v", *(name for name in ("bias", "sinks") if name in options)]
    inputs = tuple(jnp.asarray(x) for x in (*case.qkv, *(options.pop(name) for name in names[3:])))
    fixed = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if "segments" in fixed:
        fixed["segments"] = tuple(jnp.asarray(ids) for ids in fixed["segments"])

    def ours(q, k, v, *rest):
        out, lse = bridge.attention(q, k, v, **dict(zip(names[3:], rest, strict=True)), **fixed, return_lse=True)
        return out, jnp.where(lse == -jnp.inf, 0.0, lse)

    def dense(q, k, v, *rest):
        return jax_dense.attention(q, k, v, **dict(zip(names[3:], rest, strict=True)), **fixed)

    return ours, dense, inputs


def finite(case: Case) -> Case:
    """No -inf in the bias: check_grads perturbs every entry."""
    if case.options.get("bias") is not None:
        bias = case.options["bias"]
        case.options["bias"] = np.where(np.isinf(bias), 0.0, bias)
    return case


def close(actual, expected, bound=1e-11):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected) > 0
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(np.asarray(a), np.asarray(b)) < bound


def directions(values, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(x.shape)) for x in values)
