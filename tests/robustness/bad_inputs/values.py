"""Values and sizes: numbers that are awkward, axes that are empty or too long. ``do(call)`` spoils a good call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bad_inputs.calls import good
from bad_inputs.row import Row

TINY = 5e-324
LARGEST = float(np.finfo(np.float64).max)


def put(name: str, value: float, *index: Any) -> Callable[[Any], None]:
    """``value`` at ``index`` of the argument; a bias is made where there is none."""

    def do(call: Any) -> None:
        if call[name] is None:
            call[name] = np.zeros((3, 5)) if name == "bias" else np.zeros(4)
        call[name][index] = value

    return do


def times(factor: float, *names: str) -> Callable[[Any], None]:
    def do(call: Any) -> None:
        for name in names:
            call[name] = call[name] * factor

    return do


def one_array(call: Any) -> None:
    """q, k, v, dout and the tangents are one and the same array."""
    x = call["q"]
    call.arguments.update(dict.fromkeys(("q", "k", "v", "dout", "dout_dot", "q_dot", "k_dot", "v_dot"), x))


AT = (0, 1, 2, 3)
KEY = (1, 0, 4, 2)
VALUES = [
    Row("q: nan", put("q", np.nan, *AT)),
    Row("q: inf", put("q", np.inf, *AT)),
    Row("q: -inf", put("q", -np.inf, *AT)),
    Row("k: nan", put("k", np.nan, *KEY)),
    Row("k: inf", put("k", np.inf, *KEY)),
    Row("v: nan", put("v", np.nan, *KEY)),
    Row("v: inf", put("v", np.inf, *KEY)),
    Row("v: -inf", put("v", -np.inf, *KEY)),
    Row("q: all subnormal", times(1e-310, "q")),
    Row("k: all subnormal", times(1e-310, "k")),
    Row("v: all subnormal", times(1e-310, "v")),
    Row("q, k and v: the smallest number", times(TINY, "q", "k", "v")),
    Row("q and k: negative zeros", times(-0.0, "q", "k")),
    Row("v: huge", times(1e300, "v")),
    Row("bias: -inf", put("bias", -np.inf, 1, 2)),
    Row("bias: a row of -inf", put("bias", -np.inf, 1)),
    Row("bias: all -inf", put("bias", -np.inf, ...)),
    Row("bias: inf", put("bias", np.inf, 1, 2)),
    Row("bias: nan", put("bias", np.nan, 1, 2)),
    Row("bias: the largest number", put("bias", LARGEST, 1, 2)),
    Row("bias: a row of the largest number", put("bias", LARGEST, 1)),
    Row("bias: minus the largest number", put("bias", -LARGEST, 1, 2)),
    Row("bias: a row of minus the largest number", put("bias", -LARGEST, 1)),
    Row("bias: subnormal", put("bias", TINY, 1, 2)),
    Row("sinks: -inf", put("sinks", -np.inf, 1)),
    Row("sinks: inf", put("sinks", np.inf, 1)),
    Row("sinks: nan", put("sinks", np.nan, 1)),
    Row("sinks: the largest number", put("sinks", LARGEST, 1)),
    Row("sinks: minus the largest number", put("sinks", -LARGEST, 1)),
    Row("dout: nan", put("dout", np.nan, *AT)),
    Row("dout: inf", put("dout", np.inf, *AT)),
    Row("dout: subnormal", times(1e-310, "dout")),
    Row("dlse: inf", put("dlse", np.inf, 0, 1, 2)),
    Row("q_dot: nan", put("q_dot", np.nan, *AT)),
    Row("v_dot: inf", put("v_dot", np.inf, *KEY)),
    Row("tangents: huge", times(1e150, "q_dot", "k_dot", "v_dot")),
    Row("one array for all", one_array),
]

SCORES = [
    Row("scores of 1e300", times(1e150, "q", "k")),
    Row("scores that overflow to inf", lambda c: c.arguments.update(q=abs(c["q"]) * 1e200, k=abs(c["k"]) * 1e200)),
    Row("scores that overflow to -inf", lambda c: c.arguments.update(q=abs(c["q"]) * -1e200, k=abs(c["k"]) * 1e200)),
    Row("scores of -inf by a query of -inf", lambda c: c.arguments.update(q=c["q"] - np.inf, k=abs(c["k"]))),
]  # fmt: skip
"""Too large for their derivatives to have digits: forward passes."""

# --- sizes: (b, hq, hk, t, s, d, e) ---------------------------------------------------------------------------------------

_EMPTY: dict[str, tuple[int, ...]] = {
    "no batch entry": (0, 4, 2, 3, 5, 4, 6),
    "no heads": (2, 0, 0, 3, 5, 4, 6),
    "no query heads": (2, 0, 2, 3, 5, 4, 6),
    "no queries": (2, 4, 2, 0, 5, 4, 6),
    "no keys": (2, 4, 2, 3, 0, 4, 6),
    "neither queries nor keys": (2, 4, 2, 0, 0, 4, 6),
    "no features": (2, 4, 2, 3, 5, 0, 6),
    "no features, one query": (1, 4, 1, 1, 70, 0, 6),
    "no features of the values": (2, 4, 2, 3, 5, 4, 0),
    "no features of the values, one query": (1, 4, 1, 1, 70, 4, 0),
    "no features at all": (2, 4, 2, 3, 5, 0, 0),
    "nothing": (0, 0, 0, 0, 0, 0, 0),
    "one of everything": (1, 1, 1, 1, 1, 1, 1),
    "primes": (1, 3, 1, 7, 13, 11, 5),
}


def of_shape(shape: tuple[int, ...]) -> Callable[[Any], None]:
    return lambda call: call.arguments.update(good(full=True, shape=shape).arguments)


EMPTY = [Row(name, of_shape(shape)) for name, shape in _EMPTY.items()]


def zeros(*shape: int) -> Any:
    """An array of any size that takes no memory."""
    return np.broadcast_to(np.zeros(()), shape)


def sized(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> Callable[[Any], None]:
    def do(call: Any) -> None:
        call.arguments.clear()
        call.arguments.update(q=zeros(*q), k=zeros(*k), v=zeros(*v), dlse=zeros(*q[:-1]))

    return do


FITS = r"takes \d+ bytes|Unable to allocate|array is too big"
TOO_MANY = r"must have fewer than 2\*\*31 tokens \(axis -2\) and heads \(axis -3\)"
TOO_BIG = (MemoryError, ValueError)
LARGE = [
    Row("tokens: 2**31", sized((2**31, 1), (1, 1), (1, 1)), ValueError, f"q {TOO_MANY}"),
    Row("keys: 2**31", sized((1, 1), (2**31, 1), (2**31, 1)), ValueError, f"k {TOO_MANY}"),
    Row("keys: 2**40", sized((1, 3, 1), (1, 2**40, 1), (1, 2**40, 1)), ValueError, f"k {TOO_MANY}"),
    Row("heads: 2**31", sized((2**31, 1, 1), (1, 1, 1), (1, 1, 1)), ValueError, f"q {TOO_MANY}"),
    Row("tokens: 2**59, without features", sized((2**59, 0), (1, 0), (1, 0)), ValueError, f"q {TOO_MANY}"),
    Row("leading axes: 2**58 in product", sized((2**29, 2**29, 1, 1, 1), (2**29, 2**29, 1, 1, 1), (2**29, 2**29, 1, 1, 1)), TOO_BIG, FITS),
    Row("a result of 2**50 numbers", sized((2**20, 2**30, 1), (1, 1, 1), (1, 1, 1)), TOO_BIG, FITS),
]  # fmt: skip
LARGE_RESULTS = [
    Row("a result of 2**80 numbers", sized((2**30, 1), (1, 1), (1, 2**50)), TOO_BIG, FITS),
    Row("a result of 2**64 bytes", sized((2**30, 1), (1, 1), (1, 2**31)), TOO_BIG, FITS),
    Row("no batch entry, and a shape that no array has", sized((0, 1, 2**30, 1), (0, 1, 1, 1), (0, 1, 1, 2**50)), TOO_BIG, FITS),
]  # fmt: skip
