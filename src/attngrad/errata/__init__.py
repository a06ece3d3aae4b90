"""The errata that runs: four documents on the gradient of attention, every claim of theirs checked when asked.

A matrix formula is read from its text, as printed, by the parser of ``attngrad.audit_formula``; code, traces and prose
are rewritten here. The truth is the derivative by the complex step, in float64, at sizes that all differ. Nothing
is looked up: a verdict is what the check finds, and the corrected form is checked beside the claim. One rule decides:
code is judged as it runs, a formula by its literal reading as a matrix formula in the document's own notation; where a
kinder reading holds, the finding says which.

>>> [result] = [r for r in run("001") if r.entry.id == "001-8"]
>>> result.entry.says, result.holds
('dK = Q^T dS / sqrt(d)', False)
>>> result.entry.correct, result.corrected_error < 1e-10
('dK = dS^T Q / sqrt(d)', True)
"""

from __future__ import annotations

from attngrad.errata import _code, _note, _omega, _self_attention, _traces
from attngrad.errata._claim import TOLERANCE, Cases, Claim, Entry, Finding, Reading, Result
from attngrad.errata._report import DOCUMENTS, render, summary, to_json

__all__ = [
    "DOCUMENTS",
    "TOLERANCE",
    "Cases",
    "Claim",
    "Entry",
    "Finding",
    "Reading",
    "Result",
    "check",
    "entries",
    "render",
    "run",
    "summary",
    "to_json",
]

_ENTRIES = (
    *_note.ENTRIES,
    *_self_attention.FORMULAS,
    *_code.CODE,
    *_self_attention.DERIVATION,
    *_code.EXAMPLE,
    *_traces.ENTRIES,
    *_omega.ENTRIES,
)


def entries() -> tuple[Entry, ...]:
    """Every claim of the four documents, by id; the ids are stable, and later ones may stand earlier in a document.

    >>> entries()[0].id, entries()[-1].document
    ('000-1', '003')
    """
    return _ENTRIES


def check(entry: Entry, seed: int = 0) -> Result:
    """Judge one entry, on inputs drawn from ``seed``.

    >>> check(entries()[0]).holds
    True
    """
    return Result(entry, *entry.check(Cases(seed)))


def run(document: str | None = None, seed: int = 0) -> tuple[Result, ...]:
    """Judge every claim, or those of one document, on inputs drawn from ``seed``.

    >>> results = run("000")
    >>> len(results), sum(not r.holds for r in results)
    (7, 5)
    """
    if document is not None and document not in DOCUMENTS:
        raise ValueError(f"run: document must be None or one of {', '.join(DOCUMENTS)}; got {document!r}.")
    cases = Cases(seed)
    return tuple(Result(e, *e.check(cases)) for e in _ENTRIES if document in (None, e.document))
