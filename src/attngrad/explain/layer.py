"""The trace of a layer: the projections around attention, their gradients, and everything in between, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.binding import bind
from attngrad.core.options import OptionArguments
from attngrad.explain.places import Tokens
from attngrad.explain.rules import RULES, Rule, resolve
from attngrad.explain.trace import Trace
from attngrad.explain.values import compute, widen
from attngrad.layers.linear import affine, affine_vjp, merge, split

if TYPE_CHECKING:
    from attngrad.layers.projections import Projections
    from attngrad.layers.rope import Rotation


_INPUT = {"query": "X", "key": "X_k", "value": "X_v"}
_ROW = {"q": "i", "k": "j", "v": "j"}


def _rule(stage: str, name: str, letters: str, formula: str, entry: str = "") -> Rule:
    return Rule(name, "", stage, letters, formula, entry)


_forward, _backward = partial(_rule, "forward"), partial(_rule, "backward")


def _rules(source: Mapping[str, str], params: Mapping[str, Any], rope: bool) -> tuple[list[Rule], list[Rule]]:
    """The rules of the projections: those before attention, and those after it."""
    before = [_forward(_INPUT[name], "im", f"the {name}") for name in dict.fromkeys(source.values())]
    for c in "qkvo":
        before.append(_forward(f"W_{c}", "mn" if c != "o" else "nm", "a weight"))
        if f"b_{c}" in params:
            before.append(_forward(f"b_{c}", "n" if c != "o" else "m", "a bias"))
    after: list[Rule] = []
    inputs: dict[str, list[tuple[str, str]]] = {}
    for c, name in source.items():
        big, row = c.upper(), _ROW[c]
        letters = row + ("e" if c == "v" else "d")
        x, bias = _INPUT[name], f"b_{c}" in params
        turns = rope and c != "v"
        inner = f"{big}_in" if turns else big
        product = f"{x} W_{c}{f' + b_{c}' if bias else ''}, by heads"
        entry = f"sum_m {x}[{row}m] W_{c}[mn]{f' + b_{c}[n]' if bias else ''}"
        before.append(_forward(inner, letters, product, entry))
        if turns:
            cos, sin, at, partner = f"cos_{c}[{letters}]", f"sin_{c}[{letters}]", f"[{letters}]", f"[{row}p]"
            turned = f"{cos} {inner}{at} + {sin} {inner}{partner}"
            before.append(_forward(f"cos_{c}", letters, "the cosines of the positions"))
            before.append(_forward(f"sin_{c}", letters, "the sines of the positions, with their signs"))
            before.append(_forward(big, letters, f"rope({inner})", turned))
            back = f"{cos} d{big}{at} - {sin} d{big}{partner}"
            after.append(_backward(f"d{inner}", letters, f"rope^T(d{big})", back))
        after.append(_backward(f"dW_{c}", "mn", f"{x}^T d{inner}", f"sum_bi {x}[im] d{inner}[in]"))
        if bias:
            after.append(_backward(f"db_{c}", "n", f"sum(d{inner})", f"sum_bi d{inner}[in]"))
        inputs.setdefault(x, []).append((f"d{inner}", f"W_{c}"))
    for x, parts in inputs.items():
        formula = " + ".join(f"{d} {w}^T" for d, w in parts)
        entry = " + ".join(f"sum_n {d}[in] {w}[mn]" for d, w in parts)
        after.append(_backward(f"d{x}", "im", formula, entry))
    return before, after


def _output_rules(bias: bool) -> tuple[Rule, list[Rule]]:
    formula, entry = ("O W_o + b_o", "sum_n O[in] W_o[nm] + b_o[m]") if bias else ("O W_o", "sum_n O[in] W_o[nm]")
    back = [
        _backward("dY", "im", "the loss gradient at Y, given"),
        _backward("dW_o", "nm", "O^T dY", "sum_bi O[in] dY[im]"),
        *([_backward("db_o", "m", "sum(dY)", "sum_bi dY[im]")] if bias else []),
        _backward("dO", "ie", "dY W_o^T, by heads", "sum_m dY[im] W_o[nm]"),
    ]
    return _forward("Y", "im", f"{formula}, heads merged", entry), back


def _turned(turn: Rotation, shape: tuple[int, ...]) -> tuple[NDArray, NDArray]:
    """cos and signed sin, of the shape of the heads: y_d = x_d cos_d + x_p sin_d for the partner p of d."""
    cos = np.concatenate([turn.cos, turn.cos], axis=-1)
    sin = np.concatenate([-turn.sin, turn.sin], axis=-1)
    return np.broadcast_to(cos, shape), np.broadcast_to(sin, shape)


def trace_layer(p: Projections, dy: NDArray | None, options: OptionArguments, tokens: Tokens | None) -> Trace:
    """The trace of one checked call of a layer, its projections in float64."""
    values: dict[str, NDArray] = {_INPUT[name]: a for name, a in p.x.items()}
    values |= {f"{'W' if name[0] == 'w' else 'b'}{name[1:]}": a for name, a in p.w.items()}
    w_o = p.w["w_o"]
    heads: dict[str, NDArray] = {}
    with np.errstate(all="ignore"):
        for c, name in p.source.items():
            heads[c] = split(affine(p.x[name], p.w[f"w_{c}"], p.w.get(f"b_{c}")), p.d_head)
            if c in p.turns:
                values[f"{c.upper()}_in"] = heads[c]
                values[f"cos_{c}"], values[f"sin_{c}"] = _turned(p.turns[c], heads[c].shape)
                heads[c] = p.turns[c].apply(heads[c])
        wide: dict[str, Any] = dict(options)
        wide |= {n: np.asarray(wide[n], np.float64) for n in ("bias", "sinks") if wide.get(n) is not None}
        operands, o, _ = bind("MultiHeadAttention.trace", heads["q"], heads["k"], heads["v"], wide, convert=True)
        operands = widen(operands)
        dout = None if dy is None else np.ascontiguousarray(split(affine(dy, w_o.T), p.d_head))
        inner, flags = compute(operands, o, dout)
        values |= inner
        merged = merge(inner["O"])
        values["Y"] = affine(merged, w_o, p.w.get("b_o"))
        if dy is not None:
            values["dY"] = dy
            _, values["dW_o"], values["db_o"] = affine_vjp(merged, w_o, dy)
            for c, name in p.source.items():
                dheads = inner[f"d{c.upper()}"]
                if c in p.turns:
                    dheads = values[f"d{c.upper()}_in"] = p.turns[c].invert(dheads)
                dx, values[f"dW_{c}"], values[f"db_{c}"] = affine_vjp(p.x[name], p.w[f"w_{c}"], merge(dheads))
                key = f"d{_INPUT[name]}"
                values[key] = values[key] + dx if key in values else dx
    before, after = _rules(p.source, p.w, bool(p.turns))
    y, back = _output_rules("b_o" in p.w)
    # attention's own rules for what a layer computes are replaced
    made = {rule.name for rule in (*before, *back)}
    body = [rule for rule in RULES if rule.name not in made]
    first, rest = ([rule for rule in body if (rule.stage == "forward") == is_first] for is_first in (True, False))
    rules = resolve([*before, *first, y, *back, *rest, *after], flags)
    return Trace(operands, o, values, rules, tokens)
