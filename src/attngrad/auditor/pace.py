"""How long a candidate would take at the sizes of blocks: where that is too long, a case is left out and said so.

Going by the largest case so far, a call costs what it costs at any size (the fastest call of all), and beyond that as
its multiplications do. That is far too much where a call was held up by chance. So the fastest of several calls counts,
and before a case is left out, sizes between are tried, as far as they should not take too long themselves.
"""

from __future__ import annotations

import math
from dataclasses import replace

from attngrad.auditor.cases import Case
from attngrad.auditor.session import Session
from attngrad.auditor.shrink import cut

_CALLS = 4
"""How many calls of the largest case so far the fastest is taken of."""
_GROWTH = 1.5
"""How much more work a case between must be than the largest so far."""


def too_slow(session: Session, case: Case, patience: float) -> bool:
    """Whether a large case would take too long; loops in Python do, and are no fault."""
    pace = session.pace
    if not case.dims.large or pace is None:
        return False
    most = min(patience, 0.5 * session.limit)

    def expected() -> float:
        return pace.least + (pace.seconds - pace.least) * case.dims.work / pace.case.dims.work

    between: Case | None = pace.case
    while expected() > most and between is not None:
        spent = 0.0
        while expected() > most and spent <= most and (pace.case is not between or pace.calls < _CALLS):
            call, seconds = session.timed(between)
            spent += math.inf if call.timeout or call.error is not None else seconds
        between = _between(session, case, most / pace.seconds) if spent < math.inf else None
    if expected() > most:
        session.skipped.append(f"{case.name} (a call would take about {expected():.0f} s, more than {most:g} s)")
        return True
    return False


def _between(session: Session, case: Case, room: float) -> Case | None:
    """The case with fewer tokens: more work than the largest so far, at most ``room`` times as much."""
    assert session.pace is not None  # noqa: S101
    done, n = session.pace.case.dims.work, case.dims
    for parts in (2, 4, 8, 16):
        small = replace(n, t=-(-n.t // parts), s=-(-n.s // parts))
        taken = session.target.adapt is None or session.target.adapt(small) == small
        if taken and _GROWTH * done <= small.work <= room * done:
            return replace(cut(case, small), name=f"{case.name}, cut")
    return None
