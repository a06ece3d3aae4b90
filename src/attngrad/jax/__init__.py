"""JAX: attention with every derivative, under every transformation, on the CPU, by the kernels.

``attention`` has our signature, and takes our layout or that of ``jax.nn.dot_product_attention``, whose signature
``dot_product_attention`` has. docs/jax.md is the guide. ``audit`` is ``attngrad.audit`` for a candidate written in JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("attngrad.jax: JAX is not installed. Run: pip install 'attngrad[jax]'.") from error

from attngrad.core.names import missing
from attngrad.jax._attention import attention, dot_product_attention

if TYPE_CHECKING:
    from attngrad.auditor.jax_candidate import audit

__all__ = ["attention", "audit", "dot_product_attention"]


def __getattr__(name: str) -> Any:
    if name == "audit":
        return importlib.import_module("attngrad.auditor.jax_candidate").audit
    raise missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__
