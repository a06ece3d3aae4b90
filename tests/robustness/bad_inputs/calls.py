"""A good call of attention and its derivatives, to be spoiled in one place; and the public functions that take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import attngrad
from attngrad import MultiHeadAttention, reference

FLOATING = (
    "q",
    "k",
    "v",
    "bias",
    "sinks",
    "dout",
    "dlse",
    "dout_dot",
    "q_dot",
    "k_dot",
    "v_dot",
    "bias_dot",
    "sinks_dot",
)
OTHERS = ("mask", "q_segments", "k_segments", "offset")
OPTIONAL = frozenset((*FLOATING[3:], *OTHERS))


@dataclass
class Call:
    """All arguments by name; those that are None are not given."""

    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def __setitem__(self, name: str, x: Any) -> None:
        self.arguments[name] = x

    def given(self) -> dict[str, Any]:
        """The keyword options, with the arrays among them."""
        more = {name: self[name] for name in ("bias", "sinks", "mask", "offset") if self[name] is not None}
        if self["q_segments"] is not None or self["k_segments"] is not None:
            more["segments"] = (self["q_segments"], self["k_segments"])
        return more | self.options

    def plain(self) -> Call:
        """The same numbers in plain, contiguous, writable arrays of native byte order."""
        return Call(
            {name: _plain(x) for name, x in self.arguments.items()}, {n: _plain(x) for n, x in self.options.items()}
        )

    def arrays(self) -> Iterator[np.ndarray]:
        """Every NumPy array of the call."""
        for x in (*self.arguments.values(), *self.options.values()):
            for a in x if isinstance(x, tuple) else (x,):
                if issubclass(type(a), np.ndarray):
                    yield a


def _plain(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_plain, x))
    if not issubclass(type(x), np.ndarray):
        return x
    base = np.array(x, copy=True, order="C", subok=False)
    return base.astype(base.dtype.newbyteorder("="))


def good(full: bool = False, shape: tuple[int, ...] = (2, 4, 2, 3, 5, 4, 6)) -> Call:
    """A call of float64 arrays; with every array among the options where ``full``."""
    b, hq, hk, t, s, d, e = shape
    rng = np.random.default_rng(0)
    sizes = {"q": (b, hq, t, d), "k": (b, hk, s, d), "v": (b, hk, s, e), "dout": (b, hq, t, e), "dlse": (b, hq, t)}
    sizes |= {"dout_dot": sizes["dout"], "q_dot": sizes["q"], "k_dot": sizes["k"], "v_dot": sizes["v"]}
    if full:
        sizes |= {"bias": (b, hq, t, s), "sinks": (hq,), "bias_dot": (b, hq, t, s), "sinks_dot": (hq,)}
    call = Call({name: rng.standard_normal(size) for name, size in sizes.items()})
    if full:
        call["mask"] = rng.random((b, hq, t, s)) > 0.3
        call["q_segments"], call["k_segments"] = rng.integers(0, 2, (b, t)), rng.integers(0, 2, (b, s))
        call["offset"] = rng.integers(0, 3, (b,))
        call.options["causal"] = True
    return call


# --- the functions ----------------------------------------------------------------------------------------------------

Results = dict[str, Any]


def attention(c: Call, module: Any = attngrad) -> Results:
    out, lse = module.attention(c["q"], c["k"], c["v"], **c.given() | {"return_lse": True})
    return {"out": out, "lse": lse}


def vjp(c: Call, module: Any = attngrad) -> Results:
    out, pullback = module.vjp(c["q"], c["k"], c["v"], **c.given())
    return {"out": out} | _named("d{}", pullback(c["dout"], c["dlse"]))


def jvp(c: Call, module: Any = attngrad) -> Results:
    out, out_dot = module.jvp(*_moving(c), **_dots(c), **c.given())
    return {"out": out, "out_dot": out_dot}


def hvp(c: Call, module: Any = attngrad) -> Results:
    more = {"dlse": c["dlse"]} | _dots(c) | c.given()
    grads, grads_dot = module.hvp(*_moving(c), c["dout"], c["dout_dot"], **more)
    return _named("d{}", grads) | _named("d{}_dot", grads_dot)


def jacobian(c: Call, module: Any = attngrad) -> Results:
    return {"jacobian": module.jacobian(c["q"], c["k"], c["v"], wrt="k", **c.given())}


def attention_weights(c: Call, module: Any = attngrad) -> Results:
    return {"weights": module.attention_weights(c["q"], c["k"], **c.given())}


def trace(c: Call, module: Any = attngrad) -> Results:
    if module is reference:
        return hvp(c, reference) | {"out": attention(c, reference)["out"]}
    dots = tuple(c[f"{name}_dot"] for name in ("q", "k", "v", "bias", "sinks"))
    more = {"dlse": c["dlse"], "dout_dot": c["dout_dot"], "tangents": dots}
    t = attngrad.trace(c["q"], c["k"], c["v"], c["dout"], **more, **c.given())
    names = {"q": "Q", "k": "K", "v": "V", "bias": "bias", "sinks": "sigma"}
    found = {f"d{n}{dot}": t[f"d{m}{dot}"].value for n, m in names.items() for dot in ("", "_dot") if f"d{m}" in t}
    return found | {"out": t["O"].value}


def _moving(c: Call) -> tuple[Any, Any]:
    return (c["q"], c["k"], c["v"]), (c["q_dot"], c["k_dot"], c["v_dot"])


def _dots(c: Call) -> Results:
    return {name: c[name] for name in ("bias_dot", "sinks_dot")}


def _named(form: str, grads: Any) -> Results:
    return {form.format(name): g for name, g in grads._asdict().items() if g is not None}


_DOTS = ("q_dot", "k_dot", "v_dot", "bias_dot", "sinks_dot")
INPUTS = ("q", "k", "v", "bias", "sinks")
FUNCTIONS: dict[str, tuple[Callable[..., Results], tuple[str, ...]]] = {
    "attention": (attention, INPUTS),
    "vjp": (vjp, (*INPUTS, "dout", "dlse")),
    "jvp": (jvp, (*INPUTS, *_DOTS)),
    "hvp": (hvp, (*INPUTS, *_DOTS, "dout", "dlse", "dout_dot")),
    "jacobian": (jacobian, INPUTS),
    "attention_weights": (attention_weights, ("q", "k", "bias", "sinks")),
    "trace": (trace, (*INPUTS, "q_dot", "dout", "dlse")),
}
"""The public functions on arrays, and those of their arguments that are floating arrays."""

# --- the layer --------------------------------------------------------------------------------------------------------

LAYER = MultiHeadAttention(8, 4, num_kv_heads=2, bias=True, dtype=np.float64, rng=5)
LAYER_INPUTS = ("query", "key", "value", "dy", "query_dot", "dy_dot")


def good_layer(full: bool = False) -> Call:
    """A call of the layer, whose options are those of ``good``."""
    rng = np.random.default_rng(1)
    call = good(full)
    kept = {name: call[name] for name in ("bias", "sinks", *OTHERS)}
    sizes = {
        "query": (2, 3, 8),
        "key": (2, 5, 8),
        "value": (2, 5, 8),
        "dy": (2, 3, 8),
        "query_dot": (2, 3, 8),
        "dy_dot": (2, 3, 8),
    }
    return Call({name: rng.standard_normal(size) for name, size in sizes.items()} | kept, call.options)


def layer_backward(c: Call) -> Results:
    """Forward, backward and the gradients of the parameters."""
    LAYER.zero_grad()
    y = LAYER(c["query"], c["key"], c["value"], **c.given())
    found = LAYER.backward(c["dy"])
    return {"y": y} | dict(enumerate(found)) | {name: g.copy() for name, g in LAYER.grads.items()}


def layer_hvp(c: Call) -> Results:
    inputs, dots = (c["query"], c["key"], c["value"]), (c["query_dot"], None, None)
    grads, grads_dot = LAYER.hvp(inputs, dots, c["dy"], c["dy_dot"], **c.given())
    return dict(enumerate((*grads.inputs, *grads_dot.inputs))) | grads_dot.params


LAYER_FUNCTIONS: dict[str, Callable[[Call], Results]] = {"backward": layer_backward, "hvp": layer_hvp}
