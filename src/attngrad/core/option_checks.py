"""The checks of single options, ``check(function, value, x)``: the value as Options and Operands hold it, or an error.

``x`` are the operands as far as they are known: q, k and v, arrays or Specs. What options ask of one another is in
``seed_beside`` and ``magnitudes``.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np

from attngrad.core import layouts
from attngrad.core.arrays import Array, is_array, is_boolean, is_integer, kind_of, namespace
from attngrad.core.checks import (
    check_array,
    check_broadcast,
    check_flag,
    check_integer,
    check_real,
    fail,
    shape_of,
)
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.spec import Spec

FAR = 2**61
"""Offsets stay below this, and sides of a window below twice this: a position and a side then fit into 64 bits."""
_POWERS = {np.dtype(np.float64): 1000, np.dtype(np.float32): 100}
"""A softcap c is from 2**-n to 2**n in the dtype it is computed in: neither z/c nor c tanh(z/c) loses digits."""
_LARGEST = {dtype: float(np.finfo(str(dtype)).max) / 2 for dtype in _POWERS}
"""What scale over softcap may be, in the dtype it is computed in."""

# --- numbers --------------------------------------------------------------------------------------------------------


def scale(function: str, value: Any, x: Any) -> float:
    """A finite number."""
    return check_real(function, "scale", value)


def causal(function: str, value: Any, x: Any) -> bool:
    """True or False."""
    return check_flag(function, "causal", value)


def softcap(function: str, value: Any, x: Any) -> float:
    """A positive number."""
    cap = check_real(function, "softcap", value)
    if cap <= 0.0:
        fail(ValueError, function, "softcap", "be positive", cap, "None means no cap.")
    return cap


def window(function: str, value: Any, x: Any) -> tuple[int | None, int | None] | None:
    """Two sides; None where neither bounds anything."""
    if not isinstance(value, (tuple, list)):
        fail(TypeError, function, "window", "be a pair (left, right)", kind_of(value))
    if len(value) != 2:
        fail(ValueError, function, "window", "be a pair (left, right)", f"{len(value)} values")
    sides = []
    for side in value:
        width = None if side is None else check_integer(function, "window", side)
        if width is not None and width < 0:
            fail(ValueError, function, "window", "have sides >= 0", value, "None on a side leaves it unbounded.")
        sides.append(None if width is None or width >= 2 * FAR else width)
    return None if sides == [None, None] else (sides[0], sides[1])


def dropout(function: str, value: Any, x: Any, name: str = "dropout") -> float:
    """A rate; ``name`` is what the function calls it."""
    rate = check_real(function, name, value)
    if not 0.0 <= rate < 1.0:
        fail(ValueError, function, name, "be in [0, 1)", rate)
    return rate


def seed(function: str, value: Any, x: Any) -> int:
    """64 bits."""
    number = check_integer(function, "seed", value)
    if not 0 <= number < 2**64:
        fail(ValueError, function, "seed", "be in [0, 2**64)", number)
    return number


def seed_beside(function: str, rate: float, number: Any) -> None:
    """A seed is given where dropout is."""
    if rate > 0.0 and number is None:
        rule = "be given where dropout is"
        fail(ValueError, function, "seed", rule, "None", "Pass seed=<integer>; the backward reuses the same mask.")


def magnitudes(function: str, o: Any, dtype: Any) -> None:
    """What the numbers ask of one another, and of the dtype that inputs of ``dtype`` are computed in."""
    if o.softcap is None and abs(o.scale) < 1e37:
        return
    wide = ACCUMULATE.get(dtype, dtype)
    if wide not in _POWERS:  # of the reference, which computes in any
        return
    n, cap = _POWERS[wide], 1.0 if o.softcap is None else o.softcap
    if not 2.0**-n <= cap <= 2.0**n:
        fail(ValueError, function, "softcap", f"be from 2**-{n} to 2**{n} in {wide}", cap, "None means no cap.")
    if abs(o.scale) / min(cap, 1.0) > _LARGEST[wide]:
        over = "" if o.softcap is None else f" over a softcap of {cap}"
        fail(ValueError, function, "scale", f"be finite in {wide}", f"{o.scale}{over}", "Scale q or k instead.")


# --- arrays ---------------------------------------------------------------------------------------------------------


def offset(function: str, value: Any, x: Any) -> Array | int:
    """An integer, or integers over the leading axes of q; their range, where there are numbers."""
    if not is_array(value):
        if isinstance(value, Integral):
            number = check_integer(function, "offset", value)
            if abs(number) >= FAR:
                fail(ValueError, function, "offset", "be within 2**61 of zero", number)
            return number
        fail(TypeError, function, "offset", "be an integer or an integer array", kind_of(value))
    if not is_integer(value):
        fail(TypeError, function, "offset", "have an integer dtype", value.dtype)
    check_broadcast(function, "offset", value, tuple(x.q.shape[:-3]), "the leading axes of q", x)
    if math.prod(value.shape) and not isinstance(value, Spec):
        xp = namespace(value)
        low, high = int(xp.min(value)), int(xp.max(value))
        if low <= -FAR or high >= FAR:
            fail(ValueError, function, "offset", "be within 2**61 of zero", low if low <= -FAR else high)
    return value


def mask(function: str, value: Any, x: Any) -> Array:
    """Boolean, True = may attend."""
    check_array(function, "mask", value)
    if not is_boolean(value):
        remedy = "True = may attend; for additive terms use bias."
        fail(TypeError, function, "mask", "be boolean", f"dtype {value.dtype}", remedy)
    check_broadcast(function, "mask", value, x.scores_shape, "(..., Hq, T, S)", x)
    return value


def bias(function: str, value: Any, x: Any) -> Array:
    """Added to the scores."""
    _additive(function, "bias", value, x.q)
    check_broadcast(function, "bias", value, x.scores_shape, "(..., Hq, T, S)", x)
    return value


def sinks(function: str, value: Any, x: Any) -> Array:
    """One logit per query head."""
    _additive(function, "sinks", value, x.q)
    if tuple(value.shape) != (x.heads,):
        rule = f"have shape ({x.heads},), one logit per query head"
        remedy = layouts.count_note(value.shape[0], "q", -2, x).strip() if len(value.shape) == 1 else ""
        fail(ValueError, function, "sinks", rule, shape_of(value), remedy)
    return value


def _additive(function: str, name: str, array: Any, q: Any) -> None:
    """Of q's dtype or, beside 16-bit inputs, float32."""
    check_array(function, name, array)
    dtype = array.dtype
    known = isinstance(q, (np.ndarray, Spec))
    if dtype != q.dtype and not (known and dtype == ACCUMULATE.get(q.dtype, q.dtype)):
        also = " or float32" if known and q.dtype in ACCUMULATE else ""
        fail(TypeError, function, name, f"have the dtype of q, {q.dtype}{also}", dtype, "Cast it with astype.")


def segments(function: str, value: Any, x: Any) -> tuple[Array, Array]:
    """Ids of queries and of keys."""
    if not isinstance(value, (tuple, list)):
        got = kind_of(value)
        fail(TypeError, function, "segments", "be a pair (q_segments, k_segments)", got, "Use (ids, ids).")
    if len(value) != 2:
        fail(ValueError, function, "segments", "be a pair (q_segments, k_segments)", f"{len(value)} values")
    leading = tuple(x.q.shape[:-3])
    for name, ids, tokens in zip(("q_segments", "k_segments"), value, x.scores_shape[-2:], strict=True):
        check_array(function, name, ids)
        if not is_integer(ids):
            fail(TypeError, function, name, "have an integer dtype", ids.dtype)
        if len(ids.shape) == 0 or ids.shape[-1] != tokens:
            remedy = layouts.count_note(ids.shape[-1], name[0], -3, x).strip() if ids.shape else ""
            fail(ValueError, function, name, f"have {tokens} ids along axis -1, one per token", shape_of(ids), remedy)
        check_broadcast(function, name, ids, (*leading, tokens), "(leading axes, tokens)", x)
    return value[0], value[1]
