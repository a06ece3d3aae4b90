"""PyTorch: attention with every derivative; on the CPU by the kernels, on other devices by PyTorch's operations.

``scaled_dot_product_attention`` has PyTorch's signature, ``flash_attn_func`` that of flash-attn, ``attention`` ours;
``with sdpa():`` puts the first in the place of PyTorch's, and ``MultiheadAttention`` is a drop-in for
``torch.nn.MultiheadAttention``. docs/torch.md is the guide. ``audit`` is ``attngrad.audit`` for a candidate written in
PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("attngrad.torch: PyTorch is not installed. Run: pip install 'attngrad[torch]'.") from error

from attngrad.core.names import missing
from attngrad.torch._attention import attention, scaled_dot_product_attention, sdpa
from attngrad.torch._choice import backend_of, use_backend
from attngrad.torch._flash import flash_attn_func
from attngrad.torch._module import MultiheadAttention
from attngrad.torch._weights import attention_weights

if TYPE_CHECKING:
    from attngrad.auditor.torch_candidate import audit

__all__ = [
    "MultiheadAttention",
    "attention",
    "attention_weights",
    "audit",
    "backend_of",
    "flash_attn_func",
    "scaled_dot_product_attention",
    "sdpa",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name == "audit":
        return importlib.import_module("attngrad.auditor.torch_candidate").audit
    raise missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__
