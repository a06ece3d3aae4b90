"""Plain NumPy implementations with a switch for every mistake: what the auditor is tried on.

They share no code with the catalogue. ``attention(*bugs)`` and ``layer(*bugs)`` give candidates with these mistakes
planted; ``PLANTS`` and ``LAYER_PLANTS`` name each plant, the id it should be found by, and the options it needs.
"""

import attngrad
from planted.in_attention import attention
from planted.in_layer import LAYER_PLANTS, layer
from planted.in_tangents import TANGENT_PLANTS, sinks, tangents
from planted.table import PLANTS, pairs, plant

__all__ = [
    "ELSEWHERE",
    "LAYER_PLANTS",
    "PLANTS",
    "TANGENT_PLANTS",
    "attention",
    "layer",
    "pairs",
    "plant",
    "right",
    "sinks",
    "tangents",
]

ELSEWHERE = {"detached-second-order", "detached-tangent", "constant-lse-second-order"}
ELSEWHERE |= {"not-deterministic", "uninitialised-tail"}
"""Planted where they are tested: they take a framework, or no formula."""


def right(q, k, v, dout):
    """Nothing planted: the kernels."""
    out, pullback = attngrad.vjp(q, k, v)
    return (out, *pullback(dout)[:3])
