"""Entries of a trace by central differences: the same numbers, from nothing but the pass before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attngrad import reference
from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail
from attngrad.core.operands import Operands, Tangents
from attngrad.explain.invariants import tangents_of, value_of
from attngrad.explain.values import compute
from attngrad.layers.linear import affine, merge, split
from attngrad.reference.dense import drop
from attngrad.reference.modifiers import modifiers

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace


_OPERAND = {"dQ": "q", "dK": "k", "dV": "v", "dbias": "bias", "dsigma": "sinks"}
_MATRIX = ("dA", "dS", "dZ")


def difference(t: Trace, name: str, index: tuple[int, ...], step: float) -> float:
    """The entry of ``name`` at ``index`` by (f(x + step) - f(x - step)) / (2 step)."""
    if name.endswith("_dot") and t.rules[name].entry:
        ends = [_moved(t, name, sign * step)[index] for sign in (1, -1)]
    elif name in _OPERAND or name in _MATRIX or name in ("dO", "dL"):
        ends = [_loss(t, name, index, sign * step) for sign in (1, -1)]
    elif name.startswith("d") and name != "delta" and "Y" in t:
        ends = [_layer_loss(t, name[1:], index, sign * step) for sign in (1, -1)]
    else:
        known = [n for n in t if n in _OPERAND or n in _MATRIX or (n.endswith("_dot") and t.rules[n].entry)]
        rule = f"be a derivative: {', '.join(known) or 'none is in this trace; give dout or tangents'}"
        fail(ValueError, "trace.finite_difference", "name", rule, repr(name))
    # equal ends may both be -inf, at what is hidden
    return 0.0 if ends[0] == ends[1] else float((ends[0] - ends[1]) / (2.0 * step))


def _loss(t: Trace, name: str, index: tuple[int, ...], step: float) -> float:
    """<dO, O> + <dL, L> where the entry that ``name`` is the gradient at has moved by ``step``."""
    x, o = t.operands, t.options
    dout, dlse = t["dO"].value, value_of(t, "dL")
    if name in ("dO", "dL"):
        moved = {"dO": t["O"].value.copy(), "dL": t["L"].value.copy()}
        moved[name][index] += step
        return _pairing(dout, moved["dO"], dlse, moved["dL"])
    if name == "dA":
        weights = t["A"].value.copy()
        weights[index] += step
        v = np.repeat(x.v, x.group, axis=-3) if x.group > 1 else x.v
        out = drop(weights, value_of(t, "M")) @ v
        return float(np.sum(np.where(np.any(t.visible, axis=-1, keepdims=True), dout * out, 0.0)))
    if name in _OPERAND:
        field = _OPERAND[name]
        array = getattr(x, field).copy()
        array[index] += step
        f = reference.forward(x._replace(**{field: array}), o)
    else:
        # S moves as a bias moves it; Z moves S by what the cap makes of it
        bias = np.zeros(x.scores_shape) if x.bias is None else np.broadcast_to(x.bias, x.scores_shape).copy()
        if name == "dZ":
            cap, z = modifiers(o), t["Z"].value[index]
            step = float(cap.value(np.float64(z + step)) - cap.value(np.float64(z)))
        bias[index] += step
        f = reference.forward(x._replace(bias=bias), o)
    return _pairing(dout, f.out, dlse, f.lse)


def _layer_loss(t: Trace, name: str, index: tuple[int, ...], step: float) -> float:
    """<dY, Y> where one entry of an input, a weight, a bias or a Q or K before RoPE has moved by ``step``."""
    moved = {n: a.value for n, a in t.items()}
    moved[name] = moved[name].copy()
    moved[name][index] += step
    heads: dict[str, Any] = {}
    for c in "qkv":
        inner = f"{c.upper()}_in" if f"{c.upper()}_in" in t else c.upper()
        if name == inner:
            x = moved[inner]
        else:
            source, weight, *bias = (moved[n] for n in t[inner].inputs)
            x = split(affine(source, weight, *bias), t[inner].shape[-1])
        if inner != c.upper():
            x = moved[f"cos_{c}"] * x + moved[f"sin_{c}"] * np.roll(x, x.shape[-1] // 2, axis=-1)
        heads[c] = x
    out = reference.forward(t.operands._replace(**heads), t.options).out
    y = moved["Y"] if name == "Y" else affine(merge(out), moved["W_o"], moved.get("b_o"))
    return float(np.sum(moved["dY"] * y))


def _pairing(dout: NDArray, out: NDArray, dlse: NDArray | None, lse: NDArray) -> float:
    total = float(np.sum(dout * out))
    return total if dlse is None else total + float(np.sum(np.where(np.isfinite(lse), dlse * lse, 0.0)))


def _moved(t: Trace, name: str, step: float) -> NDArray:
    """The step whose tangent ``name`` is, where everything has moved by ``step`` along the tangents."""
    x, direction = t.operands, tangents_of(t)

    def along(value: Any, tangent: Any) -> Any:
        return value if tangent is None or value is None else value + step * tangent

    fields = {f: along(getattr(x, f), d) for f, d in zip(Tangents._fields, direction, strict=True)}
    moved: Operands = x._replace(**fields)
    dout, dlse = (along(value_of(t, name), value_of(t, f"{name}_dot")) for name in ("dO", "dL"))
    values, _ = compute(moved, t.options, dout, dlse)
    return values[name.removesuffix("_dot")]
