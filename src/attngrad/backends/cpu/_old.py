# temporary
import math

import numpy as np

from attngrad import _native
from attngrad.core.dtypes import CODES


def kind(x):
    return 3 if x.dtype == np.uint16 else CODES[x.dtype]


def Call(q, k, v, f):
    f = dict(f)
    left, right = f.pop("window", None) or (None, None)
    extra = {}
    off = f.pop("offset", 0)
    if not isinstance(off, int):
        extra["offset_array"] = off
        off = 0
    for n in ("mask", "sinks", "q_segments", "k_segments", "seed", "origin"):
        if n in f:
            extra[n] = f.pop(n)
    if "bias" in f:
        extra["bias"] = f.pop("bias")
        extra["bias_type"] = kind(extra["bias"])
    if "dropout" in f:
        extra["dropout"] = f["dropout"]
        extra["threshold"] = math.floor(f.pop("dropout") * 2.0**32)
    if f.pop("natural", False) and "sinks" not in extra and "bias" not in extra:
        extra["sinks"] = np.full(q.shape[1], -np.inf, q.dtype)
    a = (
        f.pop("scale"),
        f.pop("softcap", 0.0),
        f.pop("causal", False),
        -1 if left is None else left,
        -1 if right is None else right,
        off,
    )
    assert not f, f
    return _native.Call(kind(q), q, k, v, *a, **extra)


def Directions(q, k, v, b, s):
    return _native.Directions(q, k, v, b, 1 if b is None else kind(b), s)


def numbers(f):
    l, r = f.get("window") or (None, None)
    return (f["scale"], f.get("softcap", 0.0), f.get("causal", False), -1 if l is None else l, -1 if r is None else r)


if not hasattr(_native, "forward_by_address"):
    _native.forward_by_address = lambda t, q, k, v, f, *a: _native.plain_forward(t, q, k, v, numbers(f), *a)
    _native.backward_by_address = lambda s, t, q, k, v, f, *a: _native.plain_backward(s, t, q, k, v, numbers(f), *a)
    _native.residuals_of = _native.plain_parts
