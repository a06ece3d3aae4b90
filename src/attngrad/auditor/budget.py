"""How long the auditor may go on searching."""

from __future__ import annotations

import time
from typing import NamedTuple


class Budget:
    """Work, which is counted, so that every machine finds the same; and, as a last safety, seconds by the clock.

    >>> budget = Budget(2, 60.0)
    >>> budget.spend()
    >>> budget.over, budget.cut
    (False, '')
    >>> budget.spend()
    >>> budget.over, budget.cut
    (True, 'work')
    """

    def __init__(self, work: float, seconds: float) -> None:
        self.cut = ""
        """What ended it: "work" or "time"; empty where nothing has yet."""
        self._left = work
        self._end = time.monotonic() + seconds

    def spend(self, work: float = 1.0) -> None:
        """Count what was done."""
        self._left -= work

    @property
    def over(self) -> bool:
        """Whether it is spent; once over, it stays so."""
        if not self.cut and self._left <= 0:
            self.cut = "work"
        elif not self.cut and time.monotonic() >= self._end:
            self.cut = "time"
        return bool(self.cut)


class Limits(NamedTuple):
    """What an effort spends on the search for explanations, and on the smallest case: work, and at most seconds."""

    predictions: float
    """Of one result of a small case: 12,000 take about a second. Larger cases count for more."""
    seconds: float
    """Well below the silence after which the command ends a process (``process.patience``)."""
    calls: float
    """Of the candidate."""
    calling: float
    """Seconds."""


LIMITS = {
    "quick": Limits(9_000, 12.5, 60, 2.0),
    "default": Limits(60_000, 50.0, 200, 6.0),
    "full": Limits(800_000, 110.0, 400, 20.0),
}
