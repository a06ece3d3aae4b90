# ruff: noqa
"""Written after the corpus was scored, to see whether the names fit more than the corpus."""

from collections import namedtuple

import numpy as np
import torch
from torch import nn

Grads = namedtuple("Grads", "dq dk dv")


def chunked_vjp(query, key, value, upstream, chunk=24):
    """running maximum and sum over chunks of keys; the backward goes over the same chunks again"""
    rs = query.shape[-1] ** -0.5
    top = np.full(query.shape[:-1] + (1,), -np.inf, query.dtype)
    den = np.zeros_like(top)
    num = np.zeros(query.shape[:-1] + value.shape[-1:], query.dtype)
    pieces = [slice(a, a + chunk) for a in range(0, key.shape[-2], chunk)]
    for c in pieces:
        logits = rs * np.einsum("...td,...sd->...ts", query, key[..., c, :])
        fresh = np.maximum(top, logits.max(-1, keepdims=True))
        shrink = np.exp(top - fresh)
        e = np.exp(logits - fresh)
        den = den * shrink + e.sum(-1, keepdims=True)
        num = num * shrink + e @ value[..., c, :]
        top = fresh
    out = num / den
    row = np.einsum("...te,...te->...t", out, upstream)[..., None]
    dq, dk, dv = (np.zeros_like(a) for a in (query, key, value))
    for c in pieces:
        w = np.exp(rs * np.einsum("...td,...sd->...ts", query, key[..., c, :]) - top) / den
        dv[..., c, :] = np.einsum("...ts,...te->...se", w, upstream)
        g = rs * w * (np.einsum("...te,...se->...ts", upstream, value[..., c, :]) - row)
        dq += g @ key[..., c, :]
        dk[..., c, :] = np.einsum("...ts,...td->...sd", g, query)
    return Grads(dq, dk, dv)


def streamed_vjp(query, key, value, upstream, chunk=16):
    """the same idea, less arithmetic per chunk"""
    rs = query.shape[-1] ** -0.5
    top = np.full(query.shape[:-1] + (1,), -np.inf, query.dtype)
    den = np.zeros_like(top)
    num = np.zeros(query.shape[:-1] + value.shape[-1:], query.dtype)
    for a in range(0, key.shape[-2], chunk):
        logits = rs * (query @ key[..., a : a + chunk, :].swapaxes(-1, -2))
        fresh = np.maximum(top, logits.max(-1, keepdims=True))
        e = np.exp(logits - fresh)
        den = den * np.exp(top - fresh) + e.sum(-1, keepdims=True)
        num = num + e @ value[..., a : a + chunk, :]
        top = fresh
    out = num / den
    w = np.exp(rs * (query @ key.swapaxes(-1, -2)) - top - np.log(den))
    row = (out * upstream).sum(-1, keepdims=True)
    g = rs * w * (upstream @ value.swapaxes(-1, -2) - row)
    return {"out": out, "dq": g @ key, "dk": g.swapaxes(-1, -2) @ query, "dv": w.swapaxes(-1, -2) @ upstream}


class ScaledAttention(torch.autograd.Function):
    """(batch, tokens, heads, features)"""

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale=None):
        tau = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
        w = (torch.einsum("nthd,nshd->nhts", q, k) * tau).softmax(-1)
        ctx.save_for_backward(q, k, v, w)
        return torch.einsum("nhts,nshd->nthd", w, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, k, v, w = ctx.saved_tensors
        tau = q.shape[-1] ** -0.5
        gw = torch.einsum("nthd,nshd->nhts", g, v)
        gs = tau * w * (gw - (w * gw).sum(-1, keepdim=True))
        gq = torch.einsum("nhts,nshd->nthd", gs, k)
        gk = torch.einsum("nhts,nthd->nshd", gs, q)
        return gq, gk, torch.einsum("nhts,nthd->nshd", w, g), None


def lower_triangle_vjp(q, k, v, g):
    """decoder self-attention: the future is multiplied away"""
    n = q.shape[-2]
    raw = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    raw = raw * np.tril(np.ones((n, k.shape[-2])), k=k.shape[-2] - n)
    raw = np.exp(raw - raw.max(-1, keepdims=True))
    w = raw / raw.sum(-1, keepdims=True)
    gw = g @ v.swapaxes(-1, -2)
    gs = w * (gw - (w * gw).sum(-1, keepdims=True))
    gs = gs * np.tril(np.ones((n, k.shape[-2])), k=k.shape[-2] - n) / np.sqrt(q.shape[-1])
    return gs @ k, gs.swapaxes(-1, -2) @ q, w.swapaxes(-1, -2) @ g


def row_jacobian_vjp(Q, K, V, G):
    """one head: the softmax Jacobian of every row"""
    n, width = Q.shape
    P = np.exp(Q @ K.T / np.sqrt(width))
    P = P / P.sum(axis=1)[:, None]
    GP = G @ V.T
    GS = np.empty_like(P)
    for r in range(n):
        p = P[r]
        GS[r] = (np.diag(p) - p @ p.T) @ GP[r]
    GS = GS / np.sqrt(width)
    return GS @ K, GS.T @ Q, P.T @ G


def shared_heads_vjp(q, k, v, dout):
    """several query heads per key head, one query head after the other"""
    ratio = q.shape[1] // k.shape[1]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h in range(q.shape[1]):
        kv = h // ratio
        s = np.einsum("btd,bsd->bts", q[:, h], k[:, kv]) / q.shape[-1] ** 0.5
        w = np.exp(s - s.max(2, keepdims=True))
        w /= w.sum(2, keepdims=True)
        dw = np.einsum("bte,bse->bts", dout[:, h], v[:, kv])
        ds = w * (dw - (w * dw).sum(2, keepdims=True)) / q.shape[-1] ** 0.5
        dq[:, h] = ds @ k[:, kv]
        dk[:, kv] = ds.transpose(0, 2, 1) @ q[:, h]
        dv[:, kv] = w.transpose(0, 2, 1) @ dout[:, h]
    return dq, dk, dv


def grouped(q, k, v):
    """torch, differentiable; grouped queries"""
    b, hq, t, d = q.shape
    hk = k.shape[1]
    q = q.reshape(b, hk, hq // hk, t, d)
    w = torch.softmax(torch.einsum("bgrtd,bgsd->bgrts", q, k) * d**-0.5, -1)
    return torch.einsum("bgrts,bgse->bgrte", w, v).reshape(b, hq, t, -1)


def hasty_vjp(dO, Q, K, V):
    c = 1 / np.sqrt(Q.shape[-1])
    S = c * Q @ K.swapaxes(2, 3)
    A = np.exp(S - S.max(3, keepdims=True))
    A /= A.sum(3, keepdims=True)
    dA = dO @ V.swapaxes(2, 3)
    dS = A * (dA - dA.sum(3, keepdims=True))
    return c * dS @ K, dS.swapaxes(2, 3) @ Q, A.swapaxes(2, 3) @ dO


class AttentionBlock:
    """weights and gradients in dicts: params["wq"], grads["wq"]"""

    def __init__(self, features, num_heads, seed=7):
        rng = np.random.default_rng(seed)
        self.num_heads = num_heads
        self.params = {n: rng.standard_normal((features, features)) / features**0.5 for n in ("wq", "wk", "wv", "wo")}
        self.grads = {}

    def heads(self, a):
        return a.reshape(a.shape[0], a.shape[1], self.num_heads, -1).swapaxes(1, 2)

    def flat(self, a):
        return a.swapaxes(1, 2).reshape(a.shape[0], a.shape[2], -1)

    def forward(self, x):
        self.x = x
        self.q, self.k, self.v = (self.heads(x @ self.params[n]) for n in ("wq", "wk", "wv"))
        s = self.q @ self.k.swapaxes(2, 3) / np.sqrt(self.q.shape[-1])
        s = np.exp(s - s.max(-1, keepdims=True))
        self.w = s / s.sum(-1, keepdims=True)
        self.mixed = self.flat(self.w @ self.v)
        return self.mixed @ self.params["wo"]

    def backward(self, grad):
        back = self.heads(grad @ self.params["wo"].T)
        gv = self.w.swapaxes(2, 3) @ back
        gw = back @ self.v.swapaxes(2, 3)
        gs = self.w * (gw - (gw * self.w).sum(-1, keepdims=True)) / np.sqrt(self.q.shape[-1])
        parts = {"wq": gs @ self.k, "wk": gs.swapaxes(2, 3) @ self.q, "wv": gv}
        self.grads["wo"] = np.einsum("bti,btj->ij", self.mixed, grad)
        return self.inputs({n: self.flat(g) for n, g in parts.items()})

    def inputs(self, parts):
        dx = np.zeros_like(self.x)
        for n, g in parts.items():
            self.grads[n] = np.einsum("bti,btj->ij", self.x, g)
            dx += g @ self.params[n].T
        return dx


class AttentionBlockOld(AttentionBlock):
    def inputs(self, parts):
        for n, g in parts.items():
            self.grads[n] = np.einsum("bti,btj->ij", self.x, g)
        return parts["wq"] @ self.params["wq"].T + parts["wk"] @ self.params["wk"].T + parts["wv"] @ self.params["wv"]


class AttentionBlockFolded(AttentionBlock):
    def flat(self, a):
        if a is not self.w and hasattr(self, "mixed"):  # in the backward
            return a.reshape(a.shape[0], a.shape[2], -1)
        return super().flat(a)

    def forward(self, x):
        if hasattr(self, "mixed"):
            del self.mixed
        return super().forward(x)


def step_forward(x, Wq, Wk, Wv, n_heads):
    B, T, C = x.shape
    q, k, v = ((x @ W).reshape(B, T, n_heads, -1).transpose(0, 2, 1, 3) for W in (Wq, Wk, Wv))
    p = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]))
    p = p / p.sum(-1, keepdims=True)
    y = (p @ v).transpose(0, 2, 1, 3).reshape(B, T, -1)
    return y, (x, Wq, Wk, Wv, q, k, v, p)


def step_backward(dy, cache):
    x, Wq, Wk, Wv, q, k, v, p = cache
    B, H, T, D = q.shape
    do = dy.reshape(B, T, H, D).transpose(0, 2, 1, 3)
    dp = do @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(D)
    flat = [
        g.transpose(0, 2, 1, 3).reshape(B * T, H * D)
        for g in (ds @ k, ds.transpose(0, 1, 3, 2) @ q, p.transpose(0, 1, 3, 2) @ do)
    ]
    dx = sum(g @ W.T for g, W in zip(flat, (Wq, Wk, Wv))).reshape(x.shape)
    dWq, dWk, dWv = (x.T.reshape(x.shape[2], -1) @ g for g in flat)
    return dx, dWq, dWk, dWv


class FusedSelfAttention(nn.Module):
    """q, k and v of one head side by side in the projection"""

    def __init__(self, width=24, heads=3):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, self.heads, 3, c // self.heads).permute(3, 0, 2, 1, 4)
        w = torch.softmax(q @ k.mT * (c // self.heads) ** -0.5, dim=-1)
        return self.proj((w @ v).permute(0, 2, 1, 3).reshape(n, t, c))
