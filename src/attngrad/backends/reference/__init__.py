"""The dense reference as a backend: T x S matrices, so only where it is named; and what is dense by nature."""

from __future__ import annotations

from attngrad import reference
from attngrad.backends.merge import refuses, wide_operands, widen
from attngrad.backends.reference.parts import backward_parts, forward_parts, tangent_parts
from attngrad.backends.reference.passes import (
    backward,
    backward_tangent,
    forward,
    forward_tangent,
    quiet,
    residual_specs,
)
from attngrad.core.arrays import Array
from attngrad.core.operands import Operands
from attngrad.core.options import Options
from attngrad.reference.jacobians import dense_jacobian

__all__ = [
    "LIBRARY",
    "NAME",
    "backward",
    "backward_parts",
    "backward_tangent",
    "borrow",
    "forward",
    "forward_parts",
    "forward_tangent",
    "jacobian",
    "refuses",
    "residual_specs",
    "softmax_jacobian",
    "tangent_parts",
    "weights",
]

NAME = "reference"
LIBRARY = "numpy"
borrow = tensors = None


@quiet
def weights(x: Operands, o: Options) -> tuple[Array, Array]:
    """The dense ``weights`` and ``lse``, in the accumulation dtype."""
    f = reference.forward(wide_operands(x), o)
    return f.weights, f.lse


@quiet
def jacobian(x: Operands, o: Options, wrt: str) -> Array:
    """The dense Jacobian, in the accumulation dtype."""
    return dense_jacobian(wide_operands(x), o, wrt)


@quiet
def softmax_jacobian(scores: Array) -> Array:
    """diag(a) - a a^T, in the accumulation dtype."""
    return reference.softmax_jacobian(widen(scores))
