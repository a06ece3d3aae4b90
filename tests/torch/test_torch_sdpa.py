"""PyTorch's signature: against PyTorch's own function and its own samples, and in its place."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import attngrad
import attngrad.torch as bridge

ORIGINAL = functional.scaled_dot_product_attention


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def agree(*args, **kwargs):
    """Ours and PyTorch's: values, and gradients along a random cotangent."""
    results = []
    for function in (bridge.scaled_dot_product_attention, ORIGINAL):
        leaves = [x.detach().clone().requires_grad_() for x in args]
        options = dict(kwargs)
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            options["attn_mask"] = mask.detach().clone().requires_grad_()
            leaves.append(options["attn_mask"])
        out = function(*leaves[:3], **options)
        grads = torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(out.dtype))
        results.append((out, *grads))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_signature_is_pytorchs_as_documented():
    written = re.search(r"scaled_dot_product_attention\((.*?)\)", ORIGINAL.__doc__, re.S).group(1)
    documented = [argument.split("=") for argument in written.replace("\n", "").replace(" ", "").split(",")]
    ours = [
        p for p in inspect.signature(bridge.scaled_dot_product_attention).parameters.values() if p.kind != p.VAR_KEYWORD
    ]
    assert [p.name for p in ours] == [name for name, *_ in documented]
    assert [str(p.default) for p in ours if p.default is not p.empty] == [
        value for _, *rest in documented for value in rest
    ]
    q = draw(1, 2, 3, 4)
    for function in (bridge.scaled_dot_product_attention, ORIGINAL):  # scale and what follows are keywords
        function(q, q, q, None, 0.0, True, scale=0.5, enable_gqa=True)
        with pytest.raises(TypeError):
            function(q, q, q, None, 0.0, True, 0.5)


def test_tokens_before_heads_are_noted():
    q, k = draw(2, 10, 4, 8), draw(2, 7, 4, 8)
    with pytest.raises(ValueError, match=r"fit as \(batch, tokens, heads, features\): .* pass q\.swapaxes\(-3, -2\)"):
        bridge.scaled_dot_product_attention(q, k, k)
    assert bridge.scaled_dot_product_attention(*(x.swapaxes(-3, -2) for x in (q, k, k))).shape == (2, 4, 10, 8)


def test_dir_shows_the_public_names_alone():
    for name in ("torch", "distributed", "transformers", "diffusers"):
        module = getattr(attngrad, name)
        assert dir(module) == sorted(module.__all__), name
        assert all(getattr(module, public) for public in dir(module))
    assert "audit" in dir(bridge)


# --- PyTorch's own samples ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples():
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    name = "nn.functional.scaled_dot_product_attention"
    return list(next(op for op in op_db if op.name == name).sample_inputs("cpu", torch.float64, requires_grad=True))


def test_samples_of_pytorch_pass_forward_backward_gradgrad_and_forward_over_reverse(samples):
    assert len(samples) >= 20
    assert any(s.kwargs.get("attn_mask") is not None for s in samples)
    for sample in samples:
        options = dict(sample.kwargs)
        inputs = (sample.input, *sample.args)
        if (mask := options.pop("attn_mask", None)) is not None:
            inputs = (*inputs, mask)

        def function(*inputs, options=options):
            torch.manual_seed(0)
            return bridge.scaled_dot_product_attention(*inputs, **options)

        if options["dropout_p"] == 0.0:
            torch.testing.assert_close(function(*inputs), ORIGINAL(*inputs, **options), rtol=1e-12, atol=1e-12)
        assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True, fast_mode=True)


# --- semantics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [
    ((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)),
    ((4, 5), (6, 5), (6, 7)),
    ((3, 4, 5), (3, 6, 5), (3, 6, 5)),
    ((1, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5)),
    ((2, 3, 4, 5), (1, 6, 5), (2, 1, 6, 5)),
    ((4, 5), (2, 3, 6, 5), (2, 3, 6, 5)),
    ((2, 2, 3, 4, 5), (3, 6, 5), (2, 1, 1, 6, 5)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_axes_broadcast_as_pytorch_has_it(shapes, is_causal):
    agree(*(draw(*shape, seed=i) for i, shape in enumerate(shapes)), is_causal=is_causal)


@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1), (2, 1, 4, 6), (1, 3, 4, 6), (2, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_every_shape(shape, boolean):
    mask = draw(*shape, seed=5)
    if boolean:
        mask = mask > -0.5
        mask[..., 0] = True
    agree(draw(2, 3, 4, 5), draw(2, 3, 6, 5, seed=1), draw(2, 3, 6, 5, seed=2), attn_mask=mask)


def test_a_mask_meets_the_axes_that_query_key_and_value_broadcast_to():
    mask = draw(2, 3, 4, 6, seed=5)
    agree(draw(1, 3, 4, 5), draw(2, 1, 6, 5, seed=1), draw(2, 3, 6, 5, seed=2), attn_mask=mask)
    with pytest.raises(ValueError, match="attn_mask must broadcast to"):  # and does not widen them, as in PyTorch
        bridge.scaled_dot_product_attention(*(draw(1, 3, n, 5) for n in (4, 6, 6)), attn_mask=mask)
    one = [draw(n, 5) for n in (4, 6, 6)]
    out = bridge.scaled_dot_product_attention(*one, attn_mask=mask[:1, 0])  # one head has its axis
    assert torch.equal(out, bridge.scaled_dot_product_attention(*one, attn_mask=mask[0, 0]))


def test_where_query_key_and_value_do_not_fit_the_mask_is_not_blamed():
    q, k, mask = draw(2, 3, 4, 8), draw(2, 7, 2, 8), torch.ones(2, 1, 3, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"k must have 3 or a divisor of 3 heads.*tokens, heads"):
        bridge.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    with pytest.raises(ValueError, match=r"k must have 8 features"):
        bridge.scaled_dot_product_attention(draw(2, 3, 4, 8), draw(2, 3, 8, 7), draw(2, 3, 7, 8), attn_mask=mask)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_grouped_queries(key_heads):
    agree(
        draw(2, 6, 4, 5), draw(2, key_heads, 7, 5, seed=1), draw(2, key_heads, 7, 5, seed=2), enable_gqa=True, scale=0.3
    )


def test_a_float32_mask_beside_float64_gets_its_gradient_in_float32():
    q = draw(2, 3, 4, 5)
    mask = draw(4, 4, dtype=torch.float32).requires_grad_()
    bridge.scaled_dot_product_attention(q, q, q, mask).sum().backward()
    assert mask.grad.dtype is torch.float32


def test_a_mask_and_is_causal_combine_and_rows_that_see_nothing_are_zero():
    q, k = draw(2, 3, 4, 5), draw(2, 3, 6, 5, seed=1)
    mask = draw(4, 6, seed=2) > 0
    mask[0] = False
    both = mask & torch.ones(4, 6, dtype=torch.bool).tril()
    out = bridge.scaled_dot_product_attention(q, k, k, mask, is_causal=True)
    torch.testing.assert_close(out, bridge.scaled_dot_product_attention(q, k, k, both))
    assert not out[:, :, 0].any()
    bias = draw(4, 6, seed=3)
    out = bridge.scaled_dot_product_attention(q, k, k, bias, is_causal=True)
    causal = torch.ones(4, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(out, ORIGINAL(q, k, k, bias.masked_fill(~causal, -torch.inf)))


def test_our_options_may_be_added():
    q, k = draw(2, 4, 3, 5), draw(2, 2, 6, 5, seed=1)
    sinks, bias, mask = draw(4), draw(3, 6), draw(3, 6, seed=4) > -0.5
    options = {"window": (2, 1), "softcap": 2.0, "sinks": sinks, "bias": bias, "return_lse": True}
    actual = bridge.scaled_dot_product_attention(q, k, k, mask, is_causal=True, enable_gqa=True, offset=3, **options)
    expected = bridge.attention(q, k, k, causal=True, offset=3, mask=mask, **options)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_dropout_is_repeated_by_manual_seed_and_has_the_right_mean():
    q, k = draw(1, 2, 8, 5), draw(1, 2, 8, 5, seed=1)

    def once():
        return bridge.scaled_dot_product_attention(q, k, k, dropout_p=0.4)

    torch.manual_seed(7)
    first, second = once(), once()
    torch.manual_seed(7)
    assert torch.equal(once(), first)
    assert not torch.equal(first, second)
    mean = torch.stack([once() for _ in range(2000)]).mean(0)
    assert (mean - ORIGINAL(q, k, k)).abs().max() < 0.1
    given = bridge.scaled_dot_product_attention(q, k, k, dropout_p=0.4, seed=5)
    expected = attngrad.attention(q.numpy(), k.numpy(), k.numpy(), dropout=0.4, seed=5)
    assert torch.equal(given, torch.from_numpy(expected))


def test_dropout_under_vmap_follows_its_randomness():
    q = draw(3, 2, 8, 5)
    same = q[:1].expand(3, -1, -1, -1)

    def function(x):
        return bridge.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    a, b, _ = torch.vmap(function, randomness="different")(same)
    assert not torch.equal(a, b)
    a, b, _ = torch.vmap(function, randomness="same")(same)
    assert torch.equal(a, b)


Q = torch.zeros(2, 6, 3, 4)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, "must broadcast.*enable_gqa", lambda f: f(Q, Q[:, :2], Q[:, :2])),
        (ValueError, "must have a heads axis", lambda f: f(Q[0, 0], Q[0, 0], Q[0, 0], enable_gqa=True)),
        (TypeError, "Did you mean 'is_causal'", lambda f: f(Q, Q, Q, causal=True)),
        (TypeError, "Did you mean 'dropout_p'", lambda f: f(Q, Q, Q, dropout=0.5)),
        (TypeError, "Did you mean 'softcap'", lambda f: f(Q, Q, Q, soft_cap=1.0)),
        (TypeError, "attn_mask must be boolean or floating", lambda f: f(Q, Q, Q, torch.ones(3, 3, dtype=torch.int32))),
        (TypeError, "attn_mask must be a torch.Tensor", lambda f: f(Q, Q, Q, 1.0)),
        (ValueError, "bias must not be given beside", lambda f: f(Q, Q, Q, Q[0, 0, :, :3], bias=Q[0, 0, :, :3])),
        (ValueError, "at least 2 axes", lambda f: f(Q[0, 0, 0], Q, Q)),
        (ValueError, "key must be on the device of query, meta; got cpu", lambda f: f(Q.to("meta"), Q, Q)),
        (ValueError, r"dropout must be in \[0, 1\)", lambda f: f(Q, Q, Q, dropout_p=1.5)),
    ],
)  # fmt: skip
def test_a_mistake_is_told_what_it_is(kind, message, call):
    with pytest.raises(kind, match=message):
        call(bridge.scaled_dot_product_attention)


def test_autocast_casts_as_pytorch_has_it():
    q = draw(1, 2, 3, 4, dtype=torch.float32).requires_grad_()
    mask = draw(3, 3, dtype=torch.float32, seed=1).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for inputs in ((q, q, q), (q.bfloat16(), q, q), (q, q, q, mask), (q.double(), q.double(), q.double())):
            ours, theirs = (f(*inputs) for f in (bridge.scaled_dot_product_attention, ORIGINAL))
            assert ours.dtype is theirs.dtype
            torch.testing.assert_close(ours, theirs)
            grads = torch.autograd.grad(ours.sum(), [q, mask] if len(inputs) == 4 else [q])
            assert all(g.dtype is torch.float32 for g in grads)
    assert bridge.scaled_dot_product_attention(q, q, q).dtype is torch.float32


# --- in the place of PyTorch's --------------------------------------------------------------------------------------


def test_sdpa_routes_the_calls_of_a_model_and_gives_them_forward_mode():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, t = draw(2, 5, 8), draw(2, 5, 8, seed=1)
    expected = layer(x)
    with (
        pytest.raises(NotImplementedError),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ):
        torch.func.jvp(layer, (x,), (t,))
    with bridge.sdpa():
        out, out_dot = torch.func.jvp(layer, (x,), (t,))
    torch.testing.assert_close(out, expected)
    step = 1e-6
    torch.testing.assert_close(out_dot, (layer(x + step * t) - layer(x - step * t)) / (2 * step), rtol=1e-6, atol=1e-7)


def test_sdpa_restores_on_exit_on_exceptions_and_when_nested():
    with bridge.sdpa():
        assert functional.scaled_dot_product_attention is bridge.scaled_dot_product_attention
        with bridge.sdpa():
            pass
        assert functional.scaled_dot_product_attention is bridge.scaled_dot_product_attention
    assert functional.scaled_dot_product_attention is ORIGINAL
    with pytest.raises(ZeroDivisionError), bridge.sdpa():
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is ORIGINAL


# --- MultiheadAttention ---------------------------------------------------------------------------------------------


def modules(**options):
    """Ours and PyTorch's, with the same parameters, none of them zero."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(12, 3, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours = bridge.MultiheadAttention(12, 3, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    return ours, theirs


def same_layer(ours, theirs, inputs, **options):
    """Results, and the gradients of all inputs and parameters, weights included in the loss."""
    found = []
    for layer in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, weights = layer(*(leaves if len(leaves) == 3 else leaves * 3), **options)
        loss = (out * draw(*out.shape, seed=3)).sum()
        if weights is not None:
            loss = loss + (weights * draw(*weights.shape, seed=4)).sum()
        grads = torch.autograd.grad(loss, [*leaves, *layer.parameters()])
        found.append((out, *([] if weights is None else [weights]), *grads))
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [
    {}, {"batch_first": True}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}, {"kdim": 5, "vdim": 7},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_equals_pytorchs(options, need_weights):
    ours, theirs = modules(**options)
    query = draw(4, 2, 12)
    key, value = draw(6, 2, options.get("kdim", 12), seed=1), draw(6, 2, options.get("vdim", 12), seed=2)
    if options.get("batch_first"):
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    same_layer(ours, theirs, (query, key, value), need_weights=need_weights)
    if "kdim" not in options:
        same_layer(ours, theirs, (query,), need_weights=need_weights, average_attn_weights=False)


@pytest.mark.parametrize("attn", [None, "bool", "float", "heads", "bool heads"])
@pytest.mark.parametrize("padding", [None, "bool", "float"])
@pytest.mark.parametrize("extra", [False, True])
def test_multihead_attention_with_masks_equals_pytorchs(attn, padding, extra):
    ours, theirs = modules(batch_first=True, add_bias_kv=extra, add_zero_attn=extra)
    query, key = draw(2, 4, 12), draw(2, 6, 12, seed=1)
    attn_mask = None if attn is None else draw(*((2 * 3, 4, 6) if "heads" in attn else (4, 6)), seed=5)
    pad = None if padding is None else draw(2, 6, seed=6)
    if attn is not None and "bool" in attn:
        attn_mask = attn_mask > 0.7
        attn_mask[..., 0] = False
    if padding == "bool":
        pad = pad > 0.9
        pad[:, 0] = False
    mixed = attn_mask is not None and pad is not None and attn_mask.dtype != pad.dtype
    for need_weights in (True, False):
        options = {"attn_mask": attn_mask, "key_padding_mask": pad, "need_weights": need_weights}
        if mixed:  # which PyTorch deprecates, with a warning
            with pytest.warns(UserWarning, match="mismatched"):
                same_layer(ours, theirs, (query, key, key.clone()), **options)
        else:
            same_layer(ours, theirs, (query, key, key.clone()), **options)


def test_multihead_attention_with_the_causal_hint_and_without_a_batch():
    ours, theirs = modules()
    x = draw(5, 12)
    same_layer(ours, theirs, (x,))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    for need_weights in (True, False):
        same_layer(ours, theirs, (x,), attn_mask=mask, is_causal=True, need_weights=need_weights)
    same_layer(ours, theirs, (x,), key_padding_mask=torch.tensor([False, True, False, False, True]))
    with pytest.raises(ValueError, match="attn_mask must be given with is_causal"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        ours(x, x, x, key_padding_mask=torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="attn_mask must have shape"):
        ours(x, x, x, attn_mask=torch.zeros(4, 5))


def test_multihead_attention_drops_in_training_alone_and_returns_the_weights_it_used():
    ours, _ = modules(dropout=0.5, batch_first=True)
    x = draw(2, 5, 12)
    torch.manual_seed(1)
    out, weights = ours(x, x, x, average_attn_weights=False)
    value = torch.nn.functional.linear(x, ours.in_proj_weight[24:], ours.in_proj_bias[24:])
    heads = weights @ value.unflatten(-1, (3, 4)).transpose(1, 2)
    torch.testing.assert_close(ours.out_proj(heads.transpose(1, 2).flatten(-2)), out)
    assert (weights == 0).any()
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_multihead_attention_has_second_derivatives():
    ours, _ = modules(batch_first=True)
    x = draw(1, 3, 12).requires_grad_()
    assert gradgradcheck(lambda x: ours(x, x, x)[0], (x,), check_fwd_over_rev=True)


def test_a_misspelt_option_leads_to_one_that_it_has():
    q = torch.ones(1, 2, 3)
    for wrong, meant in (("is_casual", "is_causal"), ("causal", "is_causal"), ("atten_mask", "attn_mask")):
        with pytest.raises(TypeError, match=f"unknown option '{wrong}'. Did you mean '{meant}'?"):
            bridge.scaled_dot_product_attention(q, q, q, **{wrong: True})
