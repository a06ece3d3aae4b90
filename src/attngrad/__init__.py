"""attngrad: every derivative of attention, exact, fast, and explained.

>>> import attngrad, numpy as np
>>> q = k = v = np.random.default_rng(0).standard_normal((2, 4, 10, 32), dtype=np.float32)
>>> out, pullback = attngrad.vjp(q, k, v, causal=True)
>>> dq, dk, dv, _, _ = pullback(np.ones_like(out))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Where each public name lives; a module is imported when one of its names is first used (PEP 562).
_HOME = {
    "attention": "functional",
    "vjp": "functional",
    "jvp": "functional",
    "hvp": "functional",
    "jacobian": "functional",
    "attention_weights": "functional",
    "softmax_jacobian": "functional",
    "segments_from_lengths": "functional",
    "dropout_mask": "functional",
    "FormulaReport": "formulas",
    "audit_formula": "formulas",
    "Gradients": "core.operands",
    "Options": "core.options",
    "Operands": "core.operands",
    "MultiHeadAttention": "layers",
    "trace": "explain.trace",
    "Trace": "explain.trace",
    "audit": "auditor.run",
    "AuditReport": "auditor.report",
    "get_num_threads": "backends.cpu.threads",
    "set_num_threads": "backends.cpu.threads",
    "share_threads": "backends.cpu.workers",
}
_MODULES = ("errata", "layers", "optim", "reference", "testing")
# Not in __all__: a star must not import a framework.
_BRIDGES = ("diffusers", "distributed", "jax", "torch", "transformers")

__all__ = [
    "AuditReport",
    "FormulaReport",
    "Gradients",
    "MultiHeadAttention",
    "Operands",
    "Options",
    "Trace",
    "__version__",
    "attention",
    "attention_weights",
    "audit",
    "audit_formula",
    "dropout_mask",
    "errata",
    "get_num_threads",
    "hvp",
    "jacobian",
    "jvp",
    "layers",
    "optim",
    "reference",
    "segments_from_lengths",
    "set_num_threads",
    "share_threads",
    "softmax_jacobian",
    "testing",
    "trace",
    "vjp",
]

if TYPE_CHECKING:
    from attngrad import errata, layers, optim, reference, testing
    from attngrad.auditor import AuditReport, audit
    from attngrad.backends.cpu.threads import get_num_threads, set_num_threads
    from attngrad.backends.cpu.workers import share_threads
    from attngrad.core.operands import Gradients, Operands
    from attngrad.core.options import Options
    from attngrad.explain.trace import Trace, trace
    from attngrad.formulas import FormulaReport, audit_formula
    from attngrad.functional import (
        attention,
        attention_weights,
        dropout_mask,
        hvp,
        jacobian,
        jvp,
        segments_from_lengths,
        softmax_jacobian,
        vjp,
    )
    from attngrad.layers import MultiHeadAttention


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"attngrad.{_HOME[name]}"), name)
    elif name in _MODULES or name in _BRIDGES:
        value = importlib.import_module(f"attngrad.{name}")
    else:
        raise importlib.import_module("attngrad.core.names").missing("attngrad", name, __dir__())
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, *_BRIDGES))
