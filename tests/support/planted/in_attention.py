"""An attention, forward and backward, with the mistakes that are asked for."""

from __future__ import annotations

import numpy as np

import attngrad
from planted.steps import dscores, online, scales, seen_keys, softmax, turned


def attention(*bugs, names=None):
    """A candidate with these mistakes; ``names``: the mapping of results that it returns, else (out, dq, dk, dv)."""

    def candidate(q, k, v, dout, causal=False, window=None, offset=None, mask=None, bias=None, softcap=None, scale=None,
                  dropout=0.0, seed=None):  # fmt: skip
        o = {"causal": causal, "window": window, "offset": offset, "mask": mask, "scale": scale}
        dtype = q.dtype
        group = q.shape[1] // k.shape[1]
        if "low precision" in bugs:
            low = np.float32 if dtype == np.float64 else np.float16
            q, k, v, dout = (x.astype(low) for x in (q, k, v, dout))
        many = (lambda x: np.tile(x, (1, group, 1, 1))) if "tiled heads" in bugs else (lambda x: np.repeat(x, group, 1))
        kk, vv = many(k), many(v)
        s_z, s_q, s_k = (q.dtype.type(x) for x in scales(q, o, bugs))
        z = s_z * (q @ turned(kk))
        s = z if softcap is None else q.dtype.type(softcap) * np.tanh(z / q.dtype.type(softcap))
        raw = s if bias is None else s + bias
        seen = seen_keys(q, k, o, bugs)
        if "unseen tail" in bugs and k.shape[-2] % 8:
            seen = seen & (np.arange(k.shape[-2]) < k.shape[-2] // 8 * 8)
        if "mask ignored" in bugs:
            seen = np.ones_like(seen)
        if "mask after" in bugs:
            a, total, top = softmax(raw)
            a = a * seen
        elif "mask zero" in bugs:
            a, total, top = softmax(np.where(seen, raw, 0))
        elif "mean of V" in bugs:
            a, total, top = softmax(np.where(seen, raw, q.dtype.type(-1e4)))
        elif "block softmax" in bugs:
            each = [softmax(np.where(seen, raw, -np.inf)[..., c : c + 4]) for c in range(0, k.shape[-2], 4)]
            a, (_, total, top) = np.concatenate([x[0] for x in each], -1), each[-1]
        elif "no rescale" in bugs:
            a, total, top = online(raw, 4)
        elif "overflow" in bugs:
            with np.errstate(all="ignore"):
                e = np.exp(np.where(seen, raw, -np.inf))
                a, total, top = e / np.sum(e, -1, keepdims=True), np.sum(e, -1, keepdims=True), 0 * e[..., :1]
        else:
            a, total, top = softmax(np.where(seen, raw, -np.inf), -2 if "softmax axis" in bugs else -1)
        if "epsilon" in bugs:
            a = a * total / (total + q.dtype.type(1e-5))
        with np.errstate(divide="ignore"):
            lse = (top + np.log(total))[..., 0] if "softmax axis" not in bugs else None
        if "lse base 2" in bugs:
            lse = lse / q.dtype.type(np.log(2))
        if "lse without max" in bugs:
            lse = lse - top[..., 0]
        m = np.ones(a.shape, q.dtype)
        if dropout:
            m = attngrad.dropout_mask(a.shape, dropout, seed).astype(q.dtype)
            m = m if "dropout not rescaled" in bugs else m / q.dtype.type(1 - dropout)
        out = (a * m) @ vv
        if "no rescale" in bugs:
            a = np.exp(raw - lse[..., None])
        if "mask ignored backward" in bugs:
            a = np.exp(raw - np.where(np.isneginf(lse), 0, lse)[..., None])
            seen = np.ones_like(seen)
        if dropout and "dropout no mask" in bugs:
            m = np.ones_like(m)
        if dropout and "dropout other mask" in bugs:
            rng = np.random.default_rng(a.size)
            m = (rng.random(a.shape) > dropout).astype(q.dtype) / q.dtype.type(1 - dropout)
        da = (dout @ turned(vv)) * m
        if "K for V" in bugs:
            da = (dout @ turned(kk)) * m
        dv = ((a * m) if "dv" in bugs else turned(a * m)) @ dout
        ds = dscores(a, da, dout, out, bugs)
        if (
            "dA for dS" not in bugs
            and "mean" not in bugs
            and "row term without A" not in bugs
            and "mean of V" not in bugs
        ):
            ds = np.where(seen, ds, 0)
        if "one entry" in bugs:
            ds[0, 0, -1, 0] *= q.dtype.type(0.99)
        dz = ds
        if softcap is not None:
            tanh = s / q.dtype.type(softcap)
            dz = ds * (1 - tanh**2)
            if "no cap derivative" in bugs:
                dz = ds
            if "s tanh(s)" in bugs:
                dz = ds * s * np.tanh(s)
        dq = s_q * (dz @ kk)
        dk = s_k * (turned(dz) @ q)
        if "dk" in bugs:
            dk = s_k * (dz @ q)
        if "dq transposed" in bugs:
            dq = s_q * (turned(dz) @ kk)
        if "own operand" in bugs:
            dq, dk = s_q * (dz @ q), s_k * (turned(dz) @ kk)
        if "overwritten dq" in bugs:
            for c in range(0, k.shape[-2], 4):
                dq = s_q * (dz[..., c : c + 4] @ kk[..., c : c + 4, :])
        if "overwritten dkv" in bugs:
            for c in range(0, q.shape[-2], 4):
                dk = s_k * (turned(dz[..., c : c + 4, :]) @ q[..., c : c + 4, :])
                dv = turned((a * m)[..., c : c + 4, :]) @ dout[..., c : c + 4, :]
        if group > 1 and "group unsummed" not in bugs:
            if {"tiled groups", "tiled heads"} & set(bugs):
                split = [x.reshape(x.shape[0], group, -1, *x.shape[2:]) for x in (dk, dv)]
                dk, dv = (x.sum(axis=1) for x in split)
            else:
                split = [x.reshape(x.shape[0], -1, group, *x.shape[2:]) for x in (dk, dv)]
                if "group last" in bugs:
                    dk, dv = (x[:, :, -1] for x in split)
                elif "group mean" in bugs:
                    dk, dv = (x.mean(axis=2) for x in split)
                else:
                    dk, dv = (x.sum(axis=2) for x in split)
        if "dk transposed" in bugs:
            dk = turned(dk)
        if "dk times 1.001" in bugs:
            dk = dk * q.dtype.type(1.001)
        if "tail zero" in bugs and q.shape[-2] % 8:
            dq[..., q.shape[-2] // 8 * 8 :, :] = 0
        if "tail stale" in bugs and q.shape[-2] % 8:
            dq[..., q.shape[-2] // 8 * 8 :, :] = np.random.default_rng(3).standard_normal(
                q[..., q.shape[-2] // 8 * 8 :, :].shape
            )
        if "biased row" in bugs:
            dq[0, 0, 0] *= 1 + 1e-6
        if "one small entry" in bugs:
            dq[-1, -1, -1, 0] *= 1 + 1e-9
        dbias = None
        if bias is not None:
            axes = tuple(range(4 - bias.ndim)) + tuple(4 - bias.ndim + i for i, n in enumerate(bias.shape) if n == 1)
            reduce = np.mean if "dbias mean" in bugs else np.sum
            dbias = ds if "dbias unreduced" in bugs else reduce(ds, axis=axes).reshape(bias.shape)
            if "dbias by batch" in bugs:
                sizes = (1,) * (4 - bias.ndim) + bias.shape
                dbias = ds.sum(axis=tuple(i for i in (1, 2, 3) if sizes[i] == 1), keepdims=True)
            if "dbias scaled" in bugs:
                dbias = dbias * s_z
        if "exchange dq dk" in bugs:
            dq, dk = dk, dq
        if "exchange dk dv" in bugs:
            dk, dv = dv, dk
        everything = {"scores": np.where(seen, raw, -np.inf), "lse": lse, "weights": a, "out": out, "dweights": da,
                      "dscores": ds, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}  # fmt: skip
        chosen = names or (("out", "dq", "dk", "dv", "dbias") if bias is not None else ("out", "dq", "dk", "dv"))
        return {n: x.astype(dtype) for n, x in everything.items() if n in chosen}

    return candidate
