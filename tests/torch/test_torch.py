"""The PyTorch bridge: every derivative through autograd, torch.func and torch.compile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import attngrad
import attngrad.torch as bridge
import torch_dense
from attngrad.backends import cpu
from attngrad.testing import relative_error, rms_error, rounding_bound
from attngrad.torch import _direct, _functions
from cases import EVERYTHING, SHAPES, SINGLES, Case, Shape, label, make

SMALL = Shape((2,), 2, 1, 2, 3, 2, 1)
GRID = [*SINGLES, EVERYTHING, ("causal", "bias", "sinks"), ("mask", "softcap", "bias of a head")]


def grid(test):
    return pytest.mark.parametrize("names", GRID, ids=label)(test)


def problem(case: Case, return_lse: bool = True):
    """The differentiable inputs as leaves, and attention as a function of them."""
    options = dict(case.options)
    bias, sinks = options.pop("bias", None), options.pop("sinks", None)
    given = {"q": case.q, "k": case.k, "v": case.v, "bias": bias, "sinks": sinks}
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in given.items() if x is not None}
    fixed = {}
    for name, value in options.items():
        if name == "segments":
            value = tuple(torch.tensor(ids) for ids in value)
        elif isinstance(value, np.ndarray):
            value = torch.tensor(value)
        fixed[name] = value

    def function(*inputs):
        named = dict(zip(leaves, inputs, strict=True))
        q, k, v = named.pop("q"), named.pop("k"), named.pop("v")
        out = bridge.attention(q, k, v, **named, **fixed, return_lse=return_lse)
        if return_lse:  # the lse of a row that sees nothing is -inf, which finite differences cannot take
            out = (out[0], torch.where(out[1] == -torch.inf, 0.0, out[1]))
        return out

    return function, tuple(leaves.values())


def finite(case: Case) -> Case:
    """No -inf in the bias: gradcheck perturbs every entry by finite differences, and -inf + eps is no number."""
    if case.options.get("bias") is not None:
        bias = case.options["bias"]
        case.options["bias"] = np.where(np.isinf(bias), 0.0, bias)
    return case


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
    right, by_address = cpu.backward, _direct.backward

    def wrong(*args, **kwargs):
        grads = right(*args, **kwargs)
        return grads._replace(q=grads.q * 1.01)

    monkeypatch.setattr(cpu, "backward", wrong)
    monkeypatch.setattr(_direct, "backward", lambda *args: (by_address(*args)[0] * 1.01, *by_address(*args)[1:]))
    function, inputs = problem(make(names, SMALL))
    assert not gradcheck(function, inputs, raise_exception=False)


# --- against a dense attention in PyTorch ---------------------------------------------------------------------------


def dense(case: Case):
    """The same function as ``problem``'s, in plain PyTorch."""
    options = dict(case.options)
    names = [name for name in ("bias", "sinks") if options.pop(name, None) is not None]

    def function(q, k, v, *rest):
        out, lse = torch_dense.attention(q, k, v, **dict(zip(names, rest, strict=True)), **options)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    return function


def close(actual, expected, bound=1e-11):
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a.detach().numpy(), b.detach().numpy()) < bound


def directions(inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in inputs)


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


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_vmap_of_every_pass_equals_a_loop(names):
    case = make(names, Shape((2,), 4, 2, 2, 3, 2, 3))
    function, inputs = problem(case)
    inputs = tuple(x.detach() for x in inputs)
    mapped = tuple(torch.stack([x, x * 0.5 + 0.1, x - 0.2]) for x in inputs)

    def passes(*x):
        t = tuple(y * 0.3 + 0.1 for y in x)
        out, out_dot = torch.func.jvp(function, x, t)
        grads = torch.func.vjp(function, *x)[1](out)
        grads_dot = torch.func.jvp(lambda *x: torch.func.vjp(function, *x)[1](out), x, t)[1]
        return *out, *out_dot, *grads, *grads_dot

    samples = [passes(*x) for x in zip(*mapped, strict=True)]
    close(torch.vmap(passes)(*mapped), [torch.stack(parts) for parts in zip(*samples, strict=True)], 1e-13)
    # One input mapped, along another axis than the first; the others shared.
    moved = (inputs[0], mapped[1].movedim(0, 2), *inputs[2:])
    samples = [passes(inputs[0], k, *inputs[2:]) for k in mapped[1]]
    dims = (None, 2, *(None,) * (len(inputs) - 2))
    close(torch.vmap(passes, dims)(*moved), [torch.stack(parts) for parts in zip(*samples, strict=True)], 1e-13)


def test_vmap_over_masks_offsets_segments_and_seeds():
    case = make(())
    q, k, v = (torch.tensor(x) for x in case.qkv)
    rng = np.random.default_rng(0)
    masks = torch.tensor(rng.random((3, 3, 5)) > 0.4)
    close(
        [torch.vmap(lambda m: bridge.attention(q, k, v, mask=m))(masks)],
        [torch.stack([bridge.attention(q, k, v, mask=m) for m in masks])],
    )
    offsets = torch.tensor([[0, 1], [2, 1], [3, 0]])
    close(
        [torch.vmap(lambda n: bridge.attention(q, k, v, offset=n, causal=True))(offsets)],
        [torch.stack([bridge.attention(q, k, v, offset=n, causal=True) for n in offsets])],
    )
    ids = torch.tensor(rng.integers(0, 2, (3, 5)))
    close(
        [torch.vmap(lambda n: bridge.attention(q, k, v, segments=(n[:3], n)))(ids)],
        [torch.stack([bridge.attention(q, k, v, segments=(n[:3], n)) for n in ids])],
    )
    seeds = torch.tensor([1, 2, 3])
    close(
        [torch.vmap(lambda n: bridge.attention(q, k, v, dropout=0.5, seed=n))(seeds)],
        [torch.stack([bridge.attention(q, k, v, dropout=0.5, seed=int(n)) for n in seeds])],
    )


def test_nested_vmap_equals_two_loops():
    q = torch.randn(2, 3, 2, 4, 5, dtype=torch.float64)
    k = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    inner = torch.vmap(lambda q, k: bridge.attention(q, k, k, causal=True))
    expected = torch.stack(
        [torch.stack([bridge.attention(a, b, b, causal=True) for a, b in zip(x, k, strict=True)]) for x in q]
    )
    close([torch.vmap(inner, (0, None))(q, k)], [expected])


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


# --- tensors as they come -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_gives_what_the_numpy_functions_give(dtype):
    from attngrad.torch._tensors import to_array

    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 3, 5, 4, generator=generator).to(dtype) for _ in range(4))
    bias = torch.randn(3, 1, 5, generator=generator).to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out, lse = bridge.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    assert out.dtype is dtype
    assert lse.dtype is (torch.float32 if dtype.itemsize == 2 else dtype)
    grads = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    assert all(g.dtype is dtype for g in grads)

    arrays = [to_array(x) for x in (q, k, v, bias)]
    (expected, expected_lse), pullback = attngrad.vjp(*arrays[:3], bias=arrays[3], causal=True, return_lse=True)
    expected_grads = pullback(to_array(dout), np.ones_like(expected_lse))
    for x, y in zip((out, lse, *grads), (expected, expected_lse, *expected_grads[:4]), strict=True):
        assert np.array_equal(to_array(x), y)
    t = torch.randn(2, 3, 5, 4, generator=generator).to(dtype)
    assert torch.func.jvp(lambda q: bridge.attention(q, k.detach(), v.detach()), (q.detach(),), (t,))[1].dtype is dtype


def test_sixteen_bit_double_backward_is_within_the_rounding_bound():
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(2, 3, 6, 4, generator=generator).to(torch.float16) for _ in range(5)]

    def second(dtype, attention):
        q, k, v, dout, u = (x.to(dtype).requires_grad_() for x in wide)
        (dq,) = torch.autograd.grad(attention(q, k, v), q, dout, create_graph=True)
        return [g.detach().numpy() for g in torch.autograd.grad(dq, (q, k, v, dout), u)]

    actual, truth = second(torch.float16, bridge.attention), second(torch.float64, bridge.attention)
    naive = second(torch.float16, lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v)
    for a, t, n in zip(actual, truth, naive, strict=True):
        assert a.dtype == np.float16
        assert rms_error(a, t) <= rounding_bound(n, t, 2.0**-10)


def test_gradients_are_computed_where_they_are_asked_for(monkeypatch):
    found = []
    backward = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *a, **k: found.append(backward(*a, **k)) or found[-1])
    given = {"q": torch.randn(2, 3, 4), "k": torch.randn(2, 3, 4), "v": torch.randn(2, 3, 4)}
    given |= {"bias": torch.randn(3, 3), "sinks": torch.randn(2)}
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    every = dict(
        zip(leaves, torch.autograd.grad(bridge.attention(**leaves).sum(), tuple(leaves.values())), strict=True)
    )
    for name in leaves:
        some = {n: x if n == name else x.detach() for n, x in leaves.items()}
        (grad,) = torch.autograd.grad(bridge.attention(**some).sum(), (leaves[name],))
        assert torch.equal(grad, every[name])
        assert [n for n, g in found[-1]._asdict().items() if g is not None] == [name]


def test_float32_bias_and_sinks_beside_bfloat16_keep_their_dtype():
    q = torch.randn(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    bias, sinks = torch.randn(3, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    bridge.attention(q, q, q, bias=bias, sinks=sinks).sum().backward()
    assert q.grad.dtype is torch.bfloat16
    assert bias.grad.dtype is sinks.grad.dtype is torch.float32


def test_nothing_is_copied_in_or_out(monkeypatch):
    seen = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda x, o, **how: seen.append((x, forward(x, o, **how))) or seen[-1][1])
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.randn(2, 5, 3, 2, 8).to(dtype)  # (batch, tokens, q k v, heads, features)
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
        out = bridge.attention(q, k, v, mask=torch.ones(5, 5, dtype=torch.bool))
        x, (array, *_) = seen[-1]
        assert [a.ctypes.data for a in (x.q, x.k, x.v)] == [t.data_ptr() for t in (q, k, v)]
        assert out.data_ptr() == array.ctypes.data


def test_inputs_are_not_written_to_and_writing_to_them_before_backward_is_noticed():
    q = torch.randn(2, 3, 4, requires_grad=True)
    k = torch.randn(2, 3, 4)
    before = k.clone()
    out = bridge.attention(q, k, k)
    assert torch.equal(k, before)
    k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_was_kept_goes_when_the_graph_goes_and_stays_when_it_stays():
    import gc
    import weakref

    q = torch.randn(2, 3, 4, requires_grad=True)
    out = bridge.attention(q, q, q, mask=torch.ones(3, 3, dtype=torch.bool), causal=True)
    node = out.grad_fn
    kept = weakref.ref(node.kept.saved[0])
    (first,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(first, second)
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), q)


def test_saved_tensor_hooks_see_all_that_is_saved():
    q = torch.randn(2, 3, 4, requires_grad=True)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x):
        out = bridge.attention(q, q, q)
    assert len(seen) == 6  # q, k, v, out and two numbers per row
    assert not hasattr(out.grad_fn, "kept")


def test_writing_to_the_output_does_not_spoil_the_gradient():
    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(bridge.attention(q, q, q), q, torch.ones(2, 3, 4, dtype=torch.float64))
    out = bridge.attention(q, q, q)
    with torch.no_grad():
        out.zero_()
    (actual,) = torch.autograd.grad(out, q, torch.ones(2, 3, 4, dtype=torch.float64))
    assert torch.equal(actual, expected)


def test_gradients_of_any_stride_and_negative_bits_are_read_right():
    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    out = bridge.attention(q, q, q)
    ones = torch.ones_like(out)
    (expected,) = torch.autograd.grad(out, q, ones, retain_graph=True)
    (expanded,) = torch.autograd.grad(out.sum(), q, retain_graph=True)  # strides of zero
    (strided,) = torch.autograd.grad(out, q, torch.ones(4, 3, 2, dtype=torch.float64).permute(2, 1, 0))
    assert torch.equal(expected, expanded)
    assert torch.equal(expected, strided)

    for dtype in (torch.float64, torch.float32):
        negative = (
            torch.randn(2, 3, 4, dtype=torch.complex128 if dtype is torch.float64 else torch.complex64).conj().imag
        )
        assert negative.is_neg()
        plain = negative.resolve_neg().clone()
        assert torch.equal(bridge.attention(negative, negative, negative), bridge.attention(plain, plain, plain))


def test_forward_ad_with_dual_tensors():
    q, t = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        out_dot = forward_ad.unpack_dual(bridge.attention(dual, q, q)).tangent
    _, expected = attngrad.jvp((q.numpy(),) * 3, (t.numpy(), None, None))
    assert np.allclose(out_dot.numpy(), expected, rtol=0, atol=1e-14)


def test_no_grad_and_detached_inputs_save_nothing(monkeypatch):
    forward = cpu.forward

    def checked(x, o, *, save):
        assert not save
        return forward(x, o, save=save)

    monkeypatch.setattr(cpu, "forward", checked)
    monkeypatch.setattr(_functions, "direct", None)
    q = torch.randn(2, 3, 4, requires_grad=True)
    for options in ({}, {"mask": torch.ones(3, 3, dtype=torch.bool)}):
        with torch.no_grad():
            assert not bridge.attention(q, q, q, **options).requires_grad
        with torch.inference_mode():
            bridge.attention(q, q, q, **options)
        bridge.attention(q.detach(), q.detach(), q.detach(), **options)


def test_empty_and_two_axis_inputs():
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)):
        q = torch.randn(shape, requires_grad=True)
        out = bridge.attention(q, q, q)
        assert out.shape == shape
        out.sum().backward()
        assert q.grad.shape == shape
    q = torch.randn(3, 4, requires_grad=True)
    out, lse = bridge.attention(q, q, q, return_lse=True, sinks=torch.zeros(1))
    assert out.shape == (3, 4)
    assert lse.shape == (3,)


def test_a_gradient_can_be_taken_through_the_lse_alone():
    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    _, lse = bridge.attention(q, q, q, return_lse=True)
    (actual,) = torch.autograd.grad(lse.sum(), q)
    (expected,) = torch.autograd.grad(torch.logsumexp(q @ q.mT / 2, -1).sum(), q)
    assert torch.allclose(actual, expected)


def test_activation_checkpointing_repeats_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def f(q):
        return bridge.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sin()

    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(f(q).sum(), q)
    torch.manual_seed(0)
    (actual,) = torch.autograd.grad(checkpoint(f, q, use_reentrant=False).sum(), q)
    assert torch.equal(actual, expected)


# --- errors ---------------------------------------------------------------------------------------------------------

Q = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (TypeError, "q must be a torch.Tensor; got ndarray", lambda: bridge.attention(np.zeros((2, 3, 4)), Q, Q)),
        (TypeError, "mask must be a torch.Tensor", lambda: bridge.attention(Q, Q, Q, mask=np.ones((3, 3), bool))),
        (ValueError, "k must be on the device of q, meta; got cpu", lambda: bridge.attention(Q.to("meta"), Q, Q)),
        (TypeError, "must be a strided tensor", lambda: bridge.attention(Q.to_sparse(), Q, Q)),
        (TypeError, "must have dtype float64", lambda: bridge.attention(Q.int(), Q.int(), Q.int())),
        (TypeError, "must have dtype float64", lambda: bridge.attention(*(Q.to(torch.complex64),) * 3)),
        (TypeError, "k must have the dtype of q", lambda: bridge.attention(Q, Q.double(), Q)),
        (ValueError, "k must have 4 features", lambda: bridge.attention(Q, Q[..., :2], Q)),
        (ValueError, "at least 2 axes", lambda: bridge.attention(Q[0, 0], Q[0, 0], Q[0, 0])),
        (TypeError, "Did you mean 'causal'", lambda: bridge.attention(Q, Q, Q, casual=True)),
        (TypeError, "causal must be True or False", lambda: bridge.attention(Q, Q, Q, causal=[1])),
        (ValueError, "seed must be given", lambda: bridge.attention(Q, Q, Q, dropout=0.5)),
        (TypeError, "seed must be an integer or an int64", lambda: bridge.attention(Q, Q, Q, dropout=0.5, seed=Q)),
        (TypeError, "segments must be a pair", lambda: bridge.attention(Q, Q, Q, segments=Q)),
        (TypeError, "offset must be an integer", lambda: bridge.attention(Q, Q, Q, offset="1")),
        (ValueError, "offset must be within", lambda: bridge.attention(Q, Q, Q, offset=2**62)),
        (ValueError, "window must have sides >= 0", lambda: bridge.attention(Q, Q, Q, window=(-1, 0))),
        (ValueError, "sinks must have shape", lambda: bridge.attention(Q, Q, Q, sinks=torch.zeros(3))),
        (TypeError, "return_lse must be True or False", lambda: bridge.attention(Q, Q, Q, return_lse=1)),
    ],
)
def test_a_mistake_is_told_what_it_is(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
