"""Mistakes in the matrix products: transposes and exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Base, need, only, way
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference.dense import drop, matmul, transpose


def _square(step: Callable[[Pipeline], Any]) -> Override:
    """``step`` where T = S; elsewhere its shapes do not fit."""

    def made(p: Pipeline, base: Base) -> Any:
        need(p.q.shape[-2] == p.k.shape[-2])
        return step(p)

    return made


def _reshaped(x: Any) -> Any:
    """What a transposed result looks like when it is forced into the right shape."""
    return np.ascontiguousarray(transpose(x)).reshape(x.shape)


def _with_keys(p: Pipeline, base: Base) -> Any:
    need(p.k.shape[-1] == p.v.shape[-1])
    return drop(matmul(p.dout, transpose(p.k_heads)), p.keep_back)


_WITH_Q = _square(lambda p: p.c(p.scale_dq) * matmul(p.dz, p.q))
_WITH_K = _square(lambda p: p.c(p.scale_dk) * matmul(transpose(p.dz), p.k_heads))

VARIANTS = {
    "dv-not-transposed": only(dv_heads=_square(lambda p: matmul(drop(p.weights_back, p.keep_back), p.dout))),
    "dk-not-transposed": only(dk_heads=_square(lambda p: p.c(p.scale_dk) * matmul(p.dz, p.q))),
    "dk-transposed": (
        way("of shape (D, S)", dk=lambda p, base: transpose(base())),
        way("reshaped to (S, D)", dk=lambda p, base: _reshaped(base())),
    ),
    "dq-with-transpose": only(dq_made=_square(lambda p: p.c(p.scale_dq) * matmul(transpose(p.dz), p.k_heads))),
    "dq-dk-exchanged": only(dq=lambda p, base: p.dk_made, dk=lambda p, base: p.dq_made),
    "dk-dv-exchanged": only(dk=lambda p, base: p.dv_made, dv=lambda p, base: p.dk_made),
    "own-operand-in-product": (
        way("both", dq_made=_WITH_Q, dk_heads=_WITH_K),
        way("dQ", dq_made=_WITH_Q),
        way("dK", dk_heads=_WITH_K),
    ),
    "keys-for-values": only(dweights=_with_keys),
}
