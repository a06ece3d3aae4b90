"""How the claims of a document are written: as formulas, read from their text, or as functions of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Claims(Generic[C]):
    """Writes the claims that are judged on one kind of case.

    >>> from attngrad.errata import Cases
    >>> claim = Claims(Head.random).formula("back-pass-9", "backward pass, 6", "the gradient at V", "", "dV = A^T dO")
    >>> claim.document, claim.check(Cases(seed=0)).holds
    ('back-pass', True)
    """

    def __init__(self, case: MakeCase[C]) -> None:
        self.case = case

    def claim(
        self,
        id: str,  # noqa: A002
        where: str,
        title: str,
        says: str,
        claimed: Callable[[C], Value],
        truth: Callable[[C], Value],
        corrected: Callable[[C], Value] | None = None,
        evidence: Callable[[C], str] | None = None,
        reading: Reading[C] | None = None,
        **said: str,
    ) -> Entry:
        """``claimed`` should be ``truth``, and ``corrected`` is; ``said`` are the words ``wrong`` and ``correct``."""
        return Entry(id, where, title, says, Claim(self.case, claimed, truth, corrected, evidence, reading), **said)

    def formula(
        self: Claims[H],
        id: str,  # noqa: A002
        where: str,
        title: str,
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
        claimed, kinder = Formula(text, also), None
        right = Formula(corrected, also).right if corrected else None
        if reading is not None:
            other = Formula(reading[1], also)
            kinder = Reading(reading[0], other.right, other.left)
        check = Claim(self.case, claimed.right, claimed.left, right, evidence, kinder, text)
        return Entry(id, where, title, says, check, **{"correct": corrected} | said)
