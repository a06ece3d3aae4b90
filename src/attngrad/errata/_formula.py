"""How the claims of a document are written: as formulas, read from their text, or as functions of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from attngrad.core.arrays import Array
from attngrad.errata._claim import Claim, Reading, Value, relative_error
from attngrad.errata._records import C, Entry, MakeCase
from attngrad.formulas.case import Head
from attngrad.formulas.evaluate import each_side
from attngrad.formulas.parser import parse
from attngrad.formulas.values import HeadValues

H = TypeVar("H", bound=Head)
Also = Mapping[str, Callable[[Head], Array]]
"""What a document's own letters mean, where they differ from those of ``attngrad.audit_formula``."""


class Formula:
    """The two sides of a formula at a case, read from its text by the parser of ``attngrad.audit_formula``.

    The left side is evaluated at the true value of its name, the others as they stand. Several equations, and several
    right sides, give a tuple.

    >>> import numpy as np
    >>> from attngrad.formulas.case import AWKWARD
    >>> Formula("dV = A^T dO").right(Head.random(AWKWARD, np.random.default_rng(0))).shape
    (7, 4)
    """

    def __init__(self, text: str, also: Also | None = None) -> None:
        self.text, self.also, self.equations = text, also, parse(text)

    def left(self, head: Head) -> Value:
        """The truth, once for each right side."""
        return self._of(head, lambda first, others: [first] * len(others))

    def right(self, head: Head) -> Value:
        """What the formula claims."""
        return self._of(head, lambda first, others: others)

    def error(self, head: Head) -> float:
        """The worst relative error of a right side."""
        return relative_error(self.right(head), self.left(head))

    def _of(self, head: Head, pick: Callable[[Array, list[Array]], list[Array]]) -> Value:
        values = HeadValues(head, self.also)
        found: list[Array] = []
        for equation in self.equations:
            first, *others = each_side(equation, values)
            found += pick(first, others)
        return found[0] if len(found) == 1 else tuple(found)


@dataclass(frozen=True)
class Statement(Generic[C]):
    """A statement of a document by its id, place and title, before it is said what it claims; ``case`` judges it.

    >>> from attngrad.errata import Cases
    >>> gradient = Statement(Head.random, "back-pass-9", "backward pass, 6", "the gradient at V")
    >>> claim = gradient.formula("dV = A^T dO", "dV = A^T dO")
    >>> claim.document, claim.check(Cases(seed=0)).holds
    ('back-pass', True)
    """

    case: MakeCase[C]
    id: str
    where: str
    title: str

    def claim(
        self,
        says: str,
        claimed: Callable[[C], Value],
        truth: Callable[[C], Value],
        corrected: Callable[[C], Value] | None = None,
        evidence: Callable[[C], str] | None = None,
        reading: Reading[C] | None = None,
        printed: str = "",
        **said: str,
    ) -> Entry:
        """``claimed`` should be ``truth``, and ``corrected`` is; ``said`` are the words ``wrong`` and ``correct``."""
        check = Claim(self.case, claimed, truth, corrected, evidence, reading, printed)
        return Entry(self.id, self.where, self.title, says, check, **said)

    def formula(
        self: Statement[H],
        says: str,
        text: str,
        corrected: str = "",
        evidence: Callable[[Any], str] | None = None,
        reading: tuple[str, str] | None = None,
        also: Also | None = None,
        **said: str,
    ) -> Entry:
        """A formula, its correction and a kinder reading (how, formula), all judged from their texts.

        The correction is shown as it is computed, unless ``said`` has other words for it.
        """
        claimed = Formula(text, also)
        right = Formula(corrected, also).right if corrected else None
        kinder: Reading[H] | None = None
        if reading is not None:
            other = Formula(reading[1], also)
            kinder = Reading(reading[0], other.right, other.left)
        said = {"correct": corrected} | said
        return self.claim(says, claimed.right, claimed.left, right, evidence, kinder, text, **said)
