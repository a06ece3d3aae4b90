"""Mistakes in the matrix products: transposes and exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.mistakes._entry import Mistake, need, only, reading, way
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

MISTAKES = (
    Mistake(
        "dv-not-transposed",
        "dV has A in place of A^T",
        "dV = A dO",
        "dV = A^T dO",
        "O = A V: value j reaches query i with weight A_ij, so dV_j sums over the queries i.",
        "Transpose A over its last two axes: A.swapaxes(-1, -2) @ dO. (A transpose that lists the axes in their own "
        "order does nothing.)",
        only(**_DV),
    ),
    Mistake(
        "dk-not-transposed",
        "dK has dS in place of dS^T",
        "dK = scale dS Q",
        "dK = scale dS^T Q",
        "Z = scale Q K^T: key j meets query i in Z_ij, so dK_j sums over the queries i.",
        "Transpose dS over its last two axes.",
        only(**reading("dk_heads", dz=_transposed)),
    ),
    Mistake(
        "dk-transposed",
        "dK is transposed",
        "dK = scale Q^T dS",
        "dK = scale dS^T Q",
        "Q^T dS is D x S: the gradient of K^T, not of K.",
        "Transpose it over its last two axes.",
        (
            way("of shape (D, S)", dk=lambda p, base: transpose(base())),
            way("reshaped to (S, D)", dk=lambda p, base: _reshaped(base())),
        ),
    ),
    Mistake(
        "dq-with-transpose",
        "dQ has dS^T in place of dS",
        "dQ = scale dS^T K",
        "dQ = scale dS K",
        "Z = scale Q K^T: query i meets key j in Z_ij, so dQ_i sums over the keys j.",
        "Use dS as it is for dQ, and its transpose for dK.",
        only(**reading("dq_made", dz=_transposed)),
    ),
    Mistake(
        "dq-dk-exchanged",
        "dQ and dK are exchanged",
        "dQ, dK = scale dS^T Q, scale dS K",
        "dQ, dK = scale dS K, scale dS^T Q",
        "The two are returned in the wrong order.",
        "Return dQ first.",
        only(dq=lambda p, base: p.dk_made, dk=lambda p, base: p.dq_made),
    ),
    Mistake(
        "dk-dv-exchanged",
        "dK and dV are exchanged",
        "dK, dV = A^T dO, scale dS^T Q",
        "dK, dV = scale dS^T Q, A^T dO",
        "The two are returned in the wrong order.",
        "Return dK before dV.",
        only(dk=lambda p, base: p.dv_made, dv=lambda p, base: p.dk_made),
    ),
    Mistake(
        "own-operand-in-product",
        "dQ is made with Q, or dK with K",
        "dQ = scale dS Q,  dK = scale dS^T K",
        "dQ = scale dS K,  dK = scale dS^T Q",
        "The derivative of Q K^T by Q is K, and by K it is Q.",
        "Exchange Q and K in the two products.",
        (
            way("both", **_WITH_Q, **_WITH_K),
            way("dQ", **_WITH_Q),
            way("dK", **_WITH_K),
        ),
    ),
    Mistake(
        "keys-for-values",
        "dA is made with K in place of V",
        "dA = dO K^T",
        "dA = dO V^T",
        "O = A V, so dA = dO V^T.",
        "Use V.",
        only(**reading("dweights", v_heads=_keys)),
    ),
)
