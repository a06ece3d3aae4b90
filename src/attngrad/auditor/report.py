"""What an audit found: the report, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SYMBOLS = {
    "q": "Q", "k": "K", "v": "V", "z": "Z", "scores": "S", "lse": "L", "weights": "A", "out": "O", "y": "Y",
    "dout": "dO", "dweights": "dA", "delta": "delta", "dscores": "dS", "dz": "dZ", "dbias": "dBias", "dsinks": "dSinks",
    "dq": "dQ", "dk": "dK", "dv": "dV", "dw_o": "dW_o", "dw_q": "dW_q", "dw_k": "dW_k", "dw_v": "dW_v",
    "dquery": "dX_q", "dkey": "dX_k", "dvalue": "dX_v", "dx": "dX", "dmemory": "dX_kv",
    "dq_mixed": "dQ_mixed", "dk_mixed": "dK_mixed", "dv_mixed": "dV_mixed",
}  # fmt: skip
"""How pages and reports print the names; a tangent keeps its suffix."""

LONGEST = "tokens"
"""The name of the note on a length that a candidate does not take."""
NO_CONVENTION = "right under no convention that is known"
NOT_DETERMINISTIC = "not-deterministic"
EXIT = {"right": 0, "wrong": 1, "not audited": 2}
CLOSED = 4
"""The exit status of a child process that cannot speak any more."""


def symbol(name: str) -> str:
    """The mathematical name of a result.

    >>> symbol("dscores"), symbol("dq_dot")
    ('dS', 'dQ_dot')
    """
    base = name.removesuffix("_dot")
    return SYMBOLS.get(base, base) + ("_dot" if base != name else "")


def joined(names: Iterable[str]) -> str:
    """A list in words.

    >>> joined(["dQ", "dK", "dV"])
    'dQ, dK and dV'
    """
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def short(x: float) -> str:
    """An error in a few characters.

    >>> short(0.0), short(1.25e-7), short(float("inf"))
    ('0', '1.2e-07', '-')
    """
    return "-" if not math.isfinite(x) else "0" if x == 0 else f"{x:.1e}"


def distinct_digits(a: float, b: float) -> tuple[str, str]:
    """Two numbers with six digits, or as many as it takes to tell them apart.

    >>> distinct_digits(1.5, 2.0), distinct_digits(0.125438001, 0.125438002)
    (('1.5', '2'), ('0.125438001', '0.125438002'))
    """
    digits = next((n for n in range(6, 17) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17)
    return f"{a:.{digits}g}", f"{b:.{digits}g}"


@dataclass(frozen=True)
class Stage:
    """One result over all cases."""

    name: str
    status: str
    """"right", "wrong", "shape" or "nan"."""
    error: float
    """The RMS error relative to the largest entry, in the case with the worst entry; in a wrong one, if any is."""
    allowed: float
    """What rounding allows there, likewise."""
    wrong: int
    cases: int
    case: str = ""
    where: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    detail: str = ""
    pattern: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is right in every case."""
        return self.status == "right"

    @property
    def what(self) -> str:
        """What is wrong with it, in a few words."""
        if self.ok:
            return ""
        if self.status == "shape":
            return self.detail
        at = "" if self.where is None else f" at {list(self.where)}"
        if self.status == "nan":
            return f"{self.got}{at}, should be {self.expected:.6g}" if self.expected is not None else "not finite"
        values = ""
        if self.got is not None and self.expected is not None:
            values = ": {}, should be {}".format(*distinct_digits(self.got, self.expected))
        return f"{self.detail or 'worst'}{at}{values}"


@dataclass(frozen=True)
class Finding:
    """One thing that was found. A note is no fault."""

    kind: str
    """wrong, mistake, unexplained, crash, timeout, exit, strange, mutates, not-deterministic (a note where it is within
    rounding); notes: unsupported, printed, unknown, option, axes, memory, limit, derived."""
    text: str
    fault: bool = True
    name: str | None = None
    """The result, or the id of the mistake."""
    case: str | None = None


@dataclass(frozen=True)
class Explained:
    """A mistake as the report tells it."""

    id: str
    title: str
    note: str
    formula: str
    correct: str
    why: str
    fix: str

    def rows(self) -> tuple[tuple[str, str], ...]:
        """What to tell of it, by label. A note that is a formula is what was computed here; another says where."""
        special = " = " in self.note
        return (
            ("computed", self.note if special else self.formula),
            ("here", "" if special else self.note),
            ("should be", self.correct),
            ("why", self.why),
            ("fix", self.fix),
        )


@dataclass(frozen=True)
class Heat:
    """The error of one result over (row, column), in one head."""

    name: str
    case: str
    head: tuple[int, ...]
    errors: tuple[tuple[float, ...], ...]
    allowed: float


@dataclass(frozen=True, repr=False)
class AuditReport:
    """What an audit found: ``ok``, ``mistakes`` (ids), ``findings``; ``str(report)``, ``to_json()``, ``to_html()``.

    >>> import attngrad
    >>> report = attngrad.audit(lambda q, k, v, dout: {"out": attngrad.attention(q, k, v)}, effort="quick")
    >>> report.ok, report.mistakes, report.exit_code
    (True, (), 0)
    """

    candidate: str
    status: str
    """"right", "wrong" or "not audited"."""
    mistakes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    stages: tuple[Stage, ...] = ()
    explanations: tuple[tuple[Explained, ...], ...] = ()
    """Each a combination of mistakes that reproduces everything; more than one where they are numerically the same."""
    smallest: str = ""
    """The smallest failing case, as code."""
    traceback: str = ""
    heat: Heat | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tried: tuple[str, ...] = ()
    """What was tried: sizes, options and the conventions that they were right under, repeated calls."""
    untried: tuple[str, ...] = ()
    """What was not tried, each with its reason."""

    @property
    def ok(self) -> bool:
        """Whether every result is right in every case."""
        return self.status == "right"

    @property
    def exit_code(self) -> int:
        """0 right, 1 wrong, 2 could not be audited."""
        return EXIT[self.status]

    @property
    def first(self) -> str | None:
        """The first result, in the order of the data flow, that is wrong."""
        return next((stage.name for stage in self.stages if not stage.ok), None)

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        cases = self.settings.get("cases", 0)
        if self.ok:
            names = ", ".join(symbol(s.name) for s in self.stages)
            agree = "agrees" if len(self.stages) == 1 else "agree"
            where = f"all {cases} cases" if cases != 1 else "the one case"
            own = "".join(f" {f.text}" for f in self.findings if f.kind == "convention")
            length = "".join(f" {f.text.partition(',')[0]}: it raises." for f in self.findings if f.name == LONGEST)
            told = f"{own}{length}{self._unjudged}{self._unasked}"
            return f"RIGHT: {names} {agree} with the truth in {where}, within rounding.{told}"
        if self.status == "not audited":
            fault = next((f.text for f in self.findings if f.fault), "nothing came back")
            return f"NOT AUDITED: {fault}"
        bad = [symbol(s.name) for s in self.stages if not s.ok]
        if flaky := next((f for f in self.findings if f.kind == NOT_DETERMINISTIC and f.fault), None):
            return f"NOT DETERMINISTIC: {flaky.text}"
        if not bad:
            return "WRONG: " + next(f.text for f in self.findings if f.fault)
        titles = sorted({m.title for state in self.explanations for m in state})
        told = ("; " if len(self.explanations) == 1 else " or ").join(titles) or "no known mistake explains it"
        left = [symbol(f.name or "") for f in self.findings if f.kind == "unexplained"]
        if titles and left:
            told += f"; and {joined(left)} for another reason, which no known mistake explains"
        return f"WRONG: {joined(bad)} {'is' if len(bad) == 1 else 'are'} wrong; {told}.{self._size}"

    @property
    def _unjudged(self) -> str:
        """Which options may be wrong: tried, and right under no convention."""
        odd = [text.partition(" (")[0] for text in self.untried if NO_CONVENTION in text]
        return f" With {joined(odd)} it is {NO_CONVENTION}, which was not judged." if odd else ""

    @property
    def _unasked(self) -> str:
        """Which options were not tried, and how to ask for them: as they are given here, or on the command line."""
        names = self.settings.get("unasked", ())
        if not names:
            return ""
        asked = f"options={{{', '.join(f'{name!r}: True' for name in names)}}}"
        if self.settings.get("command"):
            asked = " ".join(f"--option {name}=true" for name in names)
        return f" {joined(names)} {'was' if len(names) == 1 else 'were'} not tried: {asked}."

    @property
    def _size(self) -> str:
        """How large the error is, in words."""
        errors = [s.error for s in self.stages if s.status == "wrong"]
        if not errors:
            return ""
        what = " and there are entries that are not finite" if any(s.status == "nan" for s in self.stages) else ""
        return f" The error is {max(errors):.1e} of the largest entry (RMS){what}."

    def facts(self, *, effort: bool = False) -> list[str]:
        """What was audited, and how."""
        s = self.settings
        facts = [
            self.candidate,
            str(s.get("level")),
            str(s.get("dtype")),
            f"{(n := s.get('cases', 0))} case{'' if n == 1 else 's'}",
        ]
        facts += [f"effort {s.get('effort')}"] if effort else []
        return facts + ([f"options {s['options']}"] if s.get("options") else [])

    def __repr__(self) -> str:
        return f"AuditReport({self.candidate}: {self.verdict})"

    def _repr_html_(self) -> str:
        from attngrad.auditor.html import fragment

        return fragment(self)

    def __str__(self) -> str:
        from attngrad.auditor.terminal import as_text

        return as_text(self)

    def to_json(self) -> str:
        """The report as JSON; ``AuditReport.from_json`` reads it back."""
        return json.dumps(
            {**asdict(self), "ok": self.ok, "first": self.first}, default=_plain, allow_nan=True, indent=1
        )

    def to_html(self) -> str:
        """The report as one self-contained page, with a heat map of the error."""
        from attngrad.auditor.html import page

        return page(self)

    @classmethod
    def from_json(cls, text: str) -> AuditReport:
        """What ``to_json`` wrote."""
        x = json.loads(text, object_hook=lambda found: {name: _tuples(value) for name, value in found.items()})
        for name in ("ok", "first"):
            x.pop(name)
        x["findings"] = tuple(Finding(**f) for f in x["findings"])
        x["stages"] = tuple(Stage(**s) for s in x["stages"])
        x["explanations"] = tuple(tuple(Explained(**m) for m in state) for state in x["explanations"])
        x["heat"] = None if x["heat"] is None else Heat(**x["heat"])
        return cls(**x)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _plain(x: Any) -> Any:
    return x.item() if hasattr(x, "item") else str(x)
