"""Mistakes in the matrix products: transposes and exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.mistakes import need, only, reading, way
from attngrad.auditor.pipeline import Pipeline
from attngrad.reference.dense import drop, transpose


def _square(p: Pipeline, x: Any) -> Any:
    need(p.q.shape[-2] == p.k.shape[-2])
    return x


def _transposed(p: Pipeline) -> Any:
    return transpose(_square(p, p.dz))


def _reshaped(x: Any) -> Any:
    """What a transposed result looks like when it is forced into the right shape."""
    return np.ascontiguousarray(transpose(x)).reshape(x.shape)


def _keys(p: Pipeline) -> Any:
    need(p.k.shape[-1] == p.v.shape[-1])
    return p.k_heads


_WITH_Q = reading("dq_made", k_heads=lambda p: _square(p, p.q))
_WITH_K = reading("dk_heads", q_seen=lambda p: _square(p, p.k_heads))
_DV = reading(
    "dv_heads",
    weights_back=lambda p: transpose(_square(p, drop(p.weights_back, p.keep_back))),
    keep_back=lambda p: None,
)

VARIANTS = {
    "dv-not-transposed": only(**_DV),
    "dk-not-transposed": only(**reading("dk_heads", dz=_transposed)),
    "dk-transposed": (
        way("of shape (D, S)", dk=lambda p, base: transpose(base())),
        way("reshaped to (S, D)", dk=lambda p, base: _reshaped(base())),
    ),
    "dq-with-transpose": only(**reading("dq_made", dz=_transposed)),
    "dq-dk-exchanged": only(dq=lambda p, base: p.dk_made, dk=lambda p, base: p.dq_made),
    "dk-dv-exchanged": only(dk=lambda p, base: p.dv_made, dv=lambda p, base: p.dk_made),
    "own-operand-in-product": (
        way("both", **_WITH_Q, **_WITH_K),
        way("dQ", **_WITH_Q),
        way("dK", **_WITH_K),
    ),
    "keys-for-values": only(**reading("dweights", v_heads=_keys)),
}
