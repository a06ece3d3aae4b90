"""The PyTorch bridge: every derivative through autograd and torch.func, to any order."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import attngrad
import attngrad.torch as bridge
import torch_dense
from attngrad.backends import cpu
from attngrad.torch import _direct
from cases import SHAPES, label, make
from torch_tools import SMALL, close, dense, directions, finite, grid, problem

# --- gradcheck ------------------------------------------------------------------------------------------------------


@grid
def test_gradcheck_in_slow_mode_with_forward_ad_and_batched_gradients(names):
    function, inputs = problem(finite(make(names, SMALL)))
    assert gradcheck(
        function,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        fast_mode=False,
    )


@grid
def test_gradgradcheck_with_forward_over_reverse_and_batched_gradients(names):
    function, inputs = problem(finite(make(names, SMALL)))
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("names", [(), ("mask",)], ids=label)
def test_gradcheck_notices_a_wrong_gradient(names, monkeypatch):
    right, direct = cpu.backward, _direct.backward

    def wrong(*args, **kwargs):
        grads = right(*args, **kwargs)
        return grads._replace(q=grads.q * 1.01)

    monkeypatch.setattr(cpu, "backward", wrong)
    monkeypatch.setattr(_direct, "backward", lambda *args: (direct(*args)[0] * 1.01, *direct(*args)[1:]))
    function, inputs = problem(make(names, SMALL))
    assert not gradcheck(function, inputs, raise_exception=False)


# --- against a dense attention in PyTorch ----------------------------------------------------------------------------


@grid
@pytest.mark.parametrize("shape", ["grouped", "more queries than keys", "one query"])
def test_value_and_gradients_equal_a_dense_attention(names, shape):
    case = make(names, SHAPES[shape])
    function, inputs = problem(case)
    actual, expected = function(*inputs), dense(case)(*inputs)
    close(actual, expected)
    cotangents = directions(actual)
    close(*(torch.autograd.grad(out, inputs, cotangents) for out in (actual, expected)))


@grid
def test_torch_func_transforms_equal_those_of_a_dense_attention(names):
    case = make(names)
    ours, inputs = problem(case)
    theirs = dense(case)
    inputs = tuple(x.detach() for x in inputs)
    t, u = directions(inputs), directions(inputs, 2)
    every = tuple(range(len(inputs)))

    def transforms(f):
        def loss(*x):
            out, lse = f(*x)
            return (out.sin() * out).sum() + lse.cos().sum()

        def slope(*x):  # <grad, u>
            return sum((g * c).sum() for g, c in zip(torch.func.grad(loss, every)(*x), u, strict=True))

        yield torch.func.jvp(f, inputs, t)[1]
        out, pullback = torch.func.vjp(f, *inputs)
        yield pullback(directions(out))
        yield torch.func.jvp(torch.func.grad(loss, every), inputs, t)[1]  # forward over reverse
        yield torch.func.grad(slope, every)(*inputs)  # reverse over reverse
        yield torch.func.grad(lambda *x: torch.func.jvp(loss, x, t)[1], every)(*inputs)  # reverse over forward

    for actual, expected in zip(transforms(ours), transforms(theirs), strict=True):
        close(actual, expected)


def test_hessians_of_every_kind_equal_those_of_a_dense_attention():
    case = make(("causal", "bias of a head", "softcap"), SMALL)
    function, (q, k, v, bias) = problem(case)
    every = (0, 1, 2, 3)

    def loss(f):
        return lambda *x: sum(y.sin().sum() for y in f(*x))

    inputs = tuple(x.detach() for x in (q, k, v, bias))
    expected = torch.func.hessian(loss(dense(case)), every)(*inputs)
    for nest in (torch.func.hessian, lambda f, n: torch.func.jacrev(torch.func.jacrev(f, n), n)):
        for row, expected_row in zip(nest(loss(function), every)(*inputs), expected, strict=True):
            close(row, expected_row)
    vectorized = torch.autograd.functional.hessian(loss(function), inputs, vectorize=True)
    for row, expected_row in zip(vectorized, expected, strict=True):
        close(row, expected_row)


# --- beyond second order --------------------------------------------------------------------------------------------


def third(f, x):
    """Three gradients of a scalar, one after the other."""
    for _ in range(2):
        f = (lambda g: lambda y: torch.func.grad(g)(y).sin().sum())(f)
    return torch.func.grad(f)(x)


def test_third_order_is_that_of_the_reference_and_of_dense_autograd():
    case = make(("masked rows", "softcap"), SMALL)
    q, k, v = (torch.tensor(x) for x in case.qkv)
    options = {"mask": torch.tensor(case.options["mask"]), "softcap": 1.3}
    found = third(lambda x: bridge.attention(x, k, v, **options).sin().sum(), q)
    by_reference = third(lambda x: attngrad.reference.attention(x, k, v, **options).sin().sum(), q)
    by_dense = third(lambda x: torch_dense.attention(x, k, v, **case.options)[0].sin().sum(), q)
    close([found, by_reference], [by_dense, by_dense])


def test_forward_over_forward_is_reverse_over_reverse():
    q = torch.randn(2, 3, 4, dtype=torch.float64)

    def loss(x):
        return bridge.attention(x, x, x).sin().sum()

    twice = torch.func.jacfwd(torch.func.jacfwd(loss))(q)
    close([twice], [torch.func.jacrev(torch.func.jacrev(loss))(q)])


def test_a_jvp_is_linear_in_its_tangent_to_any_order():
    q, t = torch.randn(2, 2, 3, 4, dtype=torch.float64)

    def along(t):
        return torch.func.jvp(lambda x: bridge.attention(x, x, x), (q,), (t,))[1]

    assert torch.allclose(torch.func.jvp(along, (t,), (q,))[1], along(q))
    hessian = torch.func.hessian(lambda t: along(t).square().sum())(t)
    jacobian = torch.func.jacrev(lambda x: bridge.attention(x, x, x))(q)
    expected = 2 * torch.einsum("abcdef,abcghi->defghi", jacobian, jacobian)
    assert torch.allclose(hessian, expected)
