"""A layer of attention with the mistakes that are asked for, in its projections or in its core."""

from __future__ import annotations

import numpy as np

from planted.in_attention import attention
from planted.steps import turned


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
            each = turned(x) @ dx
            if "batch unsummed" in bugs:
                return each
            if "dw reshaped" in bugs:
                return x.transpose(0, 2, 1).reshape(x.shape[2], -1) @ dx.reshape(-1, dx.shape[2])
            if "dw transposed" in bugs:
                return turned(each.sum(axis=0))
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
