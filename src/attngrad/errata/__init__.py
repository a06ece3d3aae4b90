"""The errata that runs: four documents on the gradient of attention, every claim of theirs checked at run time.

``claims.toml`` has their words. A matrix formula is read from its text, as printed, by the parser of
``attngrad.audit_formula``; code, traces and prose are rewritten here. The truth is the derivative by the complex step,
in float64, at sizes that all differ. Nothing is looked up: a verdict is what the check finds, and the corrected form is
checked with the claim. One rule decides: code is judged as it runs, a formula by its literal reading as a matrix
formula in the document's own notation; where a kinder reading holds, the finding says which.

>>> [result] = [r for r in run("back-pass") if r.entry.id == "back-pass-8"]
>>> result.entry.says, result.holds
('dK = Q^T dS / sqrt(d)', False)
>>> result.entry.correct, result.corrected_error < 1e-10
('dK = dS^T Q / sqrt(d)', True)
"""

from __future__ import annotations

from attngrad.errata._claim import TOLERANCE, Cases, Claim, Entry, Finding, Reading, Result, Results
from attngrad.errata._entries import DOCUMENTS, entries, name_of
from attngrad.errata._report import render, render_few, summary, to_json

__all__ = [
    "DOCUMENTS",
    "TOLERANCE",
    "Cases",
    "Claim",
    "Entry",
    "Finding",
    "Reading",
    "Result",
    "Results",
    "check",
    "entries",
    "render",
    "render_few",
    "run",
    "summary",
    "to_json",
]


def check(entry: Entry, seed: int = 0) -> Result:
    """Judge one entry, on inputs drawn from ``seed``.

    >>> check(entries()[0]).holds
    True
    """
    return Result(entry, *entry.check(Cases(seed)))


def run(document: str | None = None, seed: int = 0) -> Results:
    """Judge every claim, or those of one document, on inputs drawn from ``seed``.

    >>> results = run("equation-z")
    >>> len(results), sum(not r.holds for r in results)
    (7, 5)
    """
    name = None if document is None else name_of(document)
    cases = Cases(seed)
    return Results(Result(e, *e.check(cases)) for e in entries() if name in (None, e.document))
