"""The auditor: is this attention gradient right, and if not, what is the mistake?

``cases`` provoke, ``pipeline`` computes the truth and every mistake of the catalogue (``mistakes``), ``truth`` judges,
``diagnose`` names, ``shrink`` finds the smallest failing case, ``report`` tells.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngrad.auditor.report import AuditReport
    from attngrad.auditor.run import audit

__all__ = ["AuditReport", "audit"]
_HOME = {"AuditReport": "report", "audit": "run"}


def __getattr__(name: str) -> Any:
    # Lazily, so that the command line can be imported without NumPy.
    if name in _HOME:
        return getattr(import_module(f"attngrad.auditor.{_HOME[name]}"), name)
    raise AttributeError(f"module 'attngrad.auditor' has no attribute {name!r}")
