"""Calls of the same case again: whether they give the same bits, and whether they read memory that nobody wrote."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngrad.auditor.pace import expected
from attngrad.auditor.patterns import some
from attngrad.auditor.pipeline import RESULTS
from attngrad.auditor.report import joined, symbol
from attngrad.auditor.session import Session
from attngrad.auditor.truth import Observation
from attngrad.core.arrays import NDArray

REPEATS = {"quick": 16, "default": 64, "full": 256}
"""How often one case is called with the same inputs."""
_SECONDS = {"quick": 0.3, "default": 2.0, "full": 20.0}
"""After which a slow candidate is not called again; the report says how often it was."""
_TELLING = 10
"""How many calls it takes to say which rate of faults would have shown."""
_POISONED = 6
"""How many cases are called with poisoned memory: the smallest and the largest of odd lengths."""


@dataclass(frozen=True)
class Repeated:
    """What many calls with the same inputs showed."""

    case: str
    calls: int
    differing: int = 0
    names: tuple[str, ...] = ()
    error: float = 0.0
    """The largest difference between two calls, over the largest true entry."""
    wrong: bool = False
    """Whether calls differ by more than rounding."""

    @property
    def told(self) -> str:
        """How many calls differ, in what, and by how much."""
        if not self.differing:
            counted = "1 call" if self.calls == 1 else f"{self.calls} calls with the same inputs gave the same bits"
            return f"{counted}: {self._power}"
        by = f"by {self.error:.1e}" if math.isfinite(self.error) else "in what is not finite"
        return (
            f"{self.differing} of {self.calls} calls with the same inputs differ in {joined(map(symbol, self.names))}, "
            f"{by} of the largest entry{'' if self.wrong else ', which is within rounding'} (case '{self.case}')"
        )

    @property
    def _power(self) -> str:
        """The rate of faults that would have shown in 19 of 20 audits."""
        if self.calls < _TELLING:
            return "so few calls say nothing of faults that come and go"
        one_in = int(1.0 / (1.0 - 0.05 ** (1.0 / self.calls)))
        return f"a fault in 1 call of {one_in} would have shown, with 95 % certainty"


def repeat(session: Session, effort: str) -> Repeated | None:
    """Call one small case many times, and a failing one if any: the first that differs, else the first."""
    seen = sorted(session.observations, key=lambda o: (min(o.truth.case.dims.scores[2:]) < 2, o.size))
    failing = [o for o in seen if not all(j.right for j in o.judgements.values())]
    found = None
    for o in (*seen[:1], *(o for o in failing[:1] if o is not seen[0])):
        made = repeated(session, o, effort)
        if found is None or made.differing:
            found = made
    return found


def repeated(session: Session, o: Observation, effort: str) -> Repeated:
    """Call the case of an observation many times: how many calls differ."""
    case, end = o.truth.case, time.monotonic() + _SECONDS[effort]
    results = [o.results]
    while len(results) < REPEATS[effort] and time.monotonic() < end:
        found = session.call(case).results
        results.append({n: found[n] for n in o.results if n in found})
    groups = Counter(_bits(r) for r in results)
    differing = len(results) - max(groups.values())
    if not differing:
        return Repeated(case.name, len(results))
    usual = next(r for r in results if _bits(r) == groups.most_common(1)[0][0])
    others = [r for r in {_bits(r): r for r in results}.values() if r is not usual]
    names = [n for n in RESULTS if any(_bits({n: r.get(n)}) != _bits({n: usual.get(n)}) for r in others)]
    wrong = any(r.keys() != usual.keys() for r in others)
    error = math.inf if wrong else 0.0
    for name in names if not wrong else ():
        with np.errstate(invalid="ignore"):
            off = max(float(np.max(np.abs(r[name].astype(float) - usual[name].astype(float)))) for r in others)
        error = max(error, off / o.truth.unit(name) if math.isfinite(off) else math.inf)
        judged = {o.truth.judge(name, r[name]).right for r in (usual, *others)}
        wrong |= judged == {True, False} or off > 16.0 * o.truth.bound(name, widest=True) > 0.0
    return Repeated(case.name, len(results), differing, tuple(names), error, wrong)


def _bits(results: Mapping[str, NDArray | None]) -> bytes:
    return b"|".join(b"" if x is None else x.tobytes() for x in results.values())


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory of ``np.empty`` and ``torch.empty`` is filled with NaN, so that what reads it before writing shows."""

    def filled(make: Any) -> Any:
        def poison(*args: Any, **keywords: Any) -> Any:
            made = make(*args, **keywords)
            if made.dtype.kind in "fc":
                made.fill(np.nan)
            return made

        return poison

    kept = {name: getattr(np, name) for name in ("empty", "empty_like")}
    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:
            stack.enter_context(_poisoned_torch(sys.modules["torch"]))
        for name, make in kept.items():
            setattr(np, name, filled(make))
            stack.callback(setattr, np, name, make)
        yield


@contextlib.contextmanager
def _poisoned_torch(torch: Any) -> Iterator[None]:
    """By torch's own setting, which reaches its kernels and extensions too."""
    on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(on, warn_only=warns)


def uninitialised(session: Session, effort: str) -> dict[str, str]:
    """Results that read memory that was never written, with where; their observations become those of that call."""
    odd = [i for i, o in enumerate(session.observations) if o.truth.case.dims.t % 2 or o.truth.case.dims.s % 2]
    odd.sort(key=lambda i: session.observations[i].size)
    found: dict[str, str] = {}
    left = _SECONDS[effort]
    for i in dict.fromkeys((*odd[: _POISONED // 2], *odd[-_POISONED // 2 :])):
        o = session.observations[i]
        if (takes := expected(session, o.truth.case)) > left:
            continue
        left -= takes
        with poisoned():
            call = session.call(o.truth.case)
        shown = {
            n: np.isnan(x.astype(float)) for n, x in call.results.items() if n in o.results and x.dtype.kind != "b"
        }
        stale = {n: bad & ~np.isnan(o.results[n].astype(float)) for n, bad in shown.items()
                 if bad.shape == o.results[n].shape}  # fmt: skip
        stale = {n: bad for n, bad in stale.items() if bad.any()}
        if stale:
            session.observations[i] = Observation(o.truth, {**o.results, **{n: call.results[n] for n in stale}})
            found |= {n: f"{_rows(bad)} of {symbol(n)}, case '{o.truth.case.name}'" for n, bad in stale.items()}
    return {n: found[n] for n in RESULTS if n in found}


def _rows(bad: NDArray) -> str:
    """Which rows hold such entries."""
    if bad.ndim < 2:
        return "entries"
    hit = np.flatnonzero(bad.any(axis=(*range(bad.ndim - 2), bad.ndim - 1)))
    return f"row{'s' if len(hit) > 1 else ''} {some(hit, bad.shape[-2])}" if len(hit) < bad.shape[-2] else "all rows"
