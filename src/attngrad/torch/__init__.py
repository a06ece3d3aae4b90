"""PyTorch: attention with every derivative, on CPU tensors, by the kernels.

``scaled_dot_product_attention`` has PyTorch's signature, ``attention`` ours, ``with sdpa():`` puts the first in the
place of PyTorch's, and ``MultiheadAttention`` is a drop-in for ``torch.nn.MultiheadAttention``. docs/torch.md is the
guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("attngrad.torch: PyTorch is not installed. Run: pip install 'attngrad[torch]'.") from error

from attngrad.torch._attention import attention, scaled_dot_product_attention, sdpa
from attngrad.torch._module import MultiheadAttention

__all__ = ["MultiheadAttention", "attention", "audit", "scaled_dot_product_attention", "sdpa"]

if TYPE_CHECKING:
    from attngrad.auditor.torch_candidate import audit


def __getattr__(name: str) -> Any:
    if name == "audit":
        from attngrad.auditor.torch_candidate import audit

        return audit
    raise AttributeError(f"module 'attngrad.torch' has no attribute {name!r}")
