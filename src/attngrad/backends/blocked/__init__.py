"""Torch operations, a block of queries at a time: any device, every option, memory linear in the sequence."""

from __future__ import annotations

from attngrad.backends.blocked.parts import backward_parts, forward_parts, tangent_parts
from attngrad.backends.blocked.passes import (
    backward,
    backward_tangent,
    forward,
    forward_tangent,
    refuses,
    residual_specs,
)

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
    "refuses",
    "residual_specs",
    "tangent_parts",
]

NAME = "blocked"
LIBRARY = "torch"
borrow = tensors = None
