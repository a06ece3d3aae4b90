"""What must hold in a trace, checked: each error is relative to the sum of the magnitudes of what is summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attngrad import reference
from attngrad.core.arrays import NDArray
from attngrad.core.operands import Tangents

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

TOLERANCE = 1e-12


class Invariant(NamedTuple):
    """A claim, the steps it is about, and how far it is off."""

    claim: str
    steps: tuple[str, ...]
    error: float

    @property
    def holds(self) -> bool:
        """Whether the error is within TOLERANCE."""
        return self.error <= TOLERANCE


def _off(left: NDArray, right: Any, size: Any) -> float:
    """max |left - right| over the size of what was summed; infinite where NaN comes in."""
    left, right, size = np.broadcast_arrays(left, right, size)
    if left.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        error = np.abs(left - right) / np.where(size > 0, size, 1.0)
    worst = float(np.max(error))
    return float("inf") if np.isnan(worst) else worst


def _rows(x: NDArray) -> NDArray:
    total: NDArray = np.sum(x, axis=-1)
    return total


def _pair(a: NDArray, b: NDArray) -> tuple[float, float]:
    """<a, b>, and the same with magnitudes."""
    return float(np.sum(a * b)), float(np.sum(np.abs(a * b)))


@np.errstate(all="ignore")  # numbers near the largest overflow: then an invariant does not hold, and says so
def check(trace: Trace) -> list[Invariant]:
    """The invariants of the passes that the trace has."""
    found = _forward(trace)
    for step, more in (("dS", _backward), ("O_dot", _tangent), ("dS_dot", _second)):
        if step in trace:
            found += more(trace)
    return found


def _forward(t: Trace) -> list[Invariant]:
    weights = t["A"].value
    total = _rows(weights)
    sees = np.any(t.visible, axis=-1)
    if "sink" in t:
        claim = "rows of A and the sink sum to 1"
        return [Invariant(claim, ("A", "sink"), _off(total + t["sink"].value, 1.0, 1.0))]
    claim = "rows of A sum to 1" if sees.all() else "rows of A sum to 1, to 0 where a query sees nothing"
    return [Invariant(claim, ("A",), _off(total, sees.astype(float), 1.0))]


def _backward(t: Trace) -> list[Invariant]:
    weights, da, ds, delta = (t[n].value for n in ("A", "dA", "dS", "delta"))
    dout, out = t["dO"].value, t["O"].value
    dlse = t["dL"].value if "dL" in t else np.zeros_like(delta)
    sees = np.any(t.visible, axis=-1)
    size = _rows(np.abs(weights * da)) + np.abs(delta) + np.abs(dlse)
    found = []
    if "sink" in t:
        # a sink takes its share of the gradient: A sums to 1 - sink
        claim = "rows of dS sum to sink o delta + dL" if "dL" in t else "rows of dS sum to sink o delta"
        right = np.where(sees, t["sink"].value * delta + dlse, 0.0)
        found.append(Invariant(claim, ("dS", "sink", "delta"), _off(_rows(ds), right, size)))
    else:
        claim = "rows of dS sum to dL" if "dL" in t else "rows of dS sum to 0"
        found.append(Invariant(claim, ("dS",), _off(_rows(ds), np.where(sees, dlse, 0.0), size)))
    # a hidden key may hold anything in dA, and weighs nothing
    by_weights = _rows(np.where(t.visible, weights * da, 0.0))
    by_out = _rows(np.where(sees[..., None], dout * out, 0.0))
    minus = " - dL" if "dL" in t else ""
    claim = f"delta = rowsum(A o dA){minus} = rowsum(O o dO){minus}"
    size = _rows(np.abs(np.where(t.visible, weights * da, 0.0))) + np.abs(by_out) + np.abs(dlse)
    error = max(_off(by_weights - dlse, delta, size), _off(by_out - dlse, delta, size))
    found.append(Invariant(claim, ("delta", "A", "dA", "O", "dO"), error))
    found.append(_adjoint(t))
    return found


def _directions(t: Trace, seed: int) -> Tangents:
    """A fixed random direction of every differentiable input."""
    rng = np.random.default_rng(seed)
    x = t.operands
    return Tangents(*(None if a is None else rng.standard_normal(a.shape) for a in (x.q, x.k, x.v, x.bias, x.sinks)))


def _adjoint(t: Trace) -> Invariant:
    """<dO, JVP(u)> = <VJP(dO), u>, along the tangents of the trace or, without them, along a random direction."""
    x, o = t.operands, t.options
    u = tangents_of(t) if "Q_dot" in t else _directions(t, 0)
    moved = reference.forward_tangent(x, o, reference.forward(x, o), u)
    left = [_pair(t["dO"].value, moved.out_dot)]
    if "dL" in t:
        left.append(_pair(t["dL"].value, moved.lse_dot))
    names = ("dQ", "dK", "dV", "dbias", "dsigma")
    right = [_pair(t[n].value, d) for n, d in zip(names, u, strict=True) if d is not None]
    size = sum(s for _, s in (*left, *right))
    error = _off(np.array(sum(a for a, _ in left)), sum(a for a, _ in right), size)
    return Invariant("<dO, JVP(t)> = <VJP(dO), t>", ("dO", "dQ", "dK", "dV"), error)


def tangents_of(t: Trace) -> Tangents:
    """The tangents that the trace was made with."""
    return Tangents(*(value_of(t, f"{name}_dot") for name in ("Q", "K", "V", "bias", "sigma")))


def value_of(t: Trace, name: str) -> NDArray | None:
    """The numbers of a step; None where the trace has no such step."""
    return t[name].value if name in t else None


def _tangent(t: Trace) -> list[Invariant]:
    weights, s_dot, a_dot, l_dot = (t[n].value for n in ("A", "S_dot", "A_dot", "L_dot"))
    size = _rows(np.abs(weights * s_dot)) + np.abs(l_dot)
    if "sink" in t:
        # A and the sink sum to 1, so their tangents sum to 0
        sink = t["sink"].value
        sigma_dot = t["sigma_dot"].value if "sigma_dot" in t else np.zeros(t.operands.heads)
        shaped = sigma_dot if a_dot.ndim == 2 else sigma_dot[:, None]
        left = _rows(a_dot) + sink * (shaped - l_dot)
        return [Invariant("rows of A_dot and of the sink's tangent sum to 0", ("A_dot",), _off(left, 0.0, size))]
    return [Invariant("rows of A_dot sum to 0", ("A_dot",), _off(_rows(a_dot), 0.0, size))]


def _second(t: Trace) -> list[Invariant]:
    found = []
    if "sink" not in t:
        terms = np.abs(t["A_dot"].value * (t["dA"].value - t["delta"].value[..., None]))
        terms = terms + np.abs(t["A"].value * (t["dA_dot"].value - t["delta_dot"].value[..., None]))
        right = t["dL_dot"].value if "dL_dot" in t else np.zeros_like(t["delta"].value)
        sees = np.any(t.visible, axis=-1)
        size = _rows(np.where(t.visible, terms, 0.0)) + np.abs(right) + np.abs(t["delta_dot"].value)
        claim = f"rows of dS_dot sum to {'dL_dot' if 'dL_dot' in t else '0'}"
        found.append(Invariant(claim, ("dS_dot",), _off(_rows(t["dS_dot"].value), np.where(sees, right, 0.0), size)))
    found.append(_symmetry(t))
    return found


def _symmetry(t: Trace) -> Invariant:
    """<u, H t> = <t, H u>: the Hessian of the loss is symmetric."""
    x, o = t.operands, t.options
    direction, other = tangents_of(t), _directions(t, 1)
    dout, dlse = t["dO"].value, value_of(t, "dL")
    f = reference.forward(x, o)
    b = reference.backward(x, o, f, dout, dlse)
    sides, sizes = [], []
    for u, w in ((direction, other), (other, direction)):
        ft = reference.forward_tangent(x, o, f, u)
        moved = reference.backward_tangent(x, o, f, b, ft, u, dout).grads_dot
        pairs = [_pair(g, d) for g, d in zip(moved, w, strict=True) if g is not None and d is not None]
        sides.append(sum(a for a, _ in pairs))
        sizes.append(sum(s for _, s in pairs))
    claim = "<u, H t> = <t, H u>: the Hessian is symmetric"
    return Invariant(claim, ("dQ_dot", "dK_dot", "dV_dot"), _off(np.array(sides[0]), sides[1], sum(sizes)))
