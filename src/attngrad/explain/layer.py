"""The trace of a layer: the projections around attention, their gradients, and everything in between, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.binding import bind
from attngrad.core.options import OptionArguments
from attngrad.explain.rules import RULES, Rule, resolve
from attngrad.explain.tokens import Tokens
from attngrad.explain.trace import Trace
from attngrad.explain.values import compute, widen
from attngrad.layers.linear import affine, affine_vjp, merge, split
from attngrad.layers.rope import Rotation, rotation

if TYPE_CHECKING:
    from attngrad.layers import MultiHeadAttention
    from attngrad.layers.checks import Call


_INPUT = {"query": "X", "key": "X_k", "value": "X_v"}
_ROW = {"q": "i", "k": "j", "v": "j"}


def _rules(source: Mapping[str, str], params: Mapping[str, Any], rope: bool) -> tuple[list[Rule], list[Rule]]:
    """The rules of the projections: those before attention, and those after it."""
    before = [Rule(_INPUT[name], "", "forward", "im", f"the {name}") for name in dict.fromkeys(source.values())]
    for c in "qkvo":
        before.append(Rule(f"W_{c}", "", "forward", "mn" if c != "o" else "nm", "a weight"))
        if f"b_{c}" in params:
            before.append(Rule(f"b_{c}", "", "forward", "n" if c != "o" else "m", "a bias"))
    after: list[Rule] = []
    inputs: dict[str, list[tuple[str, str]]] = {}
    for c, name in source.items():
        big, row, column = c.upper(), _ROW[c], "e" if c == "v" else "d"
        x, bias = _INPUT[name], f"b_{c}" in params
        product = f"{x} W_{c}{f' + b_{c}' if bias else ''}, by heads"
        entry = f"sum_m {x}[{row}m] W_{c}[mn]{f' + b_{c}[n]' if bias else ''}"
        turns = rope and c != "v"
        inner = f"{big}_in" if turns else big
        before.append(Rule(inner, "", "forward", row + column, product, entry))
        if turns:
            cell, partner = f"[{row}{column}]", f"[{row}p]"
            before += [
                Rule(f"cos_{c}", "", "forward", row + column, "the cosines of the positions"),
                Rule(f"sin_{c}", "", "forward", row + column, "the sines of the positions, with their signs"),
                Rule(
                    big,
                    "",
                    "forward",
                    row + column,
                    f"rope({inner})",
                    f"cos_{c}{cell} {inner}{cell} + sin_{c}{cell} {inner}{partner}",
                ),
            ]
            after.append(
                Rule(
                    f"d{inner}",
                    "",
                    "backward",
                    row + column,
                    f"rope^T(d{big})",
                    f"cos_{c}{cell} d{big}{cell} - sin_{c}{cell} d{big}{partner}",
                )
            )
        after.append(Rule(f"dW_{c}", "", "backward", "mn", f"{x}^T d{inner}", f"sum_bi {x}[im] d{inner}[in]"))
        if bias:
            after.append(Rule(f"db_{c}", "", "backward", "n", f"sum(d{inner})", f"sum_bi d{inner}[in]"))
        inputs.setdefault(x, []).append((f"d{inner}", f"W_{c}"))
    for x, parts in inputs.items():
        formula = " + ".join(f"{d} {w}^T" for d, w in parts)
        entry = " + ".join(f"sum_n {d}[in] {w}[mn]" for d, w in parts)
        after.append(Rule(f"d{x}", "", "backward", "im", formula, entry))
    return before, after


def _output_rules(bias: bool) -> tuple[Rule, list[Rule]]:
    y = Rule(
        "Y",
        "",
        "forward",
        "im",
        f"O W_o{' + b_o' if bias else ''}, heads merged",
        f"sum_n O[in] W_o[nm]{' + b_o[m]' if bias else ''}",
    )
    back = [Rule("dY", "", "backward", "im", "the loss gradient at Y, given")]
    back.append(Rule("dW_o", "", "backward", "nm", "O^T dY", "sum_bi O[in] dY[im]"))
    if bias:
        back.append(Rule("db_o", "", "backward", "m", "sum(dY)", "sum_bi dY[im]"))
    back.append(Rule("dO", "", "backward", "ie", "dY W_o^T, by heads", "sum_m dY[im] W_o[nm]"))
    return y, back


def _turned(turn: Rotation, shape: tuple[int, ...]) -> tuple[NDArray, NDArray]:
    """cos and signed sin, of the shape of the heads: y_d = x_d cos_d + x_p sin_d for the partner p of d."""
    cos = np.concatenate([turn.cos, turn.cos], axis=-1)
    sin = np.concatenate([-turn.sin, turn.sin], axis=-1)
    return np.broadcast_to(cos, shape), np.broadcast_to(sin, shape)


def trace_layer(
    layer: MultiHeadAttention, call: Call, dy: NDArray | None, options: OptionArguments, tokens: Tokens | None
) -> Trace:
    """The trace of one checked call of a layer; the layer itself is left as it is."""
    x = {name: a.astype(np.float64) for name, a in call.inputs.items()}
    w = {name: p.astype(np.float64) for name, p in layer.params.items()}
    values: dict[str, NDArray] = {_INPUT[name]: a for name, a in x.items()}
    values |= {f"{'W' if name[0] == 'w' else 'b'}{name[1:]}": p for name, p in w.items()}
    turns: dict[str, Rotation] = {}
    heads: dict[str, NDArray] = {}
    with np.errstate(all="ignore"):
        for c, name in call.source.items():
            heads[c] = split(affine(x[name], w[f"w_{c}"], w.get(f"b_{c}")), layer.d_head)
            if layer.rope is not None and c != "v":
                start = call.offset if c == "q" else 0
                turns[c] = rotation(layer.rope, layer.d_head, x[name].shape[-2], start, np.float64)
                values[f"{c.upper()}_in"] = heads[c]
                values[f"cos_{c}"], values[f"sin_{c}"] = _turned(turns[c], heads[c].shape)
                heads[c] = turns[c].apply(heads[c])
        wide = {n: a.astype(np.float64) if n in ("bias", "sinks") and a is not None else a for n, a in options.items()}  # type: ignore[attr-defined]
        operands, o, _ = bind("MultiHeadAttention.trace", heads["q"], heads["k"], heads["v"], wide)
        dout = None
        if dy is not None:
            wide_dy = dy.astype(np.float64)
            values["dY"] = wide_dy
        operands = widen(operands)
        if dy is not None:
            dout = np.ascontiguousarray(split(affine(wide_dy, w["w_o"].T), layer.d_head))
        inner, flags = compute(operands, o, dout)
        values |= inner
        merged = merge(inner["O"])
        values["Y"] = affine(merged, w["w_o"], w.get("b_o"))
        if dy is not None:
            _, values["dW_o"], values["db_o"] = affine_vjp(merged, w["w_o"], wide_dy)
            for c, name in call.source.items():
                dheads = inner[f"d{c.upper()}"]
                if c in turns:
                    dheads = values[f"d{c.upper()}_in"] = turns[c].invert(dheads)
                dx, values[f"dW_{c}"], values[f"db_{c}"] = affine_vjp(x[name], w[f"w_{c}"], merge(dheads))
                key = f"d{_INPUT[name]}"
                values[key] = values[key] + dx if key in values else dx
    before, after = _rules(call.source, layer.params, layer.rope is not None)
    y, back = _output_rules("b_o" in layer.params)
    # attention's own rules for what a layer computes are replaced
    made = {rule.name for rule in (*before, *back)}
    body = [rule for rule in RULES if rule.name not in made]
    forward = [rule for rule in body if rule.stage == "forward"]
    backward = [rule for rule in body if rule.stage != "forward"]
    rules = resolve([*before, *forward, y, *back, *backward, *after], flags)
    return Trace(operands, o, values, rules, tokens)
