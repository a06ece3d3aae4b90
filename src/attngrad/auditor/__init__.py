"""The auditor: is this attention gradient right, and if not, what is the mistake?

``cases`` provoke, ``pipeline`` computes the truth and every mistake of the catalogue (``mistakes``), ``truth`` judges,
``diagnose`` names, ``shrink`` finds the smallest failing case, ``report`` tells.
"""

from __future__ import annotations

from attngrad.auditor.report import AuditReport
from attngrad.auditor.run import audit

__all__ = ["AuditReport", "audit"]
