"""Ports, lectures and homework: names, flags and lengths of their own; what they cannot be asked is said."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attngrad
import attngrad.jax
from attngrad.auditor import audit


def turned(x):
    return x.swapaxes(-1, -2)


def attend(q, k, v, dout, seen=None, scale=None):
    """out, dq, dk, dv; zero where a row sees nothing."""
    scale = scale or 1 / np.sqrt(q.shape[-1])
    z = scale * q @ turned(k)
    if seen is not None:
        z = np.where(seen, z, -np.inf)
    e = np.exp(z - np.maximum(z.max(axis=-1, keepdims=True), -1e300))
    total = e.sum(axis=-1, keepdims=True)
    a = e / np.where(total == 0, 1, total)
    da = dout @ turned(v)
    ds = scale * a * (da - np.sum(a * da, axis=-1, keepdims=True))
    return a @ v, ds @ k, turned(ds) @ q, turned(a) @ dout


# --- flags -----------------------------------------------------------------------------------------------------------


def with_flag(mask_of):
    def candidate(q, k, v, dout, causal=False):
        return attend(q, k, v, dout, mask_of(q.shape[-2], k.shape[-2]) if causal else None)

    return candidate


def peeks(t, s):
    return np.tril(np.ones((t, s), bool), 1)


def sees_what_comes(t, s):
    return np.triu(np.ones((t, s), bool))


@pytest.mark.parametrize(("mask_of", "mistakes"), [(peeks, ("causal-off-by-one",)), (sees_what_comes, ())])
def test_a_causal_flag_that_is_right_under_no_convention_is_wrong(mask_of, mistakes):
    report = audit(with_flag(mask_of), effort="quick")
    assert report.status == "wrong", report
    assert report.mistakes == mistakes
    assert any("T = S" in text for text in report.tried)


def test_a_causal_flag_for_as_many_keys_as_queries_is_tried_with_these():
    def candidate(q, k, v, dout, causal=False):
        assert not causal or q.shape == k.shape
        return attend(q, k, v, dout, np.tril(np.ones((q.shape[-2],) * 2, bool)) if causal else None)

    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert "causal (T = S)" in report.tried


def test_causal_by_default_is_told_and_judged():
    def candidate(q, k, v, dout, is_causal=True):
        t, s = q.shape[-2], k.shape[-2]
        return attend(q, k, v, dout, np.tril(np.ones((t, s), bool), s - t) if is_causal else None)

    report = audit(lambda q, k, v, dout, is_causal=True: candidate(q, k, v, dout, is_causal), effort="quick")
    assert "It is causal by default: audited as causal attention." in str(report)
    assert report.ok, report


def test_an_option_that_is_right_under_no_convention_is_in_the_verdict():
    def candidate(q, k, v, dout, window=None):
        i, j = np.ogrid[: q.shape[-2], : k.shape[-2]]
        seen = None if window is None else (j <= i) & (j > i - window - 1)
        return attend(q, k, v, dout, seen)

    report = audit(candidate, effort="quick")
    assert report.ok
    assert "With window it is right under no convention that is known, which was not judged." in report.verdict


# --- names and layouts -----------------------------------------------------------------------------------------------


def port_forward(inp, NH):
    b, t, c = inp.shape
    x = inp.reshape(b, t, 3, NH, c // 3 // NH).transpose(2, 0, 3, 1, 4)
    preatt = np.where(np.tril(np.ones((t, t), bool)), x[0] @ turned(x[1]) / np.sqrt(x.shape[-1]), -np.inf)
    e = np.exp(preatt - preatt.max(axis=-1, keepdims=True))
    att = e / e.sum(axis=-1, keepdims=True)
    out = (att @ x[2]).transpose(0, 2, 1, 3).reshape(b, t, c // 3)
    return out, preatt, att


def port_backward(dout, inp, att, NH):
    b, t, c = inp.shape
    x = inp.reshape(b, t, 3, NH, c // 3 // NH).transpose(2, 0, 3, 1, 4)
    g = dout.reshape(b, t, NH, -1).transpose(0, 2, 1, 3)
    da = g @ turned(x[2])
    ds = att * (da - np.sum(att * da, axis=-1, keepdims=True)) / np.sqrt(x.shape[-1])
    return np.stack([ds @ x[1], turned(ds) @ x[0], turned(att) @ g]).transpose(1, 3, 0, 2, 4).reshape(inp.shape)


def port_backward_without_the_diagonal(dout, inp, att, NH):
    return port_backward(dout, inp, att * np.tril(np.ones(att.shape[-2:]), -1), NH)


def test_a_backward_takes_what_its_forward_calls_by_the_same_names():
    assert audit((port_forward, port_backward), effort="quick").ok
    report = audit((port_forward, port_backward_without_the_diagonal), effort="quick")
    assert report.mistakes == ("causal-off-by-one",), report


def heads_in_features(q, k, v, dout, n_head, scale=None):
    b, _, c = q.shape
    q, k, v, dout = (x.reshape(b, -1, n_head, c // n_head).transpose(0, 2, 1, 3) for x in (q, k, v, dout))
    return [x.transpose(0, 2, 1, 3).reshape(b, -1, c) for x in attend(q, k, v, dout, scale=scale)]


def test_key_heads_that_a_reshape_takes_for_tokens_are_not_supported_and_no_fault():
    report = audit(heads_in_features, effort="quick")
    assert report.ok, report
    assert "It does not support groups of query heads (gqa)" in " ".join(str(report).split())
    wrong = audit(lambda q, k, v, dout, n_head: heads_in_features(q, k, v, dout, n_head, q.shape[-1] ** -0.5),
                  effort="quick")  # fmt: skip
    assert wrong.mistakes == ("scale-by-model",), wrong
    assert not audit(heads_in_features, effort="quick", supports="gqa").ok


@pytest.mark.parametrize(("longest", "refused"), [(16, 37), (64, 320)])
def test_a_mask_of_a_length_of_its_own_stands_in_the_verdict_and_is_no_fault(longest, refused):
    mask = np.tril(np.ones((longest, longest), bool))

    def candidate(q, k, v, dout):
        t = q.shape[-2]
        return attend(q, k, v, dout, mask[:t, :t])

    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert f"It does not take {refused} tokens: it raises." in report.verdict


def test_what_raises_in_a_short_case_is_not_taken_for_too_long():
    def candidate(q, k, v, dout):
        assert q.shape[-2] not in (2, 64)
        return attend(q, k, v, dout)

    assert audit(candidate, effort="quick").status == "not audited"


def test_a_layer_may_return_its_output_and_gradients_by_the_names_of_its_arguments():
    def candidate(x, Wq, Wk, Wv, Wo, dout, n_heads):
        layer = attngrad.MultiHeadAttention(x.shape[-1], n_heads, d_head=Wq.shape[1] // n_heads, dtype=x.dtype)
        for name, w in zip(("w_q", "w_k", "w_v", "w_o"), (Wq, Wk, Wv, Wo), strict=True):
            layer.params[name][...] = w
        y = layer(x)
        dx = layer.backward(dout)
        return y, {f"W{n}": layer.grads[f"w_{n}"] for n in "qkvo"} | {"x": dx}

    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert {"y", "dx", "dw_q"} <= {s.name for s in report.stages}


def test_the_smallest_case_of_a_module_makes_it_with_a_head_size():
    class Head(torch.nn.Module):
        def __init__(self, head_size):
            super().__init__()
            self.query, self.key, self.value = (torch.nn.Linear(32, head_size, bias=False) for _ in range(3))

        def forward(self, x):
            q, k, v = self.query(x), self.key(x), self.value(x)
            return torch.softmax(q @ k.mT * x.shape[-1] ** -0.5, dim=-1) @ v

    report = audit(Head, effort="quick", framework="torch")
    assert report.status == "wrong"
    assert re.search(r"layer = Head\(\d+\)", report.smallest), report.smallest


def test_notes_of_jax_on_its_errors_are_not_ours():
    def plain(q, k, v):
        return jax.nn.softmax(q @ k.mT / jnp.sqrt(q.shape[-1]), axis=-1) @ v

    candidate = jax.custom_vjp(plain)
    candidate.defvjp(lambda *inputs: (plain(*inputs), inputs), lambda inputs, dout: jax.vjp(plain, *inputs)[1](dout))
    report = attngrad.jax.audit(candidate, effort="quick")
    assert report.ok, report
    assert "it raises, so nothing is silently wrong: TypeError" in " ".join(str(report).split())


@pytest.mark.parametrize("bias", [False, True])
def test_biases_that_are_set_to_zero_are_not_tried_and_it_says_so(bias):
    class Layer(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(width, width, bias=bias) for _ in range(3))

        def forward(self, x):
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            return torch.softmax(q @ k.mT * x.shape[-1] ** -0.5, dim=-1) @ v

    report = audit(Layer, effort="quick", framework="torch")
    assert report.ok, report
    assert any("biases" in text for text in report.untried) == bias
