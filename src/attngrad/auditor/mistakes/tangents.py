"""Mistakes in forward mode and second order."""

from __future__ import annotations

from attngrad.auditor.mistakes._entry import Mistake, only, way, without

_DQ, _DK = without("dq_dot", "k_dot_heads"), without("dk_dot", "q_dot_seen")

MISTAKES = (
    Mistake(
        "tangent-row-term-missing",
        "A_dot has no row term",
        "A_dot = A o S_dot",
        "A_dot = A o (S_dot - rowsum(A o S_dot))",
        "The rows of A sum to 1, so the rows of A_dot sum to 0.",
        "Subtract rowsum(A * S_dot, keepdims) from S_dot.",
        only(**without("weights_dot", "lse_dot")),
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
            way("Q K_dot^T", **without("z_dot", "k_dot_heads")),
            way("Q_dot K^T", **without("z_dot", "q_dot")),
            way("A V_dot", **without("out_dot", "v_dot_heads")),
            way("A_dot V", **without("out_dot", "weights_dot")),
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
            way("A o (dA_dot - delta_dot)", **without("dscores_dot", "weights")),
            way("A_dot o (dA - delta)", **without("dscores_dot", "weights_dot")),
            way("dZ K_dot in dQ_dot, dZ^T Q_dot in dK_dot", **_DQ, **_DK),
            way("dZ K_dot in dQ_dot", **_DQ),
            way("dZ^T Q_dot in dK_dot", **_DK),
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
        only(**without("dz_dot", "curvature")),
        ("tangents", "softcap"),
        "attention",
    ),
)
