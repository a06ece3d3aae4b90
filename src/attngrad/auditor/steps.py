# ruff: noqa: D103 - a step is its formula; where that does not say it, it has a docstring
"""The steps of attention: forward, reverse, forward mode, second order, each as its formula in docs/notation.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.pipeline import Pipeline, attention_step
from attngrad.core.operands import Operands
from attngrad.core.options import Options
from attngrad.reference import SoftCap
from attngrad.reference.dense import (
    drop,
    keep_factor,
    matmul,
    per_key_head,
    per_query_head,
    rowsum,
    sum_over,
    sum_to,
    transpose,
    visibility,
    zero_hidden,
)

# --- forward ---------------------------------------------------------------------------------------------------------


@attention_step
def group(p: Pipeline) -> int:
    return int(p.q.shape[1] // p.k.shape[1])


@attention_step
def scale_value(p: Pipeline) -> Any:
    """The scale, in longdouble where it is 1/sqrt(D)."""
    return p.scale if p.scale is not None else 1 / np.sqrt(np.longdouble(p.q.shape[-1]))


@attention_step
def scale_z(p: Pipeline) -> Any:
    return p.scale_value


@attention_step
def k_heads(p: Pipeline) -> Any:
    return per_query_head(p.k, p.group)


@attention_step
def v_heads(p: Pipeline) -> Any:
    return per_query_head(p.v, p.group)


@attention_step
def position(p: Pipeline) -> Any:
    """The offset, resolved: where query 0 stands among the keys."""
    return p.offset if p.offset is not None else p.k.shape[-2] - p.q.shape[-2]


@attention_step
def band(p: Pipeline) -> Any:
    """The window."""
    return p.window


@attention_step
def is_causal(p: Pipeline) -> bool:
    return bool(p.causal)


@attention_step
def visible(p: Pipeline) -> Any:
    return visible_with(p, p.is_causal, p.position, p.band, p.mask)


def visible_with(p: Pipeline, causal: bool, offset: Any, window: Any, mask: Any) -> Any:
    """Which key each query may see, (B, Hq, T, S)."""
    x = Operands(p.q, p.k, p.v, p.bias, None, mask, p.segments, offset)
    seen = visibility(x, Options(1.0, causal, window))
    return np.broadcast_to(seen, x.scores_shape)


@attention_step
def z(p: Pipeline) -> Any:
    return p.c(p.scale_z) * matmul(p.q, transpose(p.k_heads))


@attention_step
def scores_unmasked(p: Pipeline) -> Any:
    s = SoftCap(p.softcap).value(p.z)
    if p.bias is None:
        return s
    return s + np.where(np.isneginf(p.bias.astype(np.float64)), p.c(0.0), p.bias)


@attention_step
def scores(p: Pipeline) -> Any:
    return np.where(p.visible, p.scores_unmasked, p.c(-np.inf))


def exponentials(p: Pipeline, scores: Any, visible: Any) -> tuple[Any, Any, Any, Any]:
    """exp(scores - top), the exponential of the sink, their sum, and top, the row maximum."""
    extra = np.broadcast_to(p.c(-np.inf) if p.sinks is None else p.sinks[:, None], scores.shape[:-1])
    top = np.maximum(np.max(np.where(visible, scores, p.c(-np.inf)), axis=-1), extra)
    top = np.where(top == -np.inf, p.c(0.0), top)
    e = np.where(visible, np.exp(np.where(visible, scores, top[..., None]) - top[..., None]), p.c(0.0))
    sink = np.exp(extra - top)
    return e, sink, rowsum(e) + sink, top


def softmax(p: Pipeline, scores: Any, visible: Any) -> Any:
    """Row softmax over what is visible, the sink in the denominator; a row that sees nothing is zero."""
    e, _, total, _ = exponentials(p, scores, visible)
    return e / np.where(total == 0, p.c(1.0), total)[..., None]


@attention_step
def normaliser(p: Pipeline) -> Any:
    return exponentials(p, p.scores, p.visible)


@attention_step
def lse(p: Pipeline) -> Any:
    _, _, total, top = p.normaliser
    return np.where(total == 0, p.c(-np.inf), top + np.log(np.where(total == 0, p.c(1.0), total)))


@attention_step
def weights(p: Pipeline) -> Any:
    e, _, total, _ = p.normaliser
    return e / np.where(total == 0, p.c(1.0), total)[..., None]


@attention_step
def sink_share(p: Pipeline) -> Any:
    _, sink, total, _ = p.normaliser
    return sink / np.where(total == 0, p.c(1.0), total)


@attention_step
def keep(p: Pipeline) -> Any:
    """M, the keep mask over (1 - rate); None without dropout."""
    return keep_with(p, p.seed)


def keep_with(p: Pipeline, seed: Any) -> Any:
    """M of another seed."""
    if not p.dropout:
        return None
    return keep_factor(Operands(p.q, p.k, p.v), Options(1.0, dropout=p.dropout, seed=seed))


@attention_step
def out(p: Pipeline) -> Any:
    return matmul(drop(p.weights, p.keep), p.v_heads)


# --- reverse: the backward may see other weights than the forward had, so they have names of their own ---------------


@attention_step
def visible_back(p: Pipeline) -> Any:
    return p.visible


@attention_step
def weights_back(p: Pipeline) -> Any:
    return p.weights


@attention_step
def keep_back(p: Pipeline) -> Any:
    return p.keep


@attention_step
def scale_dq(p: Pipeline) -> Any:
    return p.scale_value


@attention_step
def scale_dk(p: Pipeline) -> Any:
    return p.scale_value


@attention_step
def dv_heads(p: Pipeline) -> Any:
    return matmul(transpose(drop(p.weights_back, p.keep_back)), p.dout)


@attention_step
def dv_made(p: Pipeline) -> Any:
    """dV as it is made; ``dv`` is what is returned in its place. So with dQ and dK."""
    return per_key_head(p.dv_heads, p.v)


@attention_step
def dv(p: Pipeline) -> Any:
    return p.dv_made


@attention_step
def dweights(p: Pipeline) -> Any:
    return drop(matmul(p.dout, transpose(p.v_heads)), p.keep_back)


@attention_step
def delta(p: Pipeline) -> Any:
    return rowsum(p.dout * p.out)


@attention_step
def dscores(p: Pipeline) -> Any:
    return zero_hidden(p.weights_back * (p.dweights - p.delta[..., None]), p.visible_back)


@attention_step
def dbias(p: Pipeline) -> Any:
    return None if p.bias is None else sum_to(p.dscores, p.bias.shape)


@attention_step
def dsinks(p: Pipeline) -> Any:
    return None if p.sinks is None else sum_over(-(p.sink_share * p.delta), (0, 2))


@attention_step
def slope(p: Pipeline) -> Any:
    return SoftCap(p.softcap).first(p.z)


@attention_step
def dz(p: Pipeline) -> Any:
    return p.dscores * p.slope


@attention_step
def dq_made(p: Pipeline) -> Any:
    return p.c(p.scale_dq) * matmul(p.dz, p.k_heads)


@attention_step
def dq(p: Pipeline) -> Any:
    return p.dq_made


@attention_step
def dk_heads(p: Pipeline) -> Any:
    return p.c(p.scale_dk) * matmul(transpose(p.dz), p.q)


@attention_step
def dk_made(p: Pipeline) -> Any:
    return per_key_head(p.dk_heads, p.k)


@attention_step
def dk(p: Pipeline) -> Any:
    return p.dk_made


# --- forward mode ----------------------------------------------------------------------------------------------------


@attention_step
def z_dot(p: Pipeline) -> Any:
    k_dot = per_query_head(p.k_dot, p.group)
    return p.c(p.scale_value) * (matmul(p.q_dot, transpose(p.k_heads)) + matmul(p.q, transpose(k_dot)))


@attention_step
def scores_dot(p: Pipeline) -> Any:
    s_dot = SoftCap(p.softcap).first(p.z) * p.z_dot
    return zero_hidden(s_dot if p.bias_dot is None else s_dot + p.bias_dot, p.visible)


@attention_step
def lse_dot(p: Pipeline) -> Any:
    moved = rowsum(p.weights * p.scores_dot)
    return moved if p.sinks_dot is None else moved + p.sink_share * p.sinks_dot[:, None]


@attention_step
def weights_dot(p: Pipeline) -> Any:
    return p.weights * (p.scores_dot - p.lse_dot[..., None])


@attention_step
def out_dot(p: Pipeline) -> Any:
    v_dot = per_query_head(p.v_dot, p.group)
    return matmul(drop(p.weights_dot, p.keep), p.v_heads) + matmul(drop(p.weights, p.keep), v_dot)


# --- second order ----------------------------------------------------------------------------------------------------


@attention_step
def dweights_dot(p: Pipeline) -> Any:
    v_dot = per_query_head(p.v_dot, p.group)
    return drop(matmul(p.dout_dot, transpose(p.v_heads)) + matmul(p.dout, transpose(v_dot)), p.keep)


@attention_step
def delta_dot(p: Pipeline) -> Any:
    return rowsum(p.dout_dot * p.out + p.dout * p.out_dot)


@attention_step
def dscores_dot(p: Pipeline) -> Any:
    first = p.weights_dot * (p.dweights - p.delta[..., None])
    return zero_hidden(first + p.weights * (p.dweights_dot - p.delta_dot[..., None]), p.visible)


@attention_step
def dz_dot(p: Pipeline) -> Any:
    cap = SoftCap(p.softcap)
    return p.dscores_dot * cap.first(p.z) + p.dscores * cap.second(p.z) * p.z_dot


@attention_step
def dq_dot(p: Pipeline) -> Any:
    k_dot = per_query_head(p.k_dot, p.group)
    return p.c(p.scale_value) * (matmul(p.dz_dot, p.k_heads) + matmul(p.dz, k_dot))


@attention_step
def dk_dot(p: Pipeline) -> Any:
    heads = matmul(transpose(p.dz_dot), p.q) + matmul(transpose(p.dz), p.q_dot)
    return per_key_head(p.c(p.scale_value) * heads, p.k)


@attention_step
def dv_dot(p: Pipeline) -> Any:
    heads = matmul(transpose(drop(p.weights_dot, p.keep)), p.dout)
    return per_key_head(heads + matmul(transpose(drop(p.weights, p.keep)), p.dout_dot), p.v)


@attention_step
def dbias_dot(p: Pipeline) -> Any:
    return None if p.bias is None else sum_to(p.dscores_dot, p.bias.shape)


@attention_step
def dsinks_dot(p: Pipeline) -> Any:
    if p.sinks is None:
        return None
    shift = -p.lse_dot if p.sinks_dot is None else p.sinks_dot[:, None] - p.lse_dot
    return sum_over(-(p.sink_share * (shift * p.delta + p.delta_dot)), (0, 2))
