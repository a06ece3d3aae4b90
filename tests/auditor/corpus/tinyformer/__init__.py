# ruff: noqa
"""A small package of its own, with relative imports."""

from .attention import Attention, attention_vjp
from .old import attention_vjp_old
