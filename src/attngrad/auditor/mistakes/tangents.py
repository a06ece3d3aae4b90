"""Mistakes in forward mode and second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attngrad.auditor.mistakes._entry import Mistake, only, way
from attngrad.auditor.pipeline import Pipeline
from attngrad.reference.dense import drop, matmul, per_key_head, per_query_head, transpose, zero_hidden

Base = Callable[[], Any]


def _z_from_q(p: Pipeline, base: Base) -> Any:
    return p.c(p.scale_value) * matmul(p.q_dot, transpose(p.k_heads))


def _z_from_k(p: Pipeline, base: Base) -> Any:
    return p.c(p.scale_value) * matmul(p.q, transpose(per_query_head(p.k_dot, p.group)))


def _out_from_weights(p: Pipeline, base: Base) -> Any:
    return matmul(drop(p.weights_dot, p.keep), p.v_heads)


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


MISTAKES = (
    Mistake(
        "tangent-row-term-missing",
        "A_dot has no row term",
        "A_dot = A o S_dot",
        "A_dot = A o (S_dot - rowsum(A o S_dot))",
        "The rows of A sum to 1, so the rows of A_dot sum to 0.",
        "Subtract rowsum(A * S_dot, keepdims) from S_dot.",
        only(weights_dot=lambda p, base: p.weights * p.scores_dot),
        ("tangents",),
        "attention",
    ),
    Mistake(
        "tangent-term-missing",
        "a term of the product rule is missing in forward mode",
        "S_dot = scale Q_dot K^T",
        "S_dot = scale (Q_dot K^T + Q K_dot^T),  O_dot = A_dot V + A V_dot",
        "Both factors of a product move.",
        "Add the other term.",
        (
            way("Q K_dot^T", z_dot=_z_from_q),
            way("Q_dot K^T", z_dot=_z_from_k),
            way("A V_dot", out_dot=_out_from_weights),
            way("A_dot V", out_dot=_out_from_values),
        ),
        ("tangents",),
        "attention",
    ),
    Mistake(
        "tangent-scale-missing",
        "the scale is missing in S_dot",
        "S_dot = Q_dot K^T + Q K_dot^T",
        "S_dot = scale (Q_dot K^T + Q K_dot^T)",
        "Z = scale Q K^T, and so its tangent.",
        "Multiply by scale.",
        only(z_dot=lambda p, base: base() / p.c(p.scale_value)),
        ("tangents",),
        "attention",
    ),
    Mistake(
        "second-order-term-missing",
        "a term of the product rule is missing in second order",
        "dS_dot = A_dot o (dA - delta)",
        "dS_dot = A_dot o (dA - delta) + A o (dA_dot - delta_dot),  dQ_dot = scale (dZ_dot K + dZ K_dot)",
        "Both factors of a product move.",
        "Add the other term.",
        (
            way("A o (dA_dot - delta_dot)", dscores_dot=_dscores_first),
            way("A_dot o (dA - delta)", dscores_dot=_dscores_second),
            way("dZ K_dot in dQ_dot, dZ^T Q_dot in dK_dot", dq_dot=_dq_first, dk_dot=_dk_first),
            way("dZ K_dot in dQ_dot", dq_dot=_dq_first),
            way("dZ^T Q_dot in dK_dot", dk_dot=_dk_first),
            way("delta_dot", delta_dot=lambda p, base: base() * p.c(0.0)),
        ),
        ("tangents",),
        "attention",
    ),
    Mistake(
        "softcap-second-derivative-missing",
        "the second derivative of the softcap is missing",
        "dZ_dot = dS_dot o cap'(Z)",
        "dZ_dot = dS_dot o cap'(Z) + dS o cap''(Z) o Z_dot",
        "cap'(Z) moves with Z.",
        "Add dS o cap''(Z) o Z_dot, with cap''(z) = -2/c tanh(z/c) (1 - tanh(z/c)^2).",
        only(dz_dot=lambda p, base: p.dscores_dot * p.slope),
        ("tangents", "softcap"),
        "attention",
    ),
)
