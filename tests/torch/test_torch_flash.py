"""flash-attn's signature, against a dense float64 attention with the options as flash-attn documents them."""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import attngrad.torch as bridge
import torch_dense
from tiers import only


def original(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """The signature of flash_attn_func, as flash_attn/flash_attn_interface.py of flash-attn 2 documents it."""


SHAPES = {"square": (6, 6, 4), "more keys": (4, 7, 2), "more queries": (7, 4, 1)}
OPTIONS = {
    "none": {},
    "scale": {"softmax_scale": 0.3, "deterministic": True},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left": {"window_size": (1, -1)},
    "right": {"window_size": [-1, 0]},
    "causal window": {"causal": True, "window_size": (1, 3)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1])},
    "causal alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]), "causal": True},
    "everything": {
        "softmax_scale": 0.4,
        "causal": True,
        "window_size": (3, -1),
        "softcap": 1.5,
        "alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 0.1], [0.3, 0.6, 0.9, 0.2]]),
    },
}


def inputs(queries, keys, key_heads, batch=2):
    torch.manual_seed(0)
    shapes = ((batch, queries, 4, 5), (batch, keys, key_heads, 5), (batch, keys, key_heads, 3))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def documented(q, k, v, options):
    """``out, lse`` by flash-attn's documentation, dense: bottom-right, -1 open, softcap 0 off, ALiBi of |distance|."""
    o = {"scale": options.get("softmax_scale"), "causal": options.get("causal"), "softcap": options.get("softcap")}
    left, right = options.get("window_size", (-1, -1))
    o["window"] = (left if left >= 0 else None, right if right >= 0 else None)
    bias, slopes = None, options.get("alibi_slopes")
    if slopes is not None:
        t, s = q.shape[1], k.shape[1]
        distance = (torch.arange(t)[:, None] + s - t - torch.arange(s)).abs()
        bias = -slopes.double().expand(q.shape[0], -1)[..., None, None] * distance
    out, lse = torch_dense.attention(*(x.transpose(1, 2) for x in (q, k, v)), bias=bias, **o)
    return out.transpose(1, 2), lse


def test_the_signature_is_the_documented_one():
    ours = inspect.signature(bridge.flash_attn_func)
    expected = inspect.signature(original)
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in expected.parameters.values()
    ]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_gradients_and_tangents_are_the_documented_ones(shape, name):
    x, options = inputs(*SHAPES[shape]), OPTIONS[name]
    tangents = tuple(torch.randn_like(y) for y in x)

    def ours(*x):
        out, lse, dropped = bridge.flash_attn_func(*x, **options, return_attn_probs=True)
        assert dropped is None
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    def dense(*x):
        out, lse = documented(*x, options)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    results = []
    for function in (ours, dense):
        primal, tangent = torch.func.jvp(function, x, tangents)
        torch.manual_seed(1)
        grads = torch.autograd.grad(primal, x, [torch.randn(y.shape, dtype=y.dtype) for y in primal])
        results.append((*primal, *tangent, *grads))
    assert results[0][0].shape == (2, x[0].shape[1], 4, 3)
    assert results[0][1].shape == (2, 4, x[0].shape[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(bridge.flash_attn_func(*x, **options), results[0][0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "name"), only([("more queries", "everything")], product(SHAPES, ("none", "alibi", "everything")))
)
def test_second_derivatives(shape, name):
    def function(*x):
        return bridge.flash_attn_func(*x, **OPTIONS[name])

    x = inputs(*SHAPES[shape])
    assert gradcheck(function, x, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, x, check_fwd_over_rev=True, fast_mode=True)


def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v = inputs(5, 2, 1)  # causal, bottom-right: the first three queries come before every key
    out, lse, _ = bridge.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[:, :3].any()
    assert out[:, 3:].all()
    assert (lse[..., :3] == -torch.inf).all()
    (dq,) = torch.autograd.grad(out, q, torch.randn_like(out))
    assert not dq[:, :3].any()
    assert dq[:, 4].any()  # the query after it sees one key, whose weight is 1 whatever it is


@pytest.mark.parametrize("causal", [False, True])
def test_the_slopes_of_alibi_have_gradients(causal):
    q, k, v = inputs(4, 7, 2)
    slopes = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)

    def function(slopes):
        return bridge.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True)[:2]

    assert gradcheck(function, (slopes,), check_forward_ad=True)


def test_causal_alibi_takes_no_memory_of_tokens_by_tokens(monkeypatch):
    from attngrad.torch import _flash

    seen = []
    monkeypatch.setattr(_flash, "call", lambda name, q, k, v, given: seen.append(given["bias"]) or q)
    x = torch.zeros(2, 9, 4, 3)
    for options in ({"causal": True}, {"window_size": (-1, 0)}, {}):
        bridge.flash_attn_func(x, x, x, alibi_slopes=torch.ones(4), **options)
    assert [bias.shape for bias in seen] == [(4, 1, 9), (4, 1, 9), (4, 9, 9)]


def test_out_is_contiguous_and_inputs_are_read_where_they_lie():
    qkv = torch.randn(2, 6, 3, 4, 8)  # as a projection of width 3 * 4 * 8 gives them
    out = bridge.flash_attn_func(*qkv.unbind(2), causal=True)
    assert out.is_contiguous()
    expected = bridge.attention(*(x.transpose(1, 2).contiguous() for x in qkv.unbind(2)), causal=True)
    assert torch.equal(out, expected.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_with_float32_slopes(dtype):
    x = tuple(y.detach().to(dtype) for y in inputs(300, 300, 2))
    slopes = torch.tensor([0.3, 0.03, 0.01, 0.7])  # times 300, far from what 16 bits hold
    for options in ({"causal": True}, {}):
        out, lse, _ = bridge.flash_attn_func(*x, alibi_slopes=slopes, return_attn_probs=True, **options)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        expected, _ = documented(*(y.double() for y in x), options | {"alibi_slopes": slopes})
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_dropout_is_repeated_by_manual_seed():
    q, k, v = inputs(6, 6, 2)
    torch.manual_seed(7)
    first, second = (bridge.flash_attn_func(q, k, v, dropout_p=0.4, softcap=1.0) for _ in range(2))
    torch.manual_seed(7)
    assert torch.equal(bridge.flash_attn_func(q, k, v, 0.4, softcap=1.0), first)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    seed = int(torch.randint(2**63 - 1, ()))
    x = (y.transpose(1, 2) for y in (q, k, v))
    expected, _ = torch_dense.attention(*x, dropout=0.4, seed=seed, softcap=1.0)
    torch.testing.assert_close(first, expected.transpose(1, 2), rtol=1e-10, atol=1e-10)


def test_compiled_it_is_the_same():
    x = tuple(y.detach().float().requires_grad_() for y in inputs(4, 7, 2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1])

    def function(q, k, v):
        return bridge.flash_attn_func(q, k, v, causal=True, window_size=(3, -1), alibi_slopes=slopes)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for f in (function, compiled):
        out = f(*x)
        torch.manual_seed(1)
        results.append((out, *torch.autograd.grad(out, x, torch.randn(out.shape))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


Q = torch.zeros(2, 6, 4, 3)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, r"q must have 4 axes, \(batch, seqlen, nheads, headdim\); got shape \(6, 4, 3\)",
         lambda f: f(Q[0], Q[0], Q[0])),
        (ValueError, r"Hq a multiple of Hk; got .*\(2, 6, 3, 3\).*tokens come before heads",
         lambda f: f(Q, Q[:, :, :3], Q[:, :, :3])),
        (ValueError, "q, k and v must be", lambda f: f(Q.transpose(1, 2), Q[:, :3].transpose(1, 2), Q)),
        (ValueError, "q, k and v must be", lambda f: f(Q, Q, Q[:, :3])),
        (ValueError, "q, k and v must be", lambda f: f(Q, Q[:1], Q[:1])),
        (TypeError, "window_size must be a pair", lambda f: f(Q, Q, Q, window_size=3)),
        (TypeError, "window_size must be an integer; got None", lambda f: f(Q, Q, Q, window_size=(None, 1))),
        (TypeError, "softcap must be a real number; got None", lambda f: f(Q, Q, Q, softcap=None)),
        (TypeError, "causal must be True or False", lambda f: f(Q, Q, Q, causal="yes")),
        (TypeError, "deterministic must be True or False", lambda f: f(Q, Q, Q, deterministic=None)),
        (TypeError, "return_attn_probs must be True or False", lambda f: f(Q, Q, Q, return_attn_probs=1)),
        (ValueError, r"dropout must be in \[0, 1\)", lambda f: f(Q, Q, Q, 1.5)),
        (ValueError, r"alibi_slopes must be floating, of shape \(4,\) or \(2, 4\); got shape \(3,\)",
         lambda f: f(Q, Q, Q, alibi_slopes=torch.ones(3))),
        (ValueError, "alibi_slopes must be floating", lambda f: f(Q, Q, Q, alibi_slopes=torch.ones(4).int())),
        (TypeError, "alibi_slopes must be a torch.Tensor", lambda f: f(Q, Q, Q, alibi_slopes=[1.0] * 4)),
        (TypeError, "q must be a torch.Tensor", lambda f: f(Q.numpy(), Q, Q)),
    ],
)  # fmt: skip
def test_errors_name_the_argument(kind, message, call):
    with pytest.raises(kind, match=f"flash_attn_func: .*{message}|flash_attn_func: {message}"):
        call(bridge.flash_attn_func)


def test_empty_inputs_have_the_right_shapes():
    for batch, queries, keys in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        q, k = torch.zeros(batch, queries, 4, 5), torch.zeros(batch, keys, 4, 5)
        out, lse, _ = bridge.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
        assert out.shape == q.shape
        assert lse.shape == (batch, 4, queries)
