"""The steps of an attention in which a mistake may be planted: what is seen, softmax, scales, gradients of scores."""

from __future__ import annotations

import numpy as np


def turned(x):
    return np.swapaxes(x, -1, -2)


def seen_keys(q, k, o, bugs):
    """Which key each query sees."""
    t, s = q.shape[-2], k.shape[-2]
    offset = s - t if o.get("offset") is None else o["offset"]
    if "alignment" in bugs:
        offset = 0 if offset == s - t else s - t
    if "offset sign" in bugs:
        offset = -offset
    i, j = np.arange(t)[:, None] + offset, np.arange(s)[None, :]
    seen = np.ones((q.shape[0], q.shape[1], t, s), bool)
    if o.get("causal"):
        last = i + 1 if "causal one more" in bugs else i - 1 if "causal one less" in bugs else i
        seen &= j <= last
    if o.get("window") is not None:
        left, right = o["window"]
        seen &= (j >= i - left - ("window" in bugs)) & (j <= i + right)
    if o.get("mask") is not None:
        seen &= o["mask"]
    return seen


def softmax(s, axis=-1):
    top = np.max(s, axis=axis, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top)).astype(s.dtype)
    total = np.sum(e, axis=axis, keepdims=True)
    return e / np.where(total == 0, 1, total).astype(s.dtype), total, top


def online(s, block):
    """An online softmax over blocks of keys that rescales neither its sum nor its output."""
    top, total, e = np.full((*s.shape[:-1], 1), -np.inf, s.dtype), 0, []
    for c in range(0, s.shape[-1], block):
        part = s[..., c : c + block]
        top = np.maximum(top, part.max(-1, keepdims=True))
        e.append(np.exp(part - top))
        total = total + e[-1].sum(-1, keepdims=True)
    return np.concatenate(e, -1) / total, total, top


def scales(q, o, bugs):
    d = q.shape[-1]
    right = o["scale"] if o.get("scale") is not None else 1 / np.sqrt(d)
    for bug, wrong in {
        "scale missing": 1.0,
        "scale 1/sqrt(t)": 1 / np.sqrt(q.shape[-2]),
        "scale twice": right**2,
        "scale 1/d": 1 / d,
        "scale 1/sqrt(h d)": 1 / np.sqrt(q.shape[-3] * d),
        "scale sqrt(d)": np.sqrt(d),
    }.items():
        if bug in bugs:
            return wrong, wrong, wrong
        if f"{bug} backward" in bugs:
            return right, wrong, wrong
    if "scale ignored backward" in bugs:
        return right, 1 / np.sqrt(d), 1 / np.sqrt(d)
    to_q = 1.0 if "scale missing dq" in bugs else right
    to_k = 1.0 if "scale missing dk" in bugs else right
    return right, to_q, to_k


def dscores(a, da, dout, out, bugs):
    product = a * da
    n = a.shape[-1]
    if "no row term" in bugs:
        return product
    if "mean" in bugs:
        return product - np.mean(product, axis=-1, keepdims=True)
    if "mean of dA" in bugs:
        return a * (da - np.mean(da, axis=-1, keepdims=True))
    if "row term without A" in bugs:
        return product - np.sum(product, axis=-1, keepdims=True)
    if "row sum unweighted" in bugs:
        return a * (da - np.sum(da, axis=-1, keepdims=True))
    if "columns" in bugs:
        return product - a * np.sum(product, axis=-2, keepdims=True)
    if "matrix" in bugs:
        return product - a @ turned(da) @ a
    if "jacobian" in bugs:
        return product - np.sum(a * a, axis=-1, keepdims=True) * np.sum(da, axis=-1, keepdims=True)
    if "dA for dS" in bugs:
        return da
    if "diagonal" in bugs:
        return product * (1 - a)
    if "slope product" in bugs and n == a.shape[-2]:
        return da @ (a * (1 - a))
    if ("chunk delta" in bugs or "block softmax" in bugs) and n > 4:
        ds = np.empty_like(a)
        for start in range(0, n, 4):
            c = slice(start, start + 4)
            ds[..., c] = a[..., c] * (da[..., c] - np.sum(product[..., c], axis=-1, keepdims=True))
        return ds
    row = np.mean if "mean of dO o O" in bugs else np.sum
    return a * (da - row(dout * out, axis=-1, keepdims=True))
