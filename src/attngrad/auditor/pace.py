"""How long a candidate would take at the sizes of blocks: where that is too long, a case is left out and said so.

Going by the largest case so far, a call costs what it costs at any size (the fastest call of all), and beyond that as
its multiplications do. That is far too much where a call was held up by chance. So the fastest of several calls counts,
and before a case is left out, sizes between are tried, as far as they should not take too long themselves.
"""

from __future__ import annotations

from dataclasses import replace

from attngrad.auditor.cases import Case
from attngrad.auditor.session import Session
from attngrad.auditor.shrink import cut

_CALLS = 4
"""How many calls of the largest case so far the fastest is taken of."""
_GROWTH = 1.5
"""How much more work a case between must be than the largest so far."""


def expected(session: Session, case: Case) -> float:
    """The seconds that a call should take."""
    pace = session.pace
    if pace is None:
        return 0.0
    return pace.least + (pace.seconds - pace.least) * case.dims.work / pace.case.dims.work


def too_slow(session: Session, case: Case) -> bool:
    """Whether a large case would take longer than the session has left for these: loops in Python do, and are no fault.

    One that does not takes its part of that time.
    """
    if not case.dims.large or session.pace is None:
        return False
    between: Case | None = session.pace.case
    while between is not None and expected(session, case) > _left(session):
        tried = _time_again(session, case, between)
        between = _between(session, case, _left(session) / session.pace.seconds) if tried else None
    takes, left = expected(session, case), _left(session)
    if takes > left:
        told = f"a call would take about {takes:.1f} s, where {max(left, 0.0):.1f} s are left for cases of these sizes"
        session.skipped.append(f"{case.name} ({told})")
        return True
    session.patience -= takes
    return False


def _time_again(session: Session, case: Case, between: Case) -> bool:
    """Call a case between a few times, as long as ``case`` seems too slow; False where it does not return."""
    pace = session.pace
    while expected(session, case) > _left(session) > 0.0 and (
        pace is None or pace.case is not between or pace.calls < _CALLS
    ):
        call, _ = session.timed(between)
        if call.timeout or call.error is not None or session.pace is None:
            return False
        session.patience -= session.pace.seconds  # of the fastest, as what it tells is expected to take
    return True


def _left(session: Session) -> float:
    return min(session.patience, 0.5 * session.limit)


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
