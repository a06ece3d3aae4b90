# ruff: noqa
"""Attention for homework: NumPy, one or more heads, the backward pass by hand."""

import math

import numpy as np


def softmax(x):
    z = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)


# --- problem 1: single head, one sequence -------------------------------------------------------


def sdpa_backward(Q, K, V, dO):
    """Q (T, d), K (S, d), V (S, dv), dO (T, dv)"""
    d_k = Q.shape[-1]
    A = softmax(Q @ K.T / np.sqrt(d_k))
    dV = A.T @ dO
    dA = dO @ V.T
    dS = A * (dA - np.sum(dA * A, axis=-1, keepdims=True))
    dQ = dS @ K / np.sqrt(d_k)
    dK = dS.T @ Q / np.sqrt(d_k)
    return dQ, dK, dV


def softmax_prime(x):
    s = softmax(x)
    return s * (1 - s)


def sdpa_backward_v1(Q, K, V, dO):
    # first attempt, chain rule term by term
    d_k = Q.shape[-1]
    scores = Q @ K.T / np.sqrt(d_k)
    A = softmax(scores)
    dV = A.T @ dO
    dA = dO @ V.T
    dS = np.dot(dA, softmax_prime(scores))
    dQ = dS @ K / np.sqrt(d_k)
    dK = dS.T @ Q / np.sqrt(d_k)
    return dQ, dK, dV


def attention_grad_jacobian(q, k, v, grad_out):
    """The slow way: build diag(p) - p p^T for every row."""
    n, d = q.shape
    p = softmax(q @ k.T / math.sqrt(d))
    grad_p = grad_out @ v.T
    grad_s = np.zeros_like(p)
    for i in range(n):
        pi = p[i].reshape(-1, 1)
        J = np.diagflat(pi) - pi @ pi.T
        grad_s[i] = J @ grad_p[i]
    grad_s /= math.sqrt(d)
    return {"dq": grad_s @ k, "dk": grad_s.T @ q, "dv": p.T @ grad_out}


# --- problem 2: batched, several heads ----------------------------------------------------------


def mha_core_forward(q, k, v):
    """(B, H, T, D) -> out, cache"""
    scale = 1.0 / np.sqrt(q.shape[-2])
    scores = np.matmul(q, k.transpose(0, 1, 3, 2)) * scale
    attn = softmax(scores)
    out = np.matmul(attn, v)
    cache = (q, k, v, attn, scale)
    return out, cache


def mha_core_backward(dout, cache):
    q, k, v, attn, scale = cache
    dv = np.matmul(attn.transpose(0, 1, 3, 2), dout)
    dattn = np.matmul(dout, v.transpose(0, 1, 3, 2))
    dscores = attn * (dattn - (dattn * attn).sum(-1, keepdims=True))
    dq = np.matmul(dscores, k) * scale
    dk = np.matmul(dscores.transpose(0, 1, 3, 2), q) * scale
    return dq, dk, dv


def attn_fwd(q, k, v, causal=False):
    scale = q.shape[-1] ** -0.5
    s = np.einsum("bhid,bhjd->bhij", q, k) * scale
    if causal:
        t, n = s.shape[-2:]
        assert t <= n, "more queries than keys"
        s = np.where(np.tri(t, n, n - t, dtype=bool), s, -np.inf)
    p = softmax(s)
    o = np.einsum("bhij,bhjd->bhid", p, v)
    return o, {"q": q, "k": k, "v": v, "p": p, "scale": scale}


def attn_bwd(do, cache):
    q, k, v, p = cache["q"], cache["k"], cache["v"], cache["p"]
    dv = np.einsum("bhij,bhid->bhjd", p, do)
    dp = np.einsum("bhid,bhjd->bhij", do, v)
    ds = p * (dp - np.einsum("bhij,bhij->bhi", dp, p)[..., None])
    dq = np.einsum("bhij,bhjd->bhid", ds, k) * cache["scale"]
    dk = np.einsum("bhij,bhid->bhjd", ds, q) * cache["scale"]
    return dq, dk, dv


def attn_bwd_hw2(dout, q, k, v):
    # grad of softmax attention, arguments as in the lecture: upstream gradient first
    scale = 1 / np.sqrt(q.shape[-1])
    kt = np.swapaxes(k, -1, -2)
    w = softmax(q @ kt * scale)
    dw = dout @ np.swapaxes(v, -1, -2)
    ds = w * dw - np.mean(w * dw, axis=-1, keepdims=True)
    dq = ds @ k * scale
    dk = np.swapaxes(ds, -1, -2) @ q * scale
    dv = np.swapaxes(w, -1, -2) @ dout
    return dq, dk, dv


def attn_bwd_late_night(dout, q, k, v):
    w = softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]))
    dw = dout @ np.swapaxes(v, -1, -2)
    ds = w * (dw - (w * dw).sum(-1, keepdims=True))
    dq = ds @ k
    dk = np.swapaxes(ds, -1, -2) @ q / np.sqrt(q.shape[-1])
    dv = w @ dout
    return dq, dk, dv


def naive_attention(q, k, v, dout):
    """no tricks: exp, divide, multiply"""
    scale = 1 / np.sqrt(q.shape[-1])
    e = np.exp(q @ np.swapaxes(k, -1, -2) * scale)
    p = e / e.sum(-1, keepdims=True)
    out = p @ v
    dp = dout @ np.swapaxes(v, -1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return out, (ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ dout)


def stable_attention(q, k, v, dout):
    scale = 1 / np.sqrt(q.shape[-1])
    s = q @ np.swapaxes(k, -1, -2) * scale
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / (e.sum(-1, keepdims=True) + 1e-6)  # avoid division by zero
    out = p @ v
    dp = dout @ np.swapaxes(v, -1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return out, (ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ dout)


# --- problem 3: like the C code -----------------------------------------------------------------


def attention_backward_loops(q, k, v, dout):
    """(B, H, T, D), plain loops, the order of the C version"""
    B, H, T, D = q.shape
    S = k.shape[2]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = 1.0 / math.sqrt(D)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                # forward again: scores, max, exp, sum
                att = [scale * float(np.dot(q[b, h, t], k[b, h, t2])) for t2 in range(S)]
                maxval = max(att)
                att = [math.exp(a - maxval) for a in att]
                expsum = sum(att)
                att = [a / expsum for a in att]
                # backward through the value accumulation
                datt = [0.0] * S
                for t2 in range(S):
                    datt[t2] += float(np.dot(v[b, h, t2], dout[b, h, t]))
                    dv[b, h, t2] += att[t2] * dout[b, h, t]
                # backward through the softmax
                dot = sum(att[t2] * datt[t2] for t2 in range(S))
                for t2 in range(S):
                    dpre = att[t2] * (datt[t2] - dot) * scale
                    dq[b, h, t] += dpre * k[b, h, t2]
                    dk[b, h, t2] += dpre * q[b, h, t]
    return dq, dk, dv


def attention_backward_loops_causal(q, k, v, dout, causal=True):
    B, H, T, D = q.shape
    S = k.shape[2]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = 1.0 / math.sqrt(D)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                end = t + 1 + (S - T) if causal else S
                if end <= 0:
                    continue
                row = k[b, h, :end] @ q[b, h, t] * scale
                att = np.exp(row - row.max())
                att /= att.sum()
                datt = v[b, h, :end] @ dout[b, h, t]
                dpre = att * datt  # softmax backward
                dv[b, h, :end] += np.outer(att, dout[b, h, t])
                dq[b, h, t] = scale * (dpre @ k[b, h, :end])
                dk[b, h, :end] += scale * np.outer(dpre, q[b, h, t])
    return dq, dk, dv
