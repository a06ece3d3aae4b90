"""Mistakes in forward mode and second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor.mistakes import Variant, only, way, without
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference.dense import rowsum

_DQ, _DK = without("dq_dot", "k_dot_heads"), without("dk_dot", "q_dot_seen")


def _along_dout_dot(p: Pipeline) -> dict[str, Any]:
    """The gradients along dout_dot: all that is left of the second order where the first is a constant."""
    delta = p.redo("delta", dout_seen=p.dout_dot_seen, dlse=None)
    ds = p.redo("dscores", dweights=p.redo("dweights", dout_seen=p.dout_dot_seen), delta=delta)
    dz = p.redo("dz", dscores=ds)
    return {
        "dq": p.redo("dq_made", dz=dz),
        "dk": p.redo("dk_made", dk_heads=p.redo("dk_heads", dz=dz)),
        "dv": p.redo("dv_made", dv_heads=p.redo("dv_heads", dout_seen=p.dout_dot_seen)),
        "dbias": p.redo("dbias", dscores=ds),
        "dsinks": None if p.sinks is None else p.redo("dsinks", delta=delta),
        "dscores": ds,
    }


def _detached(*suffixes: str, names: tuple[str, ...] = ("q", "k", "v", "bias", "sinks")) -> dict[str, Override]:
    def of(name: str) -> Override:
        return lambda p, base: _along_dout_dot(p)[name]

    return {f"d{n}_{s}": of(f"d{n}") for s in suffixes for n in (names if s == "dot" else names[:3])}


class _Parts(NamedTuple):
    """What the gradient of <tangents, gradients> is made of."""

    a: Any
    by_weights: Any
    """By the weights, delta held: (dA - delta) o S_dot + dO V_dot^T."""
    row: Any
    """rowsum(A o S_dot): minus that by delta."""
    ds: Any
    dweights: Any


def _parts(p: Pipeline) -> _Parts:
    from_values = p.redo("dweights", v_heads=p.v_dot_heads)
    difference = p.dweights - p.delta[..., None]
    row = rowsum(p.weights * p.scores_dot)[..., None]
    return _Parts(p.weights, difference * p.scores_dot + from_values, row, p.dscores, p.dweights)


def _constant(note: str, by_scores: Callable[[_Parts], Any], *, delta: bool) -> tuple[Variant, Variant]:
    """dS_dot as ``by_scores`` has it, since something that the backward read was a constant: ``delta`` too, or not.

    Frameworks ask for the transpose of the derivative of the gradients, which is not symmetric here.
    """

    def dz_dot(p: Pipeline) -> Any:
        ds = np.where(p.visible, by_scores(_parts(p)), p.c(0.0))
        return p.redo("dz_dot", dscores_dot=ds + _along_dout_dot(p)["dscores"])

    def steps(suffix: str) -> dict[str, Override]:
        return {
            f"dq_{suffix}": lambda p, base: p.redo(f"dq_{suffix}", dz_dot=dz_dot(p)),
            f"dk_{suffix}": lambda p, base: p.redo(f"dk_{suffix}", dz_dot=dz_dot(p)),
            f"dv_{suffix}": lambda p, base: (
                p.redo(f"dv_{suffix}", weights_dot_second=p.weights * p.scores_dot) if delta else base()
            ),
        }

    return way(note, **steps("dot")), way(f"{note}, forward mode too", **steps("dot"), **steps("mixed"))


def _tangents(p: Pipeline) -> dict[str, Any]:
    """The tangents as they should be, for a second order that has code of its own."""
    found = {"z_dot": p.redo("z_dot")}
    found["scores_dot"] = p.redo("scores_dot", z_dot=found["z_dot"])
    found["lse_dot"] = p.redo("lse_dot", scores_dot=found["scores_dot"])
    found["weights_dot"] = p.redo("weights_dot", scores_dot=found["scores_dot"], lse_dot=found["lse_dot"])
    return found | {"out_dot": p.redo("out_dot", weights_dot=found["weights_dot"])}


def _in_both(note: str, **steps: Override) -> tuple[Variant, Variant]:
    """The mistake in forward mode and in the second order that follows from it, or in forward mode alone."""

    def right(name: str) -> Override:
        return lambda p, base: _tangents(p)[name]

    restored = {f"{name}_second": right(name) for name in ("weights_dot", "out_dot", "lse_dot")}
    alone = f"{note}, in forward mode alone" if note else "in forward mode alone"
    return way(note, **steps), way(alone, **steps, **restored, z_dot_seen=right("z_dot"))


VARIANTS = {
    "tangent-row-term-missing": _in_both("", **without("weights_dot", "lse_dot")),
    "tangent-term-missing": (
        *_in_both("Q K_dot^T", **without("z_dot", "k_dot_heads")),
        *_in_both("Q_dot K^T", **without("z_dot", "q_dot")),
        *_in_both("A V_dot", **without("out_dot", "v_dot_heads")),
        *_in_both("A_dot V", **without("out_dot", "weights_dot")),
    ),
    "tangent-scale-missing": _in_both("", z_dot=lambda p, base: base() / p.c(p.scale_value)),
    "second-order-term-missing": (
        way("A o (dA_dot - delta_dot)", **without("dscores_dot", "weights")),
        way("A_dot o (dA - delta)", **without("dscores_dot", "weights_dot_second")),
        way("dZ K_dot in dQ_dot, dZ^T Q_dot in dK_dot", **_DQ, **_DK),
        way("dZ K_dot in dQ_dot", **_DQ),
        way("dZ^T Q_dot in dK_dot", **_DK),
        way("delta_dot", delta_dot=lambda p, base: base() * p.c(0.0)),
    ),
    "detached-second-order": (
        way("", **_detached("dot")),
        way("reverse over forward too", **_detached("dot", "mixed")),
    ),
    "detached-tangent": only(**_detached("mixed")),
    "constant-lse-second-order": (
        *_constant("lse, with delta from out", lambda x: x.a * x.by_weights - x.row * x.ds, delta=False),
        *_constant("lse, with delta from A and dA", lambda x: x.a * (x.by_weights - x.row * x.dweights), delta=False),
        *_constant("lse and delta", lambda x: x.a * x.by_weights, delta=True),
        *_constant("A, with delta from out", lambda x: -x.row * x.ds, delta=False),
        *_constant("A, with delta from A and dA", lambda x: 0.0 * x.ds, delta=False),
        *_constant("A and delta", lambda x: 0.0 * x.ds, delta=True),
        *_constant(
            "delta",
            lambda x: x.a * (x.by_weights - rowsum(x.a * x.by_weights)[..., None]),
            delta=True,
        ),
    ),
    "softcap-second-derivative-missing": only(**without("dz_dot", "curvature")),
}
