"""From what a session showed to its report: stages, findings, the diagnosis, the smallest case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attngrad.auditor.budget import LIMITS, Budget, Limits
from attngrad.auditor.diagnose import Diagnosis, explain
from attngrad.auditor.mistakes import Mistake, find
from attngrad.auditor.patterns import describe, heat_of, sizes
from attngrad.auditor.pipeline import RESULTS
from attngrad.auditor.repeat import Repeated
from attngrad.auditor.report import NOT_DETERMINISTIC, AuditReport, Explained, Finding, Stage, joined, symbol
from attngrad.auditor.session import Session
from attngrad.auditor.shrink import smallest_case
from attngrad.auditor.truth import Observation

UNINITIALISED = "uninitialised-tail"


def _stages(observations: Sequence[Observation], unexplained: Sequence[str], level: str) -> tuple[Stage, ...]:
    found = []
    for name in RESULTS:
        held = [o for o in observations if name in o.judgements]
        if not held:
            continue
        bad = [o for o in held if not o.judgements[name].right]
        worst = max(bad or held, key=lambda o: (o.judgements[name].error, -o.size))
        j = worst.judgements[name]
        kinds = [o.judgements[name].kind for o in bad]
        status = next((k for k in ("wrong", "nan", "shape") if k in kinds), "right")
        if bad and j.kind != status:
            worst = next(o for o in bad if o.judgements[name].kind == status)
            j = worst.judgements[name]
        pattern = _pattern(bad, name, level) if name in unexplained else ""
        if where := sizes(held, bad):
            pattern = f"{pattern} Wrong in every case tried with {where}.".strip()
        unit = worst.truth.unit(name)
        found.append(
            Stage(
                name, status, j.rms / unit, worst.truth.bound(name) / unit, len(bad), len(held),
                worst.truth.case.name, j.where, j.got, j.expected, j.detail, pattern,
            )
        )  # fmt: skip
    return tuple(found)


def _pattern(bad: Sequence[Observation], name: str, level: str) -> str:
    """Where a result is wrong, in a case that is large enough to show it and small enough to read."""
    told = [o for o in bad if o.judgements[name].kind != "shape"]
    if not told:
        return f"In the case '{bad[0].truth.case.name}' it has {bad[0].judgements[name].detail}."
    o = max(told, key=lambda o: (o.size <= 2500, o.size))
    return f"In the case '{o.truth.case.name}' {describe(o, name, level == 'layer')}"


@dataclass(frozen=True)
class Again:
    """What calls of the same cases showed, and what was tried of them all."""

    repeated: Repeated | None = None
    stale: Mapping[str, str] = field(default_factory=dict)
    """Results that hold memory that was never written, with where."""
    tried: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    """Options that were not tried because nobody asked for them."""


def report(
    session: Session, title: str, settings: dict[str, Any], again: Again, shrinking: Callable[[], None]
) -> AuditReport:
    """The report of a session, diagnosed; ``shrinking`` is called before the search for the smallest case."""
    effort = settings["effort"]
    limits = LIMITS[effort]
    findings = session.findings
    diagnosis, explanations, ids = _diagnosed(session, again, limits)
    unexplained = diagnosis.unexplained
    stages = _stages(session.observations, unexplained, session.target.level)
    wrong = [s for s in stages if not s.ok]
    findings += [
        Finding("wrong", f"{symbol(s.name)} is wrong in {s.wrong} of {s.cases} cases.", name=s.name, case=s.case)
        for s in wrong
    ]
    findings += [Finding("mistake", f"{i}: {find(i).title}.", name=i) for i in ids]
    if "weights-updated-first" in ids:
        findings = [f for f in findings if not (f.kind == "mutates" and (f.name or "").startswith("w_"))]
    for s in stages:
        if s.name in unexplained:
            text = f"{symbol(s.name)} is wrong and no known mistake explains it. {s.pattern}"
            findings.append(Finding("unexplained", text, name=s.name, case=s.case))
    if diagnosis.derived:
        text = f"{joined(map(symbol, diagnosis.derived))}: wrong as the derivative of what is wrong before."
        findings.append(Finding("derived", text, fault=False, name="derived"))
    flaky = again.repeated if again.repeated is not None and again.repeated.differing else None
    if flaky is not None:
        findings.append(Finding(NOT_DETERMINISTIC, f"{flaky.told}.", fault=flaky.wrong, name=NOT_DETERMINISTIC))
    smallest = ""
    if wrong and not (flaky is not None and flaky.wrong):
        shrinking()
        budget = Budget(limits.calls, limits.calling)
        smallest = smallest_case(session, wrong[0].name, budget)
        findings += _cut_off(diagnosis.cut, budget.cut, effort, limits)
    kinds = {f.kind for f in findings if f.fault}
    if kinds & {"wrong", "mutates", "strange", NOT_DETERMINISTIC} and session.observations:
        status = "wrong"
    else:
        status = "not audited" if kinds or not session.observations else "right"
    heat = heat_of(session.observations, wrong[0].name) if wrong else None
    told = tuple(explanations)
    return AuditReport(
        title, status, ids, tuple(findings), stages, told, smallest, session.traceback, heat, settings,
        again.tried, again.untried,
    )  # fmt: skip


def _diagnosed(
    session: Session, again: Again, limits: Limits
) -> tuple[Diagnosis, list[tuple[Explained, ...]], tuple[str, ...]]:
    """The diagnosis, the explanations and the ids that are named."""
    if again.repeated is not None and again.repeated.wrong:  # what comes and goes is of no formula
        told = _told(find(NOT_DETERMINISTIC), again.repeated.told)
        return Diagnosis((), ()), [(told,)], (NOT_DETERMINISTIC,)
    observations = [o.without(again.stale) for o in session.telling]
    diagnosis, coarse = Diagnosis((), ()), None
    if any(not j.right for o in observations for j in o.judgements.values()):
        budget = Budget(limits.predictions, limits.seconds)
        diagnosis, coarse = explain(observations, session.target.level, budget)
    only = f"in every case tried with {diagnosis.only}" if diagnosis.only else ""
    explanations = _merged(
        [tuple(_told(m, ", ".join(filter(None, (v.note, only)))) for m, v in s) for s in diagnosis.explanations]
    )
    ids = diagnosis.ids
    if coarse is not None:
        explanations = [(_told(find("low-precision"), f"errors as of {coarse}"),)]
        ids = ("low-precision",)
    if again.stale:
        told = _told(find(UNINITIALISED), "; ".join(again.stale.values()))
        explanations, ids = [(told, *state) for state in explanations or [()]], (UNINITIALISED, *ids)
    return diagnosis, explanations, ids


def _told(m: Mistake, note: str) -> Explained:
    return Explained(m.id, m.title, note, m.formula, m.correct, m.why, m.fix)


def _cut_off(search: str, shrinking: str, effort: str, limits: Limits) -> list[Finding]:
    """What ended before it was done. Only the clock can make another run find something else."""
    clock = "was cut off by the clock, after {:g} s: another run may find more."
    told = {
        ("search", "work"): f"Not every combination of mistakes was tried: effort {effort!r} ends before that.",
        ("search", "time"): f"The search for mistakes {clock.format(limits.seconds)}",
        ("smallest", "time"): f"The search for the smallest case {clock.format(limits.calling)}",
    }
    cut = {("search", search), ("smallest", shrinking)}
    return [Finding("limit", text, fault=False, name=key[0]) for key, text in told.items() if key in cut]


def _merged(states: list[tuple[Explained, ...]]) -> list[tuple[Explained, ...]]:
    """One explanation per set of ids; the first note of each stands."""
    kept: dict[frozenset[str], tuple[Explained, ...]] = {}
    for state in states:
        kept.setdefault(frozenset(m.id for m in state), state)
    return list(kept.values())
