"""A plain NumPy attention with a switch for every mistake: what the auditor is tried on.

It shares no code with the catalogue. ``attention(*bugs)`` and ``layer(*bugs)`` give candidates with these mistakes
planted; ``PLANTS`` and ``LAYER_PLANTS`` name each plant, the id it should be found by, and the options it needs.
"""

from __future__ import annotations

import numpy as np

import attngrad


def right(q, k, v, dout):
    """Nothing planted: the kernels."""
    out, pullback = attngrad.vjp(q, k, v)
    return (out, *pullback(dout)[:3])


def _t(x):
    return np.swapaxes(x, -1, -2)


def _seen(q, k, o, bugs):
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


def _softmax(s, axis=-1):
    top = np.max(s, axis=axis, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top)).astype(s.dtype)
    total = np.sum(e, axis=axis, keepdims=True)
    return e / np.where(total == 0, 1, total).astype(s.dtype), total, top


def _online(s, block):
    """An online softmax over blocks of keys that rescales neither its sum nor its output."""
    top, total, e = np.full((*s.shape[:-1], 1), -np.inf, s.dtype), 0, []
    for c in range(0, s.shape[-1], block):
        part = s[..., c : c + block]
        top = np.maximum(top, part.max(-1, keepdims=True))
        e.append(np.exp(part - top))
        total = total + e[-1].sum(-1, keepdims=True)
    return np.concatenate(e, -1) / total, total, top


def _scales(q, o, bugs):
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


def _dscores(a, da, dout, out, bugs):
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
        return product - a @ _t(da) @ a
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
    return a * (da - np.sum(dout * out, axis=-1, keepdims=True))


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
        s_z, s_q, s_k = (q.dtype.type(x) for x in _scales(q, o, bugs))
        z = s_z * (q @ _t(kk))
        s = z if softcap is None else q.dtype.type(softcap) * np.tanh(z / q.dtype.type(softcap))
        raw = s if bias is None else s + bias
        seen = _seen(q, k, o, bugs)
        if "unseen tail" in bugs and k.shape[-2] % 8:
            seen = seen & (np.arange(k.shape[-2]) < k.shape[-2] // 8 * 8)
        if "mask ignored" in bugs:
            seen = np.ones_like(seen)
        if "mask after" in bugs:
            a, total, top = _softmax(raw)
            a = a * seen
        elif "mask zero" in bugs:
            a, total, top = _softmax(np.where(seen, raw, 0))
        elif "mean of V" in bugs:
            a, total, top = _softmax(np.where(seen, raw, q.dtype.type(-1e4)))
        elif "block softmax" in bugs:
            each = [_softmax(np.where(seen, raw, -np.inf)[..., c : c + 4]) for c in range(0, k.shape[-2], 4)]
            a, (_, total, top) = np.concatenate([x[0] for x in each], -1), each[-1]
        elif "no rescale" in bugs:
            a, total, top = _online(raw, 4)
        elif "overflow" in bugs:
            with np.errstate(all="ignore"):
                e = np.exp(np.where(seen, raw, -np.inf))
                a, total, top = e / np.sum(e, -1, keepdims=True), np.sum(e, -1, keepdims=True), 0 * e[..., :1]
        else:
            a, total, top = _softmax(np.where(seen, raw, -np.inf), -2 if "softmax axis" in bugs else -1)
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
        da = (dout @ _t(vv)) * m
        if "K for V" in bugs:
            da = (dout @ _t(kk)) * m
        dv = ((a * m) if "dv" in bugs else _t(a * m)) @ dout
        ds = _dscores(a, da, dout, out, bugs)
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
        dk = s_k * (_t(dz) @ q)
        if "dk" in bugs:
            dk = s_k * (dz @ q)
        if "dq transposed" in bugs:
            dq = s_q * (_t(dz) @ kk)
        if "own operand" in bugs:
            dq, dk = s_q * (dz @ q), s_k * (_t(dz) @ kk)
        if "overwritten dq" in bugs:
            for c in range(0, k.shape[-2], 4):
                dq = s_q * (dz[..., c : c + 4] @ kk[..., c : c + 4, :])
        if "overwritten dkv" in bugs:
            for c in range(0, q.shape[-2], 4):
                dk = s_k * (_t(dz[..., c : c + 4, :]) @ q[..., c : c + 4, :])
                dv = _t((a * m)[..., c : c + 4, :]) @ dout[..., c : c + 4, :]
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
            dk = _t(dk)
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


MASK, CAUSAL, DROP = {"mask": True}, {"causal": True}, {"dropout": 0.3, "seed": 5}
# plant: (the bugs' switch, id, options, results)
PLANTS = {
    "scale missing": ("scale-missing", None),
    "scale missing backward": ("scale-missing", None),
    "scale twice": ("scale-twice", {"scale": 0.3}),
    "scale twice backward": ("scale-twice", None),
    "scale 1/d": ("scale-by-d", None),
    "scale 1/d backward": ("scale-by-d", None),
    "scale 1/sqrt(h d)": ("scale-by-model", None),
    "scale 1/sqrt(t)": ("scale-by-length", None),
    "scale sqrt(d)": ("scale-by-sqrt-d", None),
    "scale sqrt(d) backward": ("scale-by-sqrt-d", None),
    "scale ignored backward": ("scale-ignored", {"scale": 0.3}),
    "scale missing dq": ("scale-missing-in-dq", None),
    "scale missing dk": ("scale-missing-in-dk", None),
    "no row term": ("row-term-missing", None),
    "mean": ("mean-for-row-sum", None),
    "mean of dA": ("mean-for-row-sum", None),
    "row term without A": ("row-term-without-weights", None),
    "row sum unweighted": ("row-sum-unweighted", None),
    "columns": ("row-term-over-columns", None),
    "matrix": ("row-term-matrix-product", None),
    "jacobian": ("jacobian-inner-product", None),
    "dA for dS": ("dweights-for-dscores", None),
    "diagonal": ("softmax-diagonal-only", None),
    "slope product": ("softmax-derivative-matrix-product", None),
    "softmax axis": ("softmax-wrong-axis", None),
    "dv": ("dv-not-transposed", None),
    "dk": ("dk-not-transposed", None),
    "dk transposed": ("dk-transposed", None),
    "dq transposed": ("dq-with-transpose", None),
    "own operand": ("own-operand-in-product", None),
    "K for V": ("keys-for-values", None),
    "exchange dq dk": ("dq-dk-exchanged", None),
    "exchange dk dv": ("dk-dv-exchanged", None),
    "causal one more": ("causal-off-by-one", CAUSAL),
    "causal one less": ("causal-off-by-one", CAUSAL),
    "alignment": ("causal-alignment", {"causal": True, "offset": 0}),
    "offset sign": ("causal-offset-sign", CAUSAL),
    "mask ignored": ("mask-ignored", MASK),
    "mask ignored backward": ("mask-ignored-in-backward", CAUSAL),
    "mask after": ("mask-after-softmax", MASK),
    "mask zero": ("masked-scores-zero", CAUSAL),
    "mean of V": ("masked-row-not-zero", MASK),
    "window": ("window-off-by-one", {"window": (2, 1)}),
    "group unsummed": ("group-not-summed", None),
    "group last": ("group-one-head-only", None),
    "group mean": ("group-averaged", None),
    "tiled groups": ("group-interleaved", None),
    "dropout no mask": ("dropout-mask-not-reused", DROP),
    "dropout other mask": ("dropout-mask-not-reused", DROP),
    "dropout not rescaled": ("dropout-not-rescaled", DROP),
    "no cap derivative": ("softcap-derivative-missing", {"softcap": 2.0}),
    "s tanh(s)": ("softcap-derivative-wrong", {"softcap": 2.0}),
    "dbias unreduced": ("bias-gradient-not-reduced", {"bias": True}),
    "dbias by batch": ("bias-gradient-not-reduced", {"bias": True}),
    "dbias mean": ("bias-gradient-averaged", {"bias": True}),
    "dbias scaled": ("bias-gradient-scaled", {"bias": True}),
    "chunk delta": ("delta-from-chunk", None),
    "block softmax": ("softmax-within-block", None),
    "no rescale": ("softmax-within-block", None),
    "lse base 2": ("lse-base-2", None),
    "lse without max": ("lse-without-max", None),
    "epsilon": ("epsilon-in-denominator", None),
    "overflow": ("softmax-overflow", None),
    "unseen tail": ("tile-tail", None),
    "tail zero": ("tile-tail", None),
    "tail stale": ("tile-tail", None),
    "overwritten dq": ("overwritten-not-accumulated", None),
    "overwritten dkv": ("overwritten-not-accumulated", None),
    "low precision": ("low-precision", None),
}
RETURNS = {"lse base 2": ("out", "lse", "dq", "dk", "dv"), "lse without max": ("out", "lse", "dq", "dk", "dv")}


def plant(*bugs):
    """The candidate of these plants, its options, and the ids that should be named."""
    ids = {PLANTS[bug][0] for bug in bugs}
    options = {}
    for bug in bugs:
        options |= PLANTS[bug][1] or {}
    names = next((RETURNS[bug] for bug in bugs if bug in RETURNS), None)
    if names and "bias" in options:
        names = (*names, "dbias")
    return attention(*bugs, names=names), options or None, ids


# --- the layer -------------------------------------------------------------------------------------------------------


def layer(*bugs, rate=0.05):
    """A layer candidate with these mistakes."""

    def candidate(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads):
        def split(x, wrong):
            if wrong:
                return x.reshape(len(x), num_heads, x.shape[1], -1)
            return x.reshape(len(x), x.shape[1], num_heads, -1).transpose(0, 2, 1, 3)

        def merge(x, wrong):
            if wrong:
                return x.reshape(len(x), x.shape[2], -1)
            return x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1)

        wrong_split, wrong_merge = "split" in bugs, "merge" in bugs
        q, k, v = (split(x @ w, wrong_split) for x, w in ((query, w_q), (key, w_k), (value, w_v)))
        core = attention(*bugs)
        dmerged = dy if "skip w_o" in bugs and w_o.shape[0] == w_o.shape[1] else dy @ w_o.T
        dout = split(dmerged, wrong_merge)
        r = core(q, k, v, dout)
        merged = merge(r["out"], wrong_merge)
        dq, dk, dv = (merge(r[n], wrong_split) for n in ("dq", "dk", "dv"))

        def dw(x, dx):
            each = _t(x) @ dx
            if "batch unsummed" in bugs:
                return each
            if "dw reshaped" in bugs:
                return x.transpose(0, 2, 1).reshape(x.shape[2], -1) @ dx.reshape(-1, dx.shape[2])
            if "dw transposed" in bugs:
                return _t(each.sum(axis=0))
            return each.mean(axis=0) if "batch mean" in bugs else each.sum(axis=0)

        grads = {"dw_q": dw(query, dq), "dw_k": dw(key, dk), "dw_v": dw(value, dv), "dw_o": dw(merged, dy)}
        if "update first" in bugs:
            w_q, w_k, w_v = (
                w - w.dtype.type(rate) * grads[n] for w, n in ((w_q, "dw_q"), (w_k, "dw_k"), (w_v, "dw_v"))
            )

        def dx(d, w):
            if "no w" in bugs and w.shape[0] == w.shape[1]:
                return d
            return d @ w if "w not transposed" in bugs and w.shape[0] == w.shape[1] else d @ w.T

        inputs = {"dquery": dx(dq, w_q), "dkey": dx(dk, w_k), "dvalue": dx(dv, w_v)}
        if "drop dvalue" in bugs:
            inputs["dvalue"] = np.zeros_like(inputs["dvalue"])
        return {"y": merged @ w_o, **grads, **inputs}

    return candidate


LAYER_PLANTS = {
    "split": "heads-split-without-transpose",
    "merge": "heads-merged-without-transpose",
    "update first": "weights-updated-first",
    "batch unsummed": "batch-not-summed",
    "batch mean": "batch-averaged",
    "w not transposed": "w-not-transposed",
    "dw transposed": "dw-transposed",
    "dw reshaped": "dw-batch-reshape",
    "no w": "dx-without-w",
    "drop dvalue": "input-gradient-dropped",
    "skip w_o": "output-projection-skipped",
    "no row term": "row-term-missing",
    "dv": "dv-not-transposed",
}

# --- forward mode and second order, sinks ----------------------------------------------------------------------------


def tangents(bug=""):
    """JVP and HVP from the formulas, with a term left out."""

    def candidate(q, k, v, dout, q_dot, k_dot, v_dot, dout_dot, softcap=None):
        n = q.shape[1] // k.shape[1]
        many = lambda x: np.repeat(x, n, axis=1)  # noqa: E731
        few = lambda x: x.reshape(x.shape[0], -1, n, *x.shape[2:]).sum(axis=2)  # noqa: E731
        k, v, k_dot, v_dot = many(k), many(v), many(k_dot), many(v_dot)
        scale, cap = q.dtype.type(1 / np.sqrt(q.shape[-1])), q.dtype.type(softcap or 1)
        z = scale * (q @ _t(k))
        z_dot = q_dot @ _t(k) + (0 if bug == "tangent-term-missing" else q @ _t(k_dot))
        z_dot = z_dot * (1 if bug == "tangent-scale-missing" else scale)
        tanh = np.tanh(z / cap)
        s = z if softcap is None else cap * tanh
        slope = np.ones_like(z) if softcap is None else 1 - tanh**2
        slope_dot = np.zeros_like(z) if softcap is None else -2 * tanh * slope * z_dot / cap
        s_dot = slope * z_dot
        a, _, _ = _softmax(s)
        a_dot = a * (s_dot - (0 if bug == "tangent-row-term-missing" else np.sum(a * s_dot, -1, keepdims=True)))
        out, out_dot = a @ v, a_dot @ v + a @ v_dot
        da, delta = dout @ _t(v), np.sum(dout * out, -1, keepdims=True)
        da_dot = dout_dot @ _t(v) + dout @ _t(v_dot)
        delta_dot = np.sum(dout_dot * out + dout * out_dot, -1, keepdims=True)
        ds = a * (da - delta)
        ds_dot = a_dot * (da - delta)
        if bug != "second-order-term-missing":
            ds_dot = ds_dot + a * (da_dot - delta_dot)
        dz, dz_dot = ds * slope, ds_dot * slope
        if bug != "softcap-second-derivative-missing":
            dz_dot = dz_dot + ds * slope_dot
        return {
            "out_dot": out_dot,
            "dq_dot": scale * (dz_dot @ k + dz @ k_dot),
            "dk_dot": few(scale * (_t(dz_dot) @ q + _t(dz) @ q_dot)),
            "dv_dot": few(_t(a_dot) @ dout + _t(a) @ dout_dot),
        }

    return candidate


TANGENT_PLANTS = {
    "tangent-row-term-missing": None,
    "tangent-term-missing": None,
    "tangent-scale-missing": None,
    "second-order-term-missing": None,
    "softcap-second-derivative-missing": {"softcap": 1.5},
}


ELSEWHERE = {"detached-second-order", "detached-tangent", "constant-lse-second-order"}
ELSEWHERE |= {"not-deterministic", "uninitialised-tail"}
"""Planted where they are tested: they take a framework, or no formula."""


def sinks(sign):
    """The gradient of the sinks, times a sign."""

    def candidate(q, k, v, dout, sinks):
        grads = attngrad.vjp(q, k, v, sinks=sinks)[1](dout)
        return {"dq": grads.q, "dsinks": sign * grads.sinks}

    return candidate


# --- pairs -----------------------------------------------------------------------------------------------------------

_ALTERNATIVES = (
    [p for p in PLANTS if p.startswith("scale ")],
    ["no row term", "mean", "mean of dA", "row term without A", "row sum unweighted", "columns", "matrix", "dA for dS",
     "jacobian", "diagonal", "slope product", "chunk delta", "block softmax"],
    ["softmax axis", "mask after", "mask zero", "mean of V", "overflow", "mask ignored", "epsilon", "block softmax",
     "no rescale"],
    ["group unsummed", "group last", "group mean", "tiled groups"],
    ["dropout no mask", "dropout other mask", "dropout not rescaled"],
    ["no cap derivative", "s tanh(s)"],
    ["dbias unreduced", "dbias by batch", "dbias mean", "dbias scaled"],
    ["causal one more", "causal one less", "no rescale"],
    ["alignment", "offset sign"],
    ["lse base 2", "lse without max", "softmax axis", "mask ignored backward", "block softmax", "no rescale"],
    ["dk", "dk transposed", "own operand", "overwritten dkv", "exchange dk dv"],
    ["dq transposed", "own operand", "overwritten dq", "exchange dq dk", "tail zero", "tail stale"],
    ["dv", "overwritten dkv", "exchange dk dv"],
    ["exchange dq dk", "exchange dk dv"],
    ["mask ignored", "mask ignored backward", "mask after", "mask zero", "mean of V", "causal one more",
     "causal one less", "alignment", "offset sign", "window", "no rescale"],
)  # fmt: skip
"""Plants that stand in each other's place: of these only one can be made at a time."""


def pairs():
    """Every two plants that can be made together."""
    names = [p for p in PLANTS if p != "low precision"]
    clash = {frozenset((a, b)) for group in _ALTERNATIVES for a in group for b in group}
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if frozenset((a, b)) not in clash]
