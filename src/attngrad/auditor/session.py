"""The calls of one audit, judged; and which of the crashes are faults."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngrad.auditor.candidate import Call, run
from attngrad.auditor.cases import Case
from attngrad.auditor.pipeline import LATER, RESULTS
from attngrad.auditor.plans import FEATURES
from attngrad.auditor.recorded import SMALL, Recorded
from attngrad.auditor.report import LONGEST, Finding
from attngrad.auditor.targets import Target
from attngrad.auditor.truth import Observation, Truth

_SHORTEST = 5
"""How many tokens a candidate must take, at the least, that raises beyond a length of its own."""


@dataclass
class Pace:
    """The largest case so far, the seconds of the fastest of its calls, and of the fastest call of any case."""

    case: Case
    seconds: float
    least: float
    calls: int = 0


class Session:
    """The calls of one audit, and what they showed."""

    def __init__(self, target: Target, dtype: np.dtype[Any], supports: frozenset[str], limit: float) -> None:
        self.target, self.dtype, self.supports, self.limit = target, dtype, supports, limit
        self.observations: list[Observation] = []
        self.crashes: list[tuple[Case, Call]] = []
        self.findings: list[Finding] = []
        self.traceback = ""
        self.recorded: Recorded | None = None
        self.spelled: dict[str, str] | None = None
        """Of a PyTorch function: how it spells the options. Then the smallest case is of tensors."""
        self.tensors = False
        """Whether it may want tensors: it was given NumPy arrays, and its module imports PyTorch."""
        self.transposes = False
        """Whether its code has the attribute T."""
        self.judged: tuple[str, ...] = RESULTS
        """The results that are judged with an option."""
        self.skipped: list[str] = []
        """Cases that were not tried, each with why."""
        self.pace: Pace | None = None
        self.options: dict[str, Any] = {}
        """What every case has."""
        self.patience = math.inf
        """Seconds that are left for calls at the sizes of blocks."""
        self._said: set[str] = set()

    @property
    def telling(self) -> list[Observation]:
        """What the search for mistakes looks at: of recorded inputs, the small slices, where there are any."""
        small = [o for o in self.observations if self.recorded is not None and o.size <= SMALL]
        return small or self.observations

    @property
    def wrong(self) -> bool:
        """Whether any number is wrong."""
        return any(not j.right for o in self.observations for j in o.judgements.values())

    @property
    def wrong_at_once(self) -> bool:
        """Whether any number of first order is wrong: the output, its gradients, and what is between."""
        return any(not j.right for o in self.observations for n, j in o.judgements.items() if n not in LATER)

    def count_wrong(self, without: Collection[str] = ()) -> int:
        """How many results are wrong, where they are held against attention without these options."""
        if not without:
            return sum(not j.right for o in self.observations for j in o.judgements.values())
        count = 0
        for o in self.observations:
            case = o.truth.case
            options = {name: x for name, x in case.options.items() if name not in without}
            arrays = {name: x for name, x in case.arrays.items() if name.removesuffix("_dot") not in without}
            truth = Truth(replace(case, options=options, arrays=arrays), self.dtype)
            count += sum(not truth.judge(n, x).right for n, x in o.results.items() if truth.value(n) is not None)
        return count

    def say(
        self, kind: str, text: str, *, fault: bool = True, name: str | None = None, case: str | None = None
    ) -> None:
        """A finding, once."""
        if (key := f"{kind} {name or text}") not in self._said:
            self._said.add(key)
            self.findings.append(Finding(kind, text, fault, name, case))

    def call(self, case: Case) -> Call:
        """One call of the candidate."""
        return run(self.target.prepare, case.spelt, self.target.level, self.target.tangents, self.limit)

    def timed(self, case: Case) -> tuple[Call, float]:
        """A call, and its seconds: of the processor where that is less, since other processes may have it meanwhile."""
        start, used = time.perf_counter(), time.process_time()
        call = self.call(case)
        seconds = min(time.perf_counter() - start, time.process_time() - used)
        if call.error is not None:  # which says nothing of how long it takes
            return call, seconds
        pace = self.pace = self.pace or Pace(case, seconds, seconds)
        pace.least = min(seconds, pace.least)
        if case is pace.case:
            pace.calls, pace.seconds = pace.calls + 1, min(seconds, pace.seconds)
        elif case.dims.work >= pace.case.dims.work:
            pace.case, pace.seconds, pace.calls = case, seconds, 1
        return call, seconds

    def try_case(self, case: Case) -> bool:
        """Call and judge; True where it makes no sense to go on."""
        call, _ = self.timed(case)
        if call.timeout:
            text = f"it did not return within {self.limit:g} s in the case '{case.name}'."
            self.say("timeout", text, case=case.name)
            return True
        if call.printed:
            first = call.printed.strip().splitlines()
            shown = f": {first[0][:60]!r}" if first else ""
            self.say("printed", f"It prints while it runs{shown}.", fault=False, name="printed")
        where = f"case '{case.name}'"
        for name in call.mutated:
            self.say("mutates", f"it changes its input {name} in place ({where}).", name=name, case=case.name)
        for name in call.unknown:
            text = f"It returns {name!r}, which is no result that the auditor knows."
            self.say("unknown", text, fault=False, name=name)
        for text in call.strange:
            self.say("strange", f"{text} ({where}).", name=text, case=case.name)
        if call.exited:
            self.say("exit", f"it called sys.exit ({call.error}) in the {where}.", name="exit", case=case.name)
            self.traceback = self.traceback or call.crash or ""
        elif call.crash is not None:
            self.crashes.append((case, call))
        if self.recorded is not None:
            self.recorded.observe(self, call.results)
            return True
        truth = Truth(case, self.dtype)
        found = call.results
        results = {n: found[n] for n in RESULTS if n in found and (n in case.options or truth.value(n) is not None)}
        if results:
            self.observations.append(Observation(truth, results))
        return len(self.crashes) >= 4 and not self.observations

    def settle_crashes(self) -> None:
        """Which crashes are faults, and which say what the candidate does not support."""
        passed = {o.truth.case.name for o in self.observations}
        self._settle_length()
        lacking: list[frozenset[str]] = []
        for case, call in sorted(self.crashes, key=lambda c: len(c[0].dims.features)):
            features = case.dims.features
            claimed = features & self.supports
            if features and passed and not claimed:
                if any(features >= known for known in lacking):
                    continue
                lacking.append(features)
                what = " with ".join(FEATURES[f] for f in sorted(features))
                text = f"It does not support {what}: {call.error}"
                self.say("unsupported", text, fault=False, name="+".join(sorted(features)))
                continue
            told = f"it raised {call.error} in the case '{case.name}'" + (
                f", though it claims to support {', '.join(sorted(claimed))}." if claimed else "."
            )
            if not passed and (self.tensors or "numpy.ndarray" in (call.error or "")):
                told += ' If it takes tensors: framework="torch" (--framework torch).'
            if not passed and self.target.level == "attention" and self.transposes:
                text = "Arrays are (batch, heads, tokens, features): transpose with k.swapaxes(-1, -2), not with k.T."
                self.say("axes", text, fault=False)
            self.say("crash", told, name="crash", case=case.name)
            self.traceback = self.traceback or call.crash or ""
        self._forget(lacking)

    def _settle_length(self) -> None:
        """Take out the crashes in cases longer than any that returned: what holds a mask of its own has a longest."""
        longest = max((_tokens(o.truth.case) for o in self.observations), default=0)
        ordinary = [_tokens(case) for case, _ in self.crashes if not case.dims.features]
        if longest < _SHORTEST or not ordinary or min(ordinary) <= longest:
            return
        case, call = min(self.crashes, key=lambda x: (_tokens(x[0]) <= longest, _tokens(x[0])))
        text = f"It does not take {_tokens(case)} tokens, as in the case '{case.name}': {call.error}"
        self.say("unsupported", text, fault=False, name=LONGEST)
        self.crashes = [x for x in self.crashes if _tokens(x[0]) <= longest]

    def _forget(self, lacking: list[frozenset[str]]) -> None:
        """Results of the wrong shape that broadcasting let through, where the candidate is known not to support it."""
        for o in self.observations:
            if any(o.truth.case.dims.features >= known for known in lacking):
                for name in [n for n, j in o.judgements.items() if j.kind == "shape"]:
                    del o.judgements[name], o.results[name]
        self.observations = [o for o in self.observations if o.results]


def _tokens(case: Case) -> int:
    return max(case.dims.t, case.dims.s)
