"""Torch operations, a block of queries at a time: any device, every option, memory linear in the sequence."""

from __future__ import annotations

from attngrad.backends.blocked.passes import (
    backward,
    backward_tangent,
    forward,
    forward_tangent,
    refuses,
    residual_specs,
)

__all__ = [
    "NAME",
    "backward",
    "backward_tangent",
    "by_address",
    "forward",
    "forward_tangent",
    "refuses",
    "residual_specs",
]

NAME = "blocked"
LIBRARY = "torch"
by_address = None
