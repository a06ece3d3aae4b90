"""Small companions of large cases that fail.

A kernel that branches on a size fails in large cases alone, where the search for the mistake would take a thousand
times as long. Cut along the axes that do not matter, such a case is small, and fails all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngrad.auditor.pipeline import RESULTS
from attngrad.auditor.plans import Dims
from attngrad.auditor.session import Session
from attngrad.auditor.shrink import cut
from attngrad.auditor.truth import Observation, Truth

_CASES = 3
"""How many cases get one, and how many small ones that fail are enough."""


def add_companions(session: Session) -> None:
    """Observe small cases beside those that fail, where these are large, or few."""
    wrong = sorted((o for o in session.observations if _wrong(o)), key=lambda o: o.truth.case.dims.work)
    if session.recorded is None and sum(not o.truth.case.dims.large for o in wrong) < _CASES:
        made = [_companion(session, o) for o in wrong[:_CASES]]
        session.observations += [o for o in made if o is not None]


def _wrong(o: Observation) -> set[str]:
    return {n for n, j in o.judgements.items() if not j.right}


def _companion(session: Session, start: Observation) -> Observation | None:
    """The case cut along one axis after the other, as long as the same results are wrong."""
    found = None
    case = start.truth.case
    for way in range(4):
        for n in _cuts(case.dims, way):
            small = replace(cut(case, n), name=f"{start.truth.case.name}, cut")
            if session.target.adapt is not None and session.target.adapt(n) != n:
                continue
            call = session.call(small)
            truth = Truth(small, session.dtype)
            results = {x: call.results[x] for x in RESULTS if x in call.results and truth.value(x) is not None}
            if not results or call.crash is not None:
                continue
            o = Observation(truth, results)
            if _wrong(o) == _wrong(start):
                found, case = o, small
                break
    return found


def _cuts(n: Dims, way: int) -> Iterator[Dims]:
    """Sizes to try: fewer features, fewer tokens, fewer queries, fewer keys."""
    if way == 0 and n.d > 4:
        small = replace(n, d=4, e=4 if n.d == n.e else n.e)
        yield small if n.model is None or n.model != n.inner else replace(small, model=small.inner)
    elif way == 1 and n.t == n.s > 5:
        yield replace(n, t=5, s=5)
    elif way == 2 and n.t > 5:
        yield replace(n, t=5)
    elif way == 3 and n.s > 6:
        yield replace(n, s=6)
