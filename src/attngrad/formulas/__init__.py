"""Formulas of attention, read by a parser and judged by shapes and numbers.

Text -> ``tokens`` -> ``parser`` (with ``latex``) -> ``tree`` -> ``shapes`` -> ``evaluate`` -> ``verdict``. The words of
the language are in ``symbols``, their true values in ``values``, right and wrong formulas in ``known``.
"""

from __future__ import annotations

from attngrad.formulas.report import FormulaReport
from attngrad.formulas.tokens import FormulaError
from attngrad.formulas.verdict import audit_formula

__all__ = ["FormulaError", "FormulaReport", "audit_formula"]
