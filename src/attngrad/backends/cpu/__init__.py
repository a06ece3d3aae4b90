"""The native kernels: NumPy arrays in CPU memory, and what shares it, in every dtype and with every option."""

from __future__ import annotations

from attngrad._native import borrow
from attngrad.backends.cpu import tensors
from attngrad.backends.cpu.parts import backward_parts, forward_parts, tangent_parts
from attngrad.backends.cpu.passes import (
    backward,
    backward_tangent,
    forward,
    forward_tangent,
    keep_mask,
    residual_specs,
)
from attngrad.backends.cpu.threads import check_variable, choose_isa
from attngrad.backends.cpu.workers import choose_workers
from attngrad.backends.merge import refuses

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
    "keep_mask",
    "refuses",
    "residual_specs",
    "tangent_parts",
    "tensors",
]

NAME = "cpu"
LIBRARY = "numpy"

check_variable()
choose_isa()
choose_workers()
