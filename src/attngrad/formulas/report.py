"""What is said of a formula: the report, its plain text, and the shapes under the formula."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from typing import Literal

from attngrad.formulas.tree import Equation, pieces

Kind = Literal["holds", "wrong shape", "wrong"]


def figure(error: float) -> str:
    """An error as it is printed: two digits where it is large, the power of ten where it is rounding."""
    if error == 0.0:
        return "0"
    return f"{error:.2g}" if 1e-3 <= error < 1e3 else f"{error:.0e}"


@dataclass(frozen=True, repr=False)
class FormulaReport:
    """The verdict on a formula; ``str`` gives it in plain text.

    ``formula`` is the text as it was understood, ``shapes`` the same with the shape of each part under it;
    ``corrected`` is a formula that holds (None where the one given does, or where none was found); ``error`` and
    ``corrected_error`` say how far the sides are apart; ``mistakes`` are short ids, ``why`` says it in words.

    >>> from attngrad import audit_formula
    >>> report = audit_formula("dK = dS @ Q / sqrt(d_k)")
    >>> report.ok, report.corrected
    (False, 'dK = dS.T @ Q / sqrt(d_k)')
    """

    text: str
    kind: Kind
    formula: str
    shapes: str
    corrected: str | None = None
    error: float | None = None
    corrected_error: float | None = None
    mistakes: tuple[str, ...] = ()
    why: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return self.kind == "holds"

    def rows(self) -> list[tuple[str, str]]:
        """What is said below the formula, by label."""
        found = [("note" if self.ok or i else "found", note) for i, note in enumerate(self.notes)]
        if self.why:
            found.append(("mistake", self.why + (f" ({', '.join(self.mistakes)})" if self.mistakes else "")))
        if self.corrected is not None:
            error = "" if self.corrected_error is None else f"   [{figure(self.corrected_error)}]"
            found.append(("correct", self.corrected + error))
        elif not self.ok:
            found.append(("correct", "none found by changing a sign, a transpose, a name or a sum"))
        return found

    def __repr__(self) -> str:
        corrected = "" if self.corrected is None else f", corrected={self.corrected!r}"
        return f"FormulaReport({self.kind}: {self.formula!r}{corrected})"

    def _repr_html_(self) -> str:
        from attngrad.explain import notebook

        rows = [(label, notebook.Html(f"<b>{escape(text)}</b>") if label == "correct" else text)
                for label, text in self.rows()]  # fmt: skip
        title = self.kind + (f" [{figure(self.error)}]" if self.error is not None else "")
        return notebook.report(self.ok, title, notebook.code(self.shapes), notebook.table((), rows))

    def __str__(self) -> str:
        head = self.kind + (f"   [{figure(self.error)}]" if self.error is not None else "")
        body = self.formula if self.kind != "wrong shape" else self.shapes
        lines = [head, *(f"    {line}".rstrip() for line in body.splitlines())]
        return "\n".join([*lines, *(f"  {label:<8} {text}" for label, text in self.rows())])

    def to_json(self) -> str:
        """The report as a JSON object."""
        told = ("text", "kind", "ok", "formula", "shapes", "error", "corrected", "corrected_error")
        names = (*told, "mistakes", "why", "notes")
        return json.dumps({name: getattr(self, name) for name in names}, indent=2, allow_nan=False)


def under_the_formula(equation: Equation, shapes: dict[int, tuple[str, ...]]) -> str:
    """The formula on one line and, on the next, the shape of each part under it; numbers have none."""
    top, below = "", ""
    for i, side in enumerate(equation.sides):
        if i:
            top, below = _joined(top, below, " = ", "")
        for text, part in pieces(side):
            dims = () if part is None else shapes.get(id(part), ())
            label = "" if dims in ((), ("1", "1")) else " x ".join(dims)
            top, below = _joined(top, below, text, label)
    return f"{top.rstrip()}\n{below.rstrip()}"


def _joined(top: str, below: str, text: str, label: str) -> tuple[str, str]:
    """Two lines grown by a piece and what stands under it; operators and labels wait for the label before them."""
    if label or text.startswith(" "):
        top = top.ljust(len(below) + bool(label and below))
    if label:
        below = below.ljust(len(top)) + label
    return top + text, below
