"""The findings in one line, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from attngrad.errata._claim import TOLERANCE
from attngrad.errata._documents import DOCUMENTS
from attngrad.errata._records import Result
from attngrad.formulas.report import figure


def summary(results: Sequence[Result]) -> str:
    """One line: how many claims hold, how many are wrong, and how well the corrected forms do.

    >>> from attngrad import errata
    >>> summary(errata.run("equation-z")).partition(";")[0]
    '7 claims: 2 hold, 5 are wrong'
    """
    wrong = [r for r in results if not r.holds]
    right = len(results) - len(wrong)
    line = (
        f"{len(results)} claim{'s' * (len(results) != 1)}: {right} hold{'s' * (right == 1)}, "
        f"{len(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong"
    )
    if not wrong:
        return f"{line}."
    errors = [r.corrected_error for r in wrong]
    failed = [r.entry.id for r in wrong if r.corrected_error is None or r.corrected_error >= TOLERANCE]
    if failed:
        return f"{line}; the corrected form does not hold for {', '.join(failed)}."
    return f"{line}; every corrected form holds to {figure(max(e for e in errors if e is not None))}."


_SAID = ("id", "document", "where", "title", "says", "wrong", "correct")
_FOUND = ("holds", "error", "corrected_error", "evidence")


def to_json(results: Sequence[Result]) -> str:
    """The findings as a JSON object: documents, claims, summary. An error without a number is null.

    Timings are left out, so that one seed gives the same text in every run.

    >>> from attngrad import errata
    >>> json.loads(to_json(errata.run("equation-z")))["summary"]["wrong"]
    5
    """
    claims = [
        {name: getattr(r.entry, name) for name in _SAID} | {name: getattr(r, name) for name in _FOUND} for r in results
    ]
    found = {
        "claims": len(results),
        "hold": sum(r.holds for r in results),
        "wrong": sum(not r.holds for r in results),
        "text": summary(results),
    }
    return json.dumps({"documents": DOCUMENTS, "claims": claims, "summary": found}, indent=2, allow_nan=False)
