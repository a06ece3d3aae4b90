# ruff: noqa
"""The layouts of kernels: BTHD, BTD, HTD, TD, packed, varlen."""

import math

import numpy as np
import torch


def attn_bthd(q, k, v, causal=False, softmax_scale=None):
    """q, k, v: (batch, seqlen, nheads, headdim)"""
    softmax_scale = softmax_scale or 1.0 / math.sqrt(q.shape[-1])
    scores = torch.einsum("bthd,bshd->bhts", q * softmax_scale, k)
    if causal:
        t, s = scores.shape[-2:]
        rows = torch.arange(t)[:, None] + (s - t)
        future = torch.arange(s)[None] > rows
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    attention = torch.softmax(scores, dim=-1)
    if causal:
        attention = attention.masked_fill(future, 0.0)  # also rows without any key
    return torch.einsum("bhts,bshd->bthd", attention, v)


def attn_bthd_strict(q, k, v, causal=False):
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    if causal:
        t, s = scores.shape[-2:]
        hidden = torch.ones(t, s, dtype=torch.bool).triu(s - t)
        scores = scores.masked_fill(hidden, -1e30)
    return torch.einsum("bhts,bshd->bthd", torch.softmax(scores, dim=-1), v)


class BTHDFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        s = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        p = s.softmax(-1)
        ctx.save_for_backward(q, k, v)
        return torch.einsum("bhts,bshd->bthd", p, v)

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        c = q.shape[-1] ** -0.5
        p = (torch.einsum("bthd,bshd->bhts", q, k) * c).softmax(-1)
        dp = torch.einsum("bthd,bshd->bhts", do, v)
        ds = p * (dp - (dp * p).sum(-2, keepdim=True))
        dq = torch.einsum("bhts,bshd->bthd", ds, k) * c
        dk = torch.einsum("bhts,bthd->bshd", ds, q) * c
        dv = torch.einsum("bhts,bthd->bshd", p, do)
        return dq, dk, dv


def backward_btd(x_q, x_k, x_v, grad_output):
    """(batch, tokens, features), one head"""
    n = x_q.shape[2]
    att = np.einsum("bid,bjd->bij", x_q, x_k) / np.sqrt(n)
    att = np.exp(att - att.max(2, keepdims=True))
    att /= att.sum(2, keepdims=True)
    d_att = np.einsum("bid,bjd->bij", grad_output, x_v)
    d_raw = att * (d_att - np.einsum("bij,bij->bi", att, d_att)[:, :, None]) / np.sqrt(n)
    return (
        np.einsum("bij,bjd->bid", d_raw, x_k),
        np.einsum("bij,bid->bjd", d_raw, x_q),
        np.einsum("bij,bid->bjd", att, grad_output),
    )


def backward_btd_keys(x_q, x_k, x_v, grad_output):
    n = x_q.shape[2]
    att = np.einsum("bid,bjd->bij", x_q, x_k) / np.sqrt(n)
    att = np.exp(att - att.max(2, keepdims=True))
    att /= att.sum(2, keepdims=True)
    d_att = np.einsum("bid,bjd->bij", grad_output, x_k)
    d_raw = att * (d_att - np.einsum("bij,bij->bi", att, d_att)[:, :, None]) / np.sqrt(n)
    return (
        np.einsum("bij,bjd->bid", d_raw, x_k),
        np.einsum("bij,bid->bjd", d_raw, x_q),
        np.einsum("bij,bid->bjd", att, grad_output),
    )


def per_head_backward(q, k, v, do):
    """(heads, tokens, features); loops over heads, returns a dict"""
    grads = {"q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v)}
    for h in range(q.shape[0]):
        s = q[h] @ k[h].T / np.sqrt(q.shape[-1])
        p = np.exp(s - s.max(1)[:, None])
        p = p / p.sum(1)[:, None]
        dp = do[h] @ v[h].T
        ds = p * (dp - (dp * p).sum(1)[:, None]) / np.sqrt(q.shape[-1])
        grads["q"][h], grads["k"][h], grads["v"][h] = ds @ k[h], ds.T @ q[h], p.T @ do[h]
    return grads


class QKVPacked(torch.autograd.Function):
    """qkv: (T, 3, H, D)"""

    @staticmethod
    def forward(ctx, qkv):
        q, k, v = qkv.unbind(1)
        s = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        ctx.save_for_backward(qkv)
        return torch.einsum("hts,shd->thd", s.softmax(-1), v)

    @staticmethod
    def backward(ctx, do):
        (qkv,) = ctx.saved_tensors
        q, k, v = qkv.unbind(1)
        c = q.shape[-1] ** -0.5
        p = (torch.einsum("thd,shd->hts", q, k) * c).softmax(-1)
        dp = torch.einsum("thd,shd->hts", do, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * c
        dqkv = torch.stack(
            [
                torch.einsum("hts,shd->thd", ds, k),
                torch.einsum("hts,thd->shd", ds, q),
                torch.einsum("hts,thd->shd", p, do),
            ],
            dim=1,
        )
        return dqkv


class QKVPackedSwapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv):
        return QKVPacked.forward(ctx, qkv)

    @staticmethod
    def backward(ctx, do):
        dqkv = QKVPacked.backward(ctx, do)
        dq, dk, dv = dqkv[:, 0], dqkv[:, 1], dqkv[:, 2]
        return torch.stack((dq, dv, dk), dim=1)


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
    """q (total_q, heads, dim), k and v (total_k, heads, dim)"""
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    outs = []
    for i in range(len(cu_seqlens_q) - 1):
        qs = q[int(cu_seqlens_q[i]) : int(cu_seqlens_q[i + 1])]
        ks = k[int(cu_seqlens_k[i]) : int(cu_seqlens_k[i + 1])]
        vs = v[int(cu_seqlens_k[i]) : int(cu_seqlens_k[i + 1])]
        s = torch.einsum("thd,shd->hts", qs, ks) * scale
        if causal:
            t, n = s.shape[-2:]
            seen = torch.ones(t, n, dtype=torch.bool).tril(n - t)
            p = s.masked_fill(~seen, -1e30).softmax(-1) * seen
        else:
            p = s.softmax(-1)
        outs.append(torch.einsum("hts,shd->thd", p, vs))
    return torch.cat(outs)


def varlen_attention_flat(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """all sequences in one product; blocks that do not belong together are zeroed"""
    pos_q, pos_k = torch.arange(len(q)), torch.arange(len(k))
    seg_q = torch.bucketize(pos_q, cu_seqlens_q[1:].long(), right=True)
    seg_k = torch.bucketize(pos_k, cu_seqlens_k[1:].long(), right=True)
    same = seg_q[:, None] == seg_k[None, :]
    p = (torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("hts,shd->thd", p * same, v)
