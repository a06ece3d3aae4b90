# ruff: noqa
"""Written after the corpus was scored, to see whether the names fit more than the corpus."""

import math
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

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


# Written later still, in styles that were not there yet.


class GPTAttention(nn.Module):
    """sizes from a config; the causal mask is a buffer that is called bias"""

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout
        self.register_buffer(
            "bias",
            torch.tril(torch.ones(config.block_size, config.block_size)).view(
                1, 1, config.block_size, config.block_size
            ),
        )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class ViTAttention(nn.Module):
    """one projection, and the output's in a Sequential"""

    def __init__(self, dim=24, heads=3, dim_head=4, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim**-0.5
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, n, _ = x.shape
        h = self.heads
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.reshape(b, n, h, -1).transpose(1, 2) for t in qkv)
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        attn = dots.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


def repeat_kv(x, n_rep):
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return (
        x[:, :, :, None, :]
        .expand(bs, slen, n_kv_heads, n_rep, head_dim)
        .reshape(bs, slen, n_kv_heads * n_rep, head_dim)
    )


class GroupedAttention(nn.Module):
    """fewer key heads than query heads, whose number the module has"""

    def __init__(self, dim=16, n_heads=4, n_kv_heads=2):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.n_rep = n_heads // n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, mask=None):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        keys = repeat_kv(xk, self.n_rep).transpose(1, 2)
        values = repeat_kv(xv, self.n_rep).transpose(1, 2)
        xq = xq.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float() if scores.dtype == torch.bfloat16 else scores, dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


class TimeFirstAttention(nn.Module):
    """time, batch, features"""

    def __init__(self, embed_dim=16, num_heads=2):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query, key, value, key_padding_mask=None):
        tgt_len, bsz, embed_dim = query.size()
        src_len = key.size(0)
        wq, wk, wv = self.in_proj_weight.chunk(3)
        q = F.linear(query, wq) * self.scaling
        k = F.linear(key, wk)
        v = F.linear(value, wv)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        w = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            w = w.view(bsz, self.num_heads, tgt_len, src_len)
            w = w.masked_fill(key_padding_mask[:, None, None, :], float("-inf")).view(
                bsz * self.num_heads, tgt_len, src_len
            )
        w = F.softmax(w, dim=-1)
        attn = torch.bmm(w, v).transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class ListedAttention(nn.Module):
    """four projections in a list"""

    def __init__(self, h=2, d_model=16, dropout=0.0):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value):
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        self.attn = F.softmax(query @ key.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        x = self.dropout(self.attn) @ value
        x = x.contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class FlashOverKeys(torch.autograd.Function):
    """keys in tiles of 16; its second order is that of a saved log-sum-exp"""

    @staticmethod
    def forward(ctx, q, k, v):
        scale = q.shape[-1] ** -0.5
        B, H, N, D = q.shape
        m = q.new_full((B, H, N, 1), -float("inf"))
        l = q.new_zeros((B, H, N, 1))
        acc = q.new_zeros((B, H, N, v.shape[-1]))
        for j in range(0, k.shape[2], 16):
            kj, vj = k[:, :, j : j + 16], v[:, :, j : j + 16]
            s = scale * (q @ kj.transpose(-2, -1))
            m_new = torch.maximum(m, s.max(-1, keepdim=True).values)
            p = (s - m_new).exp()
            l = (m - m_new).exp() * l + p.sum(-1, keepdim=True)
            acc = acc + p @ vj
            m = m_new
        out = acc / l
        ctx.save_for_backward(q, k, v, out, m + l.log())
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out, lse = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        p = (scale * q @ k.transpose(-2, -1) - lse).exp()
        dv = p.transpose(-2, -1) @ do
        dp = do @ v.transpose(-2, -1)
        ds = p * (dp - (do * out).sum(-1, keepdim=True))
        return scale * ds @ k, scale * ds.transpose(-2, -1) @ q, dv


class SlidingWindow(torch.autograd.Function):
    """always with a window, of so many keys before"""

    @staticmethod
    def forward(ctx, q, k, v, window):
        T, S = q.shape[-2], k.shape[-2]
        i = torch.arange(T, device=q.device)[:, None] + (S - T)
        j = torch.arange(S, device=q.device)[None, :]
        band = (j <= i) & (i - j <= window)
        s = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        s = s.masked_fill(~band, float("-inf"))
        p = torch.nan_to_num(s.softmax(-1))
        ctx.save_for_backward(q, k, v, p)
        ctx.window = window
        return p @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        T, S = q.shape[-2], k.shape[-2]
        i = torch.arange(T, device=q.device)[:, None] + (S - T)
        j = torch.arange(S, device=q.device)[None, :]
        band = (j <= i) & (i - j < ctx.window)
        dv = p.transpose(-2, -1) @ do
        dp = do @ v.transpose(-2, -1)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        ds = ds.masked_fill(~band, 0.0) / q.shape[-1] ** 0.5
        return ds @ k, ds.transpose(-2, -1) @ q, dv, None


def sliding_window_attention(q, k, v, window_size=3):
    return SlidingWindow.apply(q, k, v, window_size)


def varlen_qkvpacked(qkv, cu_seqlens, causal=False):
    """one sequence after another"""
    outs = []
    for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        q, k, v = qkv[a:b].unbind(1)
        s = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        if causal:
            s = s + torch.full_like(s[0], float("-inf")).triu(1)
        outs.append(torch.einsum("hts,shd->thd", s.softmax(-1), v))
    return torch.cat(outs)


def eager_attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """as Hugging Face has it: the module first, the output (batch, tokens, heads, features)"""
    scaling = scaling if scaling is not None else query.size(-1) ** -0.5
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask[:, :, :, : key.shape[-2]]
    attn_weights = F.softmax(attn_weights, dim=-1).to(query.dtype)
    attn_weights = F.dropout(attn_weights, p=dropout, training=getattr(module, "training", False))
    attn_output = torch.matmul(attn_weights, value)
    return attn_output.transpose(1, 2).contiguous(), attn_weights


def loops_forward(inp, NH):
    B, T, C3 = inp.shape
    C = C3 // 3
    hs = C // NH
    scale = 1.0 / math.sqrt(hs)
    out = np.zeros((B, T, C))
    preatt = np.zeros((B, NH, T, T))
    att = np.zeros((B, NH, T, T))
    for b in range(B):
        for t in range(T):
            for h in range(NH):
                query_t = inp[b, t, h * hs : (h + 1) * hs]
                maxval = -10000.0
                for t2 in range(t + 1):
                    key_t2 = inp[b, t2, C + h * hs : C + (h + 1) * hs]
                    val = 0.0
                    for i in range(hs):
                        val += query_t[i] * key_t2[i]
                    val *= scale
                    if val > maxval:
                        maxval = val
                    preatt[b, h, t, t2] = val
                expsum = 0.0
                for t2 in range(t + 1):
                    expv = math.exp(preatt[b, h, t, t2] - maxval)
                    expsum += expv
                    att[b, h, t, t2] = expv
                expsum_inv = 0.0 if expsum == 0.0 else 1.0 / expsum
                for t2 in range(T):
                    if t2 <= t:
                        att[b, h, t, t2] *= expsum_inv
                    else:
                        att[b, h, t, t2] = 0.0
                for t2 in range(t + 1):
                    value_t2 = inp[b, t2, 2 * C + h * hs : 2 * C + (h + 1) * hs]
                    for i in range(hs):
                        out[b, t, h * hs + i] += att[b, h, t, t2] * value_t2[i]
    return out, (inp, att, NH)


def loops_backward(dout, cache):
    """llm.c's, in Python"""
    inp, att, NH = cache
    B, T, C3 = inp.shape
    C = C3 // 3
    hs = C // NH
    scale = 1.0 / math.sqrt(hs)
    dinp = np.zeros_like(inp)
    datt = np.zeros((B, NH, T, T))
    dpreatt = np.zeros((B, NH, T, T))
    for b in range(B):
        for t in range(T):
            for h in range(NH):
                query_t = inp[b, t, h * hs : (h + 1) * hs]
                for t2 in range(t + 1):
                    value_t2 = inp[b, t2, 2 * C + h * hs : 2 * C + (h + 1) * hs]
                    for i in range(hs):
                        datt[b, h, t, t2] += value_t2[i] * dout[b, t, h * hs + i]
                        dinp[b, t2, 2 * C + h * hs + i] += att[b, h, t, t2] * dout[b, t, h * hs + i]
                for t2 in range(t + 1):
                    for t3 in range(t + 1):
                        indicator = 1.0 if t2 == t3 else 0.0
                        local = att[b, h, t, t2] * (indicator - att[b, h, t, t3])
                        dpreatt[b, h, t, t3] += local * datt[b, h, t, t2]
                for t2 in range(t + 1):
                    key_t2 = inp[b, t2, C + h * hs : C + (h + 1) * hs]
                    for i in range(hs):
                        dinp[b, t, h * hs + i] += key_t2[i] * dpreatt[b, h, t, t2] * scale
                        dinp[b, t2, C + h * hs + i] += query_t[i] * dpreatt[b, h, t, t2]
    return dinp


def capped_vjp(q, k, v, dout, softcap=50.0):
    """capped, unless it is told otherwise"""
    scale = q.shape[-1] ** -0.5
    z = scale * (q @ k.swapaxes(-1, -2))
    s = softcap * np.tanh(z / softcap) if softcap else z
    s_max = s.max(-1, keepdims=True)
    p = np.exp(s - s_max)
    p /= p.sum(-1, keepdims=True)
    o = p @ v
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dout * o).sum(-1, keepdims=True))
    dz = ds * (1 - s**2) if softcap else ds
    return {"out": o, "dq": scale * dz @ k, "dk": scale * dz.swapaxes(-1, -2) @ q, "dv": dv}


def curvature(q, k, v, do, vq, vk, vv):
    """the Hessian along (vq, vk, vv), do held fixed"""
    c = q.shape[-1] ** -0.5
    s = c * q @ k.swapaxes(-1, -2)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = do @ v.swapaxes(-1, -2)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta)
    s_t = c * (vq @ k.swapaxes(-1, -2) + q @ vk.swapaxes(-1, -2))
    p_t = p * (s_t - (p * s_t).sum(-1, keepdims=True))
    dp_t = do @ vv.swapaxes(-1, -2)
    delta_t = (p_t * dp + p * dp_t).sum(-1, keepdims=True)
    ds_t = p * (dp_t - delta_t)
    hq = c * (ds_t @ k + ds @ vk)
    hk = c * (ds_t.swapaxes(-1, -2) @ q + ds.swapaxes(-1, -2) @ vq)
    hv = p_t.swapaxes(-1, -2) @ do
    return hq, hk, hv


@jax.custom_vjp
def flash_jax(q, k, v):
    """the weights of the backward from what the forward saved"""
    return _fwd(q, k, v)[0]


def _fwd(q, k, v):
    s = jnp.einsum("...td,...sd->...ts", q, k) / jnp.sqrt(q.shape[-1])
    m = s.max(axis=-1, keepdims=True)
    p = jnp.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)
    out = jnp.einsum("...ts,...sd->...td", p / l, v)
    lse = jnp.log(l)
    return out, (q, k, v, out, lse)


def _bwd(res, g):
    q, k, v, out, lse = res
    sm = 1 / jnp.sqrt(q.shape[-1])
    p = jnp.exp(jnp.einsum("...td,...sd->...ts", q, k) * sm - lse)
    dv = jnp.einsum("...ts,...td->...sd", p, g)
    dp = jnp.einsum("...td,...sd->...ts", g, v)
    ds = p * (dp - jnp.sum(g * out, -1, keepdims=True)) * sm
    return jnp.einsum("...ts,...sd->...td", ds, k), jnp.einsum("...ts,...td->...sd", ds, q), dv


flash_jax.defvjp(_fwd, _bwd)
