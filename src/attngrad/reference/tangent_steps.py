# ruff: noqa: D103 - a step is its formula; where that does not say it, it has a docstring
"""Forward mode and second order, step by step: formulas (T1) to (T5) and (H1) to (H9).

Each is the derivative of a step of ``steps`` along the tangents, by the product rule.
"""

from __future__ import annotations

from attngrad.core.arrays import Array
from attngrad.reference.dense import (
    cast,
    drop,
    matmul,
    per_key_head,
    rowsum,
    scalar,
    sum_sinks,
    sum_to,
    transpose,
    zero_hidden,
)
from attngrad.reference.modifiers import Modifier
from attngrad.reference.table import step

# --- forward mode: how out and lse move when the inputs move along q_dot, k_dot, v_dot, bias_dot, sigma_dot ----------


@step("T1", "Z_dot")
def z_dot(q_dot: Array, k_heads: Array, q: Array, k_dot_heads: Array, scale: float) -> Array:
    return scalar(scale, q) * (matmul(q_dot, transpose(k_heads)) + matmul(q, transpose(k_dot_heads)))


@step("T2", "S_dot")
def scores_dot(slope: Array, z_dot: Array, bias_dot: Array | None, visible: Array) -> Array:
    s_dot = slope * z_dot
    return zero_hidden(s_dot if bias_dot is None else s_dot + cast(bias_dot, s_dot), visible)


@step("T3", "L_dot")
def lse_dot(weights: Array, scores_dot: Array, sink: Array, sigma_dot: Array | None) -> Array:
    row = rowsum(weights * scores_dot)
    return row if sigma_dot is None else row + sink * sigma_dot


@step("T4", "A_dot")
def weights_dot(weights: Array, scores_dot: Array, lse_dot: Array) -> Array:
    return weights * (scores_dot - lse_dot[..., None])


@step("T5", "O_dot")
def out_dot(weights_dot: Array, weights: Array, keep: Array | None, v_heads: Array, v_dot_heads: Array) -> Array:
    return matmul(drop(weights_dot, keep), v_heads) + matmul(drop(weights, keep), v_dot_heads)


# --- second order: how the gradients move, along the same and along dout_dot and dlse_dot ----------------------------


@step("H1", "delta_dot")
def delta_dot(dout_dot_seen: Array, out: Array, dout_seen: Array, out_dot: Array, dlse_dot: Array | None) -> Array:
    row = rowsum(dout_dot_seen * out + dout_seen * out_dot)
    return row if dlse_dot is None else row - dlse_dot


@step("H2", "dA_dot")
def dweights_dot(
    dout_dot_seen: Array, v_heads: Array, dout_seen: Array, v_dot_heads: Array, keep: Array | None
) -> Array:
    return drop(matmul(dout_dot_seen, transpose(v_heads)) + matmul(dout_seen, transpose(v_dot_heads)), keep)


@step("H3", "dS_dot")
def dscores_dot(
    weights_dot: Array,
    dweights: Array,
    delta: Array,
    weights: Array,
    dweights_dot: Array,
    delta_dot: Array,
    visible: Array,
) -> Array:
    ds_dot = weights_dot * (dweights - delta[..., None]) + weights * (dweights_dot - delta_dot[..., None])
    return zero_hidden(ds_dot, visible)


@step("H4")
def curvature(z_seen: Array, modifier: Modifier) -> Array:
    return modifier.second(z_seen)


@step("H4", "dZ_dot")
def dz_dot(dscores_dot: Array, slope: Array, dscores: Array, curvature: Array, z_dot_seen: Array) -> Array:
    return dscores_dot * slope + dscores * curvature * z_dot_seen


@step("H5", "dQ_dot")
def dq_dot(dz_dot: Array, k_heads: Array, dz: Array, k_dot_heads: Array, scale: float) -> Array:
    return scalar(scale, dz) * (matmul(dz_dot, k_heads) + matmul(dz, k_dot_heads))


@step("H6", "dK_dot")
def dk_dot(dz_dot: Array, q_seen: Array, dz: Array, q_dot_seen: Array, scale: float, k: Array) -> Array:
    heads = scalar(scale, dz) * (matmul(transpose(dz_dot), q_seen) + matmul(transpose(dz), q_dot_seen))
    return per_key_head(heads, k)


@step("H7", "dV_dot")
def dv_dot(
    weights_dot: Array, weights: Array, keep: Array | None, dout_seen: Array, dout_dot_seen: Array, v: Array
) -> Array:
    heads = matmul(transpose(drop(weights_dot, keep)), dout_seen)
    return per_key_head(heads + matmul(transpose(drop(weights, keep)), dout_dot_seen), v)


@step("H8", "dbias_dot")
def dbias_dot(dscores_dot: Array, bias: Array | None) -> Array | None:
    return None if bias is None else cast(sum_to(dscores_dot, bias.shape), bias)


@step("H9", "dsigma_dot")
def dsinks_dot(
    sink: Array,
    sigma_dot: Array | None,
    lse_dot: Array,
    delta: Array,
    delta_dot: Array,
    sinks: Array | None,
) -> Array | None:
    if sinks is None:
        return None
    shift = -lse_dot if sigma_dot is None else sigma_dot - lse_dot
    return sum_sinks(-(sink * (shift * delta + delta_dot)), sinks)
