"""Mistakes in forward mode and second order."""

from __future__ import annotations

from typing import Any

from attngrad.auditor.mistakes._entry import Base, only, way
from attngrad.auditor.pipeline import Pipeline
from attngrad.reference import SoftCap
from attngrad.reference.dense import drop, matmul, per_key_head, per_query_head, transpose, zero_hidden


def _z_from_k(p: Pipeline, base: Base) -> Any:
    return p.c(p.scale_value) * matmul(p.q, transpose(per_query_head(p.k_dot, p.group)))


def _out_from_values(p: Pipeline, base: Base) -> Any:
    return matmul(drop(p.weights, p.keep), per_query_head(p.v_dot, p.group))


def _dscores_first(p: Pipeline, base: Base) -> Any:
    return zero_hidden(p.weights_dot * (p.dweights - p.delta[..., None]), p.visible)


def _dscores_second(p: Pipeline, base: Base) -> Any:
    return zero_hidden(p.weights * (p.dweights_dot - p.delta_dot[..., None]), p.visible)


def _dq_first(p: Pipeline, base: Base) -> Any:
    return p.c(p.scale_value) * matmul(p.dz_dot, p.k_heads)


def _dk_first(p: Pipeline, base: Base) -> Any:
    return per_key_head(p.c(p.scale_value) * matmul(transpose(p.dz_dot), p.q), p.k)


VARIANTS = {
    "tangent-row-term-missing": only(weights_dot=lambda p, base: p.weights * p.scores_dot),
    "tangent-term-missing": (
        way("Q K_dot^T", z_dot=lambda p, base: p.c(p.scale_value) * matmul(p.q_dot, transpose(p.k_heads))),
        way("Q_dot K^T", z_dot=_z_from_k),
        way("A V_dot", out_dot=lambda p, base: matmul(drop(p.weights_dot, p.keep), p.v_heads)),
        way("A_dot V", out_dot=_out_from_values),
    ),
    "tangent-scale-missing": only(z_dot=lambda p, base: base() / p.c(p.scale_value)),
    "second-order-term-missing": (
        way("A o (dA_dot - delta_dot)", dscores_dot=_dscores_first),
        way("A_dot o (dA - delta)", dscores_dot=_dscores_second),
        way("dZ K_dot in dQ_dot, dZ^T Q_dot in dK_dot", dq_dot=_dq_first, dk_dot=_dk_first),
        way("dZ K_dot in dQ_dot", dq_dot=_dq_first),
        way("dZ^T Q_dot in dK_dot", dk_dot=_dk_first),
        way("delta_dot", delta_dot=lambda p, base: base() * p.c(0.0)),
    ),
    "softcap-second-derivative-missing": only(dz_dot=lambda p, base: p.dscores_dot * SoftCap(p.softcap).first(p.z)),
}
