"""The JAX bridge: every derivative under every transformation."""

from __future__ import annotations

import ctypes
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.test_util import check_grads

import attngrad
import attngrad.jax as bridge
import jax_dense
from attngrad.backends import cpu
from attngrad.jax import _ffi
from attngrad.testing import relative_error
from cases import EVERYTHING, SINGLES, Case, Shape, label, make

SMALL = Shape((2,), 2, 1, 2, 3, 2, 1)
GRID = [*SINGLES, EVERYTHING, ("causal", "bias", "sinks")]


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


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


# --- arrays as they come --------------------------------------------------------------------------------------------


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


def test_dir_shows_the_public_names_alone():
    assert dir(bridge) == sorted(bridge.__all__)
    assert "audit" in dir(bridge)
    assert all(getattr(bridge, name) for name in dir(bridge))


def test_a_call_inside_scan_remat_and_a_transposed_map():
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)))

    def layer(x, _):
        return x + bridge.attention(x, x, x, causal=True), None

    def loss(x, wrap):
        return jax.lax.scan(wrap(layer), x, None, length=3)[0].sum()

    expected = jax.grad(lambda x: sum((x := layer(x, None)[0]).sum() * (i == 2) for i in range(3)))(q)
    for wrap in (lambda f: f, jax.checkpoint):
        close(jax.jit(jax.grad(loss), static_argnums=1)(q, wrap), expected)


def test_empty_and_two_axis_inputs():
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)):
        grads = jax.jit(jax.grad(lambda q: bridge.attention(q, q, q).sum()))(jnp.ones(shape))
        assert grads.shape == shape
    q = jnp.ones((3, 4))
    out, lse = jax.jit(lambda q: bridge.attention(q, q, q, return_lse=True, sinks=jnp.zeros(1)))(q)
    assert out.shape == (3, 4)
    assert lse.shape == (3,)


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


# --- the version of XLA's interface ---------------------------------------------------------------------------------


def pretend(directory: Path, version: tuple[int, int]) -> str:
    """Where the header of a jaxlib of this version of the interface lies."""
    header = directory / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR {}\n#define XLA_FFI_API_MINOR {}\n".format(*version))
    return str(directory)


@pytest.mark.parametrize("version", [(0, 0), (1, 0), (1, 3)])
def test_another_version_of_the_interface_is_an_error_that_names_both(monkeypatch, tmp_path, version):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: pretend(tmp_path, version))
    with pytest.raises(ImportError) as error:
        _ffi.handler_version()
    assert str(error.value) == (
        "attngrad.jax: jaxlib must have XLA's foreign function interface 0.1 to 0.3, which attngrad was written for, "
        f"or a later 0.x; got {version[0]}.{version[1]}, in jaxlib {_ffi.jaxlib_version}. "
        "Install jax 0.6 to 0.10, or a newer attngrad."
    )


@pytest.mark.parametrize(("installed", "told"), [(1, 1), (2, 2), (3, 3), (4, 3), (20, 3)])
def test_xla_is_told_a_version_that_it_has_and_that_the_places_are_of(monkeypatch, tmp_path, installed, told):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: pretend(tmp_path, (0, installed)))
    assert _ffi.handler_version() == (0, told)


def test_without_a_header_xla_is_told_the_oldest_version(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert _ffi.handler_version() == (0, 1)


def test_another_version_of_the_interface_leaves_jax_as_it_was(tmp_path):
    code = f"""
import jax
jax.ffi.include_dir = lambda: {pretend(tmp_path, (1, 0))!r}
try:
    import attngrad.jax
except ImportError as error:
    print(error)
print(jax.numpy.ones(3).sum())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert "got 1.0, in jaxlib" in result.stdout
    assert result.stdout.endswith("3.0\n")


def test_the_handler_answers_from_a_frame_that_holds_the_question_alone():
    metadata = (ctypes.c_int64 * 6)(36)
    extension = (ctypes.c_int64 * 4)(32, _ffi._IS_METADATA, 0, ctypes.addressof(metadata))
    frame = (ctypes.c_int64 * 22)(168, ctypes.addressof(extension))
    assert _ffi._handle(ctypes.addressof(frame)) == 0
    assert tuple((ctypes.c_int * 2).from_buffer(metadata, 8 * _ffi._METADATA_VERSION)) == _ffi.handler_version()


PLACES = {
    "XLA_FFI_CallFrame, extension_start": _ffi._EXTENSION,
    "XLA_FFI_CallFrame, api": _ffi._API,
    "XLA_FFI_CallFrame, stage": _ffi._STAGE,
    "XLA_FFI_CallFrame, args.args": _ffi._ARGS,
    "XLA_FFI_CallFrame, rets.rets": _ffi._RETS,
    "XLA_FFI_CallFrame, attrs.attrs": _ffi._ATTRS,
    "XLA_FFI_Buffer, data": _ffi._BUFFER_DATA,
    "XLA_FFI_Metadata_Extension, metadata": _ffi._METADATA,
    "XLA_FFI_Metadata, api_version.major_version": _ffi._METADATA_VERSION,
    "XLA_FFI_Api, XLA_FFI_Error_Create": _ffi._API_ERROR_CREATE,
}
NUMBERS = {
    "XLA_FFI_ExecutionStage_EXECUTE": _ffi._EXECUTE,
    "XLA_FFI_Error_Code_INTERNAL": _ffi._INTERNAL,
    "XLA_FFI_Extension_Metadata": _ffi._IS_METADATA,
}


def test_the_places_are_those_of_the_installed_header(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a compiler")
    claims = [f"offsetof({place}) == 8 * {word}" for place, word in PLACES.items()]
    claims += [f"{name} == {value}" for name, value in NUMBERS.items()]
    source = tmp_path / "places.cpp"
    lines = ['#include "xla/ffi/api/c_api.h"', *(f'static_assert({claim}, "");' for claim in claims)]
    source.write_text("\n".join(lines))
    command = [compiler, "-std=c++17", "-fsyntax-only", "-I", jax.ffi.include_dir(), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert result.returncode == 0, result.stderr
