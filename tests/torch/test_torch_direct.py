"""The short way of the PyTorch bridge, for q, k and v alone: the results of the long way, and its care."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attngrad
import attngrad.torch as bridge
import instruction_sets
from attngrad import _native
from attngrad.torch import _attention, _direct, _functions, _passes
from attngrad.torch._passes import passes_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPTIONS = ({}, {"scale": -0.3, "causal": True}, {"window": (1, None), "softcap": 2.0}, {"window": (None, 1)})


def inputs(dtype=torch.float64, shapes=((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


@pytest.fixture
def plain(monkeypatch):
    """The long way is closed."""

    def closed(*_):
        raise AssertionError("the long way was taken")

    monkeypatch.setattr(_functions, "attention", closed)


def by_the_long_way(*args, **options):
    """What attention gives where hooks look on."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return bridge.attention(*args, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("axes", [3, 4])
def test_both_ways_give_the_same_bits(dtype, options, axes):
    q, k, v = (x.detach()[(0,) * (4 - axes)].requires_grad_() for x in inputs(dtype))
    runs = []
    for attention in (bridge.attention, by_the_long_way):
        out, lse = attention(q, k, v, **options, return_lse=True)
        cotangents = (torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype), torch.ones_like(lse))
        one = torch.autograd.grad(out, (q, k, v), cotangents[0], retain_graph=True)
        other = torch.autograd.grad(lse, (q, k), cotangents[1], retain_graph=True)
        runs.append((out, lse, *one, *other, *torch.autograd.grad((out, lse), (q, k, v), cotangents)))
    assert isinstance(bridge.attention(q, k, v, **options).grad_fn.kept, _direct.KeptMemory)
    for x, y in zip(*runs, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x, y)


@pytest.mark.usefixtures("plain")
def test_tensors_are_read_where_they_lie():
    packed = torch.randn(2, 5, 3, 2, 8, requires_grad=True)  # (batch, tokens, q k v, heads, features)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    shared = k[:1].expand(2, -1, -1, -1)  # a stride of 0
    for key in (k, shared):
        out = bridge.attention(q, key, v)
        dense = torch.softmax(q @ key.mT / 8**0.5, -1) @ v
        dout = torch.randn(2, 5, 2, 8).transpose(1, 2)
        actual, expected = (torch.autograd.grad(x, packed, dout, retain_graph=True)[0] for x in (out, dense))
        assert torch.allclose(out, dense, atol=1e-6)
        assert torch.allclose(actual, expected, atol=1e-5)


@pytest.fixture(params=instruction_sets.params(instruction_sets.ALL))
def instruction_set(request):
    before = _native.isa()
    _native.set_isa(request.param)
    yield
    _native.set_isa(before)


# One key tile and several, one query, grouped queries, features of whole vectors or not, several tasks that share keys.
TOKENS_BEFORE_HEADS = [
    (3, 10, 4, 4, 32),
    (1, 1, 4, 2, 64),
    (2, 3, 4, 1, 20),
    (2, 300, 2, 2, 64),
    (2, 37, 6, 2, 33),
    (1, 700, 1, 1, 16),
]


@pytest.mark.usefixtures("plain", "instruction_set")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", TOKENS_BEFORE_HEADS, ids=str)
def test_out_lies_in_memory_as_the_queries_do(dtype, sizes):
    b, t, heads, key_heads, d = sizes
    q, k, v = torch.randn(b, t, 3, heads, d).to(dtype).permute(2, 0, 3, 1, 4)
    k, v = k[:, :key_heads], v[:, :key_heads]
    everything, all_but_two, last = slice(None), slice(None, max(1, t - 2)), slice(-10, None)
    for options, queries, keys in (
        ({}, everything, everything),
        ({"causal": True}, everything, everything),
        ({"causal": True}, everything, all_but_two),  # the first queries see nothing
        ({"window": (1, 0)}, last, everything),  # the first keys are not seen
    ):
        for values in (v, v[..., :7]):  # D != E: the axes of q say nothing of out
            arrays = (q[:, :, queries], k[:, :, keys], values[:, :, keys])
            strided = [x.detach().requires_grad_() for x in arrays]
            contiguous = [x.detach().contiguous().requires_grad_() for x in arrays]
            found = [bridge.attention(*x, **options) for x in (strided, contiguous)]
            bare = bridge.attention(*arrays, **options)
            assert torch.equal(*found)
            assert torch.equal(bare, found[0])
            in_order = values is v or t == 1 or heads == 1
            assert all(x.transpose(1, 2).is_contiguous() is in_order for x in (bare, found[0]))
            assert found[1].is_contiguous()
            grads, expected = (
                torch.autograd.grad(y, x, y.detach().contiguous())
                for y, x in zip(found, (strided, contiguous), strict=True)
            )
            assert all(map(torch.equal, grads, expected))


@pytest.mark.usefixtures("plain")
def test_out_is_contiguous_where_the_axes_of_the_queries_say_nothing():
    q, k, v = (x.detach() for x in inputs(shapes=((2, 4, 5, 6),) * 3))
    one = q[:1, :1].expand(2, 4, 5, 6)  # strides of 0
    features_first = q.mT.contiguous().mT
    for x in (
        one,
        q,
        q.transpose(0, 1).contiguous().transpose(0, 1),
        q[0].transpose(0, 1).contiguous().transpose(0, 1),
    ):
        y = bridge.attention(x, *(k, v) if x.ndim == 4 else (k[0], v[0]))
        assert torch.equal(y, bridge.attention(x.contiguous(), *(k, v) if x.ndim == 4 else (k[0], v[0])))
        assert y.stride(-1) == 1
    with pytest.raises(AssertionError, match="the long way"):  # which copies
        bridge.attention(features_first, k, v)
    assert bridge.attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, v[..., :3]).is_contiguous()  # D != E


@pytest.mark.usefixtures("plain")
def test_gradients_of_any_stride_and_negative_bits_are_read_right():
    q, k, v = inputs()
    out, lse = bridge.attention(q, k, v, return_lse=True)
    ones = torch.ones_like(out)
    expected = torch.autograd.grad(out, (q, k, v), ones, retain_graph=True)
    negative = torch._neg_view(-ones)  # a minus sign that is a bit, over contiguous memory
    assert negative.is_neg()
    for dout in (torch.ones(()).double().expand(out.shape), ones.mT.contiguous().mT, negative):
        for x, y in zip(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), expected, strict=True):
            assert torch.equal(x, y)
    nothing = torch._efficientzerotensor(out.shape, dtype=torch.float64)
    assert not torch.autograd.grad(out, q, nothing, retain_graph=True)[0].any()
    numbers = torch.randn(lse.shape[::-1], dtype=torch.float64).permute(2, 1, 0)
    actual = torch.autograd.grad(lse, q, numbers, retain_graph=True)[0]
    assert torch.equal(actual, torch.autograd.grad(lse, q, numbers.contiguous())[0])


@pytest.mark.usefixtures("plain")
def test_a_gradient_that_is_wanted_of_one_input_alone():
    q, k, v = inputs()
    fixed = bridge.attention(q, k.detach(), v.detach())
    (actual,) = torch.autograd.grad(fixed.sum(), q)
    assert torch.equal(actual, torch.autograd.grad(bridge.attention(q, k, v).sum(), q)[0])


@pytest.mark.parametrize("axes", [3, 4])
def test_double_backward_goes_on_by_the_long_way(axes):
    q, k, v = (x.detach()[(0,) * (4 - axes)].requires_grad_() for x in inputs())
    dout = torch.randn(bridge.attention(q, k, v).shape, dtype=torch.float64, requires_grad=True)
    found = []
    for attention in (bridge.attention, by_the_long_way):
        (dk,) = torch.autograd.grad(attention(q, k, v, causal=True), k, dout, create_graph=True)
        found.append(torch.autograd.grad(dk.sin().sum(), (q, k, v, dout)))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_what_was_kept_goes_when_the_graph_goes_and_stays_when_it_stays():
    q, k, v = inputs()
    out = bridge.attention(q, k, v)
    first = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    assert out.grad_fn.kept is not None
    assert torch.equal(first, torch.autograd.grad(out.sum(), q)[0])
    assert out.grad_fn.kept is None
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), q)


def test_writing_to_an_input_is_noticed_and_writing_to_out_is_harmless():
    q, k, v = inputs()
    moved = k.detach().clone()
    out = bridge.attention(q, moved, v)
    (expected,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    with torch.no_grad():
        out.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), q, retain_graph=True)[0], expected)
    moved.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_that_lives_until_python_exits_leaves_no_message():
    code = "import torch, attngrad.torch as b; x = torch.ones(1, 2, 3, 4, requires_grad=True); y = b.attention(x, x, x)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("other", [
    torch.zeros(2, 4, 9, 6).double(), torch.zeros(2, 2, 5, 6).double(), torch.zeros(4, 5, 6).double(),
    torch.zeros(0, 4, 5, 6).double(), torch.zeros(2, 4, 5, 6),
], ids=lambda x: f"{tuple(x.shape)} {x.dtype}")  # fmt: skip
def test_an_input_replaced_by_one_of_another_shape_or_dtype_is_an_error(other):
    q, k, v = inputs()
    out = bridge.attention(q, k, v)
    q.data = other
    with pytest.raises(RuntimeError, match="must be the same in the backward pass"):
        torch.autograd.grad(out.sum(), k, retain_graph=True)
    with pytest.raises((RuntimeError, TypeError, ValueError), match="attention: "):
        torch.autograd.grad(out.sum(), k, create_graph=True)


def test_what_looks_on_takes_the_long_way():
    q, k, v = inputs()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    passes = passes_of("attention", q, {})
    assert _direct.fits(q, k, v)
    assert _direct.attention(passes, q, k, v) is not None
    assert _direct.attention(passes, q, k, v.float()) is None
    assert _direct.attention(passes, q, k, v.detach().to_sparse()) is None
    assert _direct.attention(passes, q, k, v.to("meta")) is None
    assert not _direct.fits(torch._neg_view(-q), k, v)
    assert torch.equal(bridge.attention(torch._neg_view(-q), k, v), bridge.attention(q, k, v))
    assert not _direct.fits(q.int(), k, v)
    assert not _direct.fits(q, k, v.numpy(force=True))
    assert not _direct.fits(q, k, v.as_subclass(Subclass))
    with Mode():
        assert not _direct.fits(q, k, v)
        assert torch.equal(bridge.attention(q, k, v), bridge.attention(q, k, v))
    with torch.autograd.forward_ad.dual_level():
        assert not _direct.fits(q, k, v)
    assert torch.func.vmap(lambda q: torch.tensor(not _direct.fits(q, k, v)))(q).all()


def test_a_pytorch_that_lets_nobody_read_its_tensors_takes_the_long_way(monkeypatch):
    q, k, v = inputs()
    short = bridge.attention(q, k, v)
    monkeypatch.setattr(_passes, "_EXCHANGE", None)
    _passes._passes.cache_clear()
    try:
        long = bridge.attention(q, k, v)
    finally:
        _passes._passes.cache_clear()
    assert isinstance(short.grad_fn.kept, _direct.KeptMemory)
    assert not isinstance(long.grad_fn.kept, _direct.KeptMemory)
    assert torch.equal(short, long)


# --- what most models ask for ---------------------------------------------------------------------------------------

SAME = ((2, 4, 5, 6), (2, 4, 5, 6), (2, 4, 5, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": -2}], ids=str
)
def test_sdpa_without_a_mask_takes_the_fewest_steps_to_the_same_bits(dtype, options, monkeypatch):
    q, k, v = inputs(dtype, SAME)
    ours = {{"is_causal": "causal"}.get(name, name): value for name, value in options.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        expected = bridge.attention(q, k, v, **ours)
    monkeypatch.setattr(_attention, "call", None)
    out = bridge.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(out, expected)
    dout = torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype)
    for x, y in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in (out, expected)), strict=True):
        assert torch.equal(x, y)


def test_what_these_steps_do_not_know_takes_the_others(monkeypatch):
    q, k, v = inputs(torch.float32, SAME)
    sdpa, dense = bridge.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention
    taken = []
    monkeypatch.setattr(_attention, "call", lambda *args, call=_attention.call: taken.append(args) or call(*args))
    for arguments, options in (
        ((q, k[:, :, :3], v[:, :, :3]), {"is_causal": True}),  # top-left
        ((q, k[:, :1], v[:, :1]), {}),  # broadcasts
        ((q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
        ((q[0, 0], k[0, 0], v[0, 0]), {}),
        ((q[None], k[None], v[None]), {}),
    ):
        assert torch.allclose(sdpa(*arguments, **options), dense(*arguments, **options), atol=1e-6)
    assert len(taken) == 5
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(q, k, v).dtype is torch.bfloat16
    with bridge.use_backend("blocked"):
        assert torch.allclose(sdpa(q, k, v), dense(q, k, v), atol=1e-6)
    assert len(taken) == 7


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (lambda q, k, v: (q, k, v[:, :2]), {}, "leading axes"),
        (lambda q, k, v: (q, k, v[:, :, :2]), {}, "tokens"),
        (lambda q, k, v: (q, k, v), {"scale": "0.5"}, "scale must be"),
        (lambda q, k, v: (q, k, v), {"scale": [0.5]}, "scale must be"),
        (lambda q, k, v: (q, k, v), {"scale": float("nan")}, "scale must be"),
        (lambda q, k, v: (q, k, v), {"scale": 1e39}, "scale must be finite in float32"),
        (lambda q, k, v: (q, k, v), {"is_causal": 1}, "causal must be"),
        (lambda q, k, v: (q, k, v.double()), {}, "dtype"),
    ],
)
def test_what_is_wrong_with_a_call_without_a_mask_is_told(arguments, options, text):
    q, k, v = inputs(torch.float32, SAME)
    with pytest.raises((TypeError, ValueError), match=f"attention: .*{text}"):
        bridge.scaled_dot_product_attention(*arguments(q, k, v), **options)


@pytest.mark.usefixtures("plain")
def test_default_device_and_dtype_do_not_matter():
    q, k, v = inputs(torch.float32)
    expected = torch.autograd.grad(bridge.attention(q, k, v).sum(), q)[0]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            actual = torch.autograd.grad(bridge.attention(q, k, v).sum(), q)[0]
    finally:
        torch.set_default_dtype(before)
    assert actual.device.type == "cpu"
    assert torch.equal(actual, expected)


@pytest.mark.usefixtures("plain")
def test_one_query_without_gradient_is_what_numpy_gives():
    q, k, v = (x.detach() for x in inputs(torch.float32, ((3, 4, 1, 8), (3, 4, 300, 8), (3, 4, 300, 8))))
    out, lse = bridge.attention(q, k, v, return_lse=True)
    expected = attngrad.attention(q.numpy(), k.numpy(), v.numpy(), return_lse=True)
    assert np.array_equal(out.numpy(), expected[0])
    assert np.array_equal(lse.numpy(), expected[1])


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (torch.int64, r"Convert it with \.to\(torch\.float32\)"),
        (torch.bool, r"Convert it with \.to\(torch\.float32\)"),
        (torch.float8_e4m3fn, r"Convert it with \.to\(torch\.float32\)"),
        (torch.complex64, r"attngrad\.reference computes in complex"),  # no cast, which would drop the imaginary part
    ],
)
def test_a_dtype_that_is_not_computed_is_told_in_terms_of_torch(dtype, remedy):
    x = torch.ones(2, 3, 4)
    wrong = x.to(dtype)
    with pytest.raises(TypeError, match=rf"^attention: q must have dtype float64.*; got [a-z0-9_]*\. {remedy}"):
        bridge.attention(wrong, wrong, wrong)
    with pytest.raises(TypeError, match=rf"^scaled_dot_product_attention: query must have dtype .*\. {remedy}"):
        bridge.scaled_dot_product_attention(wrong, wrong, wrong)
    with pytest.raises(TypeError, match=r"bias must have "):
        bridge.attention(x, x, x, bias=torch.ones(3, 3).to(dtype))
