"""A trace as one self-contained page: template, style and script from ``page/``, and the numbers as JSON.

The page needs no network, and may not use one: its Content-Security-Policy allows the one style and the one script that
are in it, by their hashes, and nothing else. What users name (tokens, the title) is escaped, and never becomes markup.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail
from attngrad.explain.rules import RULES
from attngrad.explain.serial import jsonable
from attngrad.explain.template import fill, policy, text
from attngrad.explain.windows import check_place
from attngrad.reference.dense import visibility
from attngrad.reference.modifiers import MODIFIERS

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace


_HERE = "attngrad.explain"
SCRIPTS = ("model", "mistakes", "checks", "entries", "words", "view", "panel", "app")
WHOLE, WINDOW = 12, 8
"""Matrices of up to WHOLE rows and columns are shown whole; of larger ones, a window of WINDOW."""
WORK = 30_000_000
"""Products of numbers that the page may do each time something changes: about a quarter of a second."""
SOFTCAP = 1.5
"""The cap of the page's switch where the trace has none."""
_MODIFIERS = ("softcap",)
"""The modifiers of the scores that the script of the page computes."""
_JAVASCRIPT = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""What JSON has no number for, as a string that JavaScript reads."""
_STEPS = ("Q", "K", "V", "Z", "S", "L", "A", "O", "dO", "dV", "dA", "delta", "dS", "dZ", "dQ", "dK")


def page(trace: Trace, *, head: int = 0, batch: int = 0, title: str = "") -> str:
    """The page of one batch entry."""
    check_place("trace.to_html", trace, head, batch)
    for name in MODIFIERS:
        if name not in _MODIFIERS and getattr(trace.options, name) is not None:
            rule = "have options that the page computes"
            fail(ValueError, "trace.to_html", "trace", rule, repr(name), "Use trace.print, or save it as .tex.")
    style = "\n" + text(_HERE, "style.css")
    body = "\n".join(text(_HERE, f"{name}.js") for name in SCRIPTS)
    script = f'\n"use strict";\n(() => {{\n{body}\n}})();\n'
    parts = {
        "CSP": policy(style, script),
        "TITLE": html.escape(title or "Attention, forward and backward"),
        "SUMMARY": html.escape(trace.summary(switches=False)),
        "STYLE": style,
        "DATA": _embed(data(trace, head, batch)),
        "SCRIPT": script,
    }
    return fill(text(_HERE, "page.html"), parts)


def _embed(value: object) -> str:
    """JSON that no label can end: < and the line separators are written as escapes."""
    found = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def data(trace: Trace, head: int, batch: int) -> dict[str, Any]:
    """What the page computes from: the operands of one batch entry, the options, the rules."""
    x, o = trace.operands, trace.options

    def one(a: NDArray, heads: int) -> NDArray:
        """The heads of this batch entry."""
        found: NDArray = a.reshape(-1, heads, *a.shape[-2:])[batch]
        return found

    def scores(a: NDArray) -> NDArray:
        return one(np.array(np.broadcast_to(a, x.scores_shape)), x.heads)

    named: dict[str, NDArray | None] = {
        "q": one(x.q, x.heads),
        "k": one(x.k, x.heads // x.group),
        "v": one(x.v, x.heads // x.group),
        "dout": one(trace["dO"].value, x.heads) if "dO" in trace else np.ones((x.heads, *x.out_shape[-2:])),
        "mask": scores(visibility(x, dataclasses.replace(o, causal=False))),
        "bias": None if x.bias is None else scores(np.where(np.isfinite(x.bias), x.bias, 0.0)),
        "keep": scores(trace["M"].value) if "M" in trace else None,
        "dlse": one(trace["dL"].value[..., None], x.heads)[..., 0] if "dL" in trace else None,
        "sinks": x.sinks,
    }
    notes = [] if "dO" in trace else ["No dO was given: the loss is the sum of O."]
    arrays, head, notes = _fit({name: a for name, a in named.items() if a is not None}, head, x.group, notes)
    given = not bool(arrays["mask"].all())
    if not given:
        arrays["mask"][..., -1] = False  # what the switch hides: the last key, as padding would
    offsets = np.broadcast_to(x.offset, x.q.shape[:-3])
    if len(x.q.shape) > 3 and math.prod(x.q.shape[:-3]) > 1:
        notes.append(f"Batch entry {batch} of {math.prod(x.q.shape[:-3])}.")
    large = max(arrays[name].shape[axis] for name in ("q", "k", "v") for axis in (1, 2)) > WHOLE
    if large:
        notes.append(f"A window of {WINDOW} rows and columns of each matrix is shown; move it beside the switches.")
    tokens = None
    if trace.tokens is not None:
        tokens = {"i": trace.tokens[0][: arrays["q"].shape[1]], "j": trace.tokens[1][: arrays["k"].shape[1]]}
    rules = {r.name: r._asdict() for r in RULES if r.name in _STEPS}
    return {
        **dict.fromkeys(named),
        **{name: jsonable(a.astype(int) if a.dtype == bool else a, _JAVASCRIPT) for name, a in arrays.items()},
        "scale": o.scale,
        "softcap": SOFTCAP if o.softcap is None else o.softcap,
        "offset": int(offsets.reshape(-1)[batch]),
        "given": {"mask": given},
        "on": {
            "causal": o.causal,
            "mask": given,
            "gqa": x.group > 1,
            "scale": True,
            "softcap": o.softcap is not None,
        },
        "head": head,
        "limit": WINDOW if large else WHOLE,
        "tokens": tokens,
        "rules": rules,
        "notice": " ".join(notes),
    }


_AXES = {"q": "hi", "k": "gj", "v": "gj", "dout": "hi", "dlse": "hi", "sinks": "h"}
"""The axes of the arrays of a page: h query head, g key head, i query, j key; of others, hij."""


def _fit(
    arrays: dict[str, NDArray], head: int, group: int, notes: list[str]
) -> tuple[dict[str, NDArray], int, list[str]]:
    """Cut what is too much for a page to compute: to the group of ``head``, then to the first tokens; and say so."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    heads, t, s = q.shape[0], q.shape[1], k.shape[1]
    each = 5 * (q.shape[-1] + v.shape[-1])  # products per score
    if each * heads * t * s <= WORK:
        return arrays, head, notes
    part: dict[str, slice] = {}
    if heads > group:
        own = head // group
        first = own * group
        part |= {"h": slice(first, first + group), "g": slice(own, own + 1)}
        notes = [*notes, f"Large input: heads {first} to {first + group - 1} of {heads} are on this page."]
        head -= first
    if each * group * t * s > WORK:
        n = max(WINDOW, int(math.sqrt(WORK / (each * group))))
        rows, columns = min(t, n), min(s, n)
        part |= {"i": slice(rows), "j": slice(columns)}
        words = f"Large input: the first {rows} of {t} queries and {columns} of {s} keys are on this page"
        notes = [*notes, f"{words}, and its numbers are those of this part."]

    def own_part(name: str, a: NDArray) -> NDArray:
        return np.array(a[tuple(part.get(axis, slice(None)) for axis in _AXES.get(name, "hij"))])

    return {name: own_part(name, a) for name, a in arrays.items()}, head, notes
