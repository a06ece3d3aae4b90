"""Operands and Options as the compiled passes take them: fields by name, those alone that differ from the default."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from attngrad import _native
from attngrad.backends.cpu.arrays import bits, contiguous, plane, rows, segment_ids
from attngrad.backends.merge import widen
from attngrad.core.arrays import Array
from attngrad.core.dtypes import BFLOAT16
from attngrad.core.operands import Operands, Tangents
from attngrad.core.options import ARRAYS, STATIC, Kind, Options


@lru_cache(maxsize=1024)
def static_fields(o: Options) -> dict[str, Any]:
    """The options that are not arrays, by name; not to be written to. A name that the kernels lack is an error."""
    fields = {row.name: value for row in STATIC if (value := getattr(o, row.name)) != row.default}
    if not o.dropout:
        fields.pop("seed", None)
    return fields


_LAST = 3 + len(ARRAYS) - 1
"""Where the offset is in Operands."""
_OFFSET = ARRAYS[-1].name
_ARRAYS = tuple((row.name, row.kind) for row in ARRAYS[:-1])
_PLANE, _PER_HEAD = Kind.PLANE, Kind.PER_HEAD


def call(x: Operands, o: Options, *, bias: Array | None = None, natural: bool = False) -> _native.Call:
    """A problem for the compiled passes. ``bias`` is ``plane(x.bias)`` where that is there already.

    ``natural``: row maxima in natural units, whatever is given; see ``Saved``.
    """
    q, k, v = rows(x.q), rows(x.k), rows(x.v)
    if q.dtype == BFLOAT16:
        q, k, v = bits(q), bits(k), bits(v)
    fields = static_fields(o)
    offset = x[_LAST]
    if not isinstance(offset, int):
        each = np.broadcast_to(offset, x.q.shape[:-3]).reshape(q.shape[0]).astype(np.int64)
        fields = {**fields, _OFFSET: each}
    elif offset != k.shape[2] - q.shape[2]:  # which the kernels take where none is given
        fields = {**fields, _OFFSET: offset}
    for value in x[3:_LAST]:
        if value is not None:
            fields = fields | _arrays(x, bias)
            break
    if o.dropout:
        fields = {**fields, "origin": x.origin}
    if natural:
        fields = {**fields, "natural": True}
    return _native.Call(q, k, v, fields)


def _arrays(x: Operands, bias: Array | None) -> dict[str, Any]:
    """The options that are arrays, by name."""
    fields = {}
    for (name, kind), value in zip(_ARRAYS, x[3:_LAST], strict=True):
        if value is None:
            continue
        if kind is _PLANE:
            fields[name] = bits(bias if bias is not None and name == "bias" else plane(value, x))
        elif kind is _PER_HEAD:
            fields[name] = contiguous(widen(value))
        elif kind is Kind.PARAMETERS:
            fields[name] = value  # which the kernels lack
        else:
            fields[f"q_{name}"], fields[f"k_{name}"] = segment_ids(x, value)
    return fields


def directions(x: Operands, t: Tangents) -> _native.Directions:
    """The tangents as the compiled passes take them."""
    q, k, v = (None if d is None else bits(rows(d)) for d in t[:3])
    bias = None if t.bias is None else bits(plane(t.bias, x))
    sinks = None if t.sinks is None else contiguous(widen(t.sinks))
    return _native.Directions(q, k, v, bias, sinks)
