"""The records of the errata: the cases of a run, an entry, what its check found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attngrad.formulas.case import Sizes

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
    check: Callable[[Cases], Finding]
    wrong: str = ""
    correct: str = ""

    @property
    def document(self) -> str:
        """The name of the document, the first part of the id."""
        return self.id.rpartition("-")[0]


@dataclass(frozen=True)
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
