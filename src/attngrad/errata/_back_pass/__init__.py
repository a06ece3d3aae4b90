"""Self-Attention Gradients Calculation for Back Pass: formulas, two classes in NumPy, a derivation, and shapes."""

from __future__ import annotations

from attngrad.errata._back_pass import code, example, formulas, optimised, shapes, softmax

_MODULES = (formulas, code, example, optimised, softmax, shapes)

ENTRIES = tuple(entry for module in _MODULES for entry in module.ENTRIES)
