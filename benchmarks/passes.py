"""The passes: what each returns, what it counts for, and the reference that verifies it. One entry a pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from attngrad import reference
from attngrad.core.arrays import NDArray
from benchmarks.cases import TANGENTS, Inputs

Arrays = dict[str, NDArray]


@dataclass(frozen=True)
class Pass:
    """A pass of the benchmark.

    ``outputs`` are the names that every peer returns, as docs/notation.md has them: ``out``, ``dq``, ``out_dot``; dbias
    comes where a bias is differentiated. ``cost`` is in FLOPs of the forward pass. ``reference`` takes float64 inputs.
    ``tangents`` are those given. ``own`` is the pass of attngrad's own that the row is held against, interleaved.
    ``whole``: of a pass along one tangent alone, the pass along all.
    """

    name: str
    short: str
    cost: float
    outputs: tuple[str, ...]
    reference: Callable[[Inputs], Arrays]
    tangents: tuple[str, ...] = ()
    own: str | None = None
    whole: str | None = None

    @property
    def method(self) -> str:
        """What a peer runs for it; the tangents make the rest."""
        return self.whole or self.name


def _options(x: Inputs) -> dict[str, Any]:
    return {"mask": x.mask, "bias": x.bias}


def by_name(grads: Any, suffix: str = "") -> Arrays:
    """Gradients as dq, dk, dv and, where there is one, dbias; with a suffix, dq_dot."""
    found = {f"d{name}{suffix}": getattr(grads, name) for name in ("q", "k", "v", "bias")}
    return {name: x for name, x in found.items() if x is not None}


def _forward(x: Inputs) -> Arrays:
    return {"out": reference.attention(x.q, x.k, x.v, **_options(x))}


def _backward(x: Inputs) -> Arrays:
    out, pullback = reference.vjp(x.q, x.k, x.v, **_options(x))
    return {"out": out} | by_name(pullback(x.dout))


def _jvp(x: Inputs) -> Arrays:
    out, out_dot = reference.jvp(x[:3], (x.q_dot, x.k_dot, x.v_dot), **_options(x))
    return {"out": out, "out_dot": out_dot}


def _hvp(x: Inputs) -> Arrays:
    """``out`` too, for attngrad's own forward + backward in the same row."""
    grads, grads_dot = reference.hvp(x[:3], (x.q_dot, x.k_dot, x.v_dot), x.dout, x.dout_dot, **_options(x))
    return _forward(x) | by_name(grads) | by_name(grads_dot, "_dot")


def jvp_products(given: Collection[str]) -> int:
    """Products a tile of a JVP along the tangents given; a product is T x S x D or T x S x E.

    z, q_dot k^T, q k_dot^T; p v, p_dot v, p v_dot.

    >>> jvp_products(()), jvp_products(("q_dot",)), jvp_products(("v_dot",)), jvp_products(TANGENTS)
    (2, 4, 3, 6)
    """
    z_dot = sum(name in given for name in ("q_dot", "k_dot"))
    return 2 + z_dot + (z_dot > 0) + ("v_dot" in given)


def hvp_products(given: Collection[str]) -> int:
    """Products a tile of an HVP along the tangents given: a JVP for out and out_dot, then backward.

    Again z, q_dot k^T, q k_dot^T; dout v^T, dout_dot v^T, dout v_dot^T; p^T dout, p_dot^T dout, p^T dout_dot;
    dz k, dz_dot k, dz k_dot; dz^T q, dz_dot^T q, dz^T q_dot.

    >>> hvp_products(()), hvp_products(("q_dot",)), hvp_products(("v_dot",)), hvp_products(TANGENTS)
    (7, 14, 11, 21)
    """
    z_dot = sum(name in given for name in ("q_dot", "k_dot"))
    dp_dot = sum(name in given for name in ("v_dot", "dout_dot"))
    dv_dot = (z_dot > 0) + ("dout_dot" in given)
    dz_dot = z_dot + dp_dot > 0
    return jvp_products(given) + 5 + z_dot + dp_dot + dv_dot + 2 * dz_dot + z_dot


JVP = Pass("jvp", "jvp", jvp_products(TANGENTS) / 2, ("out", "out_dot"), _jvp, TANGENTS[:3], own="forward")
HVP = Pass(
    "hvp",
    "hvp",
    hvp_products(TANGENTS) / 2,
    ("dq", "dk", "dv", "dq_dot", "dk_dot", "dv_dot"),
    _hvp,
    TANGENTS,
    own="forward + backward",
)


def _alone(whole: Pass, tangent: str, products: Callable[[Collection[str]], int]) -> Pass:
    """``whole`` along one tangent; the others, and dout_dot, are None."""
    name, short = f"{whole.name} {tangent}", f"{whole.name} {tangent[0]}"
    cost = products((tangent,)) / 2
    return replace(whole, name=name, short=short, cost=cost, tangents=(tangent,), whole=whole.name)


PASSES: dict[str, Pass] = {
    one.name: one
    for one in (
        # two products forward; backward five: the scores again, dv, dp, dq, dk
        Pass("forward", "fwd", 1.0, ("out",), _forward),
        Pass("forward + backward", "fwd+bwd", 3.5, ("out", "dq", "dk", "dv"), _backward),
        JVP,
        HVP,
        *(_alone(JVP, tangent, jvp_products) for tangent in TANGENTS[:3]),
        *(_alone(HVP, tangent, hvp_products) for tangent in TANGENTS[:3]),
    )
}
