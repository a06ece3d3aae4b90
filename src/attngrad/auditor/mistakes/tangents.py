"""Mistakes in forward mode and second order."""

from __future__ import annotations

from attngrad.auditor.mistakes import only, way, without

_DQ, _DK = without("dq_dot", "k_dot_heads"), without("dk_dot", "q_dot_seen")

VARIANTS = {
    "tangent-row-term-missing": only(**without("weights_dot", "lse_dot")),
    "tangent-term-missing": (
        way("Q K_dot^T", **without("z_dot", "k_dot_heads")),
        way("Q_dot K^T", **without("z_dot", "q_dot")),
        way("A V_dot", **without("out_dot", "v_dot_heads")),
        way("A_dot V", **without("out_dot", "weights_dot")),
    ),
    "tangent-scale-missing": only(z_dot=lambda p, base: base() / p.c(p.scale_value)),
    "second-order-term-missing": (
        way("A o (dA_dot - delta_dot)", **without("dscores_dot", "weights")),
        way("A_dot o (dA - delta)", **without("dscores_dot", "weights_dot")),
        way("dZ K_dot in dQ_dot, dZ^T Q_dot in dK_dot", **_DQ, **_DK),
        way("dZ K_dot in dQ_dot", **_DQ),
        way("dZ^T Q_dot in dK_dot", **_DK),
        way("delta_dot", delta_dot=lambda p, base: base() * p.c(0.0)),
    ),
    "softcap-second-derivative-missing": only(**without("dz_dot", "curvature")),
}
