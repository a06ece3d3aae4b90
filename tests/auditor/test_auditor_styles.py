"""Options that are on by default or must be given, windows that are one number, one array for all, what holds dout."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

import attngrad
from attngrad.auditor import audit


def told(report):
    return " ".join(f.text for f in report.findings)


def with_sinks(q, k, v, sinks, dout):
    out, pullback = attngrad.vjp(q, k, v, sinks=sinks)
    dq, dk, dv, _, dsinks = pullback(dout)
    return out, dq, dk, dv, dsinks


def test_sinks_that_must_be_given_are_made():
    report = audit(with_sinks, effort="quick")
    assert report.ok, report
    assert "dsinks" in {s.name for s in report.stages}
    assert "It wants sinks" in told(report)


def with_dropout(q, k, v, dropout_p=0.1):
    w = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return dropout(w, dropout_p) @ v


def test_dropout_that_is_on_by_default_is_turned_off_and_told():
    report = audit(with_dropout, effort="quick")
    assert report.ok, report
    assert "It has dropout by default: audited with dropout=0." in told(report)
    assert any("dropout" in text for text in report.untried)


def banded(left, right):
    def vjp(q, k, v, dout, window):
        out, pullback = attngrad.vjp(q, k, v, window=(left(window), right(window)))
        return (out, *pullback(dout)[:3])

    return vjp


WINDOWS = {
    "of keys before": (lambda w: w, lambda w: 0),
    "of keys up to its own": (lambda w: w - 1, lambda w: 0),
    "of keys on each side": (lambda w: w, lambda w: w),
}


@pytest.mark.parametrize("words", WINDOWS)
def test_a_window_that_is_one_number_and_always_on_is_right_by_what_it_means(words):
    vjp = banded(*WINDOWS[words])

    def candidate(q, k, v, dout, window: int = 8):
        return vjp(q, k, v, dout, window)

    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert f"Its window is a number: {words}" in told(report)


class Banded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, window):
        t, s = q.shape[-2], k.shape[-2]
        i, j = torch.arange(t)[:, None] + s - t, torch.arange(s)
        w = torch.softmax((q @ k.mT * q.shape[-1] ** -0.5).masked_fill((j > i) | (j < i - window), -torch.inf), -1)
        w = torch.nan_to_num(w)
        ctx.save_for_backward(q, k, v, w)
        return w @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, w = ctx.saved_tensors
        dw = dout @ v.mT
        ds = w * (dw - (w * dw).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, w.mT @ dout, None


def test_a_window_that_a_function_must_be_given_is_given():
    report = audit(Banded, effort="quick")
    assert report.ok, report
    assert "Its window is a number: of keys before" in told(report)


@pytest.mark.parametrize("words", list(WINDOWS)[:2])
def test_a_window_that_is_asked_for_is_given_as_the_number_that_it_is_there(words):
    vjp = banded(*WINDOWS[words])

    def candidate(q, k, v, dout, window_size=4):
        return vjp(q, k, v, dout, window_size)

    assert audit(candidate, options={"window": (3, 0)}, effort="quick").ok


@pytest.mark.parametrize("words", WINDOWS)
def test_a_window_that_is_one_number_is_tried_where_it_is_off_by_default(words):
    vjp = banded(*WINDOWS[words])

    def candidate(q, k, v, dout, window=None):
        if window is None:
            out, pullback = attngrad.vjp(q, k, v)
            return (out, *pullback(dout)[:3])
        if not isinstance(window, int):
            raise TypeError("window must be a number")
        return vjp(q, k, v, dout, window)

    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert any(f"window (a number: {words}" in text for text in report.tried)


@pytest.mark.parametrize("wrong", [False, True])
def test_second_order_that_holds_dout_is_judged_with_dout_held(wrong):
    def candidate(q, k, v, dout, tq, tk, tv):
        _, (dq, dk, dv, *_) = attngrad.hvp((q, k, v), (tq, tk, tv), dout)
        return dq, 1.5 * dk if wrong else dk, dv

    report = audit(candidate, effort="quick")
    assert report.ok != wrong, report
    assert [s.name for s in report.stages if not s.ok] == (["dk_dot"] if wrong else [])


@pytest.mark.parametrize("heads", [True, False])
def test_q_k_and_v_side_by_side_in_the_features_are_read_by_heads_where_their_number_is_taken(heads):
    def run(qkv, dout, n_head):
        def split(x):
            return x.reshape(*x.shape[:2], n_head, -1).swapaxes(1, 2)

        def merge(x):
            return x.swapaxes(1, 2).reshape(*x.shape[:1], x.shape[2], -1)

        out, pullback = attngrad.vjp(*map(split, np.split(qkv, 3, -1)))
        return merge(out), np.concatenate([merge(g) for g in pullback(split(dout))[:3]], -1)

    def many(qkv, dout, n_head):
        return run(qkv, dout, n_head)

    def one(qkv, dout):
        return run(qkv, dout, 1)

    report = audit(many if heads else one, effort="quick")
    assert report.ok, report
    assert ("3 heads features" if heads else "3 features") in told(report)


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])[:, None, None] * (np.arange(6) - np.arange(6)[:, None])


@pytest.mark.parametrize("right", [True, False])
def test_a_bias_of_its_own_may_be_stated(right):
    def alibi(q, k, v, dout):
        out, pullback = attngrad.vjp(q, k, v, causal=True, bias=SLOPES)
        return out, *pullback(dout if right else 2 * dout)[:3]

    report = audit(alibi, options={"causal": True, "bias": SLOPES}, effort="quick")
    assert report.status == ("right" if right else "wrong"), report


def test_a_bias_with_heads_is_not_given_to_a_layout_without():
    def nothing(q, k, v, dout):
        raise TypeError("no")

    assert audit(nothing, options={"bias": SLOPES}, effort="quick").status == "not audited"


def test_a_pair_is_called_by_the_name_of_its_forward():
    def forward(q, k, v):
        return attngrad.attention(q, k, v), (q, k, v)

    def backward(dout, cache):
        return attngrad.vjp(*cache)[1](dout)[:3]

    report = audit((forward, backward), effort="quick")
    assert report.ok
    assert report.candidate.endswith("forward")


def test_a_mask_that_is_a_buffer_called_bias_is_no_bias():
    class Causal(nn.Module):
        def __init__(self, n_embd=12, n_head=3, block_size=1024):
            super().__init__()
            self.n_head, self.c_attn = n_head, nn.Linear(n_embd, 3 * n_embd)
            self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size, dtype=torch.bool)))

        def forward(self, x):
            t = x.shape[1]
            q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
            return scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:t, :t]).transpose(1, 2).flatten(2)

    assert audit(Causal(), options={"causal": True}, effort="quick").ok
    assert audit(Causal, options={"causal": True}, effort="quick").ok


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.h, self.rope = config.n_head, config.rope_theta
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)


def test_what_a_config_cannot_be_asked_is_told():
    report = audit(Configured, effort="quick")
    assert report.status == "not audited"
    assert "the auditor's config has no 'rope_theta'" in str(report)


def test_weights_are_found_in_lists_and_sequences_of_any_kind():
    class Listed(nn.Module):
        def __init__(self, d_model, heads):
            super().__init__()
            self.heads, self.maps = heads, nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(3))
            self.to_out = nn.Sequential(nn.Linear(d_model, d_model), nn.Dropout(0.0))

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.maps)
            return self.to_out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    report = audit(Listed, effort="quick")
    assert report.ok, report
    assert {"dw_q", "dw_k", "dw_v", "dw_o"} <= {s.name for s in report.stages}


def test_tokens_may_come_before_the_batch():
    assert audit(nn.MultiheadAttention(12, 3), effort="quick").ok
    assert audit(nn.MultiheadAttention(12, 3, batch_first=True), effort="quick").ok
