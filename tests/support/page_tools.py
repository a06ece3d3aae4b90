"""What the tests of the page share: a page in a tab, an example, and what Python makes of the same switches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import attngrad
from attngrad import reference
from attngrad.core.binding import bind
from attngrad.reference.dense import visibility

NAMES = ("Z", "S", "L", "A", "O", "dO", "dA", "delta", "dS", "dZ", "dQ", "dK", "dV")
ALL = ("Q", "K", "V", "Z", "S", "A", "O", "L", "dO", "dA", "dS", "dQ", "dK", "dV")
SWITCHES = ("causal", "mask", "gqa", "scale", "softcap")
TOKENS = ["the", "cat", "sat", "down"]


class Page:
    """A page in a tab of its own, with everything that its console said."""

    def __init__(self, browser: Any, path: Path, fragment: str = "", **context: Any) -> None:
        settings = {"viewport": {"width": 1440, "height": 900}, "offline": True, "reduced_motion": "reduce"} | context
        self.context = browser.new_context(**settings)
        self.tab = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri() + fragment)

    def numbers(self, which: str = "shown") -> dict[str, Any]:
        """The numbers of all heads; -inf comes as None through JSON, so it is sent as text."""
        text = self.tab.evaluate(
            f"JSON.stringify(window.attngrad.{which}(), (key, x) => "
            "typeof x === 'number' && !Number.isFinite(x) ? String(x).replace('Infinity', 'inf') : x)"
        )
        return json.loads(text)

    def state(self) -> Any:
        return self.tab.evaluate("window.attngrad.state()")

    def checks(self) -> dict[str, bool]:
        return {c["claim"]: c["holds"] for c in self.tab.evaluate("window.attngrad.checks()")}

    def cell(self, name: str, i: int, j: int = 0) -> Any:
        return self.tab.locator(f'#step-{name} td[data-i="{i}"][data-j="{j}"]')


def example(heads: int = 2, key_heads: int = 2, **options: Any) -> attngrad.Trace:
    """Four tokens, three features."""
    rng = np.random.default_rng(7)
    q, dout = rng.standard_normal((2, heads, 4, 3))
    k, v = rng.standard_normal((2, key_heads, 4, 3))
    return attngrad.trace(q, k, v, dout, tokens=TOKENS, **options)


def by_python(t: attngrad.Trace, on: dict[str, bool], batch: int = 0) -> dict[str, Any]:
    """What Python makes of the operands of a page under its switches; one list a head, as the page has it."""
    x, o = t.operands, t.options
    lead = len(x.q.shape) - 3

    def one(a: Any) -> Any:
        return a.reshape(-1, *a.shape[lead:])[batch]

    q, k, v, dout = (one(a) for a in (x.q, x.k, x.v, t["dO"].value))
    group = x.heads // k.shape[0]
    if group > 1 and not on["gqa"]:
        k, v = (np.repeat(a, group, axis=0) for a in (k, v))
    if group == 1 and on["gqa"]:
        k, v = k[:1], v[:1]
    visible = one(np.broadcast_to(visibility(x, type(o)(1.0, window=o.window)), x.scores_shape)).copy()
    if visible.all():
        visible[..., -1] = False
    options: dict[str, Any] = {"scale": o.scale if on["scale"] else 1.0, "causal": on["causal"]}
    if isinstance(x.offset, int):
        options["offset"] = x.offset
    else:
        options["offset"] = int(np.broadcast_to(x.offset, x.q.shape[:-3]).reshape(-1)[batch])
    if on["softcap"]:
        options["softcap"] = 1.5 if o.softcap is None else o.softcap
    if on["mask"]:
        options["mask"] = visible
    if x.bias is not None:
        full = one(np.broadcast_to(x.bias, x.scores_shape))
        options["bias"] = np.where(np.isfinite(full), full, 0.0)
    if x.sinks is not None:
        options["sinks"] = x.sinks
    operands, bound, _ = bind("test", q, k, v, options)
    f = reference.forward(operands, bound)
    if o.dropout:
        keep = one(t["M"].value)
        f = f._replace(keep=keep, out=(f.weights * keep) @ np.repeat(v, x.heads // k.shape[0], axis=0))
    b = reference.backward(operands, bound, f, dout, one(t["dL"].value) if "dL" in t else None)
    return {
        "Z": f.z,
        "S": f.scores,
        "L": f.lse[..., None],
        "A": f.weights,
        "O": f.out,
        "dO": dout,
        "dA": b.dweights,
        "delta": b.delta[..., None],
        "dS": b.dscores,
        "dZ": b.dz,
        "dQ": b.grads.q,
        "dK": b.grads.k,
        "dV": b.grads.v,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    for name in NAMES:
        numbers = np.array(found[name], dtype=object).astype(float)
        assert numbers.shape == expected[name].shape, name
        np.testing.assert_allclose(numbers, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
