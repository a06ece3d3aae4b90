"""JVP and HVP with a term left out, and the gradient of the sinks with a sign."""

from __future__ import annotations

import numpy as np

import attngrad
from planted.steps import softmax, turned


def tangents(bug=""):
    """JVP and HVP from the formulas, with a term left out."""

    def candidate(q, k, v, dout, q_dot, k_dot, v_dot, dout_dot, softcap=None):
        n = q.shape[1] // k.shape[1]
        many = lambda x: np.repeat(x, n, axis=1)  # noqa: E731
        few = lambda x: x.reshape(x.shape[0], -1, n, *x.shape[2:]).sum(axis=2)  # noqa: E731
        k, v, k_dot, v_dot = many(k), many(v), many(k_dot), many(v_dot)
        scale, cap = q.dtype.type(1 / np.sqrt(q.shape[-1])), q.dtype.type(softcap or 1)
        z = scale * (q @ turned(k))
        z_dot = q_dot @ turned(k) + (0 if bug == "tangent-term-missing" else q @ turned(k_dot))
        z_dot = z_dot * (1 if bug == "tangent-scale-missing" else scale)
        tanh = np.tanh(z / cap)
        s = z if softcap is None else cap * tanh
        slope = np.ones_like(z) if softcap is None else 1 - tanh**2
        slope_dot = np.zeros_like(z) if softcap is None else -2 * tanh * slope * z_dot / cap
        s_dot = slope * z_dot
        a, _, _ = softmax(s)
        a_dot = a * (s_dot - (0 if bug == "tangent-row-term-missing" else np.sum(a * s_dot, -1, keepdims=True)))
        out, out_dot = a @ v, a_dot @ v + a @ v_dot
        da, delta = dout @ turned(v), np.sum(dout * out, -1, keepdims=True)
        da_dot = dout_dot @ turned(v) + dout @ turned(v_dot)
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
            "dk_dot": few(scale * (turned(dz_dot) @ q + turned(dz) @ q_dot)),
            "dv_dot": few(turned(a_dot) @ dout + turned(a) @ dout_dot),
        }

    return candidate


TANGENT_PLANTS = {
    "tangent-row-term-missing": None,
    "tangent-term-missing": None,
    "tangent-scale-missing": None,
    "second-order-term-missing": None,
    "softcap-second-derivative-missing": {"softcap": 1.5},
}


def sinks(sign):
    """The gradient of the sinks, times a sign."""

    def candidate(q, k, v, dout, sinks):
        grads = attngrad.vjp(q, k, v, sinks=sinks)[1](dout)
        return {"dq": grads.q, "dsinks": sign * grads.sinks}

    return candidate
