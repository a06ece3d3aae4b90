"""The layer is right: by torch.nn.MultiheadAttention, autograd, differences and the adjoint identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import torch_dense
from attngrad import MultiHeadAttention
from attngrad.testing import relative_error
from cases import EVERYTHING, PAIRS, SINGLES, Shape, label, make
from layer_tools import EXACT, as_tuple, directions, randomise, worst


def test_worst_sees_one_wrong_gradient_among_right_ones():
    right = {"a": np.ones(3), "b": np.ones(2)}
    assert worst(right, right) == 0.0
    assert worst({**right, "b": np.array([1.0, 1.0 + 1e-8])}, right) > EXACT


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_worst_sees_a_nan_wherever_it_stands(name):
    right = {"a": np.ones(3), "b": np.ones(2), "c": np.ones(2)}
    wrong = {**right, name: np.array([1.0, np.nan, 1.0][: right[name].size])}
    assert worst(wrong, right) == np.inf
    assert worst(right, wrong) == np.inf


# --- torch.nn.MultiheadAttention -------------------------------------------------------------------------------------


@dataclass
class TorchCase:
    """Arguments of torch's module, of its call, and of ours."""

    inputs: int = 1
    batch: tuple[int, ...] = (3,)
    t: int = 5
    s: int = 5
    kdim: int | None = None
    vdim: int | None = None
    bias: bool = True
    masks: tuple[str, ...] = ()


TORCH_CASES = {
    "self-attention": TorchCase(),
    "self-attention without biases": TorchCase(bias=False),
    "no batch": TorchCase(batch=()),
    "causal": TorchCase(masks=("causal",)),
    "attention mask": TorchCase(masks=("attention",)),
    "padding mask": TorchCase(masks=("padding",)),
    "both masks": TorchCase(masks=("attention", "padding")),
    "mask of a head": TorchCase(masks=("heads",)),
    "cross-attention, key also value": TorchCase(inputs=2, s=7),
    "cross-attention, fewer keys": TorchCase(inputs=2, s=2, masks=("padding",)),
    "three inputs": TorchCase(inputs=3, s=7, masks=("attention", "padding")),
    "kdim and vdim": TorchCase(inputs=3, s=4, kdim=6, vdim=10),
    "kdim and vdim without biases": TorchCase(inputs=3, s=4, kdim=6, vdim=10, bias=False, masks=("padding",)),
    "kdim alone": TorchCase(inputs=3, s=4, kdim=6),
}
E_MODEL, HEADS = 8, 2


@pytest.mark.parametrize("c", TORCH_CASES.values(), ids=TORCH_CASES.keys())
def test_output_and_all_gradients_equal_torch(c):
    rng = np.random.default_rng(0)
    module = torch.nn.MultiheadAttention(
        E_MODEL, HEADS, bias=c.bias, kdim=c.kdim, vdim=c.vdim, batch_first=True, dtype=torch.float64
    )
    for p in module.parameters():
        p.data = torch.tensor(rng.standard_normal(p.shape) / 2)
    layer = MultiHeadAttention.from_torch(module.state_dict(), HEADS)
    assert (layer.dtype, layer.d_model, layer.d_head) == (np.float64, E_MODEL, E_MODEL // HEADS)
    assert layer.params["w_k"].shape == (c.kdim or E_MODEL, E_MODEL)

    sizes = [(c.t, E_MODEL), (c.s, c.kdim or E_MODEL), (c.s, c.vdim or E_MODEL)][: c.inputs]
    x = [rng.standard_normal((*c.batch, *size)) for size in sizes]
    tx = torch_dense.tensors(*x)
    options: dict[str, Any] = {}
    torch_options: dict[str, Any] = {}
    mask = np.ones((*c.batch, HEADS, c.t, c.s), bool)
    for kind in c.masks:
        if kind == "causal":
            options["causal"] = True
            torch_options["attn_mask"] = torch.ones(c.t, c.t, dtype=torch.bool).triu(1)
        elif kind == "attention":
            seen = rng.random((c.t, c.s)) > 0.3
            seen[:, 0] = True
            mask &= seen
            torch_options["attn_mask"] = torch.tensor(~seen)
        elif kind == "heads":
            seen = rng.random(mask.shape) > 0.3
            seen[..., 0] = True
            mask &= seen
            torch_options["attn_mask"] = torch.tensor(~seen).reshape(-1, c.t, c.s)
        else:
            seen = np.arange(c.s) < rng.integers(1, c.s + 1, (*c.batch, 1))
            mask &= seen[..., None, None, :]
            torch_options["key_padding_mask"] = torch.tensor(~seen)
    if set(c.masks) - {"causal"}:
        options["mask"] = mask

    ty, _ = module(tx[0], tx[min(1, c.inputs - 1)], tx[-1], need_weights=False, **torch_options)
    dy = rng.standard_normal(ty.shape)
    ty.backward(torch.tensor(dy))
    y = layer(*x, **options)
    dx = as_tuple(layer.backward(dy))

    assert relative_error(y, ty.detach().numpy()) < EXACT
    assert len(dx) == c.inputs
    for ours, theirs in zip(dx, tx, strict=True):
        assert relative_error(ours, theirs.grad.numpy()) < EXACT
    theirs = {name: p.grad for name, p in module.named_parameters()}
    expected = MultiHeadAttention.from_torch(theirs, HEADS).params
    assert len(expected) == (8 if c.bias else 4)
    assert worst(layer.grads, expected) < EXACT


# --- autograd on a hand-written layer: grouped queries, rope, every option -------------------------------------------


def torch_rope(x: Any, base: float, positions: Any) -> Any:
    """Pairs (i, i + d/2) as complex numbers, multiplied by exp(i angle): written apart from ours."""
    half = x.shape[-1] // 2
    angle = positions[..., None] * base ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def torch_layer(layer: MultiHeadAttention, w: dict[str, Any], x: list[Any], options: dict[str, Any]) -> Any:
    query, key, value = x[0], x[min(1, len(x) - 1)], x[-1]
    q, k, v = (
        (a @ w[f"w_{c}"] + w.get(f"b_{c}", 0.0)).unflatten(-1, (-1, layer.d_head)).transpose(1, 2)
        for c, a in (("q", query), ("k", key), ("v", value))
    )
    if layer.rope is not None:
        t, s = q.shape[2], k.shape[2]
        offset = options.get("offset")
        start = torch.as_tensor(s - t if offset is None else offset).reshape(-1, 1, 1)
        q = torch_rope(q, layer.rope, start + torch.arange(t))
        k = torch_rope(k, layer.rope, torch.arange(s))
    out, _ = torch_dense.attention(q, k, v, **options)
    return out.transpose(1, 2).flatten(-2) @ w["w_o"] + w.get("b_o", 0.0)


SHAPE = Shape((2,), 4, 2, 3, 5, 4, 4)


@pytest.mark.parametrize("rope", [None, 7.0])
@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_grouped_queries_rope_and_every_option_equal_autograd(names, rope):
    options = make(names, SHAPE).options
    rng = np.random.default_rng(3)
    layer = randomise(MultiHeadAttention(6, 4, 2, d_head=4, bias=True, rope=rope, dtype=np.float64))
    x = [rng.standard_normal((2, tokens, 6)) for tokens in (3, 5)]
    dy = rng.standard_normal((2, 3, 6))

    tx = torch_dense.tensors(*x)
    w = dict(zip(layer.params, torch_dense.tensors(*layer.params.values()), strict=True))
    extra = {name: torch_dense.tensors(options[name])[0] for name in ("bias", "sinks") if name in options}
    ty = torch_layer(layer, w, tx, {**options, **extra})
    ty.backward(torch.tensor(dy))
    y = layer(*x, **options)
    dx = layer.backward(dy)

    assert relative_error(y, ty.detach().numpy()) < EXACT
    for ours, theirs in zip(dx, tx, strict=True):
        assert relative_error(ours, theirs.grad.numpy()) < EXACT
    assert worst(layer.grads, {name: p.grad.numpy() for name, p in w.items()}) < EXACT
    for name, theirs in extra.items():
        assert relative_error(getattr(layer.attention_gradients, name), theirs.grad.numpy()) < EXACT


# --- forward mode ----------------------------------------------------------------------------------------------------


def adjoint_gap(layer: MultiHeadAttention, x: tuple[Any, ...], options: dict[str, Any], slip: float = 0.0) -> float:
    """|<dy, y_dot> - <grads, tangents>|, relative; ``slip`` falsifies one gradient by as much."""
    t = directions(layer, x, options)
    y, y_dot = layer.jvp(x, **t, **options)
    dy = np.random.default_rng(6).standard_normal(y.shape)
    layer.zero_grad()
    assert relative_error(layer(*x, **options), y) < 1e-13
    dx = as_tuple(layer.backward(dy))
    terms = [np.sum(a * b) for a, b in zip(dx, t["inputs_dot"], strict=True)]
    terms += [np.sum(layer.grads[name] * t["params_dot"][name]) for name in layer.params]
    terms += [np.sum(getattr(layer.attention_gradients, n) * t[f"{n}_dot"]) for n in ("bias", "sinks") if n in options]
    terms[0] += slip
    forward = np.sum(dy * y_dot)
    return float(abs(forward - sum(terms)) / np.sum(np.abs(terms)))


@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("names", [*SINGLES, *PAIRS, EVERYTHING], ids=label)
def test_backward_is_the_adjoint_of_jvp(names, inputs):
    n = SHAPE if inputs > 1 else SHAPE._replace(s=SHAPE.t)
    options = make(names, n).options
    layer = randomise(MultiHeadAttention(6, 4, 2, d_head=4, bias=True, rope=7.0, dtype=np.float64))
    rng = np.random.default_rng(4)
    x = tuple(rng.standard_normal((2, tokens, 6)) for tokens in (n.t, n.s, n.s)[:inputs])
    assert adjoint_gap(layer, x, options) < 1e-12


def test_the_adjoint_gap_sees_a_wrong_gradient():
    layer = randomise(MultiHeadAttention(6, 2, dtype=np.float64))
    x = (np.random.default_rng(0).standard_normal((3, 6)),)
    assert adjoint_gap(layer, x, {}) < 1e-12
    assert adjoint_gap(layer, x, {}, slip=1e-9) > 1e-12


@pytest.mark.parametrize("names", [(), ("causal",), ("softcap",), EVERYTHING], ids=label)
def test_jvp_equals_the_central_difference(names):
    options = make(names, SHAPE).options
    layer = randomise(MultiHeadAttention(6, 4, 2, d_head=4, bias=True, rope=7.0, dtype=np.float64))
    rng = np.random.default_rng(4)
    x = tuple(rng.standard_normal((2, tokens, 6)) for tokens in (3, 5, 5))
    t = directions(layer, x, options)
    _, y_dot = layer.jvp(x, **t, **options)
    start = {name: p.copy() for name, p in layer.params.items()}

    def moved(h: float) -> Any:
        for name, p in layer.params.items():
            p[...] = start[name] + h * t["params_dot"][name]
        extra = {n: options[n] + h * t[f"{n}_dot"] for n in ("bias", "sinks") if n in options}
        return layer(*(a + h * b for a, b in zip(x, t["inputs_dot"], strict=True)), **{**options, **extra})

    h = 1e-5
    assert relative_error((moved(h) - moved(-h)) / (2 * h), y_dot) < 1e-7


def test_jvp_takes_none_and_missing_names_for_zero():
    layer = randomise(MultiHeadAttention(6, 2, bias=True, dtype=np.float64))
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2, 3, 6)), rng.standard_normal((2, 4, 6)))
    y, y_dot = layer.jvp(x, (None, None))
    assert relative_error(y, layer(*x)) < 1e-13
    assert not y_dot.any()
    for name, p in layer.params.items():
        direction = rng.standard_normal(p.shape)
        zeros = {n: np.zeros_like(a) for n, a in layer.params.items()}
        _, sparse = layer.jvp(x, (None, None), {name: direction})
        _, dense = layer.jvp(x, (np.zeros_like(x[0]), np.zeros_like(x[1])), {**zeros, name: direction})
        assert relative_error(sparse, dense) < 1e-14


def test_jvp_leaves_the_pass_that_backward_inverts():
    layer = MultiHeadAttention(6, 2, dtype=np.float64)
    rng = np.random.default_rng(0)
    x, other, dy = (rng.standard_normal((3, 6)) for _ in range(3))
    layer(x)
    expected = layer.backward(dy)
    layer(x)
    layer.jvp((other,), (x,))
    assert np.array_equal(layer.backward(dy), expected)
