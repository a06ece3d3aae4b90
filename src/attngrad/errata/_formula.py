"""Claims that are formulas, read from their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from attngrad.core.arrays import Array
from attngrad.errata._claim import Claim, MakeCase, Reading, Value, relative_error
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


def formula_claim(
    case: MakeCase[H],
    text: str,
    corrected: str = "",
    reading: Mapping[str, str] | None = None,
    also: Also | None = None,
) -> Claim[H]:
    """The claim of a formula, its correction and a kinder reading (how, formula), all judged from their texts.

    >>> from attngrad.errata import Cases
    >>> formula_claim(Head.random, "dV = A^T dO")(Cases(seed=0)).holds
    True
    """
    claimed = Formula(text, also)
    right = Formula(corrected, also).right if corrected else None
    kinder: Reading[H] | None = None
    if reading is not None:
        other = Formula(reading["formula"], also)
        kinder = Reading(reading["how"], other.right, other.left)
    return Claim(case, claimed.right, claimed.left, right, reading=kinder, printed=text)
