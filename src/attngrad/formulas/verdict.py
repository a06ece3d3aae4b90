"""Is this formula of attention right? Shapes first, then numbers; then what the mistake is, and the right formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np

from attngrad.core.checks import fail
from attngrad.formulas import known, symbols
from attngrad.formulas.case import Sizes
from attngrad.formulas.evaluate import Values, sides
from attngrad.formulas.parser import parse
from attngrad.formulas.readings import Reading, each
from attngrad.formulas.repair import repair
from attngrad.formulas.report import FormulaReport, under_the_formula
from attngrad.formulas.shapes import Fault, ShapeFault, Shapes, Unsized, infer, is_constant
from attngrad.formulas.tokens import FormulaError
from attngrad.formulas.tree import Equation, Expression, Symbol, names, show
from attngrad.formulas.values import HeadValues, case, cases

TOLERANCE = 1e-10
"""A formula holds where its relative error is below this in every case. Right ones reach 1e-14."""

RATIO_TOLERANCE = 1e-9
"""A formula is a known mistake where it agrees with it to this, up to one constant."""

MAX_REPORTS = 3
"""Readings of a wrong formula whose mistakes are looked for."""

# What a constant factor between a formula and the right one says; c is the scale.
_FACTORS: tuple[tuple[str, Callable[[float], float], str], ...] = (
    ("", lambda c: 1.0, ""),
    ("scale-missing", lambda c: 1.0 / c, "The scale is missing."),
    ("scale-twice", lambda c: c, "The scale is applied twice, or is 1/d_k."),
    ("scale-by-sqrt-d", lambda c: c**-2, "The scale is inverted: sqrt(d_k) in place of 1/sqrt(d_k)."),
    ("sign", lambda c: -1.0, "The sign is wrong."),
    ("sign", lambda c: -1.0 / c, "The sign is wrong, and the scale is missing."),
    ("factor-2", lambda c: 2.0, "There is a factor 2 too many."),
    ("factor-1/2", lambda c: 0.5, "There is a factor 1/2 too many."),
)


def audit_formula(text: str, *, scale: float | None = None, seed: int = 0) -> FormulaReport:
    r"""Read a formula of attention, in plain text or LaTeX, and judge it: it holds, has a wrong shape, or is wrong.

    Every name has its true value (by the reference and the complex step, in float64) at random inputs of awkward sizes:
    n queries, m keys, d_k features of Q and K, d_v of V. The sides must have one shape and be equal to rounding. For a
    wrong formula the report names the mistake where it knows it, and gives the right one. ``scale`` is 1/sqrt(d_k)
    unless given. What cannot be read is a FormulaError, a ValueError that points at the place.

    >>> report = audit_formula("dS = dA*A - A @ dA.T @ A")
    >>> report.ok, report.kind, report.corrected
    (False, 'wrong', 'dS = A * (dA - rowsum(A * dA))')
    >>> audit_formula(r"\frac{\partial L}{\partial Q} = \frac{1}{\sqrt{d_k}} \frac{\partial L}{\partial S} K").ok
    True
    """
    _check_arguments(text, scale, seed)
    fitting: list[_Judged] = []
    others: list[_Judged] = []
    with np.errstate(all="ignore"):  # a formula may overflow; the report says so
        for read in each(lambda reading: _Judged(text, reading, scale, seed), FormulaError):
            if read.holds:
                return read.report()
            (fitting if read.fits else others).append(read)
        # Wrong in every reading: the first that names the mistake, of the first few that fit.
        reports = [read.report() for read in (fitting or others[:1])[:MAX_REPORTS]]
    return next((report for report in reports if report.mistakes), reports[0])


class _Judged:
    """A text in one reading, judged."""

    def __init__(self, text: str, reading: Reading, scale: float | None, seed: int) -> None:
        equations = parse(text, reading)
        used = names(*(side for equation in equations for side in equation.sides))
        at = cases(used, scale, seed)
        self.text, self.notes = text, reading.notes()
        self.audits = [_Audit(text, equation, at, used, scale) for equation in equations]
        faults = [audit.shapes()[0] for audit in self.audits]
        self.fits = not any(faults)
        self.holds = self.fits and all(audit.worst_error(audit.equation) < TOLERANCE for audit in self.audits)

    def report(self) -> FormulaReport:
        """One report for all equations, with how they were read."""
        found = _together(self.text, [audit.report() for audit in self.audits])
        return replace(found, notes=(*found.notes, *self.notes))


def _check_arguments(text: object, scale: object, seed: object) -> None:
    who = "audit_formula"
    if not isinstance(text, str):
        fail(TypeError, who, "text", "be a str", type(text).__name__)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real)):
        fail(TypeError, who, "scale", "be None or a number", type(scale).__name__)
    if scale is not None and not 0.0 < float(scale) < math.inf:
        fail(ValueError, who, "scale", "be finite and positive", repr(scale))
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        fail(TypeError, who, "seed", "be an int", type(seed).__name__)
    if seed < 0:
        fail(ValueError, who, "seed", "be at least 0", repr(seed))


def _together(text: str, reports: Sequence[FormulaReport]) -> FormulaReport:
    """One report for all equations of a text: that of the first wrong one, with every right formula."""
    bad = [r for r in reports if not r.ok]
    first = bad[0] if bad else reports[0]
    if len(reports) == 1:
        return first
    corrected = None
    if bad and all(r.corrected for r in bad):
        corrected = ", ".join(r.formula if r.ok else str(r.corrected) for r in reports)
    errors = [r.error for r in reports if r.error is not None]
    notes = (f"of {len(reports)} equations {len(bad)} fail; the first is {first.formula}",) if bad else ()
    return replace(
        first,
        formula=", ".join(r.formula for r in reports),
        corrected=corrected,
        error=first.error if bad else max(errors),
        notes=(*notes, *first.notes),
    )


def relative_error(equation: Equation, values: Values) -> float | None:
    """How far the sides are apart, relative to the largest of them; None where a value is not finite.

    Sides that are zero by cancellation are measured by a thousandth of the largest name in them.
    """
    found = sides(equation, values)
    if not all(np.all(np.isfinite(x)) for x in found):
        return None
    valued = names(*equation.sides) - set(symbols.SIZED) or {"Q"}
    largest = max(1e-3 * float(np.max(np.abs(values[name]))) for name in valued)
    largest = max(largest, *(float(np.max(np.abs(x))) for x in found))
    return max(float(np.max(np.abs(x / largest - y / largest))) for x, y in pairwise(found))  # x - y may overflow


class _Audit:
    """One equation of a text, at cases that the equations share."""

    def __init__(
        self, text: str, equation: Equation, at: list[HeadValues], used: set[str], scale: float | None
    ) -> None:
        self.text, self.equation, self.at, self.scale = text, equation, at, scale
        self.used, self.layer = used, bool(used & set(symbols.LAYER))
        self.style = known.scale_style(used, scale)

    def dims_of(self, name: str) -> tuple[str, ...]:
        """The shape by sizes; in a layer of self-attention m is n."""
        dims = symbols.KNOWN[name]
        return _one_length(dims) if self.layer else dims

    def report(self) -> FormulaReport:
        formula = show(self.equation)
        fault, shapes = self.shapes()
        drawn = under_the_formula(self.equation, shapes)
        tell = partial(FormulaReport, self.text, formula=formula, shapes=drawn)
        if fault is not None and fault.part is self.equation and self.holds(self.equation):
            why = "The formula holds; the shape that is printed behind it is wrong."
            told = partial(tell, corrected=formula, corrected_error=self.worst_error(self.equation), why=why)
            return told("wrong shape", mistakes=("stated-shape",), notes=(fault.message,))
        if fault is not None:
            return tell("wrong shape", **self.correct(fits=False), notes=(fault.message, *self.where_sizes_agree()))
        worst = self.worst_error(self.equation)
        if worst < TOLERANCE:
            same = len(set(self.equation.sides)) == 1
            return tell("holds", error=worst, notes=("both sides are the same, so it says nothing",) if same else ())
        finite = worst < math.inf
        notes = () if finite else ("it gives values that are not finite",)
        return tell(
            "wrong",
            error=worst if finite else None,
            **self.correct(fits=True),
            notes=(*notes, *self.where_sizes_agree()),
        )

    # --- shapes ------------------------------------------------------------------------------------------------------

    def shapes(self) -> tuple[ShapeFault | None, dict[int, tuple[str, ...]]]:
        """What does not fit, if anything; and the shape of every part that has one: what surrounds a fault has none."""
        found = Shapes()
        try:
            infer(self.equation, self.dims_of, found)
        except ShapeFault as fault:
            return fault, found.by_part()
        except Unsized as fault:
            raise FormulaError(fault.message, self.text, fault.part.position) from None
        told = next((found[s] for s in self.equation.sides if not is_constant(s)), None)
        stated = self.equation.stated
        # The documents write n for both lengths.
        if stated is not None and told is not None and _one_length(told) != _one_length(stated):
            message = f"it is said to be {' x '.join(stated)}, and is {' x '.join(told)}"
            return ShapeFault(self.equation, message), found.by_part()
        return None, found.by_part()

    # --- numbers -----------------------------------------------------------------------------------------------------

    def holds(self, equation: Equation) -> bool:
        """Whether another equation holds in every case."""
        try:
            infer(equation, self.dims_of)
            errors = (relative_error(equation, values) for values in self.at)
            return all(e is not None and e < TOLERANCE for e in errors)
        except Fault:
            return False

    def holds_alone(self, equation: Equation) -> bool:
        """Whether it holds, and does as a text of its own, too: without a name of the layer, m need not be n."""
        if not self.holds(equation):
            return False
        used = names(*equation.sides)
        if not self.layer or used & set(symbols.LAYER):
            return True
        return _Audit(self.text, equation, cases(used, self.scale, 0), used, self.scale).holds(equation)

    def worst_error(self, equation: Equation) -> float:
        return max(e if (e := relative_error(equation, v)) is not None else math.inf for v in self.at)

    def where_sizes_agree(self) -> tuple[str, ...]:
        """What becomes of the formula where n = m, and where all sizes are equal."""
        for words, sizes in _AGREEING:
            try:
                error = relative_error(self.equation, case(sizes, self.used, self.scale, [0]))
            except Fault:
                continue
            if error is not None and error < TOLERANCE:
                return (f"it is right only where {words}",)
        return ()

    # --- the mistake -------------------------------------------------------------------------------------------------

    @property
    def target(self) -> Symbol | None:
        """The name that the equation is for: the first side that is a name alone."""
        return next((s for s in self.equation.sides if isinstance(s, Symbol)), None)

    def correct(self, fits: bool) -> dict[str, Any]:
        """The right formula and its error, the ids of the mistakes, and what they are in words."""
        forms = [] if self.target is None else known.nearest_right_forms(self.target, self.used, self.style)
        right = next((form for form in forms if self.holds_alone(form)), None)  # some are right without dropout only
        ids, why = self.recognise() if fits and self.target is not None else ((), "")
        if right is None or not ids:
            repaired = repair(self.equation, self.holds_alone)
            if repaired is not None:
                ids = tuple(dict.fromkeys(edit.id for edit in repaired[1]))
                why = "; ".join(edit.words for edit in repaired[1])
                why = f"{'T' + why[1:] if why.startswith('the') else why}."  # a name keeps its case
                right = right or repaired[0]
        found = {} if right is None else {"corrected": show(right), "corrected_error": self.worst_error(right)}
        return {"mistakes": ids, "why": why, **found}

    def recognise(self) -> tuple[tuple[str, ...], str]:
        """The known mistake that gives the same numbers in every case, up to a constant that has a meaning."""
        target = self.target
        wrong = next((s for s in self.equation.sides if s != target), None)
        if target is None or wrong is None:
            return (), ""
        candidates: list[tuple[str, str, Expression]] = [("", "", target)]
        candidates += [(m.id, m.why, side) for m, side in known.mistakes_of(target, self.style)]
        for id_, why, side in candidates:
            ratios = [self.ratio(Equation((wrong, side)), values) for values in self.at]
            if any(r is None for r in ratios):
                continue
            for factor_id, factor, words in _FACTORS:
                wanted = [factor(values.head.scale) for values in self.at]
                if np.allclose([r for r in ratios if r is not None], wanted, rtol=RATIO_TOLERANCE, atol=0.0):
                    ids = tuple(x for x in (id_, factor_id) if x)
                    return ids, " ".join(x for x in (why, words) if x)
        return (), ""

    @staticmethod
    def ratio(equation: Equation, values: Values) -> float | None:
        """The constant c with left = c right, or None."""
        try:
            left, right = sides(equation, values)
        except Fault:
            return None
        if not (np.all(np.isfinite(left)) and np.any(left) and np.any(right)):
            return None
        a, b = float(np.max(np.abs(left))), float(np.max(np.abs(right)))
        left, right = left / a, right / b
        c = float(np.sum(left * right) / np.sum(right * right))
        return c * (a / b) if np.max(np.abs(left - c * right)) <= RATIO_TOLERANCE else None


_AGREEING = (
    ("n = m", Sizes(batch=1, heads=1, queries=5, keys=5, model=6, width=3, value_width=4)),
    ("all sizes are equal", Sizes(batch=1, heads=1, queries=4, keys=4, model=4, width=4, value_width=4)),
)


def _one_length(dims: tuple[str, ...]) -> tuple[str, ...]:
    """The shape where there are as many keys as queries."""
    return tuple("n" if d == "m" else d for d in dims)
