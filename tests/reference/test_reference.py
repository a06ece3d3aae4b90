"""The book is right: held against the complex step, longdouble, identities, PyTorch, and other array libraries."""

from __future__ import annotations

from typing import Any

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_dense
from attngrad import reference, testing
from attngrad.core.binding import bind
from attngrad.core.operands import Gradients
from attngrad.testing import complex_step_hvp, complex_step_jvp, complex_step_vjp, relative_error
from cases import EVERYTHING, OPTIONS, PAIRS, SHAPES, SINGLES, Case, Shape, label, make

COMBINATIONS = [*SINGLES, *PAIRS, EVERYTHING]
EXACT = 1e-12


def errors(actual: Gradients, expected: Gradients) -> dict[str, float]:
    """The relative error of each gradient that is there; both must have the same ones."""
    assert [g is None for g in actual] == [g is None for g in expected]
    return {
        name: relative_error(a, b)
        for name, a, b in zip(Gradients._fields, actual, expected, strict=True)
        if a is not None and b is not None
    }


def inner(a: Any, b: Any) -> float:
    """The inner product of two tuples of arrays, None being zero."""
    return float(sum(np.sum(x * y) for x, y in zip(a, b, strict=True) if x is not None and y is not None))


def reference_hvp(c: Case, **changes: Any) -> tuple[Gradients, Gradients]:
    arguments = {"dout_dot": c.dout_dot, "dlse": c.dlse, "dlse_dot": c.dlse_dot, **c.tangents, **changes}
    return reference.hvp(c.qkv, c.t[:3], c.dout, **arguments, **c.options)


# --- the complex step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", COMBINATIONS, ids=label)
def test_vjp_equals_the_complex_step(names):
    c = make(names)
    _, pullback = reference.vjp(*c.qkv, **c.options)
    truth = complex_step_vjp(*c.qkv, c.dout, c.dlse, **c.options)
    assert max(errors(pullback(c.dout, c.dlse), truth).values()) < EXACT


@pytest.mark.parametrize("names", COMBINATIONS, ids=label)
def test_jvp_equals_the_complex_step(names):
    c = make(names)
    _, (out_dot, lse_dot) = reference.jvp(c.qkv, c.t[:3], return_lse=True, **c.tangents, **c.options)
    out_truth, lse_truth = complex_step_jvp(*c.qkv, c.t, **c.options)
    assert relative_error(out_dot, out_truth) < EXACT
    assert relative_error(lse_dot, lse_truth) < EXACT


@pytest.mark.parametrize("names", COMBINATIONS, ids=label)
def test_hvp_equals_the_complex_step_of_the_vjp(names):
    c = make(names)
    truth = complex_step_hvp(*c.qkv, c.t, c.dout, c.dout_dot, c.dlse, c.dlse_dot, **c.options)
    grads, grads_dot = reference_hvp(c)
    _, pullback = reference.vjp(*c.qkv, **c.options)
    assert max(errors(grads_dot, truth).values()) < EXACT
    assert max(errors(grads, pullback(c.dout, c.dlse)).values()) < 1e-15


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_equals_the_complex_step(shape):
    c = make(EVERYTHING, shape, seed=1)
    _, pullback = reference.vjp(*c.qkv, **c.options)
    assert max(errors(pullback(c.dout), complex_step_vjp(*c.qkv, c.dout, **c.options)).values()) < EXACT
    truth = complex_step_hvp(*c.qkv, c.t, c.dout, c.dout_dot, c.dlse, c.dlse_dot, **c.options)
    assert max(errors(reference_hvp(c)[1], truth).values()) < EXACT


def test_one_head_without_a_head_axis():
    c = make(("causal", "sinks", "bias of a head", "dropout"), Shape((), 1, 1, 4, 5, 3, 2))
    flat = {n: x[0] if n == "bias" else x for n, x in c.options.items()}
    out, pullback = reference.vjp(*(x[0] for x in c.qkv), **flat)
    whole, whole_pullback = reference.vjp(*c.qkv, **c.options)
    assert np.array_equal(out, whole[0])
    got, expected = pullback(c.dout[0]), whole_pullback(c.dout)
    assert np.array_equal(got.bias, expected.bias[0])
    assert np.array_equal(got.sinks, expected.sinks)
    assert np.array_equal(got.k, expected.k[0])


# --- identities, over random shapes and options ---------------------------------------------------------------------

shapes = st.builds(
    lambda batch, key_heads, group, t, s, d, e: Shape(batch, key_heads * group, key_heads, t, s, d, e),
    st.lists(st.integers(1, 2), max_size=2).map(tuple),
    st.integers(1, 2),
    st.integers(1, 3),
    *(st.integers(1, 6) for _ in range(4)),
)
flags = st.lists(st.sampled_from(list(OPTIONS)), unique=True, max_size=6).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@given(shapes, flags, seeds)
def test_vjp_is_the_adjoint_of_jvp(shape, names, seed):
    c = make(names, shape, seed)
    _, pullback = reference.vjp(*c.qkv, **c.options)
    _, (out_dot, lse_dot) = reference.jvp(c.qkv, c.t[:3], return_lse=True, **c.tangents, **c.options)
    forward_side = [inner((c.dout,), (out_dot,)), inner((c.dlse,), (lse_dot,))]
    grads = pullback(c.dout, c.dlse)
    size = sum(np.sum(np.abs(x * y)) for x, y in zip(grads, c.t, strict=True) if x is not None)
    assert abs(sum(forward_side) - inner(grads, c.t)) <= EXACT * (size + sum(map(abs, forward_side)))


@given(shapes, flags, seeds)
def test_the_hessian_is_symmetric(shape, names, seed):
    c, other = make(names, shape, seed), make(names, shape, seed + 1)
    u, w = c.t, other.t
    fixed = {"dlse": c.dlse, **c.options}
    _, h_u = reference.hvp(c.qkv, u[:3], c.dout, bias_dot=u.bias, sinks_dot=u.sinks, **fixed)
    _, h_w = reference.hvp(c.qkv, w[:3], c.dout, bias_dot=w.bias, sinks_dot=w.sinks, **fixed)
    size = sum(np.sum(np.abs(x * y)) for x, y in zip(h_u, w, strict=True) if x is not None)
    assert abs(inner(h_u, w) - inner(h_w, u)) <= EXACT * max(size, 1e-300)


@given(shapes, flags, seeds)
def test_random_combinations_equal_the_complex_step(shape, names, seed):
    c = make(names, shape, seed)
    _, (out_dot, _) = reference.jvp(c.qkv, c.t[:3], return_lse=True, **c.tangents, **c.options)
    assert relative_error(out_dot, complex_step_jvp(*c.qkv, c.t, **c.options)[0]) < EXACT
    truth = complex_step_hvp(*c.qkv, c.t, c.dout, c.dout_dot, c.dlse, c.dlse_dot, **c.options)
    assert max(errors(reference_hvp(c)[1], truth).values()) < EXACT


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_float64_agrees_with_longdouble(names):
    c = make(names, SHAPES["odd"])
    wide = c.cast(np.longdouble)
    (out, lse), pullback = reference.vjp(*c.qkv, return_lse=True, **c.options)
    (wide_out, wide_lse), wide_pullback = reference.vjp(*wide.qkv, return_lse=True, **wide.options)
    assert wide_out.dtype == wide_lse.dtype == np.longdouble
    finite = np.isfinite(lse)
    assert np.array_equal(finite, np.isfinite(wide_lse))
    assert relative_error(out, wide_out) < EXACT
    assert relative_error(lse[finite], wide_lse[finite]) < EXACT
    assert max(errors(pullback(c.dout), wide_pullback(wide.dout)).values()) < EXACT
    assert max(errors(reference_hvp(c)[1], reference_hvp(wide)[1]).values()) < EXACT


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_every_result_keeps_a_narrow_dtype(names, dtype):
    c = make(names)
    narrow = c.cast(dtype)
    narrow.dlse, narrow.dlse_dot = narrow.dlse.astype(dtype), narrow.dlse_dot.astype(dtype)
    x, o, _ = bind("test", *narrow.qkv, narrow.options, kernels=False)
    f = reference.forward(x, o)
    b = reference.backward(x, o, f, narrow.dout)
    ft = reference.forward_tangent(x, o, f, narrow.t)
    bt = reference.backward_tangent(x, o, f, b, ft, narrow.t, narrow.dout, narrow.dout_dot)
    arrays = [*f._replace(visible=None), *b._replace(grads=None), *b.grads, *ft, *bt._replace(grads_dot=None)]
    arrays += [*bt.grads_dot]
    assert {a.dtype for a in arrays if a is not None} == {np.dtype(dtype)}
    eps = float(ml_dtypes.finfo(dtype).eps)
    _, pullback = reference.vjp(*c.qkv, **c.options)
    for got, expected in zip(b.grads, pullback(c.dout), strict=True):
        if got is not None:
            assert relative_error(got, expected) < 200 * eps


def test_huge_logits_do_not_overflow():
    c = make(("causal",))
    out, lse = reference.attention(c.q * 1e6, c.k, c.v, return_lse=True, **c.options)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


# --- PyTorch --------------------------------------------------------------------------------------------------------


def torch_options(c: Case) -> dict[str, Any]:
    return {name: value for name, value in c.options.items() if name not in ("bias", "sinks")}


@pytest.mark.parametrize("names", COMBINATIONS, ids=label)
def test_all_passes_agree_with_pytorch(names):
    c = make(names, Shape((2,), 4, 2, 4, 5, 3, 2))
    arrays = (*c.qkv, c.options.get("bias"), c.options.get("sinks"))
    inputs = torch_dense.tensors(*arrays)
    given = [x for x in inputs if x is not None]
    dout, dlse = torch.tensor(c.dout, requires_grad=True), torch.tensor(c.dlse)

    def run(*xs: Any) -> Any:
        filled = iter(xs)
        q, k, v, bias, sinks = (None if a is None else next(filled) for a in arrays)
        out, lse = torch_dense.attention(q, k, v, bias, sinks, **torch_options(c))
        return out, torch.where(torch.isinf(lse), 0.0, lse)  # -inf has no derivative to compare

    (out, lse), pullback = reference.vjp(*c.qkv, return_lse=True, **c.options)
    torch_out, torch_lse = run(*given)
    assert relative_error(out, torch_out.detach().numpy()) < 1e-10
    assert relative_error(np.where(np.isinf(lse), 0.0, lse), torch_lse.detach().numpy()) < 1e-10

    grads = torch.autograd.grad((torch_out, torch_lse), given, (dout, dlse), create_graph=True)
    ours = [g for g in pullback(c.dout, c.dlse) if g is not None]
    for a, b in zip(ours, grads, strict=True):
        assert relative_error(a, b.detach().numpy()) < 1e-10

    directions = [torch.tensor(t) for t in c.t if t is not None]
    _, (torch_out_dot, torch_lse_dot) = torch.func.jvp(run, tuple(x.detach() for x in given), tuple(directions))
    _, (out_dot, lse_dot) = reference.jvp(c.qkv, c.t[:3], return_lse=True, **c.tangents, **c.options)
    assert relative_error(out_dot, torch_out_dot.numpy()) < 1e-10
    assert relative_error(lse_dot, torch_lse_dot.numpy()) < 1e-10

    # The cotangent of dout in the double backward is the JVP; the cotangents of the inputs are the HVP.
    second = torch.autograd.grad(grads, [*given, dout], directions)
    _, grads_dot = reference_hvp(c, dout_dot=None, dlse_dot=None)
    for a, b in zip([g for g in grads_dot if g is not None], second, strict=False):
        assert relative_error(a, b.numpy()) < 1e-10
    assert relative_error(out_dot, second[-1].numpy()) < 1e-10


# --- other array libraries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
@pytest.mark.parametrize("library", ["array_api_strict", "torch"])
def test_array_libraries_give_the_same_numbers(library, names):
    c = make(names)
    to = {"array_api_strict": array_api_strict.asarray, "torch": torch.tensor}[library]

    def move(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return to(x)
        return tuple(map(move, x)) if isinstance(x, tuple) else x

    options = {name: value if name == "window" else move(value) for name, value in c.options.items()}
    qkv = tuple(map(move, c.qkv))
    (out, _), pullback = reference.vjp(*qkv, return_lse=True, **options)
    expected = reference.attention(*c.qkv, **c.options)
    assert type(out) is type(qkv[0])
    assert relative_error(np.asarray(out), expected) < EXACT
    grads = pullback(move(c.dout), move(c.dlse))
    _, numpy_pullback = reference.vjp(*c.qkv, **c.options)
    as_numpy = Gradients(*(None if g is None else np.asarray(g) for g in grads))
    assert max(errors(as_numpy, numpy_pullback(c.dout, c.dlse)).values()) < EXACT
    tangents = {name: move(x) for name, x in c.tangents.items()}
    moved_t = tuple(map(move, c.t[:3]))
    _, out_dot = reference.jvp(qkv, moved_t, **tangents, **options)
    assert relative_error(np.asarray(out_dot), reference.jvp(c.qkv, c.t[:3], **c.tangents, **c.options)[1]) < EXACT
    _, dots = reference.hvp(qkv, moved_t, move(c.dout), move(c.dout_dot), **tangents, **options)
    _, numpy_dots = reference_hvp(c, dlse=None, dlse_dot=None)
    as_numpy = Gradients(*(None if g is None else np.asarray(g) for g in dots))
    assert max(errors(as_numpy, numpy_dots).values()) < EXACT


# --- Jacobians ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING, ("bias of a head", "sinks", "dropout")], ids=label)
def test_the_dense_jacobian_contracts_to_vjp_and_jvp(names):
    c = make(names)
    _, pullback = reference.vjp(*c.qkv, **c.options)
    grads = pullback(c.dout)
    _, out_dot = reference.jvp(c.qkv, c.t[:3], **c.tangents, **c.options)
    total = np.zeros_like(out_dot)
    for name, gradient, t in zip(Gradients._fields, grads, c.t, strict=True):
        if gradient is not None:
            full = reference.jacobian(*c.qkv, wrt=name, **c.options)
            assert full.shape == c.dout.shape + gradient.shape
            assert relative_error(np.tensordot(c.dout, full, c.dout.ndim), gradient) < EXACT
            total += np.tensordot(full, t, t.ndim)
    assert relative_error(total, out_dot) < EXACT


def test_softmax_jacobian_equals_the_complex_step():
    s = np.random.default_rng(0).standard_normal((2, 3, 5))
    s[0, 0, :2] = -np.inf
    full = reference.softmax_jacobian(s)
    for j in range(5):
        step = s.astype(complex)
        step[..., j] += 1e-30j
        e = np.exp(step - s.max(-1, keepdims=True))
        assert relative_error(full[..., :, j], (e / e.sum(-1, keepdims=True)).imag / 1e-30) < EXACT


def test_softmax_jacobian_of_a_row_that_sees_nothing_is_zero():
    assert np.array_equal(reference.softmax_jacobian(np.full((2, 3), -np.inf)), np.zeros((2, 3, 3)))
    assert reference.softmax_jacobian(np.zeros((4, 0))).shape == (4, 0, 0)


# --- the oracles themselves -----------------------------------------------------------------------------------------


def test_the_oracles_notice_a_wrong_gradient():
    c = make(("causal", "bias", "sinks"))
    truth = complex_step_vjp(*c.qkv, c.dout, **c.options)
    for name, gradient in truth._asdict().items():
        planted = gradient.copy()
        planted.flat[planted.argmax()] *= 1 + 1e-9
        assert errors(truth._replace(**{name: planted}), truth)[name] > EXACT
    x, o, _ = bind("test", *c.qkv, c.options, kernels=False)
    f = reference.forward(x, o)
    wrong = f.weights * (c.dout @ np.repeat(c.v, 2, axis=-3).swapaxes(-1, -2))  # Omega without the row term
    dq = o.scale * wrong @ np.repeat(c.k, 2, axis=-3)
    assert relative_error(dq, truth.q) > 1e-3


def test_relative_error_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match="shapes differ"):
        testing.relative_error(np.zeros(3), np.zeros(4))


def test_the_rounding_bound_is_twice_the_naive_error_and_eight_eps():
    truth = np.array([1.0, -4.0])
    assert testing.rounding_bound(truth + 0.5, truth, eps=0.25) == pytest.approx(2 * 0.5 + 8 * 0.25 * 4)
