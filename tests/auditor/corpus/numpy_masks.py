# ruff: noqa
"""Masks, groups of heads, dropout and blocks: what comes after the first homework."""

import numpy as np

NEG_INF = float("-inf")


def _T(x):
    return np.swapaxes(x, -1, -2)


def _softmax(s):
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isfinite(m), m, 0.0))
    z = e.sum(-1, keepdims=True)
    return e / np.where(z == 0, 1.0, z)


def _grads(p, q, k, v, do, scale):
    dp = do @ _T(v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return scale * ds @ k, scale * _T(ds) @ q, _T(p) @ do


class MaskedAttention:
    """mask: True where a position is hidden (padding), shape (..., T, S)."""

    def forward(self, q, k, v, mask=None):
        self.scale = 1 / np.sqrt(q.shape[-1])
        s = q @ _T(k) * self.scale
        if mask is not None:
            s = np.where(mask, NEG_INF, s)
        self.saved = q, k, v, _softmax(s)
        return self.saved[-1] @ v

    def backward(self, dout):
        q, k, v, p = self.saved
        return _grads(p, q, k, v, dout, self.scale)


def masked_attention_fwd(q, k, v, mask=None):
    """mask: True = keep"""
    scale = 1 / np.sqrt(q.shape[-1])
    s = q @ _T(k) * scale
    if mask is not None:
        s = np.where(mask, s, NEG_INF)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return p @ v, (q, k, v, p, scale)


def masked_attention_bwd(dout, cache):
    q, k, v, p, scale = cache
    return _grads(p, q, k, v, dout, scale)


def attention_with_bias_mask(q, k, v, dout, attn_mask=None):
    """attn_mask is added to the scores: 0 = look, -inf = do not look"""
    scale = 1 / np.sqrt(q.shape[-1])
    scores = q @ _T(k) * scale
    if attn_mask is not None:
        scores = scores + attn_mask
    p = _softmax(scores)
    return p @ v, _grads(p, q, k, v, dout, scale)


def causal_topleft(q, k, v, dout, is_causal=False):
    """is_causal as in torch: row i sees columns 0..i, whatever the lengths"""
    scale = 1 / np.sqrt(q.shape[-1])
    s = q @ _T(k) * scale
    if is_causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, NEG_INF)
    p = _softmax(s)
    return p @ v, _grads(p, q, k, v, dout, scale)


def causal_with_cache(q, k, v, dout, causal=True):
    """decoder with past keys: T new queries at the end of S keys"""
    scale = 1 / np.sqrt(q.shape[-1])
    s = q @ _T(k) * scale
    T, S = s.shape[-2:]
    if causal:
        s = np.where(np.tril(np.ones((T, S), bool), k=T - S), s, NEG_INF)
    p = _softmax(s)
    return p @ v, _grads(p, q, k, v, dout, scale)


def gqa_tiled(q, k, v, dout):
    """grouped queries: query head h uses kv head h % n_kv"""
    B, Hq, T, D = q.shape
    Hk = k.shape[1]
    r = Hq // Hk
    kk, vv = np.tile(k, (1, r, 1, 1)), np.tile(v, (1, r, 1, 1))
    scale = D**-0.5
    p = _softmax(q @ _T(kk) * scale)
    dq, dkk, dvv = _grads(p, q, kk, vv, dout, scale)
    dk = dkk.reshape(B, r, Hk, -1, D).sum(1)
    dv = dvv.reshape(B, r, Hk, k.shape[2], -1).sum(1)
    return p @ vv, (dq, dk, dv)


def gqa_repeat(q, k, v, dout):
    B, Hq, T, D = q.shape
    Hk = k.shape[1]
    r = Hq // Hk
    kk, vv = np.repeat(k, r, axis=1), np.repeat(v, r, axis=1)
    scale = D**-0.5
    p = _softmax(q @ _T(kk) * scale)
    dq, dkk, dvv = _grads(p, q, kk, vv, dout, scale)
    dk = dkk.reshape(B, r, Hk, -1, D).sum(1)  # sum the copies
    dv = dvv.reshape(B, r, Hk, k.shape[2], -1).sum(1)
    return p @ vv, (dq, dk, dv)


def dropout_attention_fwd(q, k, v, dropout=0.0, seed=0):
    scale = 1 / np.sqrt(q.shape[-1])
    p = _softmax(q @ _T(k) * scale)
    drop = np.ones_like(p)
    if dropout > 0:
        drop = (np.random.rand(*p.shape) >= dropout) / (1 - dropout)
    return (p * drop) @ v, (q, k, v, p, drop, scale)


def dropout_attention_bwd(dout, cache):
    q, k, v, p, drop, scale = cache
    dv = _T(p * drop) @ dout
    dp = (dout @ _T(v)) * drop
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return scale * ds @ k, scale * _T(ds) @ q, dv


# --- blocks -------------------------------------------------------------------------------------


def flash_forward(q, k, v, block=16):
    """(T, d); lengths must be multiples of the block"""
    T, d = q.shape
    S = k.shape[0]
    assert T % block == 0 and S % block == 0, "pad the sequence to a multiple of the block"
    o, L = np.zeros((T, v.shape[1]), q.dtype), np.zeros((T, 1), q.dtype)
    for i in range(0, T, block):
        qi = q[i : i + block] / np.sqrt(d)
        m, l, acc = np.full((block, 1), -np.inf), np.zeros((block, 1)), np.zeros((block, v.shape[1]))
        for j in range(0, S, block):
            s = qi @ k[j : j + block].T
            m_new = np.maximum(m, s.max(1, keepdims=True))
            p = np.exp(s - m_new)
            alpha = np.exp(m - m_new)
            l = l * alpha + p.sum(1, keepdims=True)
            acc = acc * alpha + p @ v[j : j + block]
            m = m_new
        o[i : i + block] = acc / l
        L[i : i + block] = m + np.log(l)
    return o, (q, k, v, o, L, block)


def flash_backward(do, cache):
    q, k, v, o, L, block = cache
    T, d = q.shape
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (do * o).sum(1, keepdims=True)
    for j in range(0, k.shape[0], block):
        kj, vj = k[j : j + block], v[j : j + block]
        for i in range(0, T, block):
            r = slice(i, i + block)
            p = np.exp(q[r] @ kj.T / np.sqrt(d) - L[r])
            dv[j : j + block] += p.T @ do[r]
            ds = p * (do[r] @ vj.T - delta[r]) / np.sqrt(d)
            dq[r] += ds @ kj
            dk[j : j + block] += ds.T @ q[r]
    return dq, dk, dv


def blocked_forward(q, k, v, block=32):
    """(H, T, d). Each block of keys by itself, so that the scores stay small."""
    H, T, d = q.shape
    out, probs = np.zeros((H, T, v.shape[-1]), q.dtype), []
    n_blocks = -(-k.shape[1] // block)
    for j in range(n_blocks):
        kj, vj = k[:, j * block : (j + 1) * block], v[:, j * block : (j + 1) * block]
        p = _softmax(q @ _T(kj) / np.sqrt(d)) / n_blocks
        out += p @ vj
        probs.append(p)
    return out, (q, k, v, probs, block)


def blocked_backward(dout, cache):
    q, k, v, probs, block = cache
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j, p in enumerate(probs):
        cols = slice(j * block, (j + 1) * block)
        a = p * len(probs)
        dp = dout @ _T(v[:, cols]) / len(probs)
        ds = a * (dp - (a * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        dq += ds @ k[:, cols]
        dk[:, cols] = _T(ds) @ q
        dv[:, cols] = _T(p) @ dout
    return dq, dk, dv


def tiled_dq_dk_dv(q, k, v, dout):
    """(H, T, d): rows in tiles of 8, no copy of the scores of all rows"""
    H, T, d = q.shape
    dq = np.empty_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    scale = 1 / np.sqrt(d)
    for t in range(T // 8 + (T < 8)):
        r = slice(8 * t, 8 * t + 8)
        p = _softmax(q[:, r] @ _T(k) * scale)
        dp = dout[:, r] @ _T(v)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
        dq[:, r] = ds @ k
        dk += _T(ds) @ q[:, r]
        dv += _T(p) @ dout[:, r]
    return dq, dk, dv
