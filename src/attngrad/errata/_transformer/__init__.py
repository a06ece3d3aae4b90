"""Transformer Attention Derivative: right on paper but for four slips, and unsafe as arithmetic."""

from __future__ import annotations

from attngrad.errata._transformer.claims import ENTRIES

__all__ = ["ENTRIES"]
