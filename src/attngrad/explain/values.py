"""The numbers of a trace: the table of steps, evaluated in float64, each value under its mathematical symbol."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.options import Operands, Options, Tangents
from attngrad.reference.modifiers import IDENTITY
from attngrad.reference.passes import directions, inputs
from attngrad.reference.table import evaluate, symbols


def to_float64(x: Any) -> Any:
    """A copy in float64; None stays None."""
    return None if x is None else np.array(x, np.float64)


def widen(x: Operands) -> Operands:
    """The operands in float64, copied, so that the trace stays what it was."""
    segments = None if x.segments is None else (np.array(x.segments[0]), np.array(x.segments[1]))
    mask = None if x.mask is None else np.array(x.mask)
    offset = x.offset if isinstance(x.offset, int) else np.array(x.offset)
    wide = {name: to_float64(getattr(x, name)) for name in Tangents._fields}
    return Operands(mask=mask, segments=segments, offset=offset, **wide)


def compute(
    x: Operands,
    o: Options,
    dout: Any = None,
    dlse: Any = None,
    dout_dot: Any = None,
    dlse_dot: Any = None,
    t: Tangents | None = None,
) -> tuple[dict[str, NDArray], set[str]]:
    """Every intermediate by its mathematical name, and the flags that choose among the rules."""
    given, stages = inputs(x, o), ["forward"]
    if dout is not None or dlse is not None:
        given |= {"dout": np.zeros(x.out_shape) if dout is None else dout, "dlse": dlse}
        stages.append("backward")
    if t is not None:
        given |= directions(x, t)
        stages.append("tangent")
    if len(stages) == 3:
        given |= {"dout_dot": np.zeros(x.out_shape) if dout_dot is None else dout_dot, "dlse_dot": dlse_dot}
        stages.append("second")
    names = symbols(stages)
    with np.errstate(all="ignore"):
        values = evaluate(given, tuple(names))
    flags = {"bias", "sinks", "keep", "dlse", "dlse_dot", "bias_dot", "sinks_dot"}
    flags = {name for name in flags if values.get(name) is not None}
    flags |= {"cap"} if values["modifier"] is not IDENTITY else set()
    flags |= {"group"} if x.group > 1 else set()
    flags |= {"hidden"} if not bool(np.all(values["visible"])) else set()
    return {symbol: values[name] for name, symbol in names.items() if values[name] is not None}, flags
