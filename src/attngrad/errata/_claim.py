"""A claim of a document, and how it is judged: what it computes, against the derivative, at run time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from attngrad import testing
from attngrad.core.arrays import Array
from attngrad.formulas.case import AWKWARD, SQUARE, Sizes
from attngrad.formulas.report import figure

C = TypeVar("C")
MakeCase = Callable[[Sizes, np.random.Generator], C]


class Cases:
    """The cases of one run, each made once, from one seed.

    >>> from attngrad.formulas.case import AWKWARD
    >>> cases = Cases(seed=0)
    >>> one = cases.get(lambda sizes, rng: rng.standard_normal(2), AWKWARD)
    >>> one.shape
    (2,)
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[tuple[Any, Sizes], Any] = {}

    def get(self, make: MakeCase[C], sizes: Sizes) -> C:
        """The case that ``make`` builds at ``sizes``."""
        if (make, sizes) not in self._made:
            self._made[make, sizes] = make(sizes, np.random.default_rng(self.seed))
        case: C = self._made[make, sizes]
        return case


class Finding(NamedTuple):
    """What a check found. An error is None where there is no number: it raises, or has another shape.

    ``evidence`` is the same in every run from one seed; ``timing`` is what was measured in this run, if anything was.

    >>> from attngrad import errata
    >>> finding = errata.entries()[0].check(errata.Cases(0))
    >>> finding.holds, finding.error < errata.TOLERANCE
    (True, True)
    """

    holds: bool
    error: float | None
    corrected_error: float | None
    evidence: str
    timing: str = ""


@dataclass(frozen=True)
class Entry:
    """One statement of a document: what it says, what is wrong with it, the right form, and the check of both.

    >>> from attngrad import errata
    >>> [entry] = [e for e in errata.entries() if e.id == "back-pass-8"]
    >>> entry.document, entry.says, entry.correct
    ('back-pass', 'dK = Q^T dS / sqrt(d)', 'dK = dS^T Q / sqrt(d)')
    """

    id: str
    where: str
    title: str
    says: str
    check: Callable[[Cases], Finding] = field(repr=False)
    wrong: str = ""
    correct: str = ""

    @property
    def document(self) -> str:
        """The name of the document, the first part of the id."""
        return self.id.rpartition("-")[0]


@dataclass(frozen=True, repr=False)
class Result:
    """An entry and what its check found; errors are relative to the largest entry of the truth.

    >>> from attngrad import errata
    >>> result = errata.run("equation-z")[0]
    >>> result.entry.id, result.holds
    ('equation-z-1', True)
    """

    entry: Entry
    holds: bool
    error: float | None
    corrected_error: float | None
    evidence: str
    timing: str = ""

    def rows(self) -> list[tuple[str, str, float | None]]:
        """What is told of it, by label, with the error of what is said and of the right form."""
        found: list[tuple[str, str, float | None]] = [("says", self.entry.says, self.error)]
        found += [("note" if self.holds else "found", self.evidence, None), ("time", self.timing, None)]
        if not self.holds:
            found += [("wrong", self.entry.wrong, None), ("correct", self.entry.correct, self.corrected_error)]
        return [row for row in found if row[1]]

    def __repr__(self) -> str:
        return f"Result({self.entry.id}: {self.entry.says!r} {'holds' if self.holds else 'is wrong'})"

    def _repr_html_(self) -> str:
        from attngrad.errata._report import fragment

        return fragment([self])


class Results(tuple[Result, ...]):
    """The findings of a run, in the order of the documents.

    >>> from attngrad import errata
    >>> repr(errata.run("equation-z")).partition(";")[0]
    'Results(7 claims: 2 hold, 5 are wrong'
    """

    __slots__ = ()

    def __repr__(self) -> str:
        from attngrad.errata._report import summary

        return f"Results({summary(self).rstrip('.')})"

    def _repr_html_(self) -> str:
        from attngrad.errata._report import fragment

        return fragment(self)


Value = Array | tuple[Array, ...]

TOLERANCE = 1e-10
"""A claim holds where its relative error is below this. Right ones reach 1e-15, the mildest wrong one 1e-3."""

FAULTS = (AttributeError, NameError, TypeError, ValueError)
"""What a claim that cannot be evaluated raises: a missing name, or shapes that do not fit."""


@dataclass(frozen=True)
class Reading(Generic[C]):
    """A kinder reading of a claim that fails as it stands: how it is read, what that computes, what it should be.

    >>> print(Reading("twice the case", lambda x: x + x, lambda x: 2.0 * x)(np.ones(3)))
    holds if read as twice the case [0]
    """

    how: str
    value: Callable[[C], Value]
    truth: Callable[[C], Value]

    def __call__(self, case: C) -> str:
        """What is said of it: whether it holds, by its error now."""
        error = relative_error(self.value(case), self.truth(case))
        verdict = "holds if" if error < TOLERANCE else "does not hold even if"
        return f"{verdict} read as {self.how} [{figure(error)}]"


@dataclass(frozen=True)
class Claim(Generic[C]):
    """``claimed`` should equal ``truth``, and ``corrected`` does; each is a function of one case.

    One rule for all: ``claimed`` is the literal reading, code as it runs and a formula as a matrix formula in the
    document's own notation, and the verdict follows it. Where it fails and a kinder ``reading`` holds, that is said.

    ``printed`` is the text of a claim that is read from it, by ``formula``.

    Judged at awkward sizes. A claim that raises there, or gives another shape, is wrong; it is then tried where all
    sizes agree, so that its error has a figure if it can have one.

    >>> claim = Claim(lambda sizes, rng: rng.standard_normal(3), lambda x: x * x, lambda x: 2 * x, lambda x: x + x)
    >>> finding = claim(Cases(seed=0))
    >>> finding.holds, finding.corrected_error
    (False, 0.0)
    """

    case: MakeCase[C]
    claimed: Callable[[C], Value]
    truth: Callable[[C], Value]
    corrected: Callable[[C], Value] | None = None
    evidence: Callable[[C], str] | None = None
    reading: Reading[C] | None = None
    printed: str = ""

    def __call__(self, cases: Cases) -> Finding:
        awkward = cases.get(self.case, AWKWARD)
        tried = [awkward]
        error, fault = self._judge(awkward)
        holds = error is not None and error < TOLERANCE
        notes = [fault] if fault else []
        if fault:
            square = cases.get(self.case, SQUARE)
            tried.append(square)
            error, fault = self._judge(square)
            if error is not None and error < TOLERANCE:
                error = None
                notes.append("right only where all sizes are equal")
            elif error is not None:
                notes.append("the error is that where all sizes are equal")
        notes += [note(awkward) for note in (self.reading, self.evidence) if note is not None]
        corrected_error = None
        if self.corrected is not None:
            corrected_error = max(relative_error(self.corrected(c), self.truth(c)) for c in tried)
        return Finding(holds, error, corrected_error, "; ".join(notes))

    def _judge(self, case: C) -> tuple[float | None, str | None]:
        truth = self.truth(case)
        try:
            claimed = self.claimed(case)
        except FAULTS as e:
            message = re.sub(r", with gufunc signature \S+", "", str(e))
            return None, f"raises {type(e).__name__}: {message}"
        if _shape(claimed) != _shape(truth):
            return None, f"has shape {_shape(claimed)}, not {_shape(truth)}"
        error = relative_error(claimed, truth)
        return (error, None) if math.isfinite(error) else (None, "gives values that are not finite")


def relative_error(value: Value, truth: Value) -> float:
    """max |value - truth| / max |truth|, the worst of the arrays; infinite where either is not finite."""
    pairs = zip(_arrays(value), _arrays(truth), strict=True)
    return max(testing.relative_error(np.asarray(x), np.asarray(y)) for x, y in pairs)


def _arrays(value: Value) -> tuple[Array, ...]:
    return value if isinstance(value, tuple) else (value,)


def _shape(value: Value) -> Any:
    return tuple(np.shape(x) for x in value) if isinstance(value, tuple) else np.shape(value)
