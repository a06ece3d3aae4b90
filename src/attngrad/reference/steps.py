# ruff: noqa: D103 - a step is its formula; where that does not say it, it has a docstring
"""The forward and the backward pass, step by step: formulas (F1) to (F5) and (R1) to (R9).

Parameters are inputs or other steps; ``table`` says how they are evaluated. Every step is rounded to the dtype of q.
"""

from __future__ import annotations

from typing import Any

from attngrad.core.arrays import Array
from attngrad.core.philox import keep_mask
from attngrad.reference.dense import (
    cast,
    convert,
    drop,
    matmul,
    namespace,
    per_key_head,
    per_query_head,
    real_part,
    rowsum,
    scalar,
    seen,
    sink_rows,
    sum_sinks,
    sum_to,
    transpose,
    zero_fully_masked,
    zero_hidden,
)
from attngrad.reference.modifiers import Modifier
from attngrad.reference.table import STEPS, Step, step

# --- what formulas read inputs and scores as --------------------------------------------------------------------------

for name in ("k", "v", "k_dot", "v_dot"):
    STEPS[f"{name}_heads"] = Step(per_query_head, (name, "group"))
for name in ("sigma", "sigma_dot"):
    STEPS[name] = Step(sink_rows, (name.replace("sigma", "sinks"), "q"))
# Rows that see nothing take no part, and hidden scores have no slope, whatever stands there: padding may hold NaN.
for name in ("q", "dout", "q_dot", "dout_dot"):
    STEPS[f"{name}_seen"] = Step(zero_fully_masked, (name, "visible"))
for name in ("z", "z_dot"):
    STEPS[f"{name}_seen"] = Step(zero_hidden, (name, "visible"))

# --- forward: z = scale q k^T, s = cap(z) + bias, p = softmax(s), out = (p o M) v ------------------------------------


@step("F1", "Z")
def z(q: Array, k_heads: Array, scale: float) -> Array:
    return scalar(scale, q) * matmul(q, transpose(k_heads))


@step("F2")
def visible(q: Array, k: Array, bias: Any, mask: Any, segments: Any, offset: Any, causal: bool, window: Any) -> Array:
    """Which key each query may attend to, (..., Hq, T, S)."""
    xp = namespace(q)
    return xp.broadcast_to(seen(q, k, bias, mask, segments, offset, causal, window), (*q.shape[:-1], k.shape[-2]))


@step("F2")
def scores_unmasked(z: Array, modifier: Modifier, bias: Array | None) -> Array:
    s = modifier.value(z)
    return s if bias is None else s + cast(bias, s)


@step("F2", "S")
def scores(scores_unmasked: Array, visible: Array) -> Array:
    xp = namespace(scores_unmasked)
    return xp.where(visible, scores_unmasked, scalar(-xp.inf, scores_unmasked))


@step("F3")
def normaliser(scores: Array, visible: Array, sigma: Array | None) -> tuple[Array, Array, Array, Array]:
    """exp(s - row_max), exp(sigma - row_max), their sum, and row_max, taken out so that exp cannot overflow.

    The sink is one more key, whose value is zero; without a sink that key scores -inf.
    """
    xp = namespace(scores)
    extra = xp.broadcast_to(scalar(-xp.inf, scores) if sigma is None else sigma, scores.shape[:-1])
    row_max = xp.max(real_part(xp.concat([scores, extra[..., None]], axis=-1)), axis=-1)
    row_max = cast(xp.where(row_max == -xp.inf, xp.zeros_like(row_max), row_max), scores)
    e = xp.where(visible, xp.exp(scores - row_max[..., None]), scalar(0.0, scores))
    e_sink = xp.exp(extra - row_max)
    return e, e_sink, rowsum(e) + e_sink, row_max


@step("F3")
def divisor(normaliser: tuple[Array, Array, Array, Array]) -> Array:
    """The sum of a row; 1 where a row sees nothing."""
    _, _, total, _ = normaliser
    xp = namespace(total)
    return xp.where(total == 0, xp.ones_like(total), total)


@step("F3", "L")
def lse(normaliser: tuple[Array, Array, Array, Array], divisor: Array) -> Array:
    _, _, total, row_max = normaliser
    xp = namespace(total)
    return xp.where(total == 0, scalar(-xp.inf, total), row_max + xp.log(divisor))


@step("F4", "A")
def weights(normaliser: tuple[Array, Array, Array, Array], divisor: Array) -> Array:
    """exp(s - lse), without rounding lse first; zero where a row sees nothing."""
    return normaliser[0] / divisor[..., None]


@step("F4", "sink")
def sink(normaliser: tuple[Array, Array, Array, Array], divisor: Array, sigma: Array | None) -> Array | None:
    """exp(sigma - lse), the weight of the sink; None without sinks."""
    return None if sigma is None else normaliser[1] / divisor


@step("F5", "M")
def keep(q: Array, k: Array, dropout: float, seed: int | None, origin: Any) -> Array | None:
    """M: the keep mask over (1 - rate); None without dropout."""
    if not dropout or seed is None:
        return None
    kept = keep_mask((*q.shape[:-1], int(k.shape[-2])), dropout, seed, origin, like=q)
    return convert(kept, q) / scalar(1.0 - dropout, q)


@step("F5", "O")
def out(weights: Array, keep: Array | None, v_heads: Array) -> Array:
    return matmul(drop(weights, keep), v_heads)


# --- backward: the gradient of <dout, out> + <dlse, lse> -------------------------------------------------------------
# out = (p o M) v


@step("R1")
def dv_heads(weights: Array, keep: Array | None, dout_seen: Array) -> Array:
    return matmul(transpose(drop(weights, keep)), dout_seen)


@step("R1", "dV")
def dv(dv_heads: Array, v: Array) -> Array:
    return per_key_head(dv_heads, v)


@step("R2", "dA")
def dweights(dout_seen: Array, v_heads: Array, keep: Array | None) -> Array:
    return drop(matmul(dout_seen, transpose(v_heads)), keep)


# p = exp(s - lse)


@step("R3", "delta")
def delta(dout_seen: Array, out: Array, dlse: Array | None) -> Array:
    row = rowsum(dout_seen * out)
    return row if dlse is None else row - dlse


@step("R4", "dS")
def dscores(weights: Array, dweights: Array, delta: Array, visible: Array) -> Array:
    return zero_hidden(weights * (dweights - delta[..., None]), visible)


# s = cap(z) + bias


@step("R5", "dbias")
def dbias(dscores: Array, bias: Array | None) -> Array | None:
    return None if bias is None else cast(sum_to(dscores, bias.shape), bias)


@step("R6", "dsigma")
def dsinks(sink: Array, delta: Array, sinks: Array | None) -> Array | None:
    return None if sinks is None else sum_sinks(-(sink * delta), sinks)


@step("R7")
def slope(z_seen: Array, modifier: Modifier) -> Array:
    return modifier.first(z_seen)


@step("R7", "dZ")
def dz(dscores: Array, slope: Array) -> Array:
    return dscores * slope


# z = scale * q k^T


@step("R8", "dQ")
def dq(dz: Array, k_heads: Array, scale: float) -> Array:
    return scalar(scale, dz) * matmul(dz, k_heads)


@step("R9")
def dk_heads(dz: Array, q_seen: Array, scale: float) -> Array:
    return scalar(scale, dz) * matmul(transpose(dz), q_seen)


@step("R9", "dK")
def dk(dk_heads: Array, k: Array) -> Array:
    return per_key_head(dk_heads, k)
