"""JAX: attention with every derivative, under every transformation, on the CPU, by the kernels.

``attention`` has our signature, and takes our layout or that of ``jax.nn.dot_product_attention``, whose signature
``dot_product_attention`` has. docs/jax.md is the guide.
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("attngrad.jax: JAX is not installed. Run: pip install 'attngrad[jax]'.") from error

from attngrad.jax._attention import attention, dot_product_attention

__all__ = ["attention", "dot_product_attention"]
